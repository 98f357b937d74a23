"""A sentence as it is usually written: with a capital and a full stop, not shouted.

Models learn from sentences that someone wrote with care, and are far worse at `how are you` and WHERE IS THE STATION?, which
are the same to people. So those are written with care first. A full stop that was added and the shouting are put back into
the translation; a capital at its beginning stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from regard.text.placeholders import KEPT, MARK, between

PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"'})  # as English and French are mostly typed
LAST_MARKS = re.compile(rf"(?:\s*{MARK.pattern})+$")
ADDED_END = re.compile(r"(?<![.!。！])\s?[.!。！]$")
WORD = re.compile(r"[^\W\d_]+")
BEGIN = re.compile(r"[\"'“„«(\[¿¡‘‚]*([^\W\d_]+)")


def loud(text: str) -> bool:
    """Whether all of it is in capitals, and more than a name: NATO is none of it."""
    words = WORD.findall(KEPT.sub(" ", text))
    cased = [word for word in words if word.lower() != word.upper()]
    return len(cased) > 1 and len(max(cased, key=len)) > 3 and all(word.isupper() for word in cased)


def careful(text: str, language: str) -> str:
    """The text with a capital at its beginning, and with none elsewhere if it shouts."""
    if loud(text):
        text = beside_kept(text, str.lower)
    if language == "en":
        text = beside_kept(text, lambda part: re.sub(r"\bi\b(?![.\w])", "I", part))
    begin = BEGIN.match(text)
    if begin is None or not begin[1].islower() or KEPT.match(text, begin.start(1)):
        return text
    return text[: begin.start(1)] + begin[1].capitalize() + text[begin.end(1) :]


def shouted(text: str) -> str:
    return beside_kept(text, str.upper)


def plain(text: str, language: str) -> str:
    """A sentence as the model saw them: single spaces, and quotes as most people type them."""
    text = " ".join(text.split())
    return text.translate(PLAIN) if language in ("en", "fr") else text.replace("’", "'")


def unstopped(text: str) -> bool:
    """Whether it ends in a word, or in a placeholder and no full stop before that."""
    words = LAST_MARKS.sub("", text)
    return words[-1:].isalnum() or (words not in ("", text) and words[-1] not in ".!?…。！？")


def stopped(text: str, language: str) -> str:
    """With a full stop, if it has none."""
    return text + ("。" if language.startswith("zh") else ".") if unstopped(text) else text


def same_end(source: str, said: str) -> str:
    """An end that the source has not - a heading, a part of a sentence - is taken off again."""
    last = source.rstrip()[-1:]
    if unstopped(source):
        return ADDED_END.sub("", said)
    return ADDED_END.sub(last, said) if last and last in ",，、;；:：" else said


def beside_kept(text: str, change: Callable[[str], str]) -> str:
    """Everything changed but what a translation must not touch."""
    return "".join(part if i % 2 else change(part) for i, part in enumerate(between(text, KEPT)))
