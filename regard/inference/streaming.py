"""Translation of a stream, line by line: the lines that have arrived are translated together, and no line waits for another.

When lines arrive slowly, each is a batch of its own and is translated at once. When they arrive faster than they are
translated, those that arrived during a batch are the next one, up to a bound; the operating system holds the rest and makes
the writing process wait. So memory is bounded, and decoding has full batches.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

from regard.data.parallel_corpus import BOM, LONGEST_LINE
from regard.decode.batch_decoding import OverlongSentence
from regard.decode.sampling import text_seed
from regard.errors import RegardError
from regard.inference.translator import Translation, Translator
from regard.text.formality import detect_form
from regard.text.language_identification import Direction, LanguageCounts
from regard.text.sentence_splitting import CODE_FENCE

BATCH_LINES = 256
BATCH_CHARACTERS = 1 << 13  # about a second of decoding on two cores
BLOCK = 1 << 16  # bytes


@dataclass(frozen=True)
class Line:
    """A line of a text: its number from 1 on, its text, and what ends it."""

    number: int
    text: str
    end: str  # "\n", "\r\n", or "" at the end of a text that does not end in one


def read_line_batches(
    blocks: Iterator[bytes],
    has_data: Callable[[], bool] = lambda: True,
    name: str = "stdin",
    lines: int = BATCH_LINES,
    characters: int = BATCH_CHARACTERS,
) -> Iterator[list[Line]]:
    """Yield the lines of a text that is read in blocks of bytes.

    A batch has at most `lines` lines, and ends with the one that makes it `characters` characters long. It is shorter where
    its lines have arrived and `has_data` says that the next block has not; without `has_data` the batches depend on the
    text alone. Text that is not UTF-8, a NUL byte and a line of over 16 MiB are errors that name the line, after all lines
    before it.
    """
    arrived: deque[bytes] = deque()
    rest, number, is_open = b"", 0, True
    while is_open or arrived:
        while is_open and len(arrived) < lines and (not arrived or has_data()):
            block = next(blocks, b"")
            is_open = bool(block)
            *whole, rest = (rest + block).split(b"\n")
            arrived.extend(line + b"\n" for line in whole)
            if (rest and not is_open) or len(rest) > LONGEST_LINE:
                arrived.append(rest)  # one that is too long is refused below, where its number is known
                is_open = False
        batch: list[Line] = []
        size = 0
        while arrived and len(batch) < lines and size < characters:
            number += 1
            try:
                batch.append(decode_line(arrived.popleft(), number, name))
            except RegardError:
                if batch:
                    yield batch
                raise
            size += len(batch[-1].text)
        if batch:
            yield batch


def read_stream(stream: BinaryIO) -> tuple[Iterator[bytes], Callable[[], bool]]:
    """Return the blocks of bytes of a stream as they arrive, and a function that tells whether reading would not wait."""
    try:
        descriptor = stream.fileno()
    except OSError:  # bytes in memory
        return iter(partial(stream.read, BLOCK), b""), lambda: True
    # Not by the stream's own buffer: `select` would not see the bytes that wait in there.
    blocks = iter(partial(os.read, descriptor, BLOCK), b"")
    return blocks, lambda: bool(select.select([descriptor], [], [], 0)[0])


def decode_line(raw: bytes, number: int, name: str) -> Line:
    """Return a line of a UTF-8 text, the first one without its byte-order mark."""
    if len(raw) > LONGEST_LINE:
        raise RegardError(f"line {number} of {name} is over {LONGEST_LINE:,} bytes long: put fewer sentences on a line")
    raw = raw.removeprefix(BOM) if number == 1 else raw
    text = raw.removesuffix(b"\n")
    text = text.removesuffix(b"\r") if len(text) < len(raw) else text
    try:
        line = Line(number, text.decode(), raw[len(text) :].decode())
    except UnicodeDecodeError as error:
        raise RegardError(f"line {number} of {name} is not UTF-8 ({error.reason} at byte {error.start + 1})") from None
    if "\0" in line.text:
        raise RegardError(f"line {number} of {name} is binary (it holds a NUL byte): give plain text")
    return line


class ChunkTranslator:
    """A translator of texts that are given in chunks, each text with the translation that it has in any other chunks.

    What chunks share is the languages seen so far, by which a heading is taken to be in the language of the texts before
    it, whether a code block between lines of ``` is open, whose lines are left as they are, and the number of texts so
    far: text i of all chunks has the random seed + i.
    """

    def __init__(
        self,
        translator: Translator,
        to: str | None = None,
        source: str | None = None,
        *,
        has_code_blocks: bool = False,
        is_document: bool = False,
        **options: Any,
    ) -> None:
        """Take a translator and the arguments of its `translate`.

        With `has_code_blocks`, lines of ``` begin and end code, as long as the model takes texts of any length; a model of
        one direction translates every line. The texts of a document have one form of address, where none is asked for: that
        of the texts that `look_ahead` is given.
        """
        self.translator, self.to, self.source, self.options = translator, to, source, options
        self.is_for_texts = bool(translator.directions)
        self.has_code_blocks = has_code_blocks and self.is_for_texts
        self.is_document, self.is_inside_code = is_document, False
        self.count = 0  # texts that were translated or skipped
        if self.is_for_texts:
            self.options = {"seen": LanguageCounts(), **options}

    def translate(self, texts: Sequence[str], alignment: bool = False) -> list[Translation]:
        """Return the translations of the next texts."""
        given = self._without_code(texts)
        options = {**self.options, "alignment": True} if alignment else self.options
        if self.count:
            own = options.get("seed")
            seed = text_seed(self.translator.options.seed if own is None else own, self.count)
            options = {**options, "seed": seed}
        try:
            found = self.translator.translate(given, self.to, self.source, **options)
        except OverlongSentence as error:  # a model of one direction, which reads each text as one sentence
            raise OverlongSentence(self.count + error.number, error.reason) from None
        self.count += len(texts)
        return_free_memory()
        return [
            replace(each, text=text) if text != part else each
            for text, part, each in zip(texts, given, found, strict=True)
        ]

    def skip(self, texts: Sequence[str]) -> None:
        """Take the next texts into account without translating them."""
        self.count += len(texts)
        self._detect(texts)

    def look_ahead(self, texts: Sequence[str]) -> None:
        """Detect the languages of texts that will be translated, so that the first of them profit from the others."""
        directions = self._detect(texts)
        self.is_inside_code = False
        languages = Counter(direction.source for direction in directions if direction.source)
        if self.is_document and self.translator.forms and languages and self.options.get("formality", "auto") == "auto":
            language = languages.most_common(1)[0][0]
            own = [text for text, direction in zip(texts, directions, strict=True) if direction.source == language]
            self.options["formality"] = detect_form(own, language)

    def _detect(self, texts: Sequence[str]) -> list[Direction]:
        given = self._without_code(texts)
        if not self.is_for_texts:
            return []
        return self.translator.detector.detect(given, self.to, self.source, seen=self.options["seen"])

    def _without_code(self, texts: Sequence[str]) -> list[str]:
        """Return the texts with nothing in place of lines of code."""
        if not self.has_code_blocks:
            return list(texts)
        given = []
        for text in texts:
            is_fence = bool(CODE_FENCE.match(text))
            given.append("" if is_fence or self.is_inside_code else text)
            self.is_inside_code ^= is_fence
        return given


def return_free_memory() -> None:
    """Return memory that is no longer used to the system, where the C library can (glibc).

    Batches of many shapes leave gaps in the heap: without this, a process that translates for hours holds several times the
    memory that it needs.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
