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
    # Two sides each: tatoeba, prose, docs, copies, words, titled of four languages, europarl and two forms of two.
    assert "60 files to train on" in said
    assert "none of them is trained on" in said
    assert "28 are not there and not checked: made-en-de-0/train.en.xz made-en-de-0/train.de.xz " in said  # of 14 jobs


@pytest.mark.parametrize(
    "line",
    [
        "number 305 IS what Tom told me",  # a test
        "nummer 306 ist was tom mir sagte?",
        "307号是汤姆告诉我的",
        "SESSION 201 is now open",  # Europarl is scored on its validation set
        "page 803 describes the machine",  # validation set of the documents
        "La page 502 décrit la machine !",  # NTREX
    ],
)
def test_a_sentence_is_found_on_any_side_of_any_file(
    data: Path,
    work: Path,
    line: str,
    write: Callable[[Path, Sequence[str]], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    write(work / "made-fr-en" / "train.fr.xz", ["fine", line])
    assert check.main(data, work) == 1
    assert f"{work / 'made-fr-en' / 'train.fr.xz'} line 2: {line}" in capsys.readouterr().out


def test_files_that_no_recipe_names_do_not_matter(data: Path, work: Path) -> None:
    """A killed job may leave parts of a draft."""
    (work / ".made-fr-en.123").mkdir()
    (work / ".made-fr-en.123" / "train.fr.xz").write_bytes(b"half a fi")
    (work / "notes.txt").write_text(json.dumps("Number 305 is what Tom told me."))
    assert check.main(data, work) == 0


def test_nothing_to_check_is_no_proof(data: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert check.main(data, tmp_path / "empty") == 1
