"""Segments: the units of text that are translated, and the interface of a document that consists of them.

A segment is plain text. What must not change inside it (inline code, an image, a line break, a variable such as `{name}`)
is one character of Unicode's private use areas, called an atom here as in computer-assisted translation tools: the
translator carries these characters over unchanged. Inline elements around words, such as emphasis or a link, are spans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

BASIC_ATOMS = 0xF8FF - 0xE000 + 1  # private-use characters of the basic plane; planes 15 and 16 continue them


@dataclass(frozen=True)
class Span:
    """An inline element around words, such as emphasis or a link; it contains at least one word."""

    begin: int  # characters of Segment.text
    end: int
    index: int  # the element of the document that it stands for


@dataclass(frozen=True)
class Segment:
    """A text that is translated as a whole: a paragraph, a heading, a table cell, a caption or a message.

    Spans are nested or disjoint, and a span comes before those inside it. Every atom occurs once.
    """

    text: str
    spans: tuple[Span, ...] = ()
    line: int = field(default=1, compare=False)  # of the document, where the segment begins


class TranslatableDocument(Protocol):
    """A parsed document: its segments in order, and a way to write it with other segments in their places."""

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments of the document in its source language."""

    def render(self, translations: Sequence[Segment], language: str = "") -> str:
        """Return the text of the document with `translations[i]` in the place of `segments[i]`.

        A segment that is equal to its source is written as it was, byte for byte. `language` is the code of the language of
        the translations: a page of HTML gets it as its `lang`, and a gettext catalogue without a language as `Language`.
        """


def is_atom(character: str) -> bool:
    """Return whether a character is of a private use area and so stands for something that must not change."""
    return "\ue000" <= character <= "\uf8ff" or character >= "\U000f0000"


def atom_character(number: int) -> str:
    """Return the private-use character for the atom `number` of a segment, counted from 0."""
    return chr(0xE000 + number if number < BASIC_ATOMS else 0xF0000 + number - BASIC_ATOMS)
