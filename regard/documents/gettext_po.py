"""Gettext catalogues (PO and POT files): messages without a translation get one.

polib reads the catalogue; the lines of each `msgstr` are replaced in the source, so comments, order and wrapping of all
other lines stay. Inside a message, placeholders of its format (`%s`, `{name}`), the sign of an accelerator key and HTML tags
are kept. Lines of a message stay lines unless they are a wrapped paragraph.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import polib

from regard.documents.html import ELEMENTS, parse_fragment, read_events
from regard.documents.inline_content import (
    INVARIABLE,
    LanguageCode,
    PiecewiseDocument,
    SegmentCollector,
    SourcePart,
    render_pieces,
    source_of,
)
from regard.documents.line_wrapping import display_width
from regard.documents.plain_text import parse_lines
from regard.documents.segment import Segment
from regard.errors import RegardError

PRINTF = (
    r"%(?:\d+\$)?[-+#0{space}']*(?:\d+|\*)?(?:\.(?:\d+|\*))?(?:hh|h|ll|l|L|q|j|z|t|I64|I32)?[diouxXeEfFgGaAcCsSpn@%m]"
)
NAMED = r"%\(\w+\)[-+#0 ]*\d*(?:\.\d+)?[a-zA-Z]|%\{\w+\}|%L?n\b|%L?\d{1,2}\b"  # Python, Ruby, Qt
BRACES = r"\{\w*(?:[.\[][\w.\]]+)?(?:![rsa])?(?::[^{}]*)?\}"
ESCAPE = r"[\x00-\x08\x0b-\x1f\t]"
MESSAGE = re.compile("|".join((PRINTF.format(space=""), NAMED, BRACES, ESCAPE, INVARIABLE.pattern)))
FLAGGED = re.compile("|".join((PRINTF.format(space=" "), NAMED, BRACES, ESCAPE, INVARIABLE.pattern)))
INVENTED = re.compile("|".join((PRINTF.format(space=""), NAMED, BRACES, r"</?[A-Za-z][^<>]*>")))
ACCELERATOR = re.compile(r"(?<![\w&_~])[_&~](?=[^\W_])|(?<=[a-z])[_&](?=[a-z])|(?<=\b[A-Z])[_&](?=[a-z])")
MAX_LABEL = 60  # characters of a message that may have an accelerator key
LINE_WIDTH = 79  # at which gettext's tools wrap strings
NO_LANGUAGE = re.compile(r'"Language:[ \t]*\\n"')  # a line of a header
LOCALES = {"zh": "zh_CN", "zh-Hans": "zh_CN", "zh-Hant": "zh_TW"}  # as gettext's catalogues call them
LINE_SEPARATORS = "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029"  # polib takes these for line ends
STAND_INS = {ord(char): 0x10F000 + i for i, char in enumerate(LINE_SEPARATORS)}
ORIGINALS = {stand_in: char for char, stand_in in STAND_INS.items()}


def parse_po(text: str, overwrite: bool = False) -> PiecewiseDocument:
    """Return a catalogue as a document whose segments are the messages without a translation.

    With `overwrite`, messages that have a translation, or a fuzzy one, get another. Obsolete messages are never changed, and
    of the header only an empty `Language`. In a language with one plural form, `msgid_plural` is translated; else `msgid`
    for the first form and `msgid_plural` for the others.
    """
    safe = text.translate(STAND_INS)
    lines = safe.splitlines(keepends=True)
    try:
        catalogue = polib.pofile(safe + "\n", check_for_duplicates=False)
    except (OSError, ValueError) as error:
        raise RegardError(f"the file is no gettext catalogue (PO): {error}") from None
    collector = SegmentCollector(forbidden=INVENTED)
    pieces: list[str | SourcePart] = []
    at = 0
    if (number := _find_empty_language(lines)) is not None:
        end = lines[number].index("\\n")
        space = "" if lines[number][end - 1].isspace() else " "
        pieces += ["".join(lines[:number]) + lines[number][:end]]
        pieces += [
            LanguageCode("", lambda code: space + LOCALES.get(code, code.replace("-", "_"))),
            lines[number][end:],
        ]
        at = number + 1
    is_wrapped = max((len(line) for line in lines if line.startswith('"')), default=0) <= LINE_WIDTH + 2
    for entry in catalogue:
        if entry.obsolete or not entry.msgid:
            continue
        is_flagged = any(flag.endswith("-format") and not flag.startswith("no-") for flag in entry.flags)
        number = max(entry.linenum - 1, 0)
        given = entry.msgstr_plural if entry.msgid_plural else {0: entry.msgstr}
        for begin, end, index in _find_strings(lines, number):
            if given.get(index) and not overwrite:
                continue
            message = entry.msgid_plural if entry.msgid_plural and (index or len(given) == 1) else entry.msgid
            inner = _message_pieces(message.translate(ORIGINALS), is_flagged, collector, begin + 1)
            if all(isinstance(piece, str) for piece in inner):
                continue
            first, raw = lines[begin], "".join(lines[begin:end]).translate(ORIGINALS)
            opening, line_end = first[: first.index('"')], first[len(first.rstrip("\r\n")) :]
            pieces += ["".join(lines[at:begin]), MessageString(tuple(inner), raw, opening, line_end, is_wrapped)]
            at = end
    pieces.append("".join(lines[at:]))
    pieces = [piece.translate(ORIGINALS) if isinstance(piece, str) else piece for piece in pieces]
    return PiecewiseDocument(tuple(pieces), collector.segments)


def _find_empty_language(lines: Sequence[str]) -> int | None:
    """Return the number of the line of the header that names no language, or None."""
    begin = next((i for i, line in enumerate(lines) if line.startswith("msgid")), len(lines))
    is_header = [line.split()[:2] for line in lines[begin : begin + 2]] == [["msgid", '""'], ["msgstr", '""']]
    end = _find_strings(lines, begin)[0][1] if is_header else begin
    return next((i for i in range(begin, end) if NO_LANGUAGE.fullmatch(lines[i].strip())), None)


def _find_strings(lines: Sequence[str], begin: int) -> list[tuple[int, int, int]]:
    """Return the lines of each `msgstr` of the entry that begins at a line: first, after the last, plural index."""
    found = []
    while begin < len(lines) and not lines[begin].lstrip().startswith("msgstr"):
        begin += 1
    while begin < len(lines) and lines[begin].lstrip().startswith("msgstr"):
        end = begin + 1
        while end < len(lines) and lines[end].lstrip().startswith('"'):
            end += 1
        head = lines[begin].split('"')[0]
        index = head[head.index("[") + 1 : head.index("]")] if "[" in head else "0"
        found.append((begin, end, int(index)))
        begin = end
    return found


def _message_pieces(message: str, is_flagged: bool, collector: SegmentCollector, line: int) -> list[str | SourcePart]:
    """Return the pieces of a message; the sign of an accelerator key moves to its first letter."""
    signs = list(ACCELERATOR.finditer(message))
    if len(signs) == 1 and message.count(signs[0][0]) == 1 and len(message) < MAX_LABEL:
        sign = signs[0]
        before = len(collector.segments)
        pieces = _text_pieces(message[: sign.start()] + message[sign.end() :], is_flagged, collector, line)
        if len(collector.segments) == before + 1 and not isinstance(pieces[0], str):
            return [sign[0], *pieces]
        if len(collector.segments) == before + 1 and not str(pieces[0]).strip():
            return [pieces[0], sign[0], *pieces[1:]]
        del collector.segments[before:]
    return _text_pieces(message, is_flagged, collector, line)


def _text_pieces(message: str, is_flagged: bool, collector: SegmentCollector, line: int) -> list[str | SourcePart]:
    """Return the pieces of a text with placeholders and perhaps tags."""
    pattern = FLAGGED if is_flagged else MESSAGE
    if any(event.kind in ("start", "end") and event.name in ELEMENTS for event in read_events(message)):
        inner = message.strip()
        begin = message.index(inner)
        pieces = parse_fragment(inner, collector, re.compile(rf"\n+|{pattern.pattern}"), line)
        return [message[:begin], *pieces, message[begin + len(inner) :]]
    return parse_lines(message, collector, pattern, line)


def write_string(text: str, opening: str, line_end: str, is_wrapped: bool) -> str:
    """Return a string of a catalogue, on one line or, where it has several lines or is long, as gettext wraps it."""
    parts = [part for part in re.split(r"(?<=\n)", text) if part]
    whole = polib.escape(text)
    is_long = is_wrapped and display_width(opening + whole) + 2 > LINE_WIDTH
    if len(parts) < 2 and not is_long:
        return f'{opening}"{whole}"{line_end}'
    rows = []
    for part in parts:
        row = ""
        for word in re.findall(r"\S*\s*", polib.escape(part)):
            if row and is_wrapped and display_width(row + word) + 2 > LINE_WIDTH:
                rows.append(row)
                row = ""
            row += word
        rows.append(row)
    return f'{opening}""{line_end}' + "".join(f'"{row}"{line_end or chr(10)}' for row in rows if row)


@dataclass(frozen=True)
class MessageString:
    """The lines of a `msgstr`."""

    inner: tuple[str | SourcePart, ...]
    source: str
    opening: str  # msgstr or msgstr[1], and a space
    line_end: str
    is_wrapped: bool  # the catalogue wraps its strings

    def render(self, translations: Sequence[Segment]) -> str:
        """Return the lines; they stay as they were where nothing was translated."""
        text = render_pieces(self.inner, translations)
        return (
            self.source
            if text == source_of(self.inner)
            else write_string(text, self.opening, self.line_end, self.is_wrapped)
        )
