"""Subtitles: SubRip (SRT) and WebVTT, in which the text of each cue is a segment.

Both formats are blocks of lines between empty lines: a number or name, a line with times, and the text. Lines of a cue are
joined to be translated and divided again into as many lines; lines that begin with a dash are different speakers and stay
apart. Notes, styles and regions of WebVTT are not changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from regard.documents.html import decode_references
from regard.documents.inline_content import (
    AtomNode,
    BreakNode,
    Chunk,
    InlineNode,
    PiecewiseDocument,
    SegmentCollector,
    SegmentNode,
    SourcePart,
    TagNode,
    TextNode,
    build_segments,
    plain,
    source_of,
    spelled,
    write_nodes,
)
from regard.documents.line_wrapping import balance_lines, joint, split_lines, split_words
from regard.documents.segment import Segment

SPEAKER_SIGNS = "-‐–—•♪♫"
SRT_TAGS = frozenset(("b", "i", "u", "s", "font", "c", "v", "ruby", "rt", "lang"))
VTT_BLOCKS = ("WEBVTT", "NOTE", "STYLE", "REGION")


def parse_srt(text: str) -> PiecewiseDocument:
    """Return subtitles in SubRip format as a document."""
    return _parse(text, is_vtt=False)


def parse_vtt(text: str) -> PiecewiseDocument:
    """Return subtitles in WebVTT format as a document."""
    return _parse(text, is_vtt=True)


def _parse(text: str, is_vtt: bool) -> PiecewiseDocument:
    """Return subtitles as a document; lines that belong to no cue stay as they are."""
    collector = SegmentCollector()
    pieces: list[str | SourcePart] = []
    lines = split_lines(text)
    at = 0
    while at < len(lines):
        end = at
        while end < len(lines) and lines[end][0].strip():
            end += 1
        times = next((i for i in range(at, min(at + 2, end)) if "-->" in lines[i][0]), None)
        is_other = is_vtt and at < end and lines[at][0].lstrip("\ufeff").startswith(VTT_BLOCKS) and times is None
        begin = end if times is None or is_other else times + 1
        pieces.append("".join(body + line_end for body, line_end in lines[at:begin]))
        if begin < end:
            collector.line = begin + 1
            *inner, (body, line_end) = lines[begin:end]
            nodes = list(_read_cue([*inner, (body, "")], is_vtt))
            pieces += [CueText(tuple(build_segments(nodes, collector)), is_vtt), line_end]
        at = end
        while at < len(lines) and not lines[at][0].strip():
            pieces.append("".join(lines[at]))
            at += 1
    return PiecewiseDocument(tuple(pieces), collector.segments)


def _read_cue(lines: Sequence[tuple[str, str]], is_vtt: bool) -> Iterator[InlineNode]:
    """Yield the nodes of the text of a cue: a segment ends where another speaker begins."""
    for i, (body, line_end) in enumerate(lines):
        is_begin = True
        for node in _read_line(body, is_vtt):
            if isinstance(node, TextNode) and is_begin and node.text.strip():
                is_begin = False
                if n := _speaker_sign(node.text):
                    yield BreakNode(("".join(node.raws[:n]),))
                    node = TextNode(node.text[n:], node.raws[n:])
            yield node
        if i + 1 < len(lines):
            following = list(_read_line(lines[i + 1][0], is_vtt))
            text = "".join(node.text for node in following if isinstance(node, TextNode))
            has_voice = any(
                isinstance(node, TagNode) and node.name == "v" and not node.is_closing for node in following
            )
            if _speaker_sign(text) or has_voice:
                yield BreakNode((line_end,))
            else:
                before = "".join(node.text for node in _read_line(body, is_vtt) if isinstance(node, TextNode))
                yield spelled(joint(before.rstrip(), text.lstrip()), line_end)


def _speaker_sign(text: str) -> int:
    """Return how many characters at the beginning of a line say that somebody else speaks or sings."""
    bare = text.lstrip()
    sign = bare[:1]
    if sign not in SPEAKER_SIGNS or not sign or bare[1:2] == sign:
        return 0
    return len(text) - len(bare[1:].lstrip())


def _read_line(body: str, is_vtt: bool) -> Iterator[InlineNode]:
    """Yield the nodes of one line: text, tags, times and position marks."""
    text, at = "", 0

    def text_nodes() -> Iterator[InlineNode]:
        yield from decode_references(text) if is_vtt else [plain(text)] if text else []

    while at < len(body):
        end = body.find("}" if body[at] == "{" else ">", at)
        inner = body[at + 1 : end]
        node: InlineNode | None = None
        if end > 0 and body[at] == "{" and inner.startswith("\\"):
            node = AtomNode((body[at : end + 1],), is_word=False)
        elif end > 0 and body[at] == "<" and inner:
            is_closing = inner[0] == "/"
            name = inner[is_closing:].replace(".", " ").replace("\t", " ").split(" ")[0].lower()
            if is_vtt and inner[0].isdigit():
                node = AtomNode((body[at : end + 1],), is_word=False)
            elif name.isalpha() and (is_vtt or name in SRT_TAGS):
                node = TagNode((body[at : end + 1],), name, is_closing)
        if node is None:
            text += body[at]
            at += 1
            continue
        yield from text_nodes()
        yield node
        text, at = "", end + 1
    yield from text_nodes()


@dataclass(frozen=True)
class CueText:
    """The text of a cue."""

    nodes: tuple[InlineNode, ...]
    is_vtt: bool

    @property
    def source(self) -> str:
        return source_of(piece for node in self.nodes for piece in node.pieces)

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the text in as many lines as it had, where there are enough words."""

        def write(text: str, node: SegmentNode) -> str:
            text = text.replace("{\\", "{")  # neither format has an escape for what begins a position mark
            if self.is_vtt:
                escapes = {"&": "&amp;", "<": "&lt;", ">": "&gt;"}
                return "".join(node.spelling.get(char) or escapes.get(char, char) for char in text)
            kept = (  # SubRip has no escapes: what would begin a tag is left out
                char
                for char, following in zip(text, text[1:] + " ", strict=True)
                if not (char == "<" and (following.isalpha() or following == "/"))
            )
            return "".join(kept).replace("-->", "->")

        def fill(node: SegmentNode, chunks: list[Chunk]) -> str:
            ends = [line_end for _, line_end in split_lines(source_of(node.pieces)) if line_end]
            if not ends:
                return "".join(chunk for chunk, _ in chunks)
            return ends[0].join(balance_lines(split_words(chunks, breaks_chinese=True), len(ends) + 1))

        return write_nodes(self.nodes, translations, write, fill)
