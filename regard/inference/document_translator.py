"""Texts of any length through a model that learned sentences, from whatever of its languages they are in.

    regard.load("en-de-fr-zh") makes a Translator; Interpreter(translator).translate("Wie geht es dir?\nGut.")

A text is cut into sentences, all of them are decoded together, and they are put together again between the white space
that was there. The model is given them as sentences are written (text/casing.py). What must not change - links, addresses,
other scripts - goes through as a placeholder (text/placeholders.py). A number that the model loses is tried once more as one
(text/placeholders.py), and around what is lost still the words are translated by themselves.

MERGED: Sentences from one language to another, with all that must not change.

Links, addresses and other scripts are placeholders for the model (text/placeholders.py). A number that it loses is tried once more
as one (text/placeholders.py); around what is lost still the words are translated by themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

from regard.errors import RegardError
from regard.inference.translator import Translation, Translator
from regard.terminal import progress_bar
from regard.text.casing import (
    add_full_stop,
    is_upper_case,
    match_final_punctuation,
    normalize_typography,
    to_sentence_case,
    to_upper_case,
)
from regard.text.language_identification import Direction, DirectionDetector
from regard.text.placeholders import (
    MARKED_UP_WORDS,
    MAX_PLACEHOLDERS,
    add_numbers_to_pattern,
    find_missing_numbers,
    has_words,
    insert_placeholders,
    protected_pattern,
    restore_placeholders,
    split_protected,
)
from regard.text.sentence_splitting import Sentence, join_sentences, split_long_sentence, split_sentences

LONGEST = 64  # tokens: longer sentences are rare in what models learn from, and go better in parts
FIRST = 0xF0000  # of the characters without a meaning
UNSPACED = ("zh", "ja")
CUT = "cut off at the length limit (--decode.max_len_b N raises it)"


@dataclass(frozen=True)
class Interpreted:
    """A text in its other language."""

    text: str
    source: str  # the language it was in
    target: str
    notes: tuple[str, ...] = ()  # what may be wrong with it

    def __str__(self) -> str:
        return self.text


class Interpreter:
    def __init__(self, translator: Translator, longest: int = LONGEST) -> None:
        self.translator = translator
        directions = translator.directions or (f"{translator.source}>{translator.target}",)
        self.routes = DirectionDetector(directions, translator.languages)
        around = len(translator.token_template.wrap(())) + bool(translator.directions) + 1  # ... and a full stop
        room = translator.model.config.max_len - around
        self.longest = min(longest, room)

    @overload
    def translate(self, texts: str, to: str | None = None, source: str | None = None, **options: Any) -> str: ...
    @overload
    def translate(
        self, texts: Sequence[str], to: str | None = None, source: str | None = None, **options: Any
    ) -> list[str]: ...
    def translate(
        self, texts: str | Sequence[str], to: str | None = None, source: str | None = None, **options: Any
    ) -> str | list[str]:
        """A text, or several. `to` is the language wanted: German for English and English for all others, if not said.
        `source` is the language of the texts, found out if not said. Options are those of `Translator.translate`."""
        if isinstance(texts, str):
            return self.translate([texts], to, source, **options)[0]
        return [made.text for made in self.interpret(texts, to, source, **options)]

    def interpret(
        self,
        texts: Sequence[str],
        to: str | None = None,
        source: str | None = None,
        quiet: bool = True,
        **options: Any,
    ) -> list[Interpreted]:
        """The same with the languages. `quiet=False` shows a bar on a terminal."""
        routes = self.routes.detect(texts, to, source)
        parts = [self.parts(text, route) for text, route in zip(texts, routes, strict=True)]
        with progress_bar("translating", sum(map(len, parts)), quiet) as advance:
            found = self._by_route(parts, routes, advance, options)
        return [put_together(*one) for one in zip(parts, found, routes, strict=True)]

    def several(
        self, texts: Sequence[str], to: str | None = None, source: str | None = None, **options: Any
    ) -> list[Translation]:
        """Of each text, which is one sentence at most, as many translations as `nbest` asks for."""
        routes = self.routes.detect(texts, to, source)
        parts = [self.parts(text, route) for text, route in zip(texts, routes, strict=True)]
        for number, (text, own) in enumerate(zip(texts, parts, strict=True), 1):
            if sum(not part.ends_line for part in own) > 1:
                where = f"line {number}: " if len(texts) > 1 else ""
                raise RegardError(f"{where}several translations (--nbest) are for one sentence, not for {text[:60]!r}")
        found = self._by_route(parts, routes, lambda done: None, options)
        return [ranked(own, said) for own, said in zip(parts, found, strict=True)]

    # ---- sentences ---------------------------------------------------------------------------------------------------

    def parts(self, text: str, route: Direction) -> list[Sentence]:
        """What the model is given of a text, and what is between."""
        if not route.source:
            return [Sentence(text, "", True)]
        kept = protected_pattern(route.source, route.target)
        return [part for s in split_sentences(text) for part in self.fitting(typed(s, route.source), kept)]

    def fitting(self, sentence: Sentence, kept: re.Pattern[str]) -> list[Sentence]:
        """The sentence in parts that the model has room for. What is kept is one character meanwhile, so never cut."""
        if self.fits(insert_placeholders(sentence.text, kept)[0]):
            return [sentence]
        aside = dict(enumerate(kept.findall(sentence.text), FIRST))
        each = iter(aside)
        whole = kept.sub(lambda _: chr(next(each)), sentence.text)
        parts = split_long_sentence(
            replace(sentence, text=whole), lambda text: self.fits(text.translate(dict.fromkeys(aside, "⟦1⟧")))
        )
        return [replace(part, text=part.text.translate(aside)) for part in parts]

    def fits(self, text: str) -> bool:
        """A token has one byte at least, and the space that some vocabularies put in front is one more."""
        if len(text.encode()) < self.longest:
            return True
        return len(self.translator.tokenizers.source.encode(normalize_typography(text, ""))) <= self.longest

    def _by_route(
        self, parts: list[list[Sentence]], routes: list[Direction], advance: Callable[[int], None], options: Any
    ) -> list[list[Translation]]:
        """The translation of every part: those to one language are decoded together."""
        made = [[unchanged(part.text) for part in own] for own in parts]
        for pair in dict.fromkeys(route.pair for route in routes if route.source):
            places = [(i, j) for i, route in enumerate(routes) if route.pair == pair for j in range(len(parts[i]))]
            passage = Passage(self.translator, *pair, self.fits, options)
            said = passage.sentences([parts[i][j].text for i, j in places], advance)
            for (i, j), each in zip(places, said, strict=True):
                made[i][j] = changed(each, to_upper_case) if parts[i][j].is_upper_case else each
        return made


# ---- one text --------------------------------------------------------------------------------------------------------


def put_together(parts: list[Sentence], said: list[Translation], route: Direction) -> Interpreted:
    text = join_sentences(parts, [each.text for each in said], not route.target.startswith(UNSPACED))
    cut = "" if all(each.ended for each in said) else CUT
    return Interpreted(text, route.source, route.target, tuple(filter(None, (route.note, cut))))


def ranked(parts: list[Sentence], said: list[Translation]) -> Translation:
    """All translations of its one sentence, with what is around that."""
    best = next((each for part, each in zip(parts, said, strict=True) if not part.ends_line), unchanged(""))
    whole = changed(best, lambda text: "".join(part.before + ("" if part.ends_line else text) for part in parts))
    return replace(whole, nbest=whole.nbest or (whole,))


def typed(sentence: Sentence, language: str) -> Sentence:
    """As it is usually written, and whether it was shouted."""
    if not has_words(sentence.text):
        return sentence
    return replace(sentence, text=to_sentence_case(sentence.text, language), is_upper_case=is_upper_case(sentence.text))


class Passage:
    """Sentences on their way from one language to another."""

    def __init__(
        self, translator: Translator, source: str, target: str, fits: Callable[[str], bool], options: Any
    ) -> None:
        self.translator, self.source, self.target, self.options, self.fits = translator, source, target, options, fits
        self.kept = protected_pattern(source, target)

    def sentences(self, texts: list[str], advance: Callable[[int], None]) -> list[Translation]:
        """Each as it is; then, where numbers are lost, with these as placeholders; what is lost still is gone around."""
        asked = {i: self.kept for i, text in enumerate(texts) if has_words(text, self.kept)}
        advance(len(texts) - len(asked))
        found = self.tried(texts, asked, advance)
        lost = {i: find_missing_numbers(texts[i], said.text) for i, said in found.items() if said}
        numbers = {i: add_numbers_to_pattern(self.kept, own) for i, own in lost.items() if own}
        found |= {i: said for i, said in self.tried(texts, numbers).items() if said}
        gone = [
            i for i, said in found.items() if said is None or any(map(long, find_missing_numbers(texts[i], said.text)))
        ]
        found |= self.around(texts, {i: numbers.get(i, self.kept) for i in gone})
        return [found.get(i) or unchanged(text) for i, text in enumerate(texts)]

    def tried(
        self, texts: list[str], asked: dict[int, re.Pattern[str]], advance: Callable[[int], None] = lambda done: None
    ) -> dict[int, Translation | None]:
        """What is said with placeholders for each pattern, or None: the model does not know such, or loses one."""
        aside = {i: insert_placeholders(texts[i], pattern) for i, pattern in asked.items()}
        can = {
            i: text
            for i, (text, kept) in aside.items()
            if len(kept) <= MAX_PLACEHOLDERS and not MARKED_UP_WORDS.search(texts[i]) and self.fits(text)
        }
        advance(len(aside) - len(can))
        said = dict(zip(can, self.said(list(can.values()), advance), strict=True))
        return {i: restored(said[i], kept) if i in said else None for i, (_, kept) in aside.items()}

    def around(self, texts: list[str], gone: dict[int, re.Pattern[str]]) -> dict[int, Translation]:
        """What is kept as it is, and the words between translated by themselves."""
        parts = {i: split_protected(texts[i], pattern) for i, pattern in gone.items()}
        words = [(i, k) for i, own in parts.items() for k in range(0, len(own), 2) if has_words(own[k], self.kept)]
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
        asked = [add_full_stop(normalize_typography(text, self.source), self.source) for text in texts]
        found = self.translator.translate(asked, progress=advance, to=to, **self.options)
        return [changed(said, partial(match_final_punctuation, text)) for text, said in zip(texts, found, strict=True)]


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
        if (text := restore_placeholders(each.text, kept)) is not None:
            whole.setdefault(text, replace(each, text=text))
    found = tuple(whole.values())
    return replace(found[0], nbest=found if said.nbest else ()) if found else None


def spaced(part: str, said: Translation) -> Translation:
    """Between the white space of its source."""
    return replace(said, text=part[: len(part) - len(part.lstrip())] + said.text + part[len(part.rstrip()) :])


def joined(said: list[Translation]) -> Translation:
    sums = {name: sum(getattr(each, name) for each in said) for name in ("score", "log_prob")}
    return Translation("".join(each.text for each in said), **sums, tokens=(), ended=all(each.ended for each in said))
