"""Inline content of a document: text, tags, atoms and breaks, cut into segments and written again after translation.

Every parser turns a paragraph into nodes, each with its source text. `build_segments` cuts the nodes at breaks, leaves
outside what has no words, and makes a segment of the rest. Tags around all of a segment, and white space and images at its
ends, stay outside too. A segment that is not translated is written as it was.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from regard.documents.segment import Segment, Span, atom_character
from regard.text.placeholders import LINK, MAIL

TEMPLATE = r"\{\{[^{}\n]{0,200}\}\}|\{%[^{}\n]{0,200}%\}|\$\{[\w.]{1,80}\}|\{\w{1,80}\}"  # variables of templates
PRIVATE_USE = r"[\ue000-\uf8ff\U000f0000-\U0010ffff]"
INVARIABLE = re.compile(
    rf"<(?:{LINK}|{MAIL})>|{LINK}|{MAIL}|{TEMPLATE}|{PRIVATE_USE}"
)  # becomes an atom wherever it stands in a text
SEPARATED_DIGITS = re.compile(r"\d[.,\s]\d")  # written differently in other languages
BREAKING_SPACE = re.compile(r"[^\S\u00a0\u2007\u202f]+")


class SourcePart(Protocol):
    """A part of a document that holds segments: its source text, and how it is written with translations."""

    @property
    def source(self) -> str:
        """The part as it stands in the document."""

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the part with translations in place of its segments."""


Pieces = tuple[str | SourcePart, ...]  # text that stays, and parts with segments


def render_pieces(pieces: Iterable[str | SourcePart], translations: Sequence[Segment]) -> str:
    """Return pieces as one text, with translations in place of the segments."""
    return "".join(piece if isinstance(piece, str) else piece.render(translations) for piece in pieces)


def source_of(pieces: Iterable[str | SourcePart]) -> str:
    """Return pieces as one text, as it stands in the document."""
    return "".join(piece if isinstance(piece, str) else piece.source for piece in pieces)


@dataclass(frozen=True)
class LanguageCode:
    """The place where a document names its own language, such as the value of `lang` in `<html lang="en">`."""

    source: str  # the code as it stands in the document, perhaps empty
    spell: Callable[[str], str] = str  # returns the code of a language as the format writes it

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the code as it is, because translations do not say what language they are in."""
        return self.source

    def replace(self, language: str) -> str:
        """Return the code of a language; one that names the same language with a region ("de-AT") stays."""
        is_same = self.source.lower().replace("_", "-").startswith(f"{language.lower()}-")
        return self.source if is_same else self.spell(language)


@dataclass(frozen=True)
class PiecewiseDocument:
    """A document as pieces: text that stays, and parts with segments."""

    pieces: Pieces
    segments: Sequence[Segment]

    def render(self, translations: Sequence[Segment], language: str = "") -> str:
        """Return the text of the document with `translations[i]` in the place of `segments[i]`.

        Where the document names its own language, it names `language` instead, unless that is empty."""
        if len(translations) != len(self.segments):
            raise ValueError(f"{len(translations)} translations for {len(self.segments)} segments")
        pieces = (p.replace(language) if language and isinstance(p, LanguageCode) else p for p in self.pieces)
        return render_pieces(pieces, translations)


@dataclass(frozen=True)
class PartSequence:
    """Pieces as one part."""

    pieces: Pieces

    @property
    def source(self) -> str:
        return source_of(self.pieces)

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the pieces with translations."""
        return render_pieces(self.pieces, translations)


# ---- nodes -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextNode:
    """Text; `raws[i]` is how character i is written in the document, such as an entity or an escape."""

    text: str
    raws: tuple[str, ...]

    @property
    def pieces(self) -> Pieces:
        return ("".join(self.raws),)


@dataclass(frozen=True)
class AtomNode:
    """Something inside a text that must not change."""

    pieces: Pieces
    is_word: bool = True  # stands for a word or symbol, as inline code does; not an image or a comment


