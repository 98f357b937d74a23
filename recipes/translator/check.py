"""Proof that no sentence of the tests was trained on.

    python recipes/translator/check.py DATA WORK

DATA holds tatoeba/ with its test files; WORK is any folder of files to train on: NAME.train.{xx}.xz, back-translations too.
Either side of every test pair is looked for on either side of every file, whatever its language, ignoring case, punctuation
and white space. What is found is listed, and the exit code is 1.
"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from regard.data.corpus import read_lines

SHOWN = 20


def main(data: Path, work: Path) -> int:
    tests, files = sentences_of(data, "test"), trained(work)
    print(f"{len(tests):,} sentences of the tests, {len(files)} files to train on")
    found = [hit for path in files for hit in hits(path.name, read_lines(path), tests)]
    for name, number, text in found[:SHOWN]:
        print(f"{name} line {number}: {text}")
    print(f"{len(found):,} lines hold a sentence of the tests" if found else "none of them is trained on")
    return int(bool(found) or not files or not tests)


def sentences_of(data: Path, split: str) -> set[str]:
    """The sentences of all test files, both sides, folded."""
    names = {f"tatoeba/*.{split}.??.xz", f"europarl-en-de/{split}.??.xz"}
    paths = [path for name in sorted(names) for path in sorted(data.glob(name))]
    return {fold(line) for path in paths for line in read_lines(path)} - {""}


def trained(work: Path) -> list[Path]:
    """All files of text but those that only validate."""
    suffixes = (".xz", ".gz", ".zst", ".txt", ".tsv")
    return [path for path in sorted(work.rglob("*")) if path.suffix in suffixes and ".val." not in path.name]


def hits(name: str, lines: Iterable[str], tests: set[str]) -> Iterator[tuple[str, int, str]]:
    for number, line in enumerate(lines, 1):
        if any(fold(text) in tests for text in line.split("\t")):
            yield name, number, line


def fold(text: str) -> str:
    """Letters and digits alone."""
    return "".join(char for char in unicodedata.normalize("NFKC", text).casefold() if char.isalnum())


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
