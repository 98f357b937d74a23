"""Check, after stages 1 and 3, that no held-out sentence is trained on.

    python recipes/translator/check.py DATA WORK

Held out are all sentences of the test and validation sets of DATA, on either side (Europarl has no test set and is scored on
its validation set). They are searched on both sides of every file that teacher.toml and student.toml name in WORK,
whatever its language, ignoring case, punctuation and white space. Matches are listed, and the exit code is 1; missing files
are named.

Whole lines are compared, in their script: a Chinese sentence is not found in the other script.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from regard.config import Config, recipes
from regard.data.parallel_corpus import ParallelCorpus, read_lines

SHOWN = 20
RECIPES = ("teacher.toml", "student.toml")


def main(data: Path, work: Path) -> int:
    held_out, named = read_held_out(data), list_training_files(work)
    files, missing = [p for p in named if p.exists()], [p for p in named if not p.exists()]
    print(f"{len(held_out):,} sentences are held out; {len(files)} files to train on")
    if missing:
        print(f"{len(missing)} are not there and not checked: {' '.join(str(p.relative_to(work)) for p in missing)}")
    found = [line for path in files for line in find_lines(path, read_lines(path), held_out)]
    for path, number, text in found[:SHOWN]:
        print(f"{path} line {number}: {text}")
    print(f"{len(found):,} lines hold one of them" if found else "none of them is trained on")
    return int(bool(found) or not files or not held_out)


def read_held_out(data: Path) -> set[str]:
    """Return the sentences of all test and validation sets, both sides, folded."""
    names = [f"{corpus}{split}.??.xz" for corpus in ("tatoeba/*.", "europarl-en-de/") for split in ("test", "val")]
    names += ["docs-en-*/valid.??.xz", "ntrex/ntrex.*.xz"]
    return {fold(line) for name in names for path in data.glob(name) for line in read_lines(path)} - {""}


def list_training_files(work: Path) -> list[Path]:
    """Return the files that the recipes train on, each once."""
    folder = Path(__file__).parent
    tables = [recipes.build({"data": recipes.load(folder / name)["data"]}, Config) for name in RECIPES]
    specs = tuple(spec for table in tables for spec in table.data.train)
    parts = ParallelCorpus(specs, "", "", work)._parts()  # as training reads them
    return list(dict.fromkeys(path for part in parts for path in part.files))


def find_lines(path: Path, lines: Iterable[str], held: set[str]) -> Iterator[tuple[Path, int, str]]:
    for number, line in enumerate(lines, 1):
        if fold(line) in held:
            yield path, number, line


def fold(text: str) -> str:
    """Return the letters and digits alone, case-folded."""
    return "".join(char for char in unicodedata.normalize("NFKC", text).casefold() if char.isalnum())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