@dataclass(frozen=True)
class BreakNode:
    """The end of a segment inside inline content: a line break that means something, or a tag without its partner."""

    pieces: Pieces


@dataclass(frozen=True)
class TagNode:
    """The opening or closing of an inline element."""

    pieces: Pieces
    name: str
    is_closing: bool = False
    rewritten: Pieces | None = None  # what closes the element where its text has been translated


@dataclass(frozen=True)
class ElementNode:
    """An inline element with what is inside it."""

    opening: TagNode
    children: tuple[InlineNode, ...]
    closing: TagNode

    @property
    def pieces(self) -> Pieces:
        inner = tuple(piece for child in self.children for piece in child.pieces)
        return self.opening.pieces + inner + self.closing.pieces


@dataclass(frozen=True)
class SegmentNode:
    """A segment of a document, and how its atoms, spans and unusual characters are written."""

    number: int  # among the segments of the document
    segment: Segment
    pieces: Pieces  # the source
    atoms: dict[str, Pieces]
    elements: tuple[tuple[Pieces, Pieces], ...]  # opening and closing of the element with index i
    spelling: dict[str, str]  # of characters that the source writes as entities or escapes
    forbidden: re.Pattern[str] | None = None  # removed from the text of a translation

    def is_changed(self, translations: Sequence[Segment]) -> bool:
        """Return whether the translation differs from the source."""
        return translations[self.number] != self.segment

    def chunks(self, translations: Sequence[Segment], write: Callable[[str, SegmentNode], str]) -> Iterator[Chunk]:
        """Yield the translation in chunks: text (written by `write`), atoms, and what opens and closes elements."""
        translated = translations[self.number]
        edges: dict[int, list[tuple[Pieces, str]]] = {}
        for span in reversed(translated.spans):  # the innermost closes first
            edges.setdefault(span.end, []).append((self.elements[span.index][1], "close"))
        for span in translated.spans:
            edges.setdefault(span.begin, []).append((self.elements[span.index][0], "open"))
        run = ""
        for i, char in enumerate([*translated.text, ""]):
            markup = edges.get(i, [])
            if char in self.atoms:
                markup = [*markup, (self.atoms[char], "atom")]
            if (markup or not char) and run:
                yield write(self.forbidden.sub("", run) if self.forbidden else run, self), "text"
                run = ""
            for pieces, kind in markup:
                yield render_pieces(pieces, translations), kind
            run += "" if char in self.atoms else char


Chunk = tuple[str, str]  # a piece of what is written, and its kind: text, atom, open or close
InlineNode = TextNode | AtomNode | BreakNode | TagNode | ElementNode | SegmentNode


def plain(text: str) -> TextNode:
    """Return text that stands in the document as it is."""
    return TextNode(text, tuple(text))


def spelled(text: str, raw: str) -> TextNode:
    """Return text that is written differently in the document, such as an entity or a line break that was joined."""
    return TextNode(text, (raw, *[""] * (len(text) - 1)) if text else (raw,))


@dataclass
class SegmentCollector:
    """The segments of a document in the order in which they are found."""

    segments: list[Segment] = field(default_factory=list)
    line: int = 1  # where the next node begins
    forbidden: re.Pattern[str] | None = None  # what text that is no atom must not contain, such as placeholders

    def add(self, segment: Segment) -> int:
        """Append a segment and return its number."""
        self.segments.append(replace(segment, line=self.line))
        return len(self.segments) - 1


# ---- nodes to segments -----------------------------------------------------------------------------------------------


def build_segments(
    nodes: Iterable[InlineNode], collector: SegmentCollector, invariable: re.Pattern[str] = INVARIABLE
) -> list[InlineNode]:
    """Return nodes with segments in place of the text that is to be translated.

    `collector.line` is the line of the first node before, and of the end of the last node after.
    """
    return list(_cut(match_tags(_find_atoms(nodes, invariable)), collector))


