"""The check that no held-out sentence is trained on."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import check
import pytest


def test_sentences_are_folded_to_letters_and_digits() -> None:
    assert check.fold(" Das ist:  GROSS, weiß ich! ") == "dasistgrossweissich"
    assert check.fold("你好，Ｔｏｍ。") == "你好tom"
    assert check.fold("...") == ""


def test_what_is_prepared_holds_no_sentence_that_is_held_out(
    data: Path, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert check.main(data, work) == 0
    said = capsys.readouterr().out
    assert (
        "44 files to train on" in said
    )  # five sets and their copies; words, formal and titled of four: two sides each
    assert "none of them is trained on" in said
    assert "46 are not there and not checked: made-en-de-de/train.en.xz made-en-de-de/train.de.xz " in said
    assert "europarl.train" not in said


@pytest.mark.parametrize(
    "line",
    [
        "number 305 IS what Tom told me",  # a test
        "nummer 306 ist was tom mir sagte?",
        "307号是汤姆告诉我的",
        "SESSION 201 is now open",  # Europarl is scored on its validation set
    ],
)
def test_a_sentence_is_found_on_any_side_of_any_file(
    data: Path,
    work: Path,
    line: str,
    write: Callable[[Path, Sequence[str]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(work / "made-en-de-fr" / "train.fr.xz", ["fine", line])
    assert check.main(data, work) == 1
    assert f"{work / 'made-en-de-fr' / 'train.fr.xz'} line 2: {line}" in capsys.readouterr().out


def test_files_that_no_recipe_names_do_not_matter(data: Path, work: Path) -> None:
    """A killed job may leave parts of a draft."""
    (work / ".made-en-de-fr.123").mkdir()
    (work / ".made-en-de-fr.123" / "train.fr.xz").write_bytes(b"half a fi")
    (work / "notes.txt").write_text(json.dumps("Number 305 is what Tom told me."))
    assert check.main(data, work) == 0


def test_nothing_to_check_is_no_proof(data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert check.main(data, tmp_path / "empty") == 1
