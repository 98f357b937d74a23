"""Markdown: CommonMark with tables, strikethrough, front matter and footnotes.

markdown-it-py finds the blocks with their lines and the inline elements of each. Its inline tokens have no positions, so the
inline rules are wrapped here to record how many characters each consumes. What is not inside a translated block is copied
from the source. A translated block is parsed again: its text is escaped further until the parser sees in it exactly the
elements that were meant, and it stays in its source language where that fails.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from html.parser import HTMLParser
from typing import Any

from markdown_it import MarkdownIt, rules_block, rules_inline
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token as MarkdownToken

from regard.documents.html import DECODED, INLINE, OPAQUE, VOID, parse_fragment
from regard.documents.inline_content import (
    AtomNode,
    BreakNode,
    Chunk,
    ElementNode,
    InlineNode,
    PartSequence,
    PiecewiseDocument,
    SegmentCollector,
    SegmentNode,
    SourcePart,
    TagNode,
    TextNode,
    build_segments,
    match_tags,
    plain,
    render_pieces,
    source_of,
    spelled,
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

PUNCTUATION = "\\`*_[]<>&~|!#"  # escaped in the text of a translation where it would be markup
FRONT_MATTER = {"---": ("---", "..."), "+++": ("+++",)}
MARK = "\0"  # before markup in the canonical form of inline content; it cannot stand in a document
MARKER = re.compile(r"\[\^[^\s\[\]^]+\]:[ \t]+|\[[ xX]\][ \t]+")  # of a footnote, of a task
ALERT = re.compile(r"\[![A-Z]+\]\s*$")  # the first line of a quotation that is an alert


# ---- the parser ------------------------------------------------------------------------------------------------------


@cache
def _parser() -> MarkdownIt:
    """Return a parser whose inline tokens say in `meta["length"]` how many characters of the source they are."""
    parser = MarkdownIt("commonmark").enable(["table", "strikethrough"])
    parser.disable(["text_join", "fragments_join"])
    rules: dict[str, Callable[[StateInline, bool], bool]] = {
        "text": rules_inline.text,
        "newline": _newline,
        "escape": rules_inline.escape,
        "backticks": rules_inline.backtick,
        "strikethrough": rules_inline.strikethrough.tokenize,
        "emphasis": rules_inline.emphasis.tokenize,
        "link": rules_inline.link,
        "image": rules_inline.image,
        "autolink": _autolink,
        "html_inline": rules_inline.html_inline,
        "entity": rules_inline.entity,
    }
    for name, rule in rules.items():
        parser.inline.ruler.at(name, _with_length(rule))
    parser.inline.ruler.before("link", "footnote_ref", _with_length(_footnote_reference))
    parser.block.ruler.at("reference", _reference)
    return parser


def _with_length(rule: Callable[[StateInline, bool], bool]) -> Callable[[StateInline, bool], bool]:
    """Return an inline rule that also records the lengths of the tokens that it makes."""

    def measured(state: StateInline, silent: bool) -> bool:
        begin, count = state.pos, len(state.tokens)
        if state.pending and not silent:
            state.pushPending()  # single characters that no rule has taken
            count = len(state.tokens)
        if not rule(state, silent):
            return False
        if silent:
            return True
        if state.pending:
            state.pushPending()
        made = state.tokens[count:]
        if made and made[0].type == "link_open":
            made[0].meta["length"] = 1
            inner = sum(token.meta.get("length", len(token.content)) for token in made[1:-1])
            made[-1].meta["length"] = state.pos - begin - 1 - inner
        elif len(made) == 1:
            made[0].meta["length"] = state.pos - begin
        else:
            for token in made:  # delimiters of emphasis
                token.meta["length"] = len(token.content)
        return True

    return measured


def _newline(state: StateInline, silent: bool) -> bool:
    """Read a line break; two spaces before it make it a hard one."""
    if state.src[state.pos] != "\n":
        return False
    if not silent:
        state.push("hardbreak" if state.src[: state.pos].endswith("  ") else "softbreak", "br", 0)
    state.pos += 1
    while state.pos < state.posMax and state.src[state.pos] in " \t":
        state.pos += 1
    return True


def _autolink(state: StateInline, silent: bool) -> bool:
    """Read `<https://example.org>` as one token."""
    begin = state.pos
    if not rules_inline.autolink(state, True):
        return False
    if not silent:
        state.push("autolink", "", 0).content = state.src[begin : state.pos]
    return True


def _footnote_reference(state: StateInline, silent: bool) -> bool:
    """Read `[^name]` as one token; where the end of a link is looked for, the brackets count by themselves."""
    end = state.src.find("]", state.pos, state.posMax)
    label = state.src[state.pos + 2 : end]
    is_reference = state.src.startswith("[^", state.pos) and end >= 0 and label != ""
    if silent or not is_reference or any(char.isspace() or char in "[^" for char in label):
        return False
    state.push("footnote_ref", "", 0).content = state.src[state.pos : end + 1]
    state.pos = end + 1
    return True


def _reference(state: StateBlock, begin: int, end: int, silent: bool) -> bool:
    """Read a link reference definition, unless it is a footnote, whose text is translated."""
    at = state.bMarks[begin] + state.tShift[begin]
    return not state.src.startswith("[^", at) and rules_block.reference(state, begin, end, silent)


# ---- blocks ----------------------------------------------------------------------------------------------------------


def parse_markdown(text: str) -> PiecewiseDocument:
    """Return a Markdown text as a document."""
    lines = split_lines(text)
    bodies = [body.replace("\0", "\ufffd") for body, _ in lines]
    skipped = _front_matter_length(bodies)
    environment: dict[str, Any] = {}
    tokens = _parser().parse("\n".join(bodies[skipped:]), environment)
    collector = SegmentCollector()
    blocks: list[tuple[int, int, SourcePart]] = []  # first line, line after the last
    paragraphs = [token.content.split("\n") for token in tokens if token.type == "inline"]
    width = common_width((each, [line.strip() for line in each]) for each in paragraphs)
    row: list[MarkdownToken] = []
    row_line = 0
    for i, token in enumerate(tokens):
        begin, end = (skipped + line for line in token.map or (0, 0))
        collector.line = begin + 1
        if token.type == "tr_open":
            row, row_line = [], begin
        elif token.type == "inline" and tokens[i - 1].type in ("th_open", "td_open"):
            row.append(token)
        elif token.type == "tr_close":
            collector.line = row_line + 1
            if part := _table_row(row, *lines[row_line], collector, environment):
                blocks.append((row_line, row_line + 1, part))
        elif token.type == "inline" and token.content.strip():
            kind = tokens[i - 1].type
            if part := _text_block(token, kind, lines, begin, collector, environment, width):
                blocks.append((begin, begin + token.content.count("\n") + 1, part))
        elif token.type == "html_block" and end > begin:
            source = "".join(body + line_end for body, line_end in lines[begin:end])
            if token.content.rstrip("\n") == "\n".join(bodies[begin:end]).rstrip("\n"):
                blocks.append(
                    (begin, end, PartSequence(tuple(parse_fragment(source, collector, first_line=begin + 1))))
                )
    pieces: list[str | SourcePart] = []
    at_line = 0
    for begin, end, part in sorted(blocks, key=lambda block: block[0]):
        pieces += ["".join(body + line_end for body, line_end in lines[at_line:begin]), part]
        at_line = end
    pieces.append("".join(body + line_end for body, line_end in lines[at_line:]))
    return PiecewiseDocument(tuple(pieces), collector.segments)


def _front_matter_length(bodies: Sequence[str]) -> int:
    """Return the number of lines of the front matter, 0 where there is none."""
    ends = FRONT_MATTER.get(bodies[0].rstrip(), ()) if bodies else ()
    return next((i + 1 for i in range(1, len(bodies)) if bodies[i].rstrip() in ends), 0)


def _text_block(
    token: MarkdownToken,
    kind: str,
    lines: list[tuple[str, str]],
    begin: int,
    collector: SegmentCollector,
    environment: dict[str, Any],
    document_width: int,
) -> SourcePart | None:
    """Return a paragraph or heading, or None where nothing in it is translated."""
    contents = token.content.split("\n")
    prefixes, tails = [], []
    for i, content in enumerate(contents):
        line = lines[begin + i][0].replace("\0", "\ufffd") if begin + i < len(lines) else ""
        is_last = i == len(contents) - 1
        core = content.strip() if is_last else content.lstrip()
        body = line.rstrip(" \t") if is_last else line
        if kind == "heading_open" and not body.endswith(core):
            body = body.rstrip("#").rstrip(" \t")  # a heading may end in "##"
        if not body.endswith(core):
            return None  # tabs that the parser has expanded
        prefixes.append(line[: len(body) - len(core)])
        tails.append(line[len(body) :] + lines[begin + i][1])
        contents[i] = core
    source = "".join(body + line_end for body, line_end in lines[begin : begin + len(contents)])
    is_paragraph = kind == "paragraph_open"
    if marker := MARKER.match(contents[0]):  # of a footnote or a task: it stays before the text
        prefixes[0], contents[0] = prefixes[0] + marker[0], contents[0][marker.end() :]
    content = "\n".join(contents)
    full = [prefix + line for prefix, line in zip(prefixes, contents, strict=True)]
    wraps = find_wraps(full, [line.strip() for line in contents], document_width, is_markup=True)
    wraps = [
        wrap and not MARKER.match(contents[i + 1]) and not ALERT.match(contents[i]) for i, wrap in enumerate(wraps)
    ]
    found = build_segments(_without_markers(read_inline(content, environment, wraps, collector)), collector)
    if not has_segments(found):
        return None
    width = (
        max(paragraph_width(full, document_width), document_width) - display_width(prefixes[-1]) if any(wraps) else 0
    )
    is_prose = content.rstrip().endswith(SENTENCE_ENDS) and display_width(content) > 0.6 * document_width
    if len(contents) == 1 and document_width and is_prose:
        width = max(document_width - display_width(prefixes[0]), display_width(content))
    following = prefixes[1:] or ["".join(char if char in ">\t" else " " for char in prefixes[0])]
    return MarkdownBlock(
        nodes=tuple(found),
        source=source,
        kind=kind,
        prefixes=(prefixes[0], *following),
        tail=tails[-1],
        line_end=lines[begin][1] or "\n",
        width=width if is_paragraph else 0,
        environment=environment,
    )


def _without_markers(nodes: Iterable[InlineNode]) -> Iterator[InlineNode]:
    """Yield nodes with a break after the label of a footnote at the beginning of a line, and after that of an alert."""
    is_begin = True
    for node in nodes:
        if isinstance(node, AtomNode) and is_begin and source_of(node.pieces).startswith("[^"):
            yield BreakNode(node.pieces)
        else:
            yield node
        is_begin = isinstance(node, BreakNode)


def has_segments(nodes: Iterable[InlineNode]) -> bool:
    """Return whether there is a segment among nodes or inside one, as in the description of an image."""
    for node in nodes:
        if isinstance(node, SegmentNode):
            return True
        if any(isinstance(piece, ImageText) and has_segments(piece.nodes) for piece in node.pieces):
            return True
    return False


def _table_row(
    cells: list[MarkdownToken], line: str, line_end: str, collector: SegmentCollector, environment: dict[str, Any]
) -> SourcePart | None:
    """Return a row of a table, or None where nothing in it is translated."""
    bounds, is_escaped = [-1], False
    for i, char in enumerate(line):
        if char == "|" and not is_escaped:
            bounds.append(i)
        is_escaped = char == "\\"
    raws = [(begin + 1, end) for begin, end in zip(bounds, [*bounds[1:], len(line)], strict=True)]
    if len(raws) > 1 and not line[raws[0][0] : raws[0][1]].strip(" \t>"):
        raws = raws[1:]  # the bar at the beginning, behind the signs of a quotation
    pieces: list[str | SourcePart] = []
    at = 0
    line_number = collector.line
    for cell, (begin, end) in zip(cells, raws, strict=False):
        core = cell.content.replace("|", "\\|")
        raw = line[begin:end].replace("\0", "\ufffd").rstrip(" \t")
        if not core or not raw.endswith(core):
            continue
        collector.line = line_number
        nodes = build_segments(read_inline(cell.content, environment, [], collector), collector)
        if has_segments(nodes):
            where = begin + len(raw) - len(core)
            tail = "" if end == len(line) else line[begin + len(raw) : end]
            block = MarkdownBlock(tuple(nodes), core, "td_open", ("",), "", "\n", 0, environment)
            pieces += [line[at:where], TableCell(block, core + tail, len(tail))]
            at = where + len(core) + len(tail)
    return PartSequence((*pieces, line[at:] + line_end)) if pieces else None


# ---- inline content --------------------------------------------------------------------------------------------------


def read_inline(
    content: str, environment: dict[str, Any], wraps: Sequence[bool], collector: SegmentCollector
) -> Iterator[InlineNode]:
    """Yield the nodes of inline content; `wraps[i]` says whether line break i only wraps a paragraph.

    Descriptions of images are segments of their own, which are added to `collector`.
    """
    made = _parser().parseInline(content, environment)
    yield from _convert(made[0].children or [], content, iter(wraps), collector)


def _convert(
    tokens: list[MarkdownToken], content: str, wraps: Iterator[bool], collector: SegmentCollector
) -> Iterator[InlineNode]:
    """Yield nodes for inline tokens, whose lengths add up to `content`."""
    at = 0
    places = []
    for token in tokens:
        length = token.meta.get("length", len(token.content))
        places.append((token, at, at + length))
        at += length
    i = 0
    opened: list[int] = []  # where the texts of open links begin
    opaque: tuple[int, str] | None = None  # where an HTML element begins whose content is not translated
    while i < len(places):
        token, begin, end = places[i]
        i += 1
        raw = content[begin:end]
        name = token.type
        if opaque is not None:
            if name == "html_inline" and read_tag(raw) == (opaque[1], "end"):
                yield AtomNode((content[opaque[0] : end],))
                opaque = None
            continue
        if name == "text" and not token.content and raw in ("*", "_"):
            if i < len(places) and places[i][0].type == "strong_open":  # the first of two signs
                yield TagNode((content[begin : places[i][2]],), "strong")
                i += 1
        elif name == "strong_close":
            end = places[i][2] if i < len(places) and not places[i][0].content else end
            i += 1
            yield TagNode((content[begin:end],), "strong", is_closing=True)
        elif name in ("em_open", "em_close", "s_open", "s_close"):
            yield TagNode((raw,), name.split("_")[0], is_closing=name.endswith("close"))
        elif name == "link_open":
            opened.append(end)
            yield TagNode((raw,), "link")
        elif name == "link_close":
            label = content[opened.pop() : begin]
            yield TagNode((raw,), "link", True, (f"][{label}]",) if raw in ("]", "][]") else None)
        elif name == "image":
            yield AtomNode(_image_pieces(token, raw, collector), is_word=False)
        elif name in ("code_inline", "autolink", "footnote_ref"):
            yield AtomNode((raw,), is_word=name != "footnote_ref")
        elif name == "html_inline":
            tag, kind = read_tag(raw)
            if kind == "start" and tag in OPAQUE and any(_ends(place[0], tag) for place in places[i:]):
                opaque = (begin, tag)
            elif kind in ("start", "end") and tag in INLINE - VOID:
                yield TagNode((raw,), f"<{tag}>", is_closing=kind == "end")
            elif kind == "empty" or tag in INLINE or kind == "other":
                yield BreakNode((raw,)) if tag == "br" else AtomNode((raw,), is_word=False)
            else:
                yield BreakNode((raw,))
        elif name == "hardbreak":
            next(wraps, False)
            yield BreakNode((raw,))
        elif name == "softbreak":
            if next(wraps, True):
                yield spelled(joint(content[:begin].rstrip(" \t*_~"), content[end:].lstrip("*_~[")), raw)
            else:
                yield BreakNode((raw,))
        elif name == "text_special":
            char = token.content
            if token.info == "escape" or (len(char) == 1 and (char.isalpha() or char in DECODED)):
                yield spelled(char, raw) if len(char) == 1 else plain(raw)
            else:
                yield AtomNode((raw,), is_word=not char.isspace())
        elif name == "text":
            following = places[i][0].type if i < len(places) else ""
            spaces = len(raw) - len(raw.rstrip(" ")) if following == "hardbreak" else 0
            yield plain(raw[: len(raw) - spaces])
            if spaces:  # part of the line break
                places[i] = (places[i][0], end - spaces, places[i][2])
        else:
            yield AtomNode((raw,))
    if opaque is not None:  # cannot happen: its end was seen
        yield AtomNode((content[opaque[0] :],))


def _ends(token: MarkdownToken, tag: str) -> bool:
    return token.type == "html_inline" and read_tag(token.content) == (tag, "end")


def _image_pieces(token: MarkdownToken, raw: str, collector: SegmentCollector) -> tuple[str | SourcePart, ...]:
    """Return an image; its description has segments, unless the file of the image is found by it."""
    label, rest = token.content, raw[2 + len(token.content) :]
    if rest in ("]", "][]") or not raw.startswith("![" + label):
        return (raw,)
    nodes = build_segments(_convert(token.children or [], label, iter(()), collector), collector)
    return ("![", ImageText(tuple(nodes)), rest)


def read_tag(raw: str) -> tuple[str, str]:
    """Return the name of an HTML tag and its kind: start, end, empty, or other for what is no tag."""
    found = ("", "other")

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            nonlocal found
            found = (tag, "start")

        def handle_startendtag(self, tag: str, attrs: object) -> None:
            nonlocal found
            found = (tag, "empty")

        def handle_endtag(self, tag: str) -> None:
            nonlocal found
            found = (tag, "end")

    reader = Reader()
    if not raw.startswith(("<!", "<?")):
        reader.feed(raw)
        reader.close()
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class WritingStyle:
    """How much of a translation is escaped, and how emphasis is marked."""

    escaped: str = ""  # characters that get a backslash
    has_stars: bool = False  # `*` for `_`, which does not work inside words
    is_spaced: bool = False  # spaces around emphasis that would not be recognized beside punctuation


STYLES = (  # tried in this order until the parser reads what was meant
    WritingStyle(),
    WritingStyle("\\`*_[]<&~"),
    WritingStyle("\\`*_[]<&~", has_stars=True),
    WritingStyle(PUNCTUATION, has_stars=True),
    WritingStyle(PUNCTUATION, has_stars=True, is_spaced=True),
)
STARS = {"_": "*", "__": "**"}


def write_segment(node: SegmentNode, translations: Sequence[Segment], style: WritingStyle) -> list[Chunk]:
    """Return a translated segment in chunks of Markdown."""

    def write(text: str, node: SegmentNode) -> str:
        return "".join(node.spelling.get(char) or ("\\" + char if char in style.escaped else char) for char in text)

    found: list[Chunk] = []
    for chunk, kind in node.chunks(translations, write):
        is_emphasis = chunk in ("*", "**", "_", "__", "~~") and kind in ("open", "close")
        if style.has_stars and is_emphasis:
            chunk = STARS.get(chunk, chunk)
        last = found[-1] if found else ("", "")
        if style.is_spaced and last[0] and not last[0].endswith(" "):
            is_behind = last[1] == "close" and kind != "close" and not chunk.startswith(" ")
            if is_behind or (is_emphasis and kind == "open" and last[1] != "open"):
                found.append((" ", "text"))
        found.append((chunk, kind))
    return found


def escape_line_begin(text: str) -> str:
    """Return text that begins no list, heading, quotation, table or rule."""
    if found := re.match(r"\d{1,9}(?=[.)])", text):
        return found[0] + "\\" + text[found.end() :]
    return "\\" + text if text[:1] in tuple("#>-+=|:~*_`") else text


def may_begin_line(word: str) -> bool:
    """Return whether a word at the beginning of a line cannot start another block."""
    if word[0] in "#>|-+=:<" or word.startswith(("```", "~~~", "[^")):
        return False
    return not re.match(r"\d{1,9}[.)]", word) and word.strip("*_") != ""


def canonical_form(
    nodes: Iterable[InlineNode], environment: dict[str, Any], translations: Sequence[Segment] | None = None
) -> str:
    """Return what inline content means: its text without spaces, and its markup behind a mark."""

    def of_markup(raw: str, kind: str) -> str:
        if kind == "atom":  # may be text, such as a link, or an element without words
            inner = match_tags(read_inline(raw, environment, [], SegmentCollector()))
            if not any(isinstance(node, (AtomNode, BreakNode)) and source_of(node.pieces) == raw for node in inner):
                return canonical_form(inner, environment)
        if kind == "close" and raw.startswith("]") and not raw.startswith("]("):
            raw = "]"  # a link by reference, which is written with its label where it was without
        return MARK + kind + STARS.get(raw, "".join(raw.split()))

    found = []
    for node in nodes:
        if isinstance(node, TextNode):
            found.append("".join(node.text.split()))
        elif isinstance(node, SegmentNode) and translations is not None:
            for chunk, kind in node.chunks(translations, lambda text, _: text):
                found.append("".join(chunk.split()) if kind == "text" else of_markup(chunk, kind))
        elif isinstance(node, ElementNode):
            found += [of_markup(source_of(node.opening.pieces), "open")]
            found += [canonical_form(node.children, environment, translations)]
            found += [of_markup(source_of(node.closing.pieces), "close")]
        elif not (
            isinstance(node, BreakNode) and source_of(node.pieces).startswith("\n")
        ):  # a line break that only wraps, or may as well
            kind = ("close" if node.is_closing else "open") if isinstance(node, TagNode) else "atom"
            raw = source_of(node.pieces) if translations is None else render_pieces(node.pieces, translations)
            found.append(of_markup(raw, kind))
    return "".join(found)


@dataclass(frozen=True)
class ImageText:
    """The description of an image."""

    nodes: tuple[InlineNode, ...]

    @property
    def source(self) -> str:
        return source_of(piece for node in self.nodes for piece in node.pieces)

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the description with everything escaped that could be markup."""
        found = []
        for node in self.nodes:
            if isinstance(node, SegmentNode) and node.is_changed(translations):
                found += [chunk for chunk, _ in write_segment(node, translations, STYLES[-1])]
            else:
                found.append(render_pieces(node.pieces, translations))
        return "".join(found)


