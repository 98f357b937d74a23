"""`regard vectors` from end to end on a tiny file: its output, the files it writes, and its errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.cli import main
from regard.vectors.word_vectors import WordVectors

PLANE = {"king": (2, 2), "man": (1, 2), "woman": (1, -2), "queen": (2, -2), "child": (-1, 0.2)}


@pytest.fixture
def plane(tmp_path: Path) -> Path:
    WordVectors(list(PLANE), np.array(list(PLANE.values()), np.float32)).save(tmp_path / "plane.txt.gz")
    (tmp_path / "questions.txt").write_text(": family\nman king woman queen\nman king aunt uncle\n")
    (tmp_path / "pairs.txt").write_text("man\tking\t3\nman\twoman\t1\nman\tuncle\t1\n")
    return tmp_path / "plane.txt.gz"


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["regard", "vectors", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    out, err = capsys.readouterr()
    assert ended.value.code == (2 if err.startswith("regard: ") else 0), err
    return err or out


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *words: run(monkeypatch, capsys, *words)


def test_nearest(call: Any, plane: Path) -> None:
    assert call("nearest", plane, "king", "-n", 1) == "0.9487  man\n"
    found = json.loads(call("nearest", plane, "king", "queen", "-n", 1, "--json"))
    assert {word: near[0]["word"] for word, near in found.items()} == {"king": "man", "queen": "woman"}
    assert call("nearest", plane, "king", "queen", "-n", 1) == "king:\n0.9487  man\nqueen:\n0.9487  woman\n"


def test_analogy(call: Any, plane: Path) -> None:
    assert call("analogy", plane, "man", "king", "woman", "-n", 1).split()[1] == "queen"
    found = json.loads(call("analogy", plane, "man", "king", "woman", "--method", "mul", "--json"))
    assert found["answers"][0]["word"] == "queen"


def test_similarity(call: Any, plane: Path) -> None:
    assert call("similarity", plane, "king", "man") == "0.9487  (man is number 1 of the 4 words near king)\n"
    assert json.loads(call("similarity", plane, "king", "queen", "--json")) == {
        "a": "king",
        "b": "queen",
        "similarity": 0.0,
        "rank": 2,
    }


def test_evaluate_prints_a_table_that_states_the_cut_and_unknown_words(call: Any, plane: Path) -> None:
    questions, pairs = plane.with_name("questions.txt"), plane.with_name("pairs.txt")
    printed = call("evaluate", plane, "--analogies", questions, "--similarity", pairs)
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[0] == "5 words of 2 numbers; the first 5 take part"
    assert "family 100.0% 1 1 1" in lines
    assert "total 100.0% 1 1 1" in lines
    assert "pairs 1.0000 1.0000 2 1" in lines
    found = json.loads(call("evaluate", plane, "--analogies", questions, "--cut", 4, "--json"))
    assert found["cut"] == 4
    assert found["analogies"]["questions.txt"][-1] == {
        "name": "total",
        "correct": 1,
        "asked": 1,
        "skipped": 1,
        "accuracy": 1.0,
    }


def test_plot_writes_the_picture_that_the_suffix_asks_for(call: Any, plane: Path) -> None:
    for name, magic in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        path = plane.with_name(name)
        assert call("plot", plane, "man:woman", "king:queen", "-o", path) == f"{path}\n"
        assert path.read_bytes().startswith(magic)
    assert json.loads(call("plot", plane, "man:woman", "king:queen", "--json"))["lines"][0] == ["man", "woman"]
    assert "a picture is a .png or .svg" in call("plot", plane, "-o", "a.gif")


def test_convert_goes_from_any_kind_to_any_other(call: Any, plane: Path) -> None:
    at = plane
    for name in ("b.bin", "folder", "c.vec", "d.bin.xz"):
        to = plane.with_name(name)
        assert call("convert", at, "-o", to) == f"{to}: 5 words of 2 numbers\n"
        at = to
    assert WordVectors.load(at).vectors.tolist() == WordVectors.load(plane).vectors.tolist()
    call("convert", at, "-o", plane.with_name("e.txt"), "--kind", "glove", "-n", 2)
    assert plane.with_name("e.txt").read_text() == "king 2 2\nman 1 2\n"


def test_project_writes_what_tensorboard_reads(call: Any, plane: Path) -> None:
    folder = plane.with_name("board")
    assert "3 words" in call("project", plane, "-o", folder, "-n", 3)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["metadata.tsv", "projector_config.pbtxt", "tensors.tsv"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nearest", "PLANE", "quen"), "did you mean 'queen'"),
        (("similarity", "nothing.bin", "a", "b"), "there is no file nothing.bin"),
        (("evaluate", "PLANE"), "give --analogies FILE"),
        (("analogy", "PLANE", "man", "king", "woman", "--method", "div"), "choose add or mul"),
        (("nearest", "PLANE", "king", "--train.steps", "3"), "--train.steps does not belong here"),
    ],
)
def test_errors_are_one_line(call: Any, plane: Path, words: tuple[str, ...], said: str) -> None:
    printed = call(*(str(plane) if word == "PLANE" else word for word in words))
    assert printed.startswith("regard: ")
    assert printed.count("\n") == 1
    assert said in printed


def test_a_place_of_others_is_refused_before_training(call: Any, plane: Path) -> None:
    folder = plane.with_name("mine")
    folder.mkdir()
    (folder / "letter.txt").write_text("years of work")
    assert "holds no word vectors" in call("train", "missing.txt", "-o", folder)
    (folder / "config.json").write_text('{"kind": "word-vectors"}')
    assert "Regard did not write" in call("train", "missing.txt", "-o", folder)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "letter.txt"]


def test_asking_does_not_wait_for_torch(plane: Path) -> None:
    program = (
        "import sys\nfrom regard.cli.main import main\ntry:\n    main()\nfinally:\n    print('torch' in sys.modules)"
    )
    words = [sys.executable, "-c", program, "vectors", "nearest", str(plane), "king", "-n", "1"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout == "0.9487  man\nFalse\n"
