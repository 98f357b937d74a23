# Every target sets up what it needs in .venv; nothing is installed outside this folder.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
RUN    := $(BIN)/regard
BROWSER = $(shell command -v chromium || command -v chromium-browser || command -v google-chrome)

.PHONY: demo test check slow format clean

# The main job on embedded data: train a small English-German Transformer, score it, translate with it.
demo: $(VENV)/.run
	$(RUN) train recipes/toy-en-de.toml --overwrite
	$(RUN) evaluate runs/toy-en-de
	$(RUN) translate --model runs/toy-en-de "I ate an apple."

test: $(VENV)/.dev
	@echo "browser tests: $(if $(BROWSER),run in $(BROWSER),skipped: no chromium on this machine (Debian: apt-get install chromium))"
	$(BIN)/python -m pytest -m "not slow"

slow: $(VENV)/.dev
	$(BIN)/python -m pytest -m slow

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.run: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/.dev: $(VENV)/.run
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[dev]"
	touch $@
