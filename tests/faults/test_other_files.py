"""Recipes, word vectors, paths that cannot be, and folders that may not be read: one line each."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import exported_package, model_package
from faults import EVERY, FAULTS, FLIPS, as_nobody, cases, content, copied, outcome, unreadable

import regard
from regard import model_folder as folders
from regard.config import Config, recipes
from regard.data.parallel_corpus import Corpus
from regard.data.text_corpus import TextCorpus
from regard.exchange import loader
from regard.exchange.huggingface import write_huggingface
from regard.tasks.run_config import make_config
from regard.text.tokenizer import Tokenizer
from regard.training.checkpoint import Checkpoints, Progress
from regard.vectors.formats import read_vectors, write_folder
from regard.vectors.word_vectors import WordVectors

CPU = torch.device("cpu")
LONG = "a" * 300

# ---- recipes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "[model]\nn_encoder_layers = 1000000000",
        "[model]\nn_decoder_layers = 1e9",
        "[model]\nd_model = 1000000000",
        "[model]\nd_ff = 1000000000\nn_heads = 1",
        "[model]\nmax_len = 1000000000",
        "[model]\nmax_len = 16000000\npositions = 'sinusoidal'",
        "[model]\nn_heads = 1000000000",
        "[model]\npreset = 'rnn-tiny'\nd_hidden = 1000000000",
        "[model]\ndilations = [1000000000]\nmixer = 'convolution'",
        "[model]\npreset = [1]",
        "[model]\npreset = 3",
        "model = 3",
        "train = 'x'",
        "data = [1]",
        "[tokenizer]\nvocab_size = 1000000000",
        "[train]\nsteps = 1e30",
        "[train]\nseed = 99999999999999999999999",
        "[train]\nlr = inf",
        "[train]\nlr = nan",
        "[decode]\nbeam = 1000000000",
        "x = " + "[" * 5000 + "]" * 5000,
        "a." * 5000 + "b = 1",
        "\x00",
        "[model",
    ],
    ids=range(24),
)
def test_a_recipe_that_cannot_be(text: str, place: Path) -> None:
    (place / "x.toml").write_text(text)
    assert outcome(lambda: make_config(recipes.load(place / "x.toml"), {}))[0] == "line"


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in FLIPS])
def test_a_fault_in_a_recipe(fault: str, place: Path) -> None:
    path = copied(write(place / "a", "x.toml", recipes.to_toml(Config())), place / "b") / "x.toml"
    FAULTS[fault](path)
    with as_nobody(fault):
        how, found = outcome(lambda: recipes.load(path))
    assert how == "line" or fault in ("emptied", "halved") or found


def write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir()
    (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("fault", [name for name in FAULTS if name not in FLIPS])
@pytest.mark.parametrize("spec", ["a.tsv", "a.txt|b.txt", "a.txt"])
def test_a_fault_in_a_corpus(spec: str, fault: str, place: Path) -> None:
    for name in ("a.tsv", "a.txt", "b.txt"):
        (place / name).write_text("ab\tba\n" * 3 if name == "a.tsv" else "ab\n" * 3)
    corpus: Any = TextCorpus((spec,), place, "line") if spec == "a.txt" else Corpus((spec,), "en", "de", place)
    FAULTS[fault](place / spec.split("|")[0])
    for use in (corpus.fingerprint, lambda: list(corpus.rows())):
        with as_nobody(fault):
            assert outcome(use)[0] == "line" or fault == "halved"


# ---- word vectors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        b"1000000000 300\na 1 2 3\n",
        b"1000000000 999999\na 1 2 3\n",
        b"999999999999 999999\nthe \x00\x01\x02\x03",
        b"1 999999\nthe \x00\x01\x02\x03\x04\x05\x06\x07 \x00",
        b"2 2\na 1 2\n",
        b"0 0\n",
        b"1 1\n",
        b"1000000000 1\na 1\n",
        b"",
        b"\x00" * 100,
        b"a " + b"1 " * 100_000,
        b"-1 3\na 1 2 3\n",
        b"1e9 300\na 1 2 3\n",
        b"99999999999999999999 3\na 1 2 3\n",
    ],
    ids=range(14),
)
def test_word_vectors_whose_header_lies(data: bytes, place: Path) -> None:
    (place / "v.txt").write_bytes(data)
    how, found = outcome(lambda: read_vectors(place / "v.txt"))
    assert how == "line" or len(found) <= 3


VECTORS = ["vectors.safetensors", "words.txt", "config.json", "manifest.json"]


@pytest.mark.parametrize(("file", "fault"), cases(VECTORS))
def test_a_fault_in_a_folder_of_word_vectors(file: str, fault: str, place: Path) -> None:
    numbers = np.arange(12, dtype=np.float32).reshape(4, 3)
    write_folder(WordVectors(["a", "b", "c", "d"], numbers), place / "vectors")
    folder = copied(place / "vectors", place / "copy")
    EVERY[fault](folder / file)
    before = content(folder)
    with as_nobody(fault):
        how, found = outcome(lambda: read_vectors(folder))
    assert how == "line" or (found.words == ["a", "b", "c", "d"] and np.array_equal(found.vectors, numbers))
    assert content(folder) == before


# ---- paths -----------------------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Path], Any]] = {
    "load": regard.load,
    "folder.load": lambda path: loader.load_model(path, CPU),
    "folder.settings": loader.model_settings,
    "train": lambda path: regard.train(path, path.parent / "run"),
    "resume": regard.resume,
    "tokenizer": Tokenizer.load,
    "vectors": WordVectors.load,
    "doctor": lambda path: __import__("regard.cli.doctor_commands", fromlist=["explain"]).explain(
        path, {}, "cpu", None
    ),
    "cost": lambda path: __import__("regard.inference.model_spec", fromlist=["config_of"]).config_of(str(path), {}),
}


def toy(folder: Path) -> Path:
    (folder / "toy.toml").write_text('[data]\ntrain = ["toy:10"]\nvalid = ["toy:5"]\n')
    return folder / "toy.toml"


@pytest.mark.parametrize("use", [*USES, "train-run"])
@pytest.mark.parametrize(
    "name", [LONG, f"{LONG}/x", "x" * 5000, f"{LONG}.toml"], ids=["long", "inside", "path", "toml"]
)
def test_a_name_that_is_too_long(use: str, name: str, place: Path) -> None:
    if use == "train-run":
        how, said = outcome(lambda: regard.train(toy(place), place / name))
    else:
        how, said = outcome(lambda: USES[use](place / name))
    assert how == "line"
    assert len(said) < 1000


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("what", ["fifo", "folder", "unreadable-file", "unreadable-folder", "link"])
def test_something_else_at_a_path(use: str, what: str, place: Path) -> None:
    path = place / "x"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "link":
        path.symlink_to("x")
    elif "folder" in what:
        path.mkdir()
    else:
        path.write_text("x")
    if what.startswith("unreadable"):
        unreadable(path)
    with as_nobody("unreadable" if what.startswith("unreadable") else ""):
        assert outcome(lambda: USES[use](path))[0] == "line"
    assert os.path.lexists(path)


@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444])
@pytest.mark.parametrize("kind", ["translation", "gpt"])
def test_a_folder_that_may_not_be_listed_or_entered(kind: str, mode: int, models: dict[str, Path], place: Path) -> None:
    folder = copied(models[kind], place / "model")
    folder.chmod(mode)
    with as_nobody("unreadable"):
        how, found = outcome(lambda: folders.load(folder, CPU))
    assert how == "line" or (mode == 0o111 and found.tokenizers is not None)
    folder.chmod(0o755)


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_every_file_that_is_written_has_the_mode_of_the_umask(umask: int, place: Path) -> None:
    before = os.umask(umask)
    try:
        made = model_package("translation")
        folders.save(place / "model", made, "# card\n")
        write_huggingface(place / "gpt2", exported_package("gpt2"))
        write_folder(WordVectors(["a"], np.ones((1, 3), np.float32)), place / "vectors")
        optimizer = torch.optim.AdamW(made.model.parameters())
        Checkpoints(place / "run").save(made.model, optimizer, Progress(step=1), {"x": torch.ones(2)})
    finally:
        os.umask(before)
    files = [path for path in place.rglob("*") if path.is_file()]
    assert len(files) > 20
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o666 & ~umask}
