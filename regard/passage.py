"""Sentences from one language to another, with all that must not change.

Links, addresses and other scripts are placeholders for the model (text/keep.py). A number that it loses is tried once more
as one (text/numbers.py); around what is lost still the words are translated by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from regard.text.keep import MOST, WRAPPED, between, kept_aside, kept_between, put_back, translatable
from regard.text.numbers import kept_too, lost_numbers
from regard.text.typed import plain, same_end, stopped
from regard.translator import Translation, Translator


class Passage:
    """Sentences on their way from one language to another."""

    def __init__(
        self, translator: Translator, source: str, target: str, fits: Callable[[str], bool], options: Any
    ) -> None:
        self.translator, self.source, self.target, self.options, self.fits = translator, source, target, options, fits
        self.kept = kept_between(source, target)

    def sentences(self, texts: list[str], advance: Callable[[int], None]) -> list[Translation]:
        """Each as it is; then, where numbers are lost, with these as placeholders; what is lost still is gone around."""
        asked = {i: self.kept for i, text in enumerate(texts) if translatable(text, self.kept)}
        advance(len(texts) - len(asked))
        found = self.tried(texts, asked, advance)
        lost = {i: lost_numbers(texts[i], said.text) for i, said in found.items() if said}
        numbers = {i: kept_too(self.kept, own) for i, own in lost.items() if own}
        found |= {i: said for i, said in self.tried(texts, numbers).items() if said}
        gone = [i for i, said in found.items() if said is None or any(map(long, lost_numbers(texts[i], said.text)))]
        found |= self.around(texts, {i: numbers.get(i, self.kept) for i in gone})
        return [found.get(i) or unchanged(text) for i, text in enumerate(texts)]

    def tried(
        self, texts: list[str], asked: dict[int, re.Pattern[str]], advance: Callable[[int], None] = lambda done: None
    ) -> dict[int, Translation | None]:
        """What is said with placeholders for each pattern, or None: the model does not know such, or loses one."""
        aside = {i: kept_aside(texts[i], pattern) for i, pattern in asked.items()}
        can = {
            i: text
            for i, (text, kept) in aside.items()
            if len(kept) <= MOST and not WRAPPED.search(texts[i]) and self.fits(text)
        }
        advance(len(aside) - len(can))
        said = dict(zip(can, self.said(list(can.values()), advance), strict=True))
        return {i: restored(said[i], kept) if i in said else None for i, (_, kept) in aside.items()}

    def around(self, texts: list[str], gone: dict[int, re.Pattern[str]]) -> dict[int, Translation]:
        """What is kept as it is, and the words between translated by themselves."""
        parts = {i: between(texts[i], pattern) for i, pattern in gone.items()}
        words = [(i, k) for i, own in parts.items() for k in range(0, len(own), 2) if translatable(own[k], self.kept)]
        said = dict(zip(words, self.said([parts[i][k].strip() for i, k in words]), strict=True))
        return {
            i: joined([spaced(p, said[i, k]) if (i, k) in said else unchanged(p) for k, p in enumerate(own)])
            for i, own in parts.items()
        }

    def said(self, texts: list[str], advance: Callable[[int], None] = lambda done: None) -> list[Translation]:
        """What the model says, ended as the text was."""
        if not texts:
            return []
        to = self.target if self.translator.directions else None
        asked = [stopped(plain(text, self.source), self.source) for text in texts]
        found = self.translator.translate(asked, progress=advance, to=to, **self.options)
        return [changed(said, partial(same_end, text)) for text, said in zip(texts, found, strict=True)]


# ---- one sentence ----------------------------------------------------------------------------------------------------


def long(number: str) -> bool:
    """Shorter ones may be said in words, which is no reason to take a sentence apart."""
    return len(number) > 2


def unchanged(text: str) -> Translation:
    return Translation(text, 0.0, 0.0, ())


def changed(said: Translation, change: Callable[[str], str]) -> Translation:
    """The same for each hypothesis."""
    return replace(said, text=change(said.text), nbest=tuple(changed(each, change) for each in said.nbest))


def restored(said: Translation, kept: list[str]) -> Translation | None:
    """The best hypothesis that has all its placeholders, which stand for these, and all the others that have; each text
    once, in whatever pieces it was said."""
    whole: dict[str, Translation] = {}
    for each in said.nbest or (said,):
        if (text := put_back(each.text, kept)) is not None:
            whole.setdefault(text, replace(each, text=text))
    found = tuple(whole.values())
    return replace(found[0], nbest=found if said.nbest else ()) if found else None


def spaced(part: str, said: Translation) -> Translation:
    """Between the white space of its source."""
    return replace(said, text=part[: len(part) - len(part.lstrip())] + said.text + part[len(part.rstrip()) :])


def joined(said: list[Translation]) -> Translation:
    sums = {name: sum(getattr(each, name) for each in said) for name in ("score", "log_prob")}
    return Translation("".join(each.text for each in said), **sums, tokens=(), ended=all(each.ended for each in said))