def _find_atoms(nodes: Iterable[InlineNode], invariable: re.Pattern[str]) -> Iterator[InlineNode]:
    """Join text nodes that follow each other, and make an atom of each part that matches."""
    text = ""
    raws: list[str] = []

    def split() -> Iterator[InlineNode]:
        at = 0
        for found in invariable.finditer(text):
            if at < found.start():
                yield TextNode(text[at : found.start()], tuple(raws[at : found.start()]))
            yield AtomNode(("".join(raws[found.start() : found.end()]),))
            at = found.end()
        if at < len(text):
            yield TextNode(text[at:], tuple(raws[at:]))

    for node in nodes:
        if isinstance(node, TextNode) and node.text:
            text += node.text
            raws += node.raws
            continue
        yield from split()
        text, raws = "", []
        yield node
    yield from split()


def match_tags(nodes: Iterable[InlineNode]) -> list[InlineNode]:
    """Return nodes with an element for each pair of tags; a tag without its partner is a break."""
    path: list[tuple[TagNode | None, list[InlineNode]]] = [(None, [])]
    for node in nodes:
        if not isinstance(node, TagNode):
            path[-1][1].append(node)
        elif not node.is_closing:
            if node.name == "a" and any(tag and tag.name == "a" for tag, _ in path):
                while any(tag and tag.name == "a" for tag, _ in path):
                    _drop_last(path)  # HTML has no link inside a link: the second ends the first
                path[-1][1].append(BreakNode(("",)))
            path.append((node, []))
        elif not any(tag and tag.name == node.name for tag, _ in path):
            path[-1][1].append(BreakNode(node.pieces))
        else:
            _drop_unclosed(path, node.name)
            opening, children = path.pop()
            assert opening is not None
            path[-1][1].append(ElementNode(opening, tuple(children), node))
    _drop_unclosed(path, None)
    return path[0][1]


def _drop_unclosed(path: list[tuple[TagNode | None, list[InlineNode]]], name: str | None) -> None:
    """Make breaks of the tags at the end of a path that are not called `name`."""
    while path[-1][0] is not None and path[-1][0].name != name:
        _drop_last(path)


def _drop_last(path: list[tuple[TagNode | None, list[InlineNode]]]) -> None:
    """Make a break of the last tag of a path."""
    tag, children = path.pop()
    assert tag is not None
    path[-1][1].extend([BreakNode(tag.pieces), *children])


def _cut(nodes: Sequence[InlineNode], collector: SegmentCollector) -> Iterator[InlineNode]:
    """Yield the nodes with segments in place of text with words."""
    run: list[InlineNode] = []
    for node in nodes:
        if isinstance(node, BreakNode):
            yield from _cut_run(run, collector)
            run = []
            yield _passed(node, collector)
        else:
            run.append(node)
    yield from _cut_run(run, collector)


def _cut_run(nodes: list[InlineNode], collector: SegmentCollector) -> Iterator[InlineNode]:
    """Yield nodes without breaks between them: what stands before the segment, the segment, and what stands after it."""
    nodes = [_merge_wordless(node) for node in nodes]
    if not has_words(nodes):
        for node in nodes:
            yield _passed(node, collector)
        return
    begin, end = 0, len(nodes)
    while _is_outside(nodes[begin]):
        begin += 1
    while _is_outside(nodes[end - 1]):
        end -= 1
    inner, before, after = nodes[begin:end], nodes[:begin], nodes[end:]
    if isinstance(first := inner[0], TextNode) and (n := len(first.text) - len(first.text.lstrip())):
        before.append(TextNode(first.text[:n], first.raws[:n]))
        inner[0] = TextNode(first.text[n:], first.raws[n:])
    if isinstance(last := inner[-1], TextNode) and (n := len(last.text.rstrip())) < len(last.text):
        after.insert(0, TextNode(last.text[n:], last.raws[n:]))
        inner[-1] = TextNode(last.text[:n], last.raws[:n])
    for node in before:
        yield _passed(node, collector)
    if len(inner) == 1 and isinstance(only := inner[0], ElementNode) and only.closing.rewritten is None:
        yield _passed(only.opening, collector)
        yield from _cut(only.children, collector)
        yield _passed(only.closing, collector)
    else:
        yield _make_segment(inner, collector)
    for node in after:
        yield _passed(node, collector)


