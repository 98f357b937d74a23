"""Casing and final punctuation: a sentence as it is usually written, and its translation as the source was written.

Models are trained on edited text and translate `how are you` and WHERE IS THE STATION? far worse than `How are you?`. Before
translation a sentence gets sentence case, a full stop and plain quotation marks. Afterwards a full stop that was added is
removed, and a sentence that was in upper case is again; a capital at the beginning stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from regard.text.placeholders import PLACEHOLDER, PROTECTED, split_protected

ASCII_QUOTES = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"'})  # as English and French are mostly typed
FINAL_PLACEHOLDERS = re.compile(rf"(?:\s*{PLACEHOLDER.pattern})+$")
FULL_STOP = re.compile(r"(?<![.!。！])\s?[.!。！]$")
WORD = re.compile(r"[^\W\d_]+")
FIRST_WORD = re.compile(r"[\"'“„«(\[¿¡‘‚*_]*([^\W\d_]+)")


def is_upper_case(text: str) -> bool:
    """Return whether a sentence is written in capitals; a single word or short names such as NATO do not count."""
    words = WORD.findall(PROTECTED.sub(" ", text))
    cased = [word for word in words if word.lower() != word.upper()]
    return len(cased) > 1 and len(max(cased, key=len)) > 3 and all(word.isupper() for word in cased)


def to_sentence_case(text: str, language: str) -> str:
    """Return the text with a capital at its beginning; text in upper case is put into lower case first.

    The text stays as long as it is, so that links between words (text/alignment.py) are right for the original."""
    if is_upper_case(text):
        text = map_unprotected(text, lambda part: "".join(c.lower() if len(c.lower()) == 1 else c for c in part))
    if language == "en":
        text = map_unprotected(text, lambda part: re.sub(r"\bi\b(?![.\w])", "I", part))
    return capitalize_first(text)


def capitalize_first(text: str) -> str:
    """Return a sentence with a capital at its beginning, unless it begins with a protected part."""
    begin = FIRST_WORD.match(text)
    if begin is None or not begin[1].islower() or PROTECTED.match(text, begin.start(1)):
        return text
    first, rest = begin[1][0].upper(), text[begin.start(1) + 1 :]
    return text[: begin.start(1)] + first + rest if len(first) == 1 else text


def to_upper_case(text: str) -> str:
    """Return the text in upper case; links, code and the like stay as they are."""
    return map_unprotected(text, str.upper)


def normalize_typography(text: str, language: str) -> str:
    """Return a sentence with single spaces and the quotation marks that the training text has most often."""
    text = " ".join(text.split())
    return text.translate(ASCII_QUOTES) if language in ("en", "fr") else text.replace("’", "'")


def lacks_full_stop(text: str) -> bool:
    """Return whether a text ends in a word, or in placeholders without a full stop before them."""
    words = FINAL_PLACEHOLDERS.sub("", text)
    return words[-1:].isalnum() or (words not in ("", text) and words[-1] not in ".!?…。！？")


def add_full_stop(text: str, language: str) -> str:
    """Return the text with a full stop at its end, unless it ends in punctuation."""
    return text + ("。" if language.startswith("zh") else ".") if lacks_full_stop(text) else text


def match_final_punctuation(source: str, translation: str) -> str:
    """Return the translation with the end of its source.

    A full stop is removed where the source (a heading, a clause) has none, and replaced by the source's comma or colon.
    """
    last = source.rstrip()[-1:]
    if lacks_full_stop(source):
        return FULL_STOP.sub("", translation)
    return FULL_STOP.sub(last, translation) if last and last in ",，、;；:：" else translation


def map_unprotected(text: str, change: Callable[[str], str]) -> str:
    """Return the text with `change` applied to everything but protected parts (text/placeholders.py)."""
    parts = split_protected(text, PROTECTED)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))
