"""Plain text corpora: files cut into documents, read as a stream.

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

from regard.data.parallel_corpus import check_file, file_digest, json_rows, parse_part, read_lines
from regard.errors import RegardError

PIECE = 1 << 20  # characters: a longer file becomes several rows of the store


@dataclass(frozen=True)
class TextCorpus:
    """The documents of some text files."""

    specs: tuple[str, ...]
    root: Path
    documents: str  # what a document is: file, line, or blank (lines up to an empty one)
    split: str = "train"

    def rows(self) -> Iterator[tuple[str]]:
        """Yield the documents; where a file is one document, it comes in several consecutive rows."""
        for path, part in self._files():
            yield from ((text,) for text in self._part(path, part))

    def characters(self) -> int:
        """Return the number of characters of all documents."""
        return sum(len(text) for (text,) in self.rows())

    def fingerprint(self) -> str:
        """Return a hash of the content, not of its place."""
        content = [[file_digest(path), part] for path, part in self._files()]
        return hashlib.sha256(json.dumps([self.documents, content]).encode()).hexdigest()

    def _files(self) -> list[tuple[Path, tuple[float, float]]]:
        if not self.specs:
            raise RegardError(
                f"no {self.split} text is given: set data.{self.split} to a file, such as 'book.txt.xz[:90%]'"
            )
        return [self._file(spec) for spec in self.specs]

    def _file(self, spec: str) -> tuple[Path, tuple[float, float]]:
        name, part = parse_part(spec)
        return check_file(self.root / name), part

    def _part(self, path: Path, part: tuple[float, float]) -> Iterator[str]:
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
    """Yield the blocks of lines that blank lines separate."""
    lines: list[str] = []
    for line in itertools.chain(read_lines(path), [""]):
        if line.strip():
            lines.append(line)
        elif lines:
            yield "\n".join(lines)
            lines = []


def _characters(path: Path, part: tuple[float, float]) -> Iterator[str]:
    """Yield a share of the characters of a file, in pieces of bounded size.

    No word is cut: a piece ends at the end of a line, or at a space of a very long line.
    """
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
    """Yield a line in parts of at most PIECE characters, cut after a space where there is one."""
    at = 0
    while at < len(line):
        end = at + PIECE
        if end < len(line):
            end = line.rfind(" ", at, end) + 1 or end
        yield line[at:end]
        at = end