def _passed(node: InlineNode, collector: SegmentCollector) -> InlineNode:
    collector.line += source_of(node.pieces).count("\n")
    return node


def _is_outside(node: InlineNode) -> bool:
    """Return whether a node is left out of a segment at whose end it stands."""
    return not node.text.strip() if isinstance(node, TextNode) else isinstance(node, AtomNode) and not node.is_word


def has_words(nodes: Iterable[InlineNode]) -> bool:
    """Return whether there is a letter outside of atoms."""
    return any(
        any(map(str.isalpha, node.text))
        if isinstance(node, TextNode)
        else isinstance(node, ElementNode) and has_words(node.children)
        for node in nodes
    )


def _merge_wordless(node: InlineNode) -> InlineNode:
    """Return an element as one atom where nothing in it changes in a translation."""
    if not isinstance(node, ElementNode):
        return node
    children = tuple(_merge_wordless(child) for child in node.children)
    text = "".join(child.text for child in children if isinstance(child, TextNode))
    is_wordless = not has_words(children) and not any(isinstance(child, ElementNode) for child in children)
    if is_wordless and not SEPARATED_DIGITS.search(text):
        is_word = bool(text.strip()) or any(isinstance(child, AtomNode) and child.is_word for child in children)
        return AtomNode(node.pieces, is_word)
    return replace(node, children=children)


def _make_segment(nodes: list[InlineNode], collector: SegmentCollector) -> SegmentNode:
    """Add a segment to the document and return its node."""
    text = ""
    spans: list[Span] = []
    atoms: dict[str, Pieces] = {}
    elements: list[tuple[Pieces, Pieces]] = []
    spelling: dict[str, str] = {}

    def add(node: InlineNode) -> None:
        nonlocal text
        if isinstance(node, TextNode):
            for char, raw in zip(node.text, node.raws, strict=bool(node.text)):  # a joined line has no text
                is_space = bool(BREAKING_SPACE.match(char))
                if not is_space and raw != char:
                    spelling[char] = raw
                if not (is_space and (not text or text.endswith(" "))):
                    text += " " if is_space else char
        elif isinstance(node, ElementNode):
            place, begin = len(spans), len(text)
            elements.append((node.opening.pieces, node.closing.rewritten or node.closing.pieces))
            spans.append(Span(0, 0, len(elements) - 1))
            for child in node.children:
                add(child)
            inner = text[begin:]
            end = begin + len(inner.rstrip(" "))
            spans[place] = Span(begin + len(inner) - len(inner.lstrip(" ")), end, spans[place].index)
        else:
            atom = atom_character(len(atoms))
            atoms[atom] = node.pieces
            text += atom

    for node in nodes:
        add(node)
    text = text.rstrip(" ")
    pieces = tuple(piece for node in nodes for piece in node.pieces)
    segment = Segment(text, tuple(spans))
    found = SegmentNode(collector.add(segment), segment, pieces, atoms, tuple(elements), spelling, collector.forbidden)
    collector.line += source_of(pieces).count("\n")
    return found


# ---- segments to text ------------------------------------------------------------------------------------------------


def write_nodes(
    nodes: Iterable[InlineNode],
    translations: Sequence[Segment],
    write: Callable[[str, SegmentNode], str],
    fill: Callable[[SegmentNode, list[Chunk]], str] | None = None,
) -> str:
    """Return nodes as text with translations; `write` escapes text, and `fill` wraps the chunks of a changed segment."""
    found = []
    for node in nodes:
        if isinstance(node, SegmentNode) and node.is_changed(translations):
            chunks = list(node.chunks(translations, write))
            found.append(fill(node, chunks) if fill else "".join(chunk for chunk, _ in chunks))
        else:
            found.append(render_pieces(node.pieces, translations))
    return "".join(found)
