"""Emphasis and other marks around words of plain text: *very*, _very_, <b>very</b>, [very](address).

A translation model was trained on text without them. They are removed before translation and put around the words of the
translation that are linked to the same words (text/alignment.py). No mark is lost: words without a link are placed by
their position in the sentence. Marks inside marks stay in the text.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from regard.text.alignment import Link, Span, word_spans

BEFORE = r"(?<![\w*>)\]/])"  # marks inside words and beside other marks stay in the text
MARKED = re.compile(
    rf"{BEFORE}(?P<star>\*{{1,3}})(?=[^\s*])(?P<starred>[^*\n]{{0,200}}?[^\s*])(?P=star)(?![\w*])"
    rf"|{BEFORE}(?P<line>_)(?=[^\s_])(?P<lined>[^_\n]{{0,200}}?[^\s_])_(?!\w)"  # __init__ is a name
    rf"|{BEFORE}(?P<tag><(?P<name>[A-Za-z]{{1,10}})(?:\s[^<>\n]{{0,80}})?>)(?P<tagged>[^<>\n]{{1,200}})(?P<end></(?P=name)>)(?!\w)"
    rf"|{BEFORE}\[(?P<words>[^\[\]\n]{{1,200}})\](?P<address>\((?:[^()\s]|\([^()\s]*\))*\))(?!\w)"
)


@dataclass(frozen=True)
class Mark:
    """A pair of marks around some characters of a text without marks."""

    begin: int
    end: int
    opening: str
    closing: str


def remove_marks(text: str) -> tuple[str, list[Mark]]:
    """Return a text without marks, and the marks."""
    if not any(char in text for char in "*_<["):
        return text, []
    plain, marks, at = "", [], 0
    for found in MARKED.finditer(text):
        inner = found["starred"] or found["lined"] or found["tagged"] or found["words"]
        both = found["star"] or found["line"]
        opening = both or found["tag"] or "["
        closing = both or found["end"] or f"]{found['address']}"
        plain += text[at : found.start()]
        marks.append(Mark(len(plain), len(plain) + len(inner), opening, closing))
        plain += inner
        at = found.end()
    return plain + text[at:], marks


def restore_marks(source: str, text: str, marks: Sequence[Mark], links: Sequence[Link]) -> str:
    """Return a translation with the marks of its source, given links between the two without marks."""
    words = word_spans(text)
    if not words:
        return text + "".join(mark.opening + source[mark.begin : mark.end] + mark.closing for mark in marks)
    owners = assign_words(words, marks, links)
    around: dict[Span, list[Mark]] = defaultdict(list)  # either disjoint or equal, so that marks never cross
    for number, mark in enumerate(marks):
        own = [i for i, owner in enumerate(owners) if owner == number]
        first, last = longest_run(own) if own else place_by_position(source, mark, len(words))
        span = words[first][0], words[last][1]
        crossed = next((other for other in around if other[0] < span[1] and span[0] < other[1]), span)
        around[crossed].append(mark)
    made, at = "", 0
    for (begin, end), own_marks in sorted(around.items()):
        opening, closing = "".join(m.opening for m in own_marks), "".join(m.closing for m in reversed(own_marks))
        made += text[at:begin] + opening + text[begin:end] + closing
        at = end
    return made + text[at:]


def assign_words(words: Sequence[Span], marks: Sequence[Mark], links: Sequence[Link]) -> list[int]:
    """Return for each word of a translation the number of the mark that it belongs to, or -1.

    It belongs to the mark that has the source word with its strongest link. A mark without any word gets the word that
    is linked most strongly to one of its words."""
    best: dict[Span, Link] = {}
    into: dict[int, Link] = {}
    for link in links:
        word = (link.target_begin, link.target_end)
        if word not in best or link.weight > best[word].weight:
            best[word] = link
        number = mark_of(link, marks)
        if number >= 0 and (number not in into or link.weight > into[number].weight):
            into[number] = link
    owners = [mark_of(best[word], marks) if word in best else -1 for word in words]
    for number, link in into.items():
        place = next((i for i, word in enumerate(words) if word == (link.target_begin, link.target_end)), -1)
        if number not in owners and place >= 0 and owners[place] < 0:
            owners[place] = number
    return owners


def mark_of(link: Link, marks: Sequence[Mark]) -> int:
    """Return the number of the mark around the source word of a link, or -1."""
    inside = (i for i, mark in enumerate(marks) if mark.begin <= link.source_begin < mark.end)
    return next(inside, -1)


def longest_run(places: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last of the longest run of consecutive places; one missing place does not end a run."""
    runs = [[places[0], places[0]]]
    for place in places[1:]:
        if place <= runs[-1][1] + 2:
            runs[-1][1] = place
        else:
            runs.append([place, place])
    first, last = max(runs, key=lambda run: run[1] - run[0])
    return first, last


def place_by_position(source: str, mark: Mark, count: int) -> tuple[int, int]:
    """Return the first and the last word of `count` that stand where the marked words stand in the source."""
    own = word_spans(source)
    inside = [i for i, (begin, _) in enumerate(own) if mark.begin <= begin < mark.end] or [0]
    scale = count / max(1, len(own))
    first, last = (min(count - 1, int(place * scale)) for place in (inside[0], inside[-1]))
    return first, last
