"""Language identification (language detection), and the translation direction of each of several texts.

The language of a text is found by its script and, among languages of one script, by letter trigrams: a profile holds the
log-probability of each frequent trigram of a language, and a text is in the language where its trigrams are most likely
(Cavnar and Trenkle 1994 compare ranks instead). Simplified and traditional Chinese are told apart by characters that only
one of them has.

Texts that are translated together are identified together: a heading or a name alone says little, so it is taken to be in
the language of most other texts, and in one that the model can translate as asked, unless it clearly is not.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

from regard.errors import RegardError
from regard.text.placeholders import LITERAL, PROTECTED, has_words

HAN = re.compile(r"[\u3400-\u9fff]")
KANA_OR_HANGUL = re.compile(r"[\u3041-\u30fa\uac00-\ud7af]")  # a text with many of these is not Chinese
WORD = re.compile(r"[^\W\d_]+")
PROFILE_SIZE = 3000  # trigrams of a profile
MIN_TRIGRAMS = 15  # a shorter text is never called unknown
UNKNOWN_LOG_PROB = -8.35  # mean log-probability of a trigram; ordinary sentences have -5 to -8 in their language
# Difference of log-probabilities that leaves no doubt: 24 of 25 sentences reach it in their own language, and one heading in
# 400 in another language.
CLEAR_MARGIN = 20.0

Profiles = dict[str, dict[str, float]]  # language -> trigram -> log-probability
Scores = dict[str, float]  # language -> log-probability of a text


# ---- one text --------------------------------------------------------------------------------------------------------


def extract_trigrams(text: str) -> list[str]:
    """Return the trigrams of all words in lower case; a space before and after each word counts as a letter."""
    words = (f" {word} " for word in WORD.findall(text.lower()))
    return [word[i : i + 3] for word in words for i in range(len(word) - 2)]


def learn_profile(texts: Iterable[str]) -> dict[str, float]:
    """Return the trigram profile of the language that all these texts are in."""
    counts = Counter(t for text in texts for t in extract_trigrams(text))
    total = sum(counts.values())
    return {t: round(math.log(n / total), 3) for t, n in counts.most_common(PROFILE_SIZE)}


def score_languages(text: str, profiles: Profiles) -> Scores:
    """Return the log-probability of a text in each language, or {"zh": 0} for Chinese of either script.

    The result is empty where the text is in none of the languages.
    """
    letters = sum(map(len, WORD.findall(text)))
    if 3 * len(HAN.findall(text)) >= max(1, letters):  # a Chinese character is worth several letters
        return {} if 4 * len(KANA_OR_HANGUL.findall(text)) > len(HAN.findall(text)) else {"zh": 0.0}
    found = extract_trigrams(text)
    if not any(t in profile for t in found for profile in profiles.values()):
        return {}
    floor = min(min(profile.values()) for profile in profiles.values()) - 1  # log-probability of unseen trigrams
    return {name: sum(profile.get(t, floor) for t in found) for name, profile in profiles.items()}


def is_unknown_language(text: str, profiles: Profiles) -> bool:
    """Return whether a text is unlikely in all languages that have a profile.

    This holds for one in a thousand texts in these languages, and for most texts in others.
    """
    scores, n = score_languages(text, profiles), len(extract_trigrams(text))
    return n >= MIN_TRIGRAMS and "zh" not in scores and max(scores.values(), default=-math.inf) / n < UNKNOWN_LOG_PROB


def count_script_characters(text: str) -> tuple[int, int]:
    """Return how many characters of a text only simplified Chinese has, and how many only traditional Chinese has.

    Simplified characters are those of the encoding GB2312, traditional ones those of Big5 (code page 950).
    """
    known = [(can_encode(char, "gb2312"), can_encode(char, "cp950")) for char in HAN.findall(text)]
    return sum(gb and not big for gb, big in known), sum(big and not gb for gb, big in known)


@cache
def can_encode(char: str, encoding: str) -> bool:
    """Return whether an encoding has this character."""
    try:
        return bool(char.encode(encoding))
    except UnicodeEncodeError:
        return False


# ---- several texts that are translated together ----------------------------------------------------------------------


@dataclass(frozen=True)
class Direction:
    """The languages that a text is translated from and to."""

    source: str  # empty where there is nothing to translate
    target: str
    note: str = ""  # why the direction may be wrong

    @property
    def pair(self) -> tuple[str, str]:
        return self.source, self.target


class DirectionDetector:
    """Finds the translation direction of texts among the directions of a model ("en>de", ...)."""

    def __init__(self, directions: Sequence[str], profiles: Profiles) -> None:
        self.directions, self.profiles = directions, profiles
        self.sources, self.targets = (
            list(dict.fromkeys(direction.split(">")[side] for direction in directions)) for side in (0, 1)
        )

    def detect(self, texts: Sequence[str], to: str | None, source: str | None) -> list[Direction]:
        """Return the direction of each text. A direction that the model does not have is a RegardError.

        `to` and `source` are language codes, or None where they are to be detected.
        """
        to = to and self._find_language("to", to, self.targets)
        source = source and self._find_language("from", source, self.sources)
        if source or len(self.sources) == 1:
            source_language = source or self.sources[0]
            found = [Direction(source_language, to or self._default_target(source_language))] * len(texts)
        else:
            scores = [self._score(text) for text in texts]
            shares = clear_language_shares(scores) or {self._most_likely(sum_scores(scores), to, {}): 1.0}
            found = [self._detect_one(text, own, to, shares) for text, own in zip(texts, scores, strict=True)]
        for number, (text, route) in enumerate(zip(texts, found, strict=True), 1):
            if route.source and f"{route.source}>{route.target}" not in self.directions:
                raise RegardError(
                    f"{f'line {number}: ' if len(texts) > 1 else ''}this model does not translate from {route.source} to "
                    f"{route.target}: it knows {', '.join(self.directions)}"
                    + ("" if source else f" (say --from LANG if this is not {route.source}: {text[:60]!r})")
                )
        return found

    def _find_language(self, side: str, code: str, known: list[str]) -> str:
        """Return the language of the model that a code names in upper or lower case."""
        for name in known:
            if name.lower() == code.lower():
                return name
        raise RegardError(f"this model does not translate {side} {code}: it knows {', '.join(self.directions)}")

    def _default_target(self, source: str) -> str:
        """Return German for English, English for others, or the first target where the model has no such direction."""
        targets = [direction.split(">")[1] for direction in self.directions if direction.split(">")[0] == source]
        first = "de" if source == "en" else "en"
        return first if first in targets or not targets else targets[0]

    def _score(self, text: str) -> Scores:
        """Return the log-probability of a text in each language; nothing where it has no word that the model can read."""
        if not has_words(text):
            return {}
        if not self.profiles:
            raise RegardError("this model cannot tell languages apart (no languages.json): say --from LANG (source=)")
        scores = score_languages(LITERAL.sub(" ", text), self.profiles)
        return {} if "zh" in scores and "zh" not in self.sources else scores

    def _most_likely(self, scores: Scores, to: str | None, shares: Scores) -> str:
        """Return the language with the highest score.

        Languages get a bonus by their share among the other texts, and where the model translates them to `to`.
        """

        def weight(name: str) -> float:
            return scores[name] + CLEAR_MARGIN * (shares.get(name, 0.0) + (f"{name}>{to}" in self.directions))

        return max(scores, key=weight, default="")

    def _detect_one(self, text: str, scores: Scores, to: str | None, shares: Scores) -> Direction:
        """Return the direction of one text, given its scores and the shares of languages among all texts."""
        languages = ", ".join(dict.fromkeys([*self.profiles, *self.sources]))
        if not scores:
            words = WORD.search(LITERAL.sub(" ", text))
            return Direction("", to or "", f"left as it is, being in none of {languages}" if words else "")
        if "zh" in scores:
            simplified, traditional = count_script_characters(text)
            source, note = "zh-Hant" if traditional > simplified and "zh-Hant" in self.sources else "zh", ""
        else:
            source, note = self._most_likely(scores, to, shares), ""
            if is_unknown_language(PROTECTED.sub(" ", text), self.profiles):
                note = f"taken for {source}, but probably in none of {languages}"
        return Direction(source, to or self._default_target(source), note)


def clear_language_shares(scores: Sequence[Scores]) -> Scores:
    """Return how many texts are clearly in each language, relative to the most common language (1.0)."""
    counts: Counter[str] = Counter()
    for own in scores:
        first, *others = sorted(own, key=own.__getitem__, reverse=True) or [""]
        if others and own[first] - own[others[0]] >= CLEAR_MARGIN:
            counts[first] += 1
    return {name: count / max(counts.values()) for name, count in counts.items()}


def sum_scores(scores: Sequence[Scores]) -> Scores:
    """Return the scores of all texts together without Chinese, which is identified by its script."""
    total: Scores = defaultdict(float)
    for own in scores:
        for name, value in own.items():
            if name != "zh":
                total[name] += value
    return total
