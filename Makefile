# Every target sets up what it needs in .venv; nothing is installed outside this folder.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/regard
# Processes that share the tests (each takes up to 2 GB); a GPU is for one, whose memory is measured.
WORKERS ?= $(if $(shell command -v nvidia-smi),0,2)
# Options for pytest, such as "-k decode" or "--shuffle 1" (a random order of the tests).
ARGS ?=
BROWSER = $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

# Compiled modules and the tests' rewritten assertions are kept: two workers and many commands import them.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo serve toy test test-gpu check slow docs format clean

# The main job with the bundled translation model, and a page that shows its attention.
demo: $(VENV)/.run
	$(RUN) translate "I ate an apple."
	$(RUN) translate --to fr "How are you? I would like a cup of coffee."
	$(RUN) translate --to zh "Where is the station?"
	$(RUN) translate "Die Kinder spielen im Garten."
	$(RUN) look en-de-fr-zh "I ate an apple." --to de -o runs/demo.html
	@echo "runs/demo.html shows every weight behind the first: open it in a browser. 'make toy' trains a model of your own."

# The bundled model on http://127.0.0.1:8000: a web page, and the APIs of LibreTranslate and OpenAI. ARGS are options.
serve: $(VENV)/.serve
	$(RUN) serve $(ARGS)

# From a corpus to a model: train a small English-German Transformer on embedded data, score it, translate with it.
toy: $(VENV)/.run
	$(RUN) train toy-en-de --overwrite
	$(RUN) evaluate runs/toy-en-de
	$(RUN) translate --model runs/toy-en-de "I ate an apple."

test: $(VENV)/.dev
	@echo "browser tests: $(if $(BROWSER),run in $(BROWSER),skipped: no chromium on this machine (Debian: apt-get install chromium))"
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not slow" $(ARGS)

# Everything that needs a CUDA device, on one; without a network: make test-gpu GPU_PYTHON=python3
GPU_PYTHON ?= $(BIN)/python
test-gpu: $(if $(filter $(BIN)/python,$(GPU_PYTHON)),$(VENV)/.dev)
	$(GPU_PYTHON) tests/run_gpu.py $(ARGS)

# Whole trainings and studies, the recipe of the bundled model, the benchmarks: what they are made of is in `make test`.
slow: $(VENV)/.dev
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m slow $(ARGS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

# The documentation site, in site/index.html. Warnings are errors: a link or an anchor that leads nowhere.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "site/index.html (its search needs a server: python3 -m http.server --directory site)"

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build site *.egg-info

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev,serve]"
	touch $@

$(VENV)/.serve: $(VENV)/.run
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[serve]"
	touch $@

$(VENV)/.docs: $(VENV)/.run
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[docs]"
	touch $@
