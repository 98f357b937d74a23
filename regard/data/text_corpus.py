"""Plain text in: files cut into documents, read as a stream.

A spec is a file, `book.txt.xz`, or a part of it, `book.txt.xz[:90%]` (of its characters where a file is one document, else
of its documents), or `texts.jsonl` (one object a line, with a "text").
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from regard.data.parallel_corpus import check_file, file_digest, json_rows, part_of, read_lines
from regard.errors import RegardError

PIECE = 1 << 20  # characters of a file that are one row of the store


@dataclass(frozen=True)
class TextCorpus:
    specs: tuple[str, ...]
    root: Path
    documents: str  # what one is: file, line or blank (lines up to an empty one)
    split: str = "train"

    def rows(self) -> Iterator[tuple[str]]:
        """The documents; a file that is one comes in pieces, which follow each other."""
        for path, part in self._files():
            yield from ((text,) for text in self._slice(path, part))

    def characters(self) -> int:
        return sum(len(text) for (text,) in self.rows())

    def fingerprint(self) -> str:
        """Hash of what is read, not of where it lies."""
        content = [[file_digest(path), part] for path, part in self._files()]
        return hashlib.sha256(json.dumps([self.documents, content]).encode()).hexdigest()

    def _files(self) -> list[tuple[Path, tuple[float, float]]]:
        if not self.specs:
            raise RegardError(
                f"no {self.split} text is given: set data.{self.split} to a file, such as 'book.txt.xz[:90%]'"
            )
        return [self._file(spec) for spec in self.specs]

    def _file(self, spec: str) -> tuple[Path, tuple[float, float]]:
        name, part = part_of(spec)
        return check_file(self.root / name), part

    def _slice(self, path: Path, part: tuple[float, float]) -> Iterator[str]:
        if self.documents == "file" and not _is_jsonl(path):
            return _characters(path, part)
        if part == (0, 1):
            return self._documents(path)
        total = sum(1 for _ in self._documents(path))
        return itertools.islice(self._documents(path), int(part[0] * total), int(part[1] * total))

    def _documents(self, path: Path) -> Iterator[str]:
        if _is_jsonl(path):
            return (text for (text,) in json_rows(path, ("text",)))
        if self.documents == "line":
            return (line for line in read_lines(path) if line.strip())
        return _paragraphs(path)


def _is_jsonl(path: Path) -> bool:
    return ".jsonl" in path.suffixes


def _paragraphs(path: Path) -> Iterator[str]:
    lines: list[str] = []
    for line in itertools.chain(read_lines(path), [""]):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []


def _characters(path: Path, part: tuple[float, float]) -> Iterator[str]:
    """A share of a file's characters, in pieces of bounded size that cut no word: they end where a line does, or a longer
    one has a space."""
    first, last = 0, sys.maxsize
    if part != (0, 1):
        total = sum(len(line) + 1 for line in read_lines(path))
        first, last = (int(share * total) for share in part)
    held, size, at = list[str](), 0, 0
    for line in read_lines(path):
        text = (line + "\n")[max(0, first - at) : max(0, last - at)]
        at += len(line) + 1
        for words in _cut(text):
            held.append(words)
            size += len(words)
            if size >= PIECE:
                yield "".join(held)
                held, size = [], 0
    if size:
        yield "".join(held)


def _cut(line: str) -> Iterator[str]:
    """A line in parts of at most PIECE characters, cut after a space where there is one."""
    at = 0
    while at < len(line):
        end = at + PIECE
        if end < len(line):
            end = line.rfind(" ", at, end) + 1 or end
        yield line[at:end]
        at = end
