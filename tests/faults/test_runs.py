"""A run with a fault resumes to the very same model, or is refused in one line; nothing of it is lost."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faults import EVERY, FLIPS, as_nobody, cases, change_json, content, copied, outcome, reseal
from safetensors.torch import load_file

import regard
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.token_cache import Filters, prepare_store
from regard.tasks.run import train_config as train
from regard.tasks.run_config import make_config
from regard.text.tokenizer import Tokenizer

STEPS = 4
STATE = ["state.json", "model.safetensors", "optimizer.safetensors", "manifest.json"]


def values_of(folder: Path, **training: Any) -> dict[str, Any]:
    sizes = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 8, "n_heads": 2, "d_ff": 16, "max_len": 32}
    every = {"log_every": 1, "valid_every": 2, "save_every": 1, "keep": 2, "samples": 0, "device": "cpu", "threads": 1}
    return {
        "name": "tiny",
        "data": {"root": str(folder), "train": ["train.tsv"], "valid": ["train.tsv"]},
        "tokenizer": {"kind": "char", "vocab_size": 40},
        "model": {"preset": "transformer-tiny", **sizes},
        "train": {"steps": STEPS, "batch_tokens": 64, **every, **training},
        "decode": {"beam": 1, "max_len_b": 4},
    }


@pytest.fixture(scope="module")
def runs(open_place: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    """A run of two steps that is to have four, and the weights that it ends with.

    The folder is removed: a worker that gets more tests of this module after those of another makes it again."""
    folder = open_place / "runs"
    folder.mkdir()
    rng = random.Random(1)
    words = ["".join(rng.choices("abcdefgh", k=4)) for _ in range(12)]
    (folder / "train.tsv").write_text("".join(f"{word}\t{word[::-1]}\n" for word in words))
    train(make_config(values_of(folder, steps=2), {}), folder / "run", quiet=True)
    shutil.rmtree(folder / "run" / "model")
    whole = copied(folder / "run", folder / "whole")
    regard.resume(whole, train={"steps": STEPS}, quiet=True)
    yield folder / "run", load_file(whole / "model" / "model.safetensors")
    shutil.rmtree(folder)


def resumed(run: Path) -> dict[str, list[Any]]:
    regard.resume(run, train={"steps": STEPS}, quiet=True)
    return {name: x.tolist() for name, x in load_file(run / "model" / "model.safetensors").items()}


NEWEST = "checkpoints/step-00000002"
FILES = [f"{NEWEST}/{name}" for name in STATE] + ["tokenizer.json", "config.toml", "metrics.jsonl"]
SLOW = ("bit-at-a-quarter", "bit-at-three-quarters", "last-bit")  # as good as the other flips


@pytest.mark.parametrize(("file", "fault"), [(file, fault) for file, fault in cases(FILES) if fault not in SLOW])
def test_a_fault_in_a_file(file: str, fault: str, runs: tuple[Path, dict[str, Any]], place: Path) -> None:
    run, weights = runs
    folder = copied(run, place / "run")
    EVERY[fault](folder / file)
    before = content(folder)
    with as_nobody(fault):
        how, found = outcome(lambda: resumed(folder))
    if file == "config.toml":  # what a run is asked for: another valid value is another run
        assert how == "line" or fault in FLIPS
    else:
        assert how == "line" or found == {name: x.tolist() for name, x in weights.items()}
    if how == "line":
        kept = {name: what for name, what in content(folder).items() if name.startswith("checkpoints/")}
        assert kept == {name: what for name, what in before.items() if name.startswith("checkpoints/")}


@pytest.mark.parametrize("wrong", [-1, 1e30, "x", None, [1]], ids=str)
@pytest.mark.parametrize(
    "keys",
    [("rng",), ("progress",), ("rng", "cpu")]
    + [
        ("progress", name)
        for name in ("step", "cursor", "validated", "best_step", "tokens", "running", "data", "seconds")
    ]
    + [("progress", "cursor", name) for name in ("epoch", "batch")],
    ids=".".join,
)
def test_a_state_that_is_none(
    keys: tuple[str, ...], wrong: Any, runs: tuple[Path, dict[str, Any]], place: Path
) -> None:
    """With checksums made anew: a run that resumes from a place that it never reached would be another run."""
    run, weights = runs
    folder = copied(run, place / "run")
    change_json(folder / NEWEST / "state.json", keys, wrong)
    reseal(folder / NEWEST)
    how, found = outcome(lambda: resumed(folder))
    counted = keys[-1] in ("tokens", "seconds", "validated", "best_step")  # told, not used for learning
    assert how == "line" or counted or found == {name: x.tolist() for name, x in weights.items()}


@pytest.mark.parametrize(
    ("file", "fault"), [case for case in cases(STATE[:3]) if case[1] not in (*FLIPS, "unreadable")]
)
def test_a_checkpoint_that_the_checksums_allow(
    file: str, fault: str, runs: tuple[Path, dict[str, Any]], place: Path
) -> None:
    folder = copied(runs[0], place / "run")
    EVERY[fault](folder / NEWEST / file)
    reseal(folder / NEWEST)
    assert outcome(lambda: resumed(folder))[0] == "line"


# ---- prepared data ---------------------------------------------------------------------------------------------------

CACHE = ["meta.json", "manifest.json", *(f"side-{i}.{what}" for i in (0, 1) for what in ("ids", "offsets"))]


@pytest.mark.parametrize(("file", "fault"), cases(CACHE))
def test_a_fault_in_prepared_data(file: str, fault: str, runs: tuple[Path, dict[str, Any]], place: Path) -> None:
    folder = runs[0].parent
    one = Tokenizer.load(folder / "run" / "tokenizer.json")
    corpus = ParallelCorpus(("train.tsv",), "en", "de", folder)

    def tokens() -> list[list[list[int]]]:
        store = prepare_store(corpus, (one, one), Filters(), place / "cache")
        return [[side[i].tolist() for i in range(len(side))] for side in store.sides]

    expected = tokens()
    (made,) = (place / "cache").iterdir()
    cached = copied(made, place / "copy")
    shutil.rmtree(made)
    cached.rename(made)
    (place / "cache").chmod(0o777)
    EVERY[fault](made / file)
    with as_nobody(fault):
        how, found = outcome(tokens)
    assert how == "line" or found == expected