@dataclass(frozen=True)
class MarkdownBlock:
    """A paragraph, a heading or a table cell."""

    nodes: tuple[InlineNode, ...]
    source: str
    kind: str  # of the token that opens the block
    prefixes: tuple[str, ...]  # of each line: indentation, signs of quotation and lists
    tail: str  # of the last line: white space, closing signs of a heading, the line end
    line_end: str
    width: int  # at which lines are wrapped; 0: not at all
    environment: dict[str, Any]  # link references of the document

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the block with translations, or as it was where none can be written so that it is read as meant."""
        written = [render_pieces(node.pieces, translations) for node in self.nodes]
        is_changed = [isinstance(node, SegmentNode) and node.is_changed(translations) for node in self.nodes]
        if not any(is_changed):
            content = "".join(written)
            if content == source_of(piece for node in self.nodes for piece in node.pieces):
                return self.source
        else:
            meant = canonical_form(self.nodes, self.environment, translations)
            for style in STYLES:
                content = "".join(
                    self._write(node, translations, style) if changed else text
                    for node, changed, text in zip(self.nodes, is_changed, written, strict=True)
                )
                if style.escaped and isinstance(self.nodes[0], SegmentNode):
                    content = escape_line_begin(content) if not self._is_read_as(content, meant) else content
                if self._is_read_as(content, meant):
                    break
            else:
                return self.source
        lines = content.split("\n")
        prefixes = [self.prefixes[min(i, len(self.prefixes) - 1)] for i in range(len(lines))]
        return self.line_end.join(map("".join, zip(prefixes, lines, strict=True))) + self.tail

    def _write(self, node: InlineNode, translations: Sequence[Segment], style: WritingStyle) -> str:
        assert isinstance(node, SegmentNode)
        chunks = write_segment(node, translations, style)
        if not self.width:
            return "".join(chunk for chunk, _ in chunks)
        return "\n".join(fill_lines(split_words(chunks, True), self.width, may_begin=may_begin_line))

    def _is_read_as(self, content: str, meant: str) -> bool:
        """Return whether the parser reads content as it is meant."""
        environment = {"references": dict(self.environment.get("references", {}))}
        if self.kind != "td_open":
            opening = "# " if self.kind == "heading_open" and "\n" not in content else ""
            tokens = _parser().parse(opening + content, environment)
            kinds = [token.type for token in tokens]
            close = "heading_close" if opening else "paragraph_close"
            if kinds != [close.replace("close", "open"), "inline", close] or (opening and tokens[1].content != content):
                return False
        nodes = read_inline(content, environment, [True] * content.count("\n"), SegmentCollector())
        if self.kind == "td_open" and "\n" in content:
            return False
        return canonical_form(match_tags(nodes), environment) == meant


@dataclass(frozen=True)
class TableCell:
    """A cell of a table, padded with spaces to its width in the source where the translation is shorter."""

    block: MarkdownBlock
    source: str
    spaces: int  # after the text

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the cell with bars escaped."""
        text = self.block.render(translations)
        if text == self.block.source:
            return self.source
        text = text.replace("|", "\\|")
        missing = display_width(self.source) - display_width(text)
        return text + " " * max(min(1, self.spaces), missing)
