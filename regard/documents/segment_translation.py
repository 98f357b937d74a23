"""Translation of a parsed document: its segments are translated, get their inline markup, and are written in its place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from regard.documents.inline_markup import finish_segment
from regard.documents.segment import TranslatableDocument
from regard.text.alignment import Link


def translate_document(
    document: TranslatableDocument,
    translate: Callable[[list[str]], list[str]],
    align: Callable[[list[str], list[str]], Sequence[Sequence[Link]]],
) -> str:
    """Return the text of a document in another language.

    Args:
        document: What `parse_document` returns.
        translate: Returns the translation of each text. Private-use characters in a text stand for what must not change.
        align: Returns the links of the word alignment of each text with its translation. It is called only with texts that
            have inline elements.
    """
    segments = document.segments
    translated = translate([segment.text for segment in segments])
    marked = [i for i, segment in enumerate(segments) if segment.spans]
    found = align([segments[i].text for i in marked], [translated[i] for i in marked]) if marked else []
    links = dict(zip(marked, found, strict=True))
    return document.render(
        [
            finish_segment(segment, text, links.get(i, ()))
            for i, (segment, text) in enumerate(zip(segments, translated, strict=True))
        ]
    )
