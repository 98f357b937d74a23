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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard.data.held_out import HeldOut, held_out_share, hold_out
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
    held_out: HeldOut | None = None  # yield only what it holds (split valid), or only the rest (split train)
    share: float = 0.0  # of the end of a file that is one document: held out

    def rows(self) -> Iterator[tuple[str]]:
        """Yield the documents; where a file is one document, it comes in several consecutive rows."""
        for path, part in self._files():
            for text in self._part(path, self._kept(path, part)):
                if self.held_out is None or self.held_out.holds(text) == (self.split == "valid"):
                    yield (text,)

    def rows_by_spec(self) -> Iterator[Iterator[tuple[str]]]:
        """Yield all rows in one iterator: the files of plain text are read as one."""
        yield self.rows()

    def hold_out(self, share: float, seed: int) -> tuple[TextCorpus, TextCorpus, str]:
        """Return the corpus without a share of it, this share as a validation corpus, and a message that says so.

        Documents are chosen by their content; of a file that is one document, the end is taken.
        """
        if all(self._is_document(path) for path, _ in self._files()):
            part = held_out_share(self.characters(), share)
            message = (
                f"data.valid is not given: the last {100 * part:.3g}% of the training text is held out for validation"
            )
            return replace(self, share=part), replace(self, split="valid", share=part), message
        if any(self._is_document(path) for path, _ in self._files()):
            raise RegardError(
                "data.valid is not given, and some files are documents, others have several: give data.valid"
            )
        held = hold_out((text for (text,) in self.rows() if text.strip()), share, seed)
        return replace(self, held_out=held), replace(self, split="valid", held_out=held), held.describe("documents")

    def _is_document(self, path: Path) -> bool:
        return self.documents == "file" and not _is_jsonl(path)

    def _kept(self, path: Path, part: tuple[float, float]) -> tuple[float, float]:
        """Return the part of a file that is read: without the end that is held out, or only this end."""
        if not self.share or not self._is_document(path):
            return part
        first, last = part
        border = last - (last - first) * self.share
        return (border, last) if self.split == "valid" else (first, border)

    def characters(self) -> int:
        """Return the number of characters of all documents."""
        return sum(len(text) for (text,) in self.rows())

    def fingerprint(self) -> str:
        """Return a hash of the content, not of its place."""
        content: list[Any] = [[file_digest(path), self._kept(path, part)] for path, part in self._files()]
        if self.held_out is not None:
            content.append([self.split, self.held_out.fingerprint()])
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
        if self._is_document(path):
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
