"""The command line, in a process of its own: one line on stderr and exit code 2."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from faults import EVERY, WRONG, change_json, copied, limits, reseal

LONG = "a" * 300


def said(*words: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> tuple[int, str]:
    """Return the exit code and stderr of a command, run as `regard` runs it."""
    from regard.cli import main

    monkeypatch.setattr("sys.argv", ["regard", *words])
    with limits(), pytest.raises(SystemExit) as end:
        main.main()
    return int(end.value.code or 0), capfd.readouterr().err


def check(words: list[str], capfd: Any, monkeypatch: Any) -> str:
    code, text = said(*words, capfd=capfd, monkeypatch=monkeypatch)
    lines = [line for line in text.splitlines() if line.strip()]
    assert code == 2, text
    assert len(lines) == 1, text
    assert lines[0].startswith("regard: ")
    return lines[0]


COMMANDS = {
    "translate": ["translate", "--model", LONG, "x"],
    "input": ["translate", "--input", LONG],
    "train": ["train", f"{LONG}.toml"],
    "resume": ["resume", LONG],
    "evaluate": ["evaluate", LONG],
    "import": ["import", LONG],
    "export": ["export", LONG, "-o", "out"],
    "generate": ["generate", LONG, "x"],
    "classify": ["classify", LONG, "x"],
    "embed": ["embed", LONG, "x"],
    "cost": ["cost", LONG],
    "summary": ["summary", LONG],
    "doctor": ["doctor", "--explain", LONG],
    "tokenizer": ["tokenizer", "encode", LONG, "x"],
    "look-training": ["look", "training", LONG],
    "look-attention": ["look", "attention", LONG, "x"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_names_that_are_too_long(
    command: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    check(COMMANDS[command], capfd, monkeypatch)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size", ["n_encoder_layers", "source_vocab"])
@pytest.mark.parametrize("wrong", WRONG)
def test_sizes(
    size: str,
    wrong: str,
    models: dict[str, Path],
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(models["translation"], place / "model")
    change_json(folder / "config.json", ("model", size), WRONG[wrong])
    reseal(folder)
    check(["translate", "--model", str(folder), "ab"], capfd, monkeypatch)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "manifest.json"])
@pytest.mark.parametrize("fault", ["emptied", "bit-in-the-middle", "deleted", "folder", "fifo"])
def test_faults(
    file: str,
    fault: str,
    models: dict[str, Path],
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(models["gpt"], place / "model")
    EVERY[fault](folder / file)
    check(["generate", str(folder), "ab"], capfd, monkeypatch)


@pytest.mark.parametrize("value", [1_000_000_000, 0, -1, "x"])
def test_imports(
    value: Any,
    foreign: dict[str, Path],
    place: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = copied(foreign["gpt2"], place / "gpt2")
    change_json(folder / "config.json", ("n_layer",), value)
    check(["import", str(folder), "-o", str(place / "out")], capfd, monkeypatch)
    assert not (place / "out").exists()


def test_an_old_configuration_says_what_to_add(
    foreign: dict[str, Path], place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied(foreign["bert"], place / "bert")
    config = json.loads((folder / "config.json").read_text())
    del config["model_type"], config["architectures"]
    (folder / "config.json").write_text(json.dumps(config))
    for words in (["import", str(folder), "-o", str(place / "out")], ["classify", str(folder), "x"]):
        assert 'add "model_type", one of "gpt2"' in check(words, capfd, monkeypatch)


@pytest.mark.parametrize("layers", ["1000000000", "1e9", "-1", "x"])
def test_training_with_sizes_that_cannot_be(
    layers: str, place: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "x.toml").write_text('[data]\ntrain = ["toy:10"]\nvalid = ["toy:5"]\n')
    words = ["train", str(place / "x.toml"), "--run", str(place / "run"), "--model.n_encoder_layers", layers]
    check(words, capfd, monkeypatch)
    assert os.listdir(place) == ["x.toml"]
