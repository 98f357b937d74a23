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
QUESTION_MARK = re.compile(r"(?<![.!?。！？])\s?[.!?。！？]$")
VERBS = "am|is|are|was|were|do|does|did|can|could|will|would|shall|should|have|has|had|may|might|must"
QUESTIONS = {  # how questions begin
    "en": re.compile(
        rf"(?:(?:how|what|where|when|why|who|which|whose)(?: \w+)? (?:{VERBS})|(?:{VERBS}) (?:i|you|he|she|it|we|they|there)"
        r"|how about|what about)\b",
        re.IGNORECASE,
    ),
    "de": re.compile(
        r"(?:(?:wie|was|wo|wann|warum|wieso|wer|wohin|woher|womit|welche[rsnm]?)(?: \w+)? "
        r"(?:ist|sind|bist|seid|war|waren|geht|gehts|heißt|heißen|kann|können|kannst|hat|haben|hast|macht|machst|machen|willst|wollen|kommt|kommst|kostet|gibt)"
        r"|(?:bist|hast|kannst|kommst|willst|magst|weißt|sprichst|gehst) du"
        r"|(?:haben|können|sind|sprechen|möchten|wissen) sie)\b",
        re.IGNORECASE,
    ),
    "fr": re.compile(
        r"(?:est-ce qu|qu'est-ce qu|(?:où|comment|quand|pourquoi|qui|combien|quel(?:le)?s?)(?: \w+)? "
        r"(?:est|sont|es|êtes|était|vas|va|allez|vont|avez|as|a|ont|peux|peut|pouvez|faites|fais|coûte)\b)",
        re.IGNORECASE,
    ),
}
WORD = re.compile(r"[^\W\d_]+")
FIRST_WORD = re.compile(r"[\"'“„«(\[¿¡‘‚*_]*([^\W\d_]+)")


def is_upper_case(text: str) -> bool:
    """Return whether a sentence is written in capitals; a single word or short names such as NATO do not count."""
    words = WORD.findall(PROTECTED.sub(" ", text))
    cased = [word for word in words if word.lower() != word.upper()]
    is_long = len(cased) > 1 and (len(max(cased, key=len)) > 3 or (len(cased) > 2 and len("".join(cased)) > 8))
    return is_long and all(word.isupper() for word in cased)


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


def is_question(text: str, language: str) -> bool:
    """Return whether a sentence has the word order of a question: "how are you", but not "how to begin"."""
    return language in QUESTIONS and bool(QUESTIONS[language].match(text))


def add_final_punctuation(text: str, language: str) -> str:
    """Return the text with a full stop or a question mark at its end, unless it ends in punctuation."""
    if not lacks_full_stop(text):
        return text
    return text + ("。" if language.startswith("zh") else "?" if is_question(text, language) else ".")


def match_final_punctuation(source: str, translation: str, language: str = "") -> str:
    """Return the translation with the end of its source, which is in `language`.

    A full stop is removed where the source (a heading, a clause) has none, and replaced by the source's comma or colon.
    So is the question mark of a question that was written without one.
    """
    last = source.rstrip()[-1:]
    if lacks_full_stop(source):
        return (QUESTION_MARK if is_question(source, language) else FULL_STOP).sub("", translation)
    return FULL_STOP.sub(last, translation) if last and last in ",，、;；:：" else translation


def map_unprotected(text: str, change: Callable[[str], str]) -> str:
    """Return the text with `change` applied to everything but protected parts (text/placeholders.py)."""
    parts = split_protected(text, PROTECTED)
    return "".join(part if i % 2 else change(part) for i, part in enumerate(parts))
