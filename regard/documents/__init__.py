"""Documents that are translated: parsers of their formats, segments, and inline markup."""

from regard.documents.document_formats import FORMATS, format_of, parse_document
from regard.documents.inline_markup import finish_segment, move_spans, restore_atoms
from regard.documents.segment import Segment, Span, TranslatableDocument
from regard.documents.segment_translation import translate_document

__all__ = [
    "FORMATS",
    "Segment",
    "Span",
    "TranslatableDocument",
    "finish_segment",
    "format_of",
    "move_spans",
    "parse_document",
    "restore_atoms",
    "translate_document",
]
