"""Plain text: paragraphs that were hard-wrapped are segments of several lines; every other line is by itself.

Lines of mail that begin with `>` are quotations, and a line `-- ` begins a signature. Lists, lines of tables (columns apart
by spaces, tabs or bars), verse, addresses and lines `key: value` keep their lines. Code, rules and drawings do not change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from regard.documents.inline_content import (
    INVARIABLE,
    Chunk,
    InlineNode,
    PiecewiseDocument,
    SegmentCollector,
    SegmentNode,
    SourcePart,
    build_segments,
    plain,
    source_of,
    spelled,
    write_nodes,
)
from regard.documents.line_wrapping import (
    SENTENCE_ENDS,
    common_width,
    display_width,
    fill_lines,
    find_wraps,
    joint,
    paragraph_width,
    split_lines,
    split_words,
)
from regard.documents.segment import Segment

QUOTE = re.compile(r"[ \t]*(?:>[ \t]?)*")
ITEM = re.compile(
    r"[ \t]*(?:(?:[-*+•‣◦·–—o]|\(?\d{1,3}[.)]|\(?[a-z]\))[ \t]+(?:\[[ xX]\][ \t]+)?|\d{1,3}、|（\d{1,3}）|[QA]:[ \t]+)(?=\S)"
)
COLUMNS = re.compile(r"(?:[ \t]*\|)+[ \t]*|[ \t]*\t[ \t]*|(?<![.!?:]) {2,}|(?<=[.!?:]) {3,}")
FENCE = re.compile(r"[ \t]*(?:```|~~~)")
CODE = re.compile(r"[ \t]*(?:\$ |>>> |#!|//|/\*|#include|[{}]+;?\s*$)|.*[=({].*[;{}]\s*$")
CODE_HINT = re.compile(
    r"\s*(?:import|from|def|class|for|while|if|return|print|let|const|var|int|sudo)\b|.*(?: = |==|\(.*\)|;\s*$)"
)
INDENTED = re.compile(r"\t| {4,}")
SIGNATURE = re.compile(r"-- ?$")
MIN_LETTERS = 0.4  # share of letters and digits in a line that is no drawing


@dataclass(frozen=True)
class TextLine:
    """A line of a text: what stands before its words, the words, and what stands after them."""

    number: int
    quote: str  # signs of quotation, with spaces
    prefix: str  # all that stands before the words: `quote`, indentation and a list marker
    body: str
    tail: str  # white space and the line end
    line_end: str
    is_item: bool
    is_kept: bool  # code, a rule, a drawing or empty: nothing is translated
    keeps_line: bool = False  # stands by itself, as in a signature

    @property
    def full(self) -> str:
        return self.prefix + self.body

    @property
    def source(self) -> str:
        return self.full + self.tail


def parse_plain_text(text: str) -> PiecewiseDocument:
    """Return a plain text or mail as a document."""
    collector = SegmentCollector()
    pieces = parse_lines(text, collector, INVARIABLE)
    return PiecewiseDocument(tuple(pieces), collector.segments)


def parse_lines(
    text: str, collector: SegmentCollector, invariable: re.Pattern[str], first_line: int = 1
) -> list[str | SourcePart]:
    """Return the pieces of a text; its segments are added to `collector`."""
    blocks = _blocks(_read_lines(text))
    width = common_width(([line.full for line in block], [line.body for line in block]) for block in blocks)
    pieces: list[str | SourcePart] = []
    for block in blocks:
        if block[0].is_kept:
            pieces.append(block[0].source)
            continue
        wraps = find_wraps([line.full for line in block], [line.body for line in block], width)
        begin = 0
        for i in range(len(block)):
            if i == len(wraps) or not wraps[i]:
                collector.line = first_line - 1 + block[begin].number
                pieces += _paragraph(block[begin : i + 1], len(block), width, collector, invariable)
                begin = i + 1
    return pieces


def _read_lines(text: str) -> list[TextLine]:
    """Return the lines of a text."""
    found = []
    in_code = in_signature = False
    lines = split_lines(text)
    kept = _find_code_and_drawings([line for line, _ in lines])
    for number, (line, line_end) in enumerate(lines, 1):
        quote = _quote(line)
        prefix = quote
        item = ITEM.match(line, len(quote))
        if item:
            prefix += item[0]
        body = line[len(prefix) :].rstrip()
        is_fence = bool(FENCE.match(line, len(quote)))
        is_kept = in_code or is_fence or kept[number - 1] or not any(map(str.isalpha, body)) or is_drawing(body)
        in_code ^= is_fence
        if SIGNATURE.match(line[len(quote) :]):
            in_signature = True
        tail = line[len(prefix) + len(body) :] + line_end
        marks = quote.rstrip(" \t") if ">" in quote else ""
        found.append(TextLine(number, marks, prefix, body, tail, line_end, bool(item), is_kept, in_signature))
    return found


def _quote(line: str) -> str:
    """Return the signs of quotation and the spaces at the beginning of a line."""
    found = QUOTE.match(line)
    assert found is not None  # the match may be empty
    return found[0]


def is_drawing(body: str) -> bool:
    """Return whether a line consists of signs more than of letters."""
    symbols = "".join(INVARIABLE.sub("x", body).split())
    return sum(map(str.isalnum, symbols)) < MIN_LETTERS * len(symbols)


def _find_code_and_drawings(lines: Sequence[str]) -> list[bool]:
    """Return for each line whether it is code or part of a drawing, judged by the lines around it too."""
    found = []
    for is_empty, group in groupby(lines, lambda line: not line.strip()):
        block = list(group)
        has_letters = [any(map(str.isalnum, line)) for line in block]
        n_drawn = sum(letters and is_drawing(line) for line, letters in zip(block, has_letters, strict=True))
        is_picture = not is_empty and len(block) > 2 and 4 * n_drawn >= len(block)
        for is_indented, part in groupby(block, lambda line: bool(INDENTED.match(line))):
            rows = list(part)
            is_code = is_indented and 2 * sum(bool(CODE_HINT.match(row)) for row in rows) > len(rows)
            found += [is_picture or is_code or bool(CODE.match(row, len(_quote(row).rstrip(" \t")))) for row in rows]
    return found


def _blocks(lines: Sequence[TextLine]) -> list[list[TextLine]]:
    """Return the lines in blocks, between which no line continues the one before."""
    found: list[list[TextLine]] = []
    for line in lines:
        previous = found[-1][-1] if found else None
        starts = (
            previous is None
            or line.is_kept
            or previous.is_kept
            or line.is_item
            or line.keeps_line
            or line.quote.count(">") != previous.quote.count(">")
            or (line.prefix != previous.prefix and len(found[-1]) > 1)
            or _is_row(line.body)
            or _is_row(previous.body)
        )
        if starts:
            found.append([line])
        else:
            found[-1].append(line)
    return found


def _is_row(body: str) -> bool:
    """Return whether a line has columns: wide gaps, tabs or bars between words."""
    gaps = list(COLUMNS.finditer(body))
    return any("|" in gap[0] or "\t" in gap[0] or len(gap[0]) > 2 for gap in gaps) or len(gaps) > 1


def _paragraph(
    lines: Sequence[TextLine], n_block: int, width: int, collector: SegmentCollector, invariable: re.Pattern[str]
) -> list[str | SourcePart]:
    """Return the pieces of a paragraph, or of a line by itself."""
    first, last = lines[0], lines[-1]
    if len(lines) == 1 and _is_row(first.body):
        return [first.prefix, *_row(first.body, collector, invariable), first.tail]
    nodes: list[InlineNode] = []
    for line, following in zip(lines, [*lines[1:], None], strict=True):
        nodes.append(plain(line.body))
        if following:
            nodes.append(spelled(joint(line.body, following.body), line.tail + following.prefix))
    found = build_segments(nodes, collector, invariable)
    columns = 0
    if len(lines) > 1:
        columns = max(paragraph_width([line.full for line in lines], width), width if n_block > 1 else 0)
        if len(lines) == 2:
            columns = max(columns, display_width(first.full))
    elif n_block == 1 and width and first.body.endswith(SENTENCE_ENDS) and display_width(first.full) > 0.6 * width:
        columns = max(width, display_width(first.full))  # a short paragraph among wrapped ones
    hanging = "".join(char if char in ">\t" else " " for char in first.prefix) if first.is_item else first.prefix
    indent = lines[1].prefix if len(lines) > 1 else hanging
    part = PlainParagraph(tuple(found), first.prefix, indent, first.line_end or "\n", columns)
    return [first.prefix, part, last.tail]


def _row(body: str, collector: SegmentCollector, invariable: re.Pattern[str]) -> list[str | SourcePart]:
    """Return the cells of a line of a table, and what stands between them."""
    pieces: list[str | SourcePart] = []
    at = 0
    line = collector.line
    for gap in [*COLUMNS.finditer(body), None]:
        end = gap.start() if gap else len(body)
        collector.line = line
        nodes = tuple(build_segments([plain(body[at:end])], collector, invariable))
        spaces = len(gap[0]) - len(gap[0].lstrip(" ")) if gap and "\t" not in gap[0] else 0
        if any(isinstance(node, SegmentNode) for node in nodes):
            pieces.append(ColumnCell(nodes, spaces, 2 if gap and "|" not in gap[0] else 1))
        else:
            pieces.append(body[at : end + spaces])
        if gap:
            pieces.append(gap[0][spaces:])
            at = gap.end()
    return pieces


# ---- writing ---------------------------------------------------------------------------------------------------------


def write_plain(text: str, node: SegmentNode) -> str:
    """Return text as it is: plain text has no markup."""
    return text


def may_begin_line(word: str) -> bool:
    """Return whether a word at the beginning of a line cannot be taken for a list marker or a sign of quotation."""
    return not word.startswith((">", "--")) and not ITEM.match(word + " x")


@dataclass(frozen=True)
class PlainParagraph:
    """A paragraph of one or several lines, without what stands before the first."""

    nodes: tuple[InlineNode, ...]
    prefix: str  # before the first line
    indent: str  # before every other line
    line_end: str
    width: int  # at which lines are wrapped; 0: not at all

    @property
    def source(self) -> str:
        return source_of(piece for node in self.nodes for piece in node.pieces)

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the paragraph, wrapped again where it was."""

        def fill(node: SegmentNode, chunks: list[Chunk]) -> str:
            words = split_words(chunks, breaks_chinese=True)
            if not self.width:
                return "".join(chunk for chunk, _ in chunks)
            indents = display_width(self.prefix), display_width(self.indent)
            return (self.line_end + self.indent).join(fill_lines(words, self.width, *indents, may_begin_line))

        return write_nodes(self.nodes, translations, write_plain, fill)


@dataclass(frozen=True)
class ColumnCell:
    """A cell of a table whose columns are made by spaces; a shorter translation is padded."""

    nodes: tuple[InlineNode, ...]
    spaces: int  # after the text
    least: int  # spaces that are kept

    @property
    def source(self) -> str:
        return source_of(piece for node in self.nodes for piece in node.pieces) + " " * self.spaces

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the cell with the spaces after it."""
        text = write_nodes(self.nodes, translations, write_plain)
        missing = display_width(self.source) - display_width(text)
        return text + " " * max(min(self.least, self.spaces), missing) if self.spaces else text
