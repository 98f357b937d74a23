"""HTML: whole pages and fragments, in which the text between tags and some attributes are translated.

Python's `html.parser` finds tags, comments and text with their positions, so everything that is not translated is copied
from the source. Inline elements such as `<em>` and `<a>` are part of a segment; every other tag ends it.
"""

from __future__ import annotations

import html
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html.entities import html5
from html.parser import HTMLParser

from regard.documents.inline_content import (
    INVARIABLE,
    AtomNode,
    BreakNode,
    Chunk,
    InlineNode,
    LanguageCode,
    Pieces,
    PiecewiseDocument,
    SegmentCollector,
    SegmentNode,
    SourcePart,
    TagNode,
    build_segments,
    plain,
    source_of,
    spelled,
    write_nodes,
)
from regard.documents.line_wrapping import display_width, fill_lines, split_lines, split_words
from regard.documents.segment import Segment

VOID = frozenset(
    ("area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "param", "source", "track", "wbr")
)
INLINE = frozenset(
    (
        *(
            "a",
            "abbr",
            "acronym",
            "b",
            "bdi",
            "bdo",
            "big",
            "cite",
            "data",
            "del",
            "dfn",
            "em",
            "font",
            "i",
            "ins",
            "label",
        ),
        *("mark", "nobr", "picture", "q", "s", "small", "span", "strike", "strong", "sub", "sup", "time", "tt", "u"),
        *("img", "input", "source", "wbr", "code", "kbd", "math", "ruby", "samp", "svg", "var"),
    )
)
OPAQUE = frozenset(
    (
        *("audio", "canvas", "code", "iframe", "kbd", "math", "noembed", "object", "pre", "ruby", "samp", "script"),
        *("style", "svg", "textarea", "var", "video"),
    )
)
BLOCKS = ("div", "dl", "h1", "h2", "h3", "h4", "html", "li", "ol", "p", "table", "td", "th", "tr", "ul")
ELEMENTS = VOID | INLINE | OPAQUE | set(BLOCKS)  # names by which a text is known to be HTML
CLOSED_BY = {  # elements without an end tag, by the start tag that ends them
    "td": ("td", "th"),
    "th": ("td", "th"),
    "dt": ("dt", "dd", "p"),
    "dd": ("dt", "dd", "p"),
    "tr": ("td", "th", "tr"),
    "tbody": ("td", "th", "tr"),
    "tfoot": ("td", "th", "tr"),
    "li": ("li", "p"),
    "option": ("option",),
}
ATTRIBUTES = frozenset(("alt", "aria-description", "aria-label", "placeholder", "title"))
META = frozenset(
    (
        *("description", "keywords", "og:title", "og:description", "og:image:alt"),
        *("twitter:title", "twitter:description"),
    )
)
BUTTONS = frozenset(("button", "reset", "submit"))
DECODED = frozenset("&<>\"'“”‘’„‚«»‹›–—…-")  # punctuation that belongs to a sentence, beside letters
MARKUP_BEGINS = frozenset("!/?" + string.ascii_letters)  # after "<"
MAX_REFERENCE = 33  # characters of the longest entity


def parse_html(text: str) -> PiecewiseDocument:
    """Return a page or fragment as a document."""
    collector = SegmentCollector()
    return PiecewiseDocument(tuple(parse_fragment(text, collector)), collector.segments)


# ---- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MarkupEvent:
    """A tag, a comment, a declaration or text of a page, and where it stands."""

    kind: str  # start, end, data, comment or other
    raw: str
    line: int
    name: str = ""
    attributes: tuple[tuple[str, str | None], ...] = ()
    is_empty: bool = False  # <name/>


class _EventParser(HTMLParser):
    """Lists the begin of every event; an event lasts until the next one begins."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[int, int, str, str, tuple[tuple[str, str | None], ...], bool]] = []
        self.starts = [0, *(match.end() for match in re.finditer("\n", text))]
        self.feed(text)
        self.close()

    def _add(self, kind: str, name: str = "", attributes: Sequence = (), is_empty: bool = False) -> None:
        line, column = self.getpos()
        self.found.append((self.starts[line - 1] + column, line, kind, name, tuple(attributes), is_empty))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add("start", tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._add("start", tag, attrs, True)

    def handle_endtag(self, tag: str) -> None:
        self._add("end", tag)

    def handle_data(self, data: str) -> None:
        self._add("data")

    def handle_comment(self, data: str) -> None:
        self._add("comment")

    def handle_decl(self, decl: str) -> None:
        self._add("other")

    def handle_pi(self, data: str) -> None:
        self._add("other")

    def unknown_decl(self, data: str) -> None:
        self._add("other")

    def parse_marked_section(self, i: int, report: int = 1) -> int:
        """Read `<![...]]>` or `<![...]>` of any kind; html.parser raises an error for kinds that it does not know."""
        closing = "]]>" if self.rawdata.startswith("<![CDATA[", i) else ">"
        end = self.rawdata.find(closing, i)
        if end >= 0:
            self.unknown_decl("")
        return end + len(closing) if end >= 0 else -1


def read_events(text: str) -> list[MarkupEvent]:
    """Return the events of a page in order; their source texts, joined, are the text."""
    found = _EventParser(text).found
    if not found:
        return [MarkupEvent("other", text, 1)] if text else []
    ends = [begin for begin, *_ in found[1:]] + [len(text)]
    events = [] if found[0][0] == 0 else [MarkupEvent("other", text[: found[0][0]], 1)]
    for (begin, line, kind, name, attributes, is_empty), end in zip(found, ends, strict=True):
        is_unfinished = kind == "data" and events and events[-1].raw == "<" and text[begin] in MARKUP_BEGINS
        if is_unfinished:  # at the end of the page; a browser takes it for a tag or comment
            events[-1] = MarkupEvent("data", "<" + text[begin:end], line)
        elif begin < end:
            events.append(MarkupEvent(kind, text[begin:end], line, name, attributes, is_empty))
    return events


# ---- pieces ----------------------------------------------------------------------------------------------------------


def parse_fragment(
    text: str, collector: SegmentCollector, invariable: re.Pattern[str] = INVARIABLE, first_line: int = 1
) -> list[str | SourcePart]:
    """Return the pieces of a page or fragment; its segments are added to `collector`."""
    events = read_events(text)
    pieces: list[str | SourcePart] = []
    run: list[InlineNode] = []
    path: list[tuple[str, bool]] = []  # open elements that end segments, and whether text was translated around them
    is_translated = True
    run_line = 1

    def flush() -> None:
        nonlocal run
        if run:
            collector.line = first_line - 1 + run_line
            pieces.append(HtmlText(tuple(build_segments(run, collector, invariable))))
            run = []

    i = 0
    while i < len(events):
        event = events[i]
        i += 1
        if not run:
            run_line = event.line
        collector.line = first_line - 1 + event.line
        if event.kind == "other" or (not is_translated and event.kind in ("data", "comment")):
            flush()
            pieces.append(event.raw)
        elif event.kind == "comment":
            run.append(AtomNode((event.raw,), is_word=False))
        elif event.kind == "data":
            if event.raw.startswith("<") and len(event.raw) > 1:
                run.append(AtomNode((event.raw,)))  # a tag that is not complete
            else:
                run += decode_references(event.raw)
        elif event.kind == "end":
            if event.name in INLINE and is_translated:
                run.append(TagNode((event.raw,), event.name, is_closing=True))
                continue
            flush()
            if any(name == event.name for name, _ in path):
                while True:
                    name, is_translated = path.pop()
                    if name == event.name:
                        break
            pieces.append(event.raw)
        else:
            wish = translation_wish(event)
            is_inline = event.name in INLINE
            tag = tag_pieces(event, collector, invariable) if is_translated and wish is not False else (event.raw,)
            if not is_inline:
                flush()
                while path and path[-1][0] in CLOSED_BY.get(event.name, ("p",)):
                    is_translated = path.pop()[1]
            is_opaque = event.name in OPAQUE or (wish is False and is_inline)
            if is_opaque and not event.is_empty and event.name not in VOID:
                end = find_end(events, i - 1)
                if end is not None:
                    tag = (*tag, "".join(each.raw for each in events[i : end + 1]))
                    i = end + 1
            if not is_translated and is_inline and wish is not True:
                pieces += tag
            elif event.name == "br":
                run.append(BreakNode(tag))
            elif is_inline and (is_opaque or event.is_empty or event.name in VOID):
                run.append(AtomNode(tag, is_word=is_opaque))
            elif is_inline and is_translated:
                run.append(TagNode(tag, event.name))
            else:
                pieces += tag
                if event.name not in VOID and not is_opaque and not event.is_empty:
                    path.append((event.name, is_translated))
                    is_translated = is_translated if wish is None else wish
    flush()
    return pieces


def translation_wish(event: MarkupEvent) -> bool | None:
    """Return whether a start tag asks for translation or against it; None where it says nothing."""
    given = dict(event.attributes)
    if "translate" in given:
        return (given["translate"] or "").lower() != "no"
    return False if "notranslate" in (given.get("class") or "").split() else None


def find_end(events: Sequence[MarkupEvent], start: int) -> int | None:
    """Return the index of the end tag of the element that begins at `start`, or None where it has none."""
    depth = 0
    for i in range(start, len(events)):
        if events[i].name == events[start].name and not events[i].is_empty:
            depth += 1 if events[i].kind == "start" else -1
            if depth == 0:
                return i
    return None


def decode_references(raw: str) -> Iterator[InlineNode]:
    """Yield text with its character references: letters and quotation marks decoded, other symbols as atoms."""
    at = 0
    while (begin := raw.find("&", at)) >= 0:
        reference = read_reference(raw, begin)
        end = begin + max(1, len(reference))
        if at < begin:
            yield plain(raw[at:begin])
        at = end
        char = html.unescape(reference) if reference else "&"
        is_between_words = raw[begin - 1 : begin].isalnum() and raw[end : end + 1].isalnum()
        if not reference:
            yield plain("&")
        elif char == "\u00ad":
            yield spelled("", reference)  # where a word of the source may be divided
        elif char.isalpha() or char in DECODED or (char == "\u00a0" and is_between_words):
            yield spelled(char, reference)
        else:
            yield AtomNode((reference,), is_word=not char.isspace())
    if at < len(raw):
        yield plain(raw[at:])


def read_reference(raw: str, begin: int) -> str:
    """Return the character reference at an ampersand, or nothing where there is none."""
    end = raw.find(";", begin, begin + MAX_REFERENCE)
    if end > 0 and not any(char.isspace() or char in "&<" for char in raw[begin + 1 : end]):
        reference = raw[begin : end + 1]
        if reference[1:] in html5 or reference[1:2] == "#":
            return reference if html.unescape(reference) != reference else ""
    for end in range(min(len(raw), begin + MAX_REFERENCE), begin + 1, -1):  # old ones need no semicolon
        if raw[begin + 1 : end] in html5:
            return raw[begin:end]
    return ""


# ---- attributes ------------------------------------------------------------------------------------------------------


def tag_pieces(event: MarkupEvent, collector: SegmentCollector, invariable: re.Pattern[str]) -> Pieces:
    """Return a start tag with a part for each attribute that is translated, and for the language of a page."""
    given = dict(event.attributes)
    names = set(ATTRIBUTES) if event.name not in ("link", "script", "style") else set()
    if event.name == "meta" and (given.get("name") or given.get("property") or "").lower() in META:
        names.add("content")
    if event.name == "input" and (given.get("type") or "").lower() in BUTTONS:
        names.add("value")
    if event.name in ("optgroup", "option", "track"):
        names.add("label")
    languages = {"lang", "xml:lang"} if event.name == "html" else set()
    names |= languages
    if not names & given.keys():
        return (event.raw,)
    places = find_attributes(event.raw)
    if [name for name, _, _ in places] != [name for name, _ in event.attributes]:
        return (event.raw,)
    pieces: list[str | SourcePart] = []
    at = 0
    for (name, begin, end), (_, value) in zip(places, event.attributes, strict=True):
        raw = event.raw[begin:end]
        if name not in names or not value:
            continue
        quote = raw[0] if raw[0] in "\"'" else ""
        inner = raw[1:-1] if quote else raw
        if html.unescape(inner) != value:
            continue
        if name in languages:
            pieces += [event.raw[at:begin] + quote, LanguageCode(inner), quote]
            at = end
            continue
        nodes = build_segments(decode_references(inner), collector, invariable)
        if any(isinstance(node, SegmentNode) for node in nodes):
            pieces += [event.raw[at:begin], HtmlAttribute(tuple(nodes), quote)]
            at = end
    return (*pieces, event.raw[at:])


def find_attributes(tag: str) -> list[tuple[str, int, int]]:
    """Return the attributes of a start tag: name, and where the value with its quotation marks begins and ends."""
    found = []
    n = len(tag)
    at = 1
    while at < n and not tag[at].isspace() and tag[at] not in "/>":
        at += 1
    while at < n:
        while at < n and (tag[at].isspace() or tag[at] == "/"):
            at += 1
        if at >= n or tag[at] == ">":
            break
        begin = at
        at += 1  # a name may begin with "="
        while at < n and not tag[at].isspace() and tag[at] not in "/>=":
            at += 1
        name = tag[begin:at].lower()
        after = at
        while at < n and tag[at].isspace():
            at += 1
        if tag[at : at + 1] != "=":
            found.append((name, after, after))
            continue
        at += 1
        while at < n and tag[at].isspace():
            at += 1
        begin = at
        if tag[at : at + 1] in ("'", '"') and (end := tag.find(tag[at], at + 1)) > 0:
            at = end + 1
        else:
            while at < n and not tag[at].isspace() and tag[at] != ">":
                at += 1
        found.append((name, begin, at))
    return found


# ---- writing ---------------------------------------------------------------------------------------------------------


def escape_text(text: str, node: SegmentNode) -> str:
    """Return text with character references for what would be markup, written as the source writes them."""
    return "".join(node.spelling.get(char) or {"&": "&amp;", "<": "&lt;"}.get(char, char) for char in text)


@dataclass(frozen=True)
class HtmlAttribute:
    """The value of an attribute."""

    nodes: tuple[InlineNode, ...]
    quote: str  # around the value; none where it has no spaces

    @property
    def source(self) -> str:
        return self.quote + source_of(piece for node in self.nodes for piece in node.pieces) + self.quote

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the value with quotation marks, which an unquoted one gets when it changes."""
        if not any(isinstance(node, SegmentNode) and node.is_changed(translations) for node in self.nodes):
            return self.source
        quote = self.quote or '"'

        def write(text: str, node: SegmentNode) -> str:
            return escape_text(text, node).replace(quote, "&quot;" if quote == '"' else "&#39;")

        return quote + write_nodes(self.nodes, translations, write) + quote


@dataclass(frozen=True)
class HtmlText:
    """Text with inline elements between two tags that end segments."""

    nodes: tuple[InlineNode, ...]

    @property
    def source(self) -> str:
        return source_of(piece for node in self.nodes for piece in node.pieces)

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the text; a segment of several lines is wrapped to their width again, at spaces only."""

        def fill(node: SegmentNode, chunks: list[Chunk]) -> str:
            lines = split_lines(source_of(node.pieces))
            words = split_words(chunks, breaks_chinese=False)
            if len(lines) < 2:
                return "".join(chunk for chunk, _ in chunks)
            indent = lines[1][0][: len(lines[1][0]) - len(lines[1][0].lstrip())]
            width = max(display_width(line) for line, _ in lines)
            return (lines[0][1] + indent).join(fill_lines(words, width, 0, display_width(indent)))

        return write_nodes(self.nodes, translations, escape_text, fill)
