"""Proof, after stages 1 and 3, that nothing that is held out is trained on.

    python recipes/translator/check.py DATA WORK

Held out are all sentences of the tests and validation sets of DATA, either side of each pair (Europarl has no test and is
scored on its validation set). They are looked for on both sides of every file that train.toml and again.toml name in WORK,
whatever its language, ignoring case, punctuation and white space. What is found is listed, and the exit code is 1; files
that are not there are named.

Whole lines are compared, in the script they are in: a Chinese sentence is not found in the other script.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from regard.config import recipes
from regard.data.parallel_corpus import ParallelCorpus, read_lines

SHOWN = 20
RECIPES = ("train.toml", "again.toml")


def main(data: Path, work: Path) -> int:
    held, named = held_out(data), trained(work)
    files, missing = [p for p in named if p.exists()], [p for p in named if not p.exists()]
    print(f"{len(held):,} sentences are held out; {len(files)} files to train on")
    if missing:
        print(f"{len(missing)} are not there and not checked: {' '.join(str(p.relative_to(work)) for p in missing)}")
    found = [hit for path in files for hit in hits(path, read_lines(path), held)]
    for path, number, text in found[:SHOWN]:
        print(f"{path} line {number}: {text}")
    print(f"{len(found):,} lines hold one of them" if found else "none of them is trained on")
    return int(bool(found) or not files or not held)


def held_out(data: Path) -> set[str]:
    """The sentences of all tests and validation sets, both sides, folded."""
    names = [f"{corpus}{split}.??.xz" for corpus in ("tatoeba/*.", "europarl-en-de/") for split in ("test", "val")]
    return {fold(line) for name in names for path in data.glob(name) for line in read_lines(path)} - {""}


def trained(work: Path) -> list[Path]:
    """The files that the recipes train on, each once."""
    folder = Path(__file__).parent
    specs = tuple(spec for name in RECIPES for spec in recipes.load(folder / name)["data"]["train"])
    parts = ParallelCorpus(specs, "", "", work)._parts()  # as training reads them
    return list(dict.fromkeys(path for part in parts for path in part.files))


def hits(path: Path, lines: Iterable[str], held: set[str]) -> Iterator[tuple[Path, int, str]]:
    for number, line in enumerate(lines, 1):
        if fold(line) in held:
            yield path, number, line


def fold(text: str) -> str:
    """Letters and digits alone."""
    return "".join(char for char in unicodedata.normalize("NFKC", text).casefold() if char.isalnum())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
