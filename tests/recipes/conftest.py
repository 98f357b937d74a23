"""Fixtures for the stages of the translator's recipe, which are scripts that import each other by name."""

from __future__ import annotations

import lzma
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "translator"))


def write_lines(path: Path, lines: Sequence[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with lzma.open(path, "wt", encoding="utf-8", preset=0) as file:
        file.writelines(line + "\n" for line in lines)


@pytest.fixture
def write() -> Callable[[Path, Sequence[str]], None]:
    return write_lines


@pytest.fixture(scope="session")
def original_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return corpora of a few lines under the names of the real ones; no test may change them."""
    numbers = range(100, 310)
    english = [f"Number {i} is what Tom told me." for i in numbers]
    others = {
        "de": [f"Nummer {i} ist, was Tom mir sagte." for i in numbers],
        "fr": [f"Le numéro {i} est ce que Tom m'a dit." for i in numbers],
        "zh": [f"{i}号是汤姆告诉我的。" if i % 2 else f"{i}號是湯姆告訴我的。" for i in numbers],
    }
    root = tmp_path_factory.mktemp("corpora") / "data"
    for lang, lines in others.items():
        for split, part in (("train", slice(0, 200)), ("val", slice(200, 205)), ("test", slice(205, 210))):
            write_lines(root / "tatoeba" / f"en-{lang}.{split}.en.xz", english[part])
            write_lines(root / "tatoeba" / f"en-{lang}.{split}.{lang}.xz", lines[part])
    write_lines(root / "tatoeba" / "en-zh.test.script.xz", ["cmn_Hans", "cmn_Hant"] * 2 + ["cmn_Hans"])
    for split, numbers in (("train", range(100, 200)), ("val", range(200, 203))):
        rest = {
            "en": [f"Same {split}.", "NUMBER 306 - is what Tom told me!"],
            "de": [f"Same {split}.", "Nummer 7 ist, was Tom sagte."],
        }
        write_lines(
            root / "europarl-en-de" / f"{split}.en.xz", [f"Session {i} is now open." for i in numbers] + rest["en"]
        )
        write_lines(
            root / "europarl-en-de" / f"{split}.de.xz", [f"Sitzung {i} ist eröffnet." for i in numbers] + rest["de"]
        )
    return root


@pytest.fixture(scope="session")
def original_work(original_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the output of stage 1 for the corpora; no test may change it."""
    import prepare

    folder = tmp_path_factory.mktemp("prepared") / "work"
    prepare.main(original_data, folder)
    return folder


@pytest.fixture
def data(original_data: Path, tmp_path: Path) -> Path:
    """Return a copy of the corpora that a test may change."""
    return Path(shutil.copytree(original_data, tmp_path / "data"))


@pytest.fixture
def work(original_work: Path, tmp_path: Path) -> Path:
    """Return a copy of the output of stage 1 that a test may change."""
    return Path(shutil.copytree(original_work, tmp_path / "work"))
