"""Texts of any length through a model that learned sentences, from whatever of its languages they are in.

    regard.load("many") makes a Translator; Interpreter(translator).translate("Wie geht es dir?\\nGut.")

A text is cut into sentences, all of them are decoded together, and they are put together again between the white space
that was there. The model is given them as sentences are written (text/typed.py). What must not change - links, addresses,
other scripts - goes through as a placeholder (text/keep.py). Whatever the model loses on the way is tried once more: around
a placeholder that is gone, and with a number that is gone as one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, overload

from regard.errors import RegardError
from regard.progress import progress_bar
from regard.text.detect import LETTERS, detect, scores, script
from regard.text.keep import KEPT, MACHINE, MOST, kept_aside, lost_numbers, put_back
from regard.text.sentences import Sentence, clauses, join, sentences
from regard.text.typed import careful, loud, shouted, stopped
from regard.translator import Translator

LONGEST = 64  # tokens: longer sentences are rare in what models learn from, and go better in parts
SURE = 3.0  # e^3 times likelier than the next language
FIRST = 0xF0000  # of the characters without a meaning
UNSPACED = ("zh", "ja")
PLAIN = str.maketrans({"’": "'", "‘": "'", "“": '"', "”": '"'})  # as English and French are mostly typed


@dataclass(frozen=True)
class Interpreted:
    """A text in its other language."""

    text: str
    source: str  # the language it was in
    target: str

    def __str__(self) -> str:
        return self.text


class Interpreter:
    def __init__(self, translator: Translator, longest: int = LONGEST) -> None:
        self.translator, self.languages = translator, translator.languages
        self.directions = translator.directions or (f"{translator.source}>{translator.target}",)
        around = len(translator.frame.one(())) + bool(translator.directions) + 1  # ... and a full stop
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
        pairs = self.pairs(texts, to, source)
        parts = [
            [part for s in sentences(text) for part in self.fitting(typed(s, pair[0]))]
            for text, pair in zip(texts, pairs, strict=True)
        ]
        with progress_bar("translating", sum(map(len, parts)), quiet) as advance:
            found = self._by_target(parts, pairs, advance, options)
        return [
            Interpreted(join(own, said, not pair[1].startswith(UNSPACED)), *pair)
            for own, said, pair in zip(parts, found, pairs, strict=True)
        ]

    # ---- which languages ---------------------------------------------------------------------------------------------

    def pairs(self, texts: Sequence[str], to: str | None, source: str | None) -> list[tuple[str, str]]:
        return [self.pair(text, to, source, texts) for text in texts]

    def pair(self, text: str, to: str | None, source: str | None, texts: Sequence[str]) -> tuple[str, str]:
        """From which language to which a text goes. One that does not say much is taken to be in that of all the texts."""
        if source is None and not translatable(text):
            return "", to or ""
        found = source or self.detected(text, to, texts)
        target = to or ("de" if found == "en" and "en>de" in self.directions else self.usual(found))
        if f"{found}>{target}" not in self.directions:
            raise RegardError(
                f"this model does not translate from {found} to {target}: it knows {', '.join(self.directions)}"
                + ("" if source else f" (say --from LANG if this is not {found}: {text[:60]!r})")
            )
        return found, target

    def usual(self, source: str) -> str:
        """English, or whatever comes first."""
        targets = [direction.split(">")[1] for direction in self.directions if direction.split(">")[0] == source]
        return "en" if "en" in targets or not targets else targets[0]

    def detected(self, text: str, to: str | None, texts: Sequence[str]) -> str:
        sources = list(dict.fromkeys(direction.split(">")[0] for direction in self.directions))
        if len(sources) == 1:
            return sources[0]
        if not self.languages:
            raise RegardError("this model cannot tell languages apart (no languages.json): say --from LANG (source=)")
        words = MACHINE.sub(" ", text)
        found = scores(words, self.languages)
        best = sorted(found.values(), reverse=True)
        if len(best) > 1 and best[0] - best[1] < SURE:  # little to tell by
            found = scores(" ".join(MACHINE.sub(" ", each) for each in texts), self.languages) or found
            can = {name: value for name, value in found.items() if to is None or f"{name}>{to}" in self.directions}
            return max(can or found, key=(can or found).__getitem__)
        language = detect(words, self.languages)
        simple, traditional = script(text) if language == "zh" else (0, 0)
        return "zh-Hant" if traditional > simple and "zh-Hant" in sources else language

    # ---- sentences ---------------------------------------------------------------------------------------------------

    def fitting(self, sentence: Sentence) -> list[Sentence]:
        """The sentence in parts that the model has room for. What is kept is one character meanwhile, so never cut."""
        if self.fits(kept_aside(sentence.text)[0]):
            return [sentence]
        kept = dict(enumerate(KEPT.findall(sentence.text), FIRST))
        each = iter(kept)
        whole = KEPT.sub(lambda _: chr(next(each)), sentence.text)
        parts = clauses(
            replace(sentence, text=whole), lambda text: self.fits(text.translate(dict.fromkeys(kept, "⟦1⟧")))
        )
        return [replace(part, text=part.text.translate(kept)) for part in parts]

    def fits(self, text: str) -> bool:
        """A token has one byte at least, and the space that some vocabularies put in front is one more."""
        if len(text.encode()) < self.longest:
            return True
        return len(self.translator.tokenizers.source.encode(plain(text, ""))) <= self.longest

    def _by_target(
        self, parts: list[list[Sentence]], pairs: list[tuple[str, str]], advance: Callable[[int], None], options: Any
    ) -> list[list[str]]:
        """The translation of every part: those to one language are decoded together."""
        made = [[part.text for part in own] for own in parts]
        for pair in dict.fromkeys(pairs):
            places = [(i, j) for i, own in enumerate(parts) for j in range(len(own)) if pairs[i] == pair]
            said = self._sentences([made[i][j] for i, j in places], pair, advance, options)
            for (i, j), text in zip(places, said, strict=True):
                made[i][j] = shouted(text) if parts[i][j].loud else text
        return made

    def _sentences(
        self, texts: list[str], pair: tuple[str, str], advance: Callable[[int], None], options: Any
    ) -> list[str]:
        asked = [i for i, text in enumerate(texts) if translatable(text)]
        advance(len(texts) - len(asked))
        tries = [Try.of(texts[i], KEPT) for i in asked]
        whole = self._said([t.text for t in tries if t.known], pair, advance, options)
        found = dict(zip([i for i, t in zip(asked, tries, strict=True) if t.known], whole, strict=True))
        first = {i: t.read(found[i]) if i in found else None for i, t in zip(asked, tries, strict=True)}
        second = self._again({i: (texts[i], said) for i, said in first.items()}, pair, options)
        return [second.get(i, first.get(i) or text) for i, text in enumerate(texts)]

    def _again(self, first: dict[int, tuple[str, str | None]], pair: tuple[str, str], options: Any) -> dict[int, str]:
        """What came out wrong once more: without its numbers where these were lost, in parts where a placeholder was."""
        numbers = {i: Try.numbers(text, lost_numbers(text, said)) for i, (text, said) in first.items() if said}
        numbers = {i: t for i, t in numbers.items() if t.kept and t.known and self.fits(t.text)}
        broken = {i: between(text) for i, (text, said) in first.items() if said is None}
        asked = [t.text for t in numbers.values()] + [
            part.strip() for parts in broken.values() for part in parts if translatable(part)
        ]
        said = iter(self._said(asked, pair, lambda done: None, options))
        better: dict[int, str] = {}
        for i, t in numbers.items():
            text, before = first[i]
            now = t.read(next(said))
            if now and len(lost_numbers(text, now)) < len(lost_numbers(text, before or "")):
                better[i] = now
        return better | {
            i: "".join(around(part, next(said)) if translatable(part) else part for part in parts)
            for i, parts in broken.items()
        }

    def _said(self, texts: list[str], pair: tuple[str, str], advance: Callable[[int], None], options: Any) -> list[str]:
        """What the model says, ended as the text was."""
        if not texts:
            return []
        to = pair[1] if self.translator.directions else None
        asked = [stopped(plain(text, pair[0]), pair[0]) for text in texts]
        found = self.translator.translate(asked, progress=advance, to=to, **options)
        return [same_end(text, said.text) for text, said in zip(texts, found, strict=True)]


# ---- one sentence ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Try:
    """A sentence with placeholders, and what they stand for."""

    text: str
    kept: list[str]

    @classmethod
    def of(cls, text: str, pattern: re.Pattern[str]) -> Try:
        return cls(*kept_aside(text, pattern))

    @classmethod
    def numbers(cls, text: str, numbers: list[str]) -> Try:
        """With these among what is kept."""
        if not numbers:
            return cls(text, [])
        exact = "|".join(rf"(?<!\d){re.escape(number)}(?!\d)" for number in numbers)
        return cls.of(text, re.compile(f"{KEPT.pattern}|{exact}"))

    @property
    def known(self) -> bool:
        return len(self.kept) <= MOST

    def read(self, said: str) -> str | None:
        return put_back(said, self.kept)


def typed(sentence: Sentence, language: str) -> Sentence:
    """As it is usually written, and whether it was shouted."""
    if not translatable(sentence.text):
        return sentence
    return replace(sentence, text=careful(sentence.text, language), loud=loud(sentence.text))


def translatable(text: str) -> bool:
    """Whether there is a word in it, beside what is kept."""
    return bool(LETTERS.search(KEPT.sub(" ", text)))


def between(text: str) -> list[str]:
    """What is kept, and what stands around each."""
    at, parts = 0, []
    for found in KEPT.finditer(text):
        parts += [text[at : found.start()], found[0]]
        at = found.end()
    return [*parts, text[at:]]


def around(part: str, said: str) -> str:
    """Its translation between its own white space."""
    return part[: len(part) - len(part.lstrip())] + said + part[len(part.rstrip()) :]


def plain(text: str, source: str) -> str:
    """A sentence as the model saw them: single spaces, and quotes as most people type them."""
    text = " ".join(text.split())
    return text.translate(PLAIN) if source in ("en", "fr") else text.replace("’", "'")


def same_end(source: str, said: str) -> str:
    """A full stop that the source has not - a heading, a part of a sentence - is taken off again."""
    last = source.rstrip()[-1:]
    if not said.endswith((".", "。")) or said.endswith("..") or not (last.isalnum() or last in ",，、;；:："):
        return said
    return said[:-1] + ("" if last.isalnum() else last)
