"""The stages of the translator's recipe are scripts in a folder; each imports the others by name, as Python runs them."""

from __future__ import annotations

import lzma
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "recipes" / "translator"))


@pytest.fixture
def write() -> Callable[[Path, Sequence[str]], None]:
    def write(path: Path, lines: Sequence[str]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with lzma.open(path, "wt", encoding="utf-8") as file:
            file.writelines(line + "\n" for line in lines)

    return write


@pytest.fixture
def data(tmp_path: Path, write: Callable[[Path, Sequence[str]], None]) -> Path:
    """Corpora of a few lines under the names of the real ones."""
    numbers = range(100, 310)
    english = [f"Number {i} is what Tom told me." for i in numbers]
    others = {
        "de": [f"Nummer {i} ist, was Tom mir sagte." for i in numbers],
        "fr": [f"Le numéro {i} est ce que Tom m'a dit." for i in numbers],
        "zh": [f"{i}号是汤姆告诉我的。" if i % 2 else f"{i}號是湯姆告訴我的。" for i in numbers],
    }
    root = tmp_path / "data"
    for lang, lines in others.items():
        for split, part in (("train", slice(0, 200)), ("val", slice(200, 205)), ("test", slice(205, 210))):
            write(root / "tatoeba" / f"en-{lang}.{split}.en.xz", english[part])
            write(root / "tatoeba" / f"en-{lang}.{split}.{lang}.xz", lines[part])
    write(root / "tatoeba" / "en-zh.test.script.xz", ["cmn_Hans", "cmn_Hant"] * 2 + ["cmn_Hans"])
    for split, numbers in (("train", range(100, 200)), ("val", range(200, 203))):
        rest = {
            "en": [f"Same {split}.", "NUMBER 306 - is what Tom told me!"],
            "de": [f"Same {split}.", "Nummer 7 ist, was Tom sagte."],
        }
        write(root / "europarl-en-de" / f"{split}.en.xz", [f"Session {i} is now open." for i in numbers] + rest["en"])
        write(root / "europarl-en-de" / f"{split}.de.xz", [f"Sitzung {i} ist eröffnet." for i in numbers] + rest["de"])
    return root


@pytest.fixture
def work(data: Path, tmp_path: Path) -> Path:
    """What stage 1 makes of them."""
    import prepare

    prepare.main(data, tmp_path / "work")
    return tmp_path / "work"
