"""What every test starts from, whatever ran before it in this process: seeds, environment, caches, and one thread."""

import gc
import os
import random
import shutil
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

# Libraries read these when they are first imported: two workers with two threads each would wait for two cores.
os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
if shutil.which("nvidia-smi") is None:  # Triton decides when it is first imported, maybe by torch
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from hypothesis import HealthCheck, settings

from regard.decode import constraints
from regard.layers import attention_kernels

# A busy machine is no reason to fail; the same examples every time, so that a red test stays red.
settings.register_profile(
    "calm", deadline=None, derandomize=True, max_examples=30, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("calm")


# ---- order ------------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run files, and the tests in each, in a random order")
    parser.addoption(
        "--shard", default="1/1", metavar="I/N", help="run one of N shares of the tests (tests/run_gpu.py)"
    )


# Whole trainings and studies, the recipe of the bundled model, the benchmarks, pages of every kind of model, and compiling.
# What they are made of is tested by itself; `make slow` runs them, and CI does.
SLOW = (
    "recipes/",
    "studies/",
    "test_benchmarks.py",
    "test_wheel.py",
    "inference/test_types.py",
    "test_docs.py::test_what_a_page_says_works",
    "test_docs.py::test_forked_commands",
    "test_dockerfile.py",
    "test_notebooks.py::test_a_notebook_runs",
    "test_recipes.py::test_a_recipe_runs",
    "data/test_multilingual.py::test_a_model_of_two_directions",
    "data/test_image_files.py::test_mnist",
    "decode/test_graph_slots.py::test_the_kernel_finds_what_a_batch_finds",
    "look/test_browser_attention.py::test_512_tokens",
    "look/test_browser_kinds.py",
    "look/test_document.py::test_512_tokens",
    "look/test_head_importance.py",
    "look/test_beam_search_trace.py::test_weights_recorded_during_beam_search",
    "models/test_convolutional.py::test_a_convolutional_pair_learns",
    "models/test_convolutional.py::test_a_dilated_language_model_learns",
    "models/test_cost_recurrent.py::test_a_recurrent_translator",
    *(
        f"models/test_counting.py::test_counting_does_not_load_torchs_compiler[{name}]"
        for name in ("transformer-base", "llama-7b", "awd-lstm", "rnnsearch")
    ),
    "models/test_seq2seq.py::test_it_learns",
    "models/test_summary.py::test_models_that_fit_nowhere",
    "tasks/test_initial_model.py::test_a_run_that_was_stopped",
    "tasks/test_learning.py",
    "tasks/test_recurrent_task.py::test_wikitext2",
    "training/test_truncated_bptt.py::test_interrupted_and_resumed",
    "training/test_compile.py::test_blocks_of_a_kind_share_a_graph_whatever_their_shapes[transformer",
    "training/test_kill.py::test_random_moments",
    "training/test_trainer.py::test_the_mean_of_the_last",
    "training/test_stochastic_rounding.py::test_a_resumed_run",
    "training/test_stochastic_rounding.py::test_bf16_weights_learn",
)
SLOW_NAMES = (  # what torch.compile makes of a layer, and pictures that a page saves
    "test_a_compiled_",
    "test_compiled_",
    "test_torch_accepts_the_operators",
    "test_lines_and_all_heads_can_be_saved",
    "test_png_is",
    "test_pictures_of_a_canvas",
    "test_what_is_worked_out_of_rounded",
)


@pytest.hookimpl(tryfirst=True)
def pytest_itemcollected(item: pytest.Item) -> None:
    if item.nodeid.removeprefix("tests/").startswith(SLOW) or item.name.startswith(SLOW_NAMES):
        item.add_marker(pytest.mark.slow)


# Files whose tests take longest run first: otherwise one worker ends with them while the others have nothing left to do.
LONGEST = ("test_notebooks.py", "training/test_parallel.py", "test_docs.py", "recipes/")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take a share of the tests, every N-th, put the longest first, and shuffle them if that is asked for."""
    share, shares = map(int, config.getoption("--shard").split("/"))
    items[:] = items[share - 1 :: shares]
    items.sort(key=lambda item: not item.nodeid.removeprefix("tests/").startswith(LONGEST))
    if (seed := config.getoption("--shuffle")) is not None:
        shuffle(items, seed)


def shuffle(items: list[pytest.Item], seed: int) -> None:
    """Shuffle the files and the tests within each, in the same way in every worker, as pytest-xdist requires.

    Tests of one file stay together: what they share, such as a trained model, would be made anew for each of them.
    """
    rng, files = random.Random(seed), defaultdict(list)
    for item in items:
        files[item.path].append(item)
    order = rng.sample(sorted(files), len(files))
    items[:] = [item for path in order for item in rng.sample(files[path], len(files[path]))]


def pytest_collection_finish() -> None:
    """Exempt modules and tests, millions of objects, from garbage collection, which would visit them again and again."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()


# ---- state that tests share -------------------------------------------------------------------------------------------


def seed_everything() -> None:
    random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed before the fixtures, including those of a module: their weights must not depend on the tests before them."""
    seed_everything()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    """Seed again: the fixtures of a module were made in this test or in an earlier one."""
    seed_everything()


@pytest.fixture(autouse=True, scope="session")
def _one_process_among_others(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use one thread, a cache folder in the temporary folder, and a disk that is never waited for.

    Threads that wait for a core that another worker uses are many times slower than a single thread. Without fsync, files
    survive everything but a crash of the machine: a killed process too.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda process: {0}, raising=False)
        patch.setattr(os, "fsync", lambda descriptor: None)
        patch.setenv("REGARD_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    """Restore what a test may change in its process, and forget the messages that are printed once in a process."""
    environment, folder = dict(os.environ), os.getcwd()
    attention_kernels.warn_once.cache_clear()
    constraints.warn_once.cache_clear()
    yield
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_float32_matmul_precision("highest")
    os.chdir(folder)
    if os.environ != environment:
        os.environ.clear()
        os.environ.update(environment)


@pytest.fixture
def data_folder() -> Path:
    """The real corpora beside the repository, or a skip where they are not."""
    folder = Path(os.environ.get("REGARD_DATA") or Path(__file__).parents[2] / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no corpora at {folder}: set REGARD_DATA to their folder")
    return folder
