"""The formats of documents: their names, their suffixes and their parsers, one line for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from regard.documents.gettext_po import parse_po
from regard.documents.html import parse_html
from regard.documents.inline_content import PiecewiseDocument
from regard.documents.markdown import parse_markdown
from regard.documents.plain_text import parse_plain_text
from regard.documents.segment import TranslatableDocument
from regard.documents.subtitles import parse_srt, parse_vtt
from regard.errors import RegardError

BYTE_ORDER_MARK = "\ufeff"


@dataclass(frozen=True)
class DocumentFormat:
    """A format of documents."""

    parse: Callable[..., PiecewiseDocument]
    suffixes: tuple[str, ...]


FORMATS = {
    "text": DocumentFormat(parse_plain_text, (".txt", ".text", ".eml")),
    "markdown": DocumentFormat(parse_markdown, (".md", ".markdown")),
    "html": DocumentFormat(parse_html, (".html", ".htm", ".xhtml")),
    "srt": DocumentFormat(parse_srt, (".srt",)),
    "vtt": DocumentFormat(parse_vtt, (".vtt",)),
    "po": DocumentFormat(parse_po, (".po", ".pot")),
}


def format_of(path: str | Path, text: str = "") -> str:
    """Return the format of a file by its suffix; plain text where the suffix is not known.

    `text`, the beginning of the file, decides where the path has no suffix: WebVTT and HTML say what they are.
    """
    suffix = Path(path).suffix.lower()
    for name, format in FORMATS.items():
        if suffix in format.suffixes:
            return name
    begin = text.lstrip(BYTE_ORDER_MARK).lstrip()[:20].lower()
    if not suffix and begin.startswith("webvtt"):
        return "vtt"
    return "html" if not suffix and begin.startswith(("<!doctype html", "<html")) else "text"


def parse_document(text: str, format: str, overwrite: bool = False) -> TranslatableDocument:
    """Return a text as a document of the given format, the name of an entry of `FORMATS`.

    `overwrite` concerns gettext catalogues: messages that have a translation get another.
    """
    if format not in FORMATS:
        raise RegardError(f"unknown document format {format!r}: choose one of {', '.join(FORMATS)}")
    has_mark = text.startswith(BYTE_ORDER_MARK)
    options = {"overwrite": True} if overwrite and format == "po" else {}
    document = FORMATS[format].parse(text[1:] if has_mark else text, **options)
    return PiecewiseDocument((BYTE_ORDER_MARK, *document.pieces), document.segments) if has_mark else document
