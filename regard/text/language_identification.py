"""Language identification (language detection), and the translation direction of each of several texts.

`identify_language` tells about a hundred languages apart. The script decides where only one language has it (Greek, Thai,
Hangul, ...). Among the languages of one script a linear classifier decides: it adds the weights of all n-grams of one to
five letters in the text and applies a softmax, as fastText does (Joulin et al. 2017). Its weights are in
`language_profiles.json`; recipes/language_identification makes them. Simplified and traditional Chinese are told apart by
characters that only one of them has.

A language that is not among these is identified by its trigram profile, which a model of several directions has learned
from its training data (`learn_profile`): a text is in the language where its trigrams are most likely.

`DirectionDetector` identifies texts that are translated together with regard to each other: a heading or a name alone says
little, so it is taken to be in the language of most other texts, and in one that the model can translate as asked, unless
it clearly is not. A text in a language that the model does not have is left as it is.
"""

from __future__ import annotations

import base64
import json
import math
import re
import unicodedata
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from regard.errors import RegardError
from regard.text.language_names import find_language, language_name, standard_code, suggest_language
from regard.text.placeholders import LITERAL

HAN = re.compile(r"[\u3400-\u9fff]")
KANA_OR_HANGUL = re.compile(r"[\u3041-\u30fa\uac00-\ud7af]")  # a text with many of these is not Chinese
WORD = re.compile(r"[^\W\d_]+")
PROFILE_SIZE = 3000  # trigrams of a profile
MIN_TRIGRAMS = 15  # a shorter text is never called unknown
UNKNOWN_LOG_PROB = -8.35  # mean log-probability of a trigram; ordinary sentences have -5 to -8 in their language

Profiles = dict[str, dict[str, float]]  # language -> trigram -> log-probability
Scores = dict[str, float]  # language -> log-probability of a text

# ---- scripts ---------------------------------------------------------------------------------------------------------

# Code points of the letters of each script, first and last, and the language that alone is written in it.
SCRIPTS = {
    "Latin": ("", "41-5a 61-7a c0-d6 d8-f6 f8-2af 300-36f 1e00-1eff"),
    "Greek": ("el", "370-37d 37f-386 388-3ff 1f00-1fff"),
    "Cyrillic": ("", "400-481 483-52f"),
    "Armenian": ("hy", "531-556 561-587"),
    "Hebrew": ("", "591-5bd 5c1-5c2 5d0-5f2"),
    "Arabic": ("", "610-61a 620-65f 66e-6d3 6d5-6dc 6e5-6ef 6fa-6ff 750-77f fb50-fdff fe70-fefc"),
    "Thaana": ("dv", "780-7bf"),
    "Devanagari": ("", "900-963 971-97f"),
    "Bengali": ("", "980-9e3 9f0-9f1"),
    "Gurmukhi": ("pa", "a00-a65 a70-a7f"),
    "Gujarati": ("gu", "a80-ae5"),
    "Odia": ("or", "b00-b65"),
    "Tamil": ("ta", "b80-be5"),
    "Telugu": ("te", "c00-c65"),
    "Kannada": ("kn", "c80-ce5"),
    "Malayalam": ("ml", "d00-d65"),
    "Sinhala": ("si", "d80-de5"),
    "Thai": ("th", "e01-e3a e40-e4e"),
    "Lao": ("lo", "e81-ecd"),
    "Tibetan": ("bo", "f40-fbc"),
    "Myanmar": ("my", "1000-103f 1050-109f"),
    "Georgian": ("ka", "10a0-10ff 1c90-1cbf"),
    "Ethiopic": ("am", "1200-135f"),
    "Khmer": ("km", "1780-17d3"),
    "Hangul": ("ko", "1100-11ff 3131-318e ac00-d7af"),
    "Kana": ("ja", "3041-309f 30a1-30fa 30fc-30ff 31f0-31ff ff66-ff9d"),
    "Han": ("zh", "3005-3005 3007-3007 3400-4dbf 4e00-9fff f900-faff"),
}
SCRIPT_NAMES = tuple(SCRIPTS)
HAN_ID, KANA_ID, HANGUL_ID = (SCRIPT_NAMES.index(name) + 1 for name in ("Han", "Kana", "Hangul"))
APOSTROPHE = len(SCRIPTS) + 1
CHARACTER_WEIGHT = 3  # a character of Chinese, Japanese or Korean is worth several letters
APOSTROPHES = dict.fromkeys(map(ord, "’ʼʻ"), "'")
MAX_ORDER = 5  # longest n-gram
HASH_FACTOR = np.uint32(0x9E3779B1)
HASH_SHIFT = 12  # the upper 20 bits of a hash are its place in a table
MAX_CHARACTERS = 4000  # a longer text is judged by its beginning
CHUNK_CHARACTERS = 50_000  # of the texts that are classified at once, which bounds the memory
MIN_LETTERS = 10  # a shorter text is never certain
MIN_PROBABILITY = 0.9  # of a language that is certain
LEAST_PROBABILITY = 1e-6  # a language that is less likely is left out
# Languages that are written much alike have one code here: Croatian also stands for Bosnian and Serbian, and so on.
ALSO = {"hr": ("bs", "sr"), "id": ("ms",), "zh": ("zh-Hant",)}
PROFILES_FILE = Path(__file__).with_name("language_profiles.json")


@cache
def script_table() -> NDArray[np.uint8]:
    """Return the number of the script of each code point below 0x10000: 0 for no letter, else 1 + its place in SCRIPTS."""
    table = np.zeros(0x10000, np.uint8)
    for number, (_, ranges) in enumerate(SCRIPTS.values(), 1):
        for each in ranges.split():
            first, last = (int(end, 16) for end in each.split("-"))
            table[first : last + 1] = number
    table[ord("'")] = APOSTROPHE
    return table


class Letters(NamedTuple):
    """The letters of several texts, one after the other, with a space between words."""

    codes: NDArray[np.uint32]  # code points
    scripts: NDArray[np.uint8]  # 0 for a space
    texts: NDArray[np.int64]  # number of the text


def read_letters(texts: Sequence[str]) -> Letters:
    """Return the letters of all texts in lower case. An apostrophe inside a word counts as a letter."""
    joined = "\n" + "\n\n".join(text.replace("\n", " ") for text in texts).lower() + "\n"
    if not joined.isascii():
        joined = unicodedata.normalize("NFC", joined).translate(APOSTROPHES)
    codes = np.frombuffer(joined.encode("utf-32-le", "surrogatepass"), np.uint32)
    scripts = script_table()[np.minimum(codes, 0xFFFF)]
    scripts[(codes >= 0x20000) & (codes < 0x40000)] = HAN_ID  # rare Chinese characters
    at = np.flatnonzero(scripts == APOSTROPHE)
    inside = [(scripts[at + side] > 0) & (scripts[at + side] != APOSTROPHE) for side in (-1, 1)]
    scripts[at[~(inside[0] & inside[1])]] = 0
    return Letters(np.where(scripts > 0, codes, np.uint32(32)), scripts, np.cumsum(codes == 10) // 2)


def hash_ngrams(letters: Letters) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """Return the hashes of all n-grams of one to five letters in words, and the number of the text of each.

    The space before and after a word counts as a letter of it.
    """
    codes, is_letter = letters.codes, letters.scripts > 0
    hashes = codes * HASH_FACTOR
    places = [np.flatnonzero(is_letter)]
    found = [hashes[places[0]]]
    is_inside = np.ones(len(codes), bool)  # no space between the first letter and the last
    for order in range(2, MAX_ORDER + 1):
        size = max(0, len(codes) - order + 1)
        hashes = hashes[:size] * HASH_FACTOR + codes[order - 1 :]
        if order == 2:
            places.append(np.flatnonzero(is_letter[:size] | is_letter[1:]))
        else:
            is_inside = is_inside[:size] & is_letter[order - 2 : order - 2 + size]
            places.append(np.flatnonzero(is_inside))
        found.append(hashes[places[-1]])
    # Multiplied once more, so that the last letter affects the upper bits too.
    return np.concatenate(found) * HASH_FACTOR, letters.texts[np.concatenate(places)]


# ---- one text --------------------------------------------------------------------------------------------------------


class LanguageClassifier(NamedTuple):
    """A linear classifier of the languages of one script by n-grams."""

    languages: list[str]
    hashes: NDArray[np.uint32]  # (N,) of the n-grams
    rows: NDArray[np.uint16]  # (2^20,) number of the n-gram with these upper bits of the hash
    weights: NDArray[np.int16]  # (N, L)
    step: float  # that one unit of the weights is worth
    bias: NDArray[np.float32]  # (L,)


@dataclass(frozen=True)
class Identification:
    """The language of a text."""

    language: str  # code, empty where the text has no letters or is in an unknown script
    probability: float
    is_certain: bool  # False for fewer than ten letters, and where another language is nearly as likely
    probabilities: Mapping[str, float] = field(default_factory=dict, repr=False)  # of all languages above 1e-6
    letters: int = 0  # a Chinese, Japanese or Korean character counts as three
    script: str = ""  # that most letters are in


@cache
def load_classifiers() -> dict[str, LanguageClassifier]:
    """Return the classifier of each script that several languages are written in."""

    def unpack(text: str, kind: type) -> NDArray:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), kind)

    found = {}
    for name, own in json.loads(PROFILES_FILE.read_text(encoding="utf-8"))["scripts"].items():
        hashes = np.cumsum(unpack(own["hashes"], np.uint32), dtype=np.uint32)
        rows = np.zeros(1 << 32 - HASH_SHIFT, np.uint16)
        rows[hashes >> HASH_SHIFT] = np.arange(len(hashes))
        weights = unpack(own["weights"], np.int8).reshape(len(hashes), -1).astype(np.int16)
        bias = np.array(own["bias"], np.float32)
        found[name] = LanguageClassifier(own["languages"], hashes, rows, weights, own["step"], bias)
    return found


@cache
def identified_languages() -> frozenset[str]:
    """Return the codes of all languages that `identify_language` knows."""
    own = [name for classifier in load_classifiers().values() for name in classifier.languages]
    return frozenset([*own, *(language for language, _ in SCRIPTS.values() if language)])


def identify_language(text: str) -> Identification:
    """Return the language of a text.

    Examples:
        >>> import regard
        >>> regard.identify_language("¿Dónde está la estación de tren?").language
        'es'
    """
    return identify_languages([text])[0]


def identify_languages(texts: Sequence[str]) -> list[Identification]:
    """Return the language of each text, judged by itself. One call with many texts is faster than many calls."""
    found: list[Identification] = []
    chunk: list[str] = []
    size = 0
    for text in texts:
        chunk.append(LITERAL.sub(" ", text[:MAX_CHARACTERS]))
        size += len(chunk[-1])
        if size > CHUNK_CHARACTERS:
            found += identify_chunk(chunk)
            chunk, size = [], 0
    return found + (identify_chunk(chunk) if chunk else [])


def identify_chunk(texts: Sequence[str]) -> list[Identification]:
    """Return the language of each text; all are classified at once."""
    letters = read_letters(texts)
    is_letter = (letters.scripts > 0) & (letters.scripts != APOSTROPHE)
    places = letters.texts[is_letter] * APOSTROPHE + letters.scripts[is_letter]
    counts = np.bincount(places, minlength=len(texts) * APOSTROPHE).reshape(len(texts), APOSTROPHE)
    lengths = (counts.sum(1) + (CHARACTER_WEIGHT - 1) * counts[:, [HAN_ID, KANA_ID, HANGUL_ID]].sum(1)).tolist()
    scripts = find_scripts(counts)
    classifiers = load_classifiers()
    found = [identify_by_script(*each) for each in zip(scripts, lengths, strict=True)]
    ngrams = hash_ngrams(letters)
    for script in classifiers.keys() & set(scripts):
        probabilities = classify(classifiers[script], *ngrams, len(texts))
        probabilities[[name != script for name in scripts]] = 0
        numbers, columns = np.nonzero(probabilities > LEAST_PROBABILITY)
        kept: defaultdict[int, dict[str, float]] = defaultdict(dict)
        names = classifiers[script].languages
        for i, j, value in zip(
            numbers.tolist(), columns.tolist(), probabilities[numbers, columns].tolist(), strict=True
        ):
            kept[i][names[j]] = value
        for i, own in kept.items():
            found[i] = choose_language(own, lengths[i], script)
    return found


def find_scripts(counts: NDArray[np.int64]) -> list[str]:
    """Return the script of each text, given how many letters of each script it has: (texts, 1 + scripts).

    Japanese is written in Chinese characters and kana, of which some suffice.
    """
    weighted = counts.copy()
    weighted[:, [HAN_ID, KANA_ID, HANGUL_ID]] *= CHARACTER_WEIGHT - 1
    han, kana = counts[:, HAN_ID], counts[:, KANA_ID]
    is_japanese = (4 * kana > han) & (han + kana > 0)
    weighted[:, KANA_ID] = np.where(is_japanese, weighted[:, KANA_ID] + weighted[:, HAN_ID], 0)
    weighted[:, HAN_ID] = np.where(is_japanese, 0, weighted[:, HAN_ID])
    # Of equal counts the later script wins, so that Chinese wins over Latin.
    best = weighted.shape[1] - 1 - weighted[:, ::-1].argmax(1)
    return ["" if not own.any() else SCRIPT_NAMES[i - 1] for i, own in zip(best.tolist(), weighted, strict=True)]


def identify_by_script(script: str, letters: int) -> Identification:
    """Return the only language of a script; no language for a text without letters."""
    language = SCRIPTS[script][0] if script else ""
    return choose_language({language: 1.0}, letters, script) if language else Identification("", 0.0, False)


def choose_language(probabilities: Mapping[str, float], letters: int, script: str) -> Identification:
    """Return the likeliest language."""
    language = max(probabilities, key=probabilities.__getitem__)
    probability = probabilities[language]
    is_certain = letters >= MIN_LETTERS and probability >= MIN_PROBABILITY
    return Identification(language, probability, is_certain, probabilities, letters, script)


def classify(
    classifier: LanguageClassifier, hashes: NDArray[np.uint32], owners: NDArray[np.int64], size: int
) -> NDArray[np.float32]:
    """Return the probability of each language for each of `size` texts, given n-grams and their texts: (size, L).

    The sum of the weights is divided by the square root of their number, since n-grams of one word are not independent.
    """
    rows = classifier.rows[hashes >> HASH_SHIFT]
    is_known = classifier.hashes[rows] == hashes
    rows, owners = rows[is_known], owners[is_known]
    rows = rows[np.argsort(owners, kind="stable")]
    number = np.bincount(owners, minlength=size)
    ends = np.cumsum(number).tolist()
    sums = np.empty((size, len(classifier.languages)), np.int32)
    for i, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):  # faster than np.add.reduceat
        sums[i] = classifier.weights[rows[start:end]].sum(0)
    scores = sums * (classifier.step / np.sqrt(np.maximum(number, 1)))[:, None].astype(np.float32) + classifier.bias
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return scores / scores.sum(1, keepdims=True)


# ---- trigram profiles of a model's own languages ---------------------------------------------------------------------


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


# ---- simplified and traditional Chinese ------------------------------------------------------------------------------


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

CONTEXT_WEIGHT = 5.0  # added to the log-probability of the most common language of the other texts
TARGET_WEIGHT = 3.0  # added to the log-probability of languages that the model translates as asked
SHORT_FLOOR = math.log(0.06)  # least log-probability of the model's languages for a text of fewer than ten letters
FLOOR = math.log(LEAST_PROBABILITY)  # and for longer texts
MIN_UNCERTAIN = 3  # this many texts that are not certain make up for one that is
FOREIGN_SHARE = 0.8  # a text is left as it is where languages that the model does not have are at least as likely


@dataclass(frozen=True)
class Direction:
    """The languages that a text is translated from and to."""

    source: str  # empty where there is nothing to translate, or where the text is in a language that the model lacks
    target: str
    note: str = ""  # why the text is left as it is
    via: str = ""  # language that the text is translated to first, where the model has no direct way

    @property
    def pair(self) -> tuple[str, str]:
        return self.source, self.target


@dataclass
class LanguageCounts:
    """The languages of the texts so far: how many were certainly in each, and what the others together say."""

    certain: Counter[str] = field(default_factory=Counter)
    uncertain: int = 0
    # Sum of the log-probabilities for the uncertain texts, relative to the least likely language of each.
    evidence: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, scores: Scores, is_certain: bool) -> None:
        """Count one text, given the log-probability of each language for it."""
        if is_certain:
            self.certain[max(scores, key=scores.__getitem__)] += 1
        elif len(scores) > 1:
            self.uncertain += 1
            least = min(scores.values())
            for name, score in scores.items():
                self.evidence[name] += score - least

    def shares(self) -> Scores:
        """Return how common each language is, relative to the most common one (1.0)."""
        if self.certain:
            most = max(self.certain.values())
            return {name: count / most for name, count in self.certain.items()}
        return {max(self.evidence, key=self.evidence.__getitem__): 1.0} if self.uncertain >= MIN_UNCERTAIN else {}


class DirectionDetector:
    """Finds the translation direction of texts among the directions of a model ("en>de", ...).

    `profiles` are the trigram profiles of the model's languages; they are needed for languages that `identify_language`
    does not know.
    """

    def __init__(self, directions: Sequence[str], profiles: Profiles) -> None:
        self.directions, self.profiles = directions, profiles
        self.sources, self.targets = (
            list(dict.fromkeys(direction.split(">")[side] for direction in directions)) for side in (0, 1)
        )

    def detect(
        self, texts: Sequence[str], to: str | None, source: str | None, seen: LanguageCounts | None = None
    ) -> list[Direction]:
        """Return the direction of each text. A direction that the model does not have, even via another, is a RegardError.

        `to` and `source` are names or codes of languages, or None where they are to be detected. The texts are judged
        together, so that short ones follow the others. With `seen` each is judged by itself and those before it, which
        `seen` counts: then the directions of a stream do not depend on how many of its texts are given at once.
        """
        to = to and self._find_language("to", to, self.targets)
        source = source and self._find_language("from", source, self.sources)
        if source or len(self.sources) == 1:
            source_language = source or self.sources[0]
            found = [Direction(source_language, to or self._default_target(source_language))] * len(texts)
        else:
            found = self._detect_sources(texts, to, seen)
        several = len(texts) > 1
        return [
            self._find_way(route, text, f"line {number}: " if several else "", source)
            for number, (text, route) in enumerate(zip(texts, found, strict=True), 1)
        ]

    def _find_language(self, side: str, name: str, known: list[str]) -> str:
        """Return the language of the model that a name or code means."""
        if code := find_language(name, known):
            return code
        nearest = suggest_language(name, known)
        hint = f"; did you mean {language_name(nearest)} ({nearest})?" if nearest else ""
        raise RegardError(f"this model does not translate {side} {name}: it knows {', '.join(self.directions)}{hint}")

    def _default_target(self, source: str) -> str:
        """Return German for English, English for others, or the first target where the model has no such direction."""
        targets = [direction.split(">")[1] for direction in self.directions if direction.split(">")[0] == source]
        first = "de" if source == "en" else "en"
        return first if first in targets or not targets else targets[0]

    def _find_way(self, route: Direction, text: str, where: str, source: str | None) -> Direction:
        """Return a direction that the model has, by way of a third language where it must, preferably English."""
        if not route.source or f"{route.source}>{route.target}" in self.directions:
            return route
        if not source and is_same_language(route.source, route.target):
            name = language_name(route.target)
            return Direction("", route.target, f"left as it is: already in {name} (--from LANG translates it anyway)")
        for via in sorted(self.targets, key=lambda name: name != "en") if route.source != route.target else ():
            if {f"{route.source}>{via}", f"{via}>{route.target}"} <= set(self.directions):
                return Direction(route.source, route.target, route.note, via)
        raise RegardError(
            f"{where}this model does not translate from {route.source} to {route.target}: "
            f"it knows {', '.join(self.directions)}"
            + ("" if source else f" (say --from LANG if this is not {route.source}: {text[:60]!r})")
        )

    def _detect_sources(self, texts: Sequence[str], to: str | None, seen: LanguageCounts | None) -> list[Direction]:
        """Return the direction of each text, whose source language is to be detected."""
        identified = self._identify(texts)
        scores = [self._score(each) for each in identified]
        if seen is None:
            together = LanguageCounts()
            for own, each in zip(scores, identified, strict=True):
                together.add(own, each.is_certain)
            shares = together.shares()
            return [self._choose(*row, to, shares) for row in zip(texts, identified, scores, strict=True)]
        found = []
        for text, each, own in zip(texts, identified, scores, strict=True):
            found.append(self._choose(text, each, own, to, seen.shares()))
            seen.add(own, each.is_certain)
        return found

    def _identify(self, texts: Sequence[str]) -> list[Identification]:
        """Return the language of each text, in the model's codes where it has the language."""
        found = identify_languages(texts)
        codes = {standard_code(name): name for name in reversed(self.sources)}
        for name, others in ALSO.items():
            if name not in codes and (alike := [other for other in others if other in codes]):
                codes[name] = codes[alike[0]]
        known = {*identified_languages(), *(other for name in ALSO for other in ALSO[name])}
        unknown = [name for name in self.sources if standard_code(name).split("-")[0] not in known]
        missing = [name for name in unknown if name not in self.profiles]
        if missing and any(each.language for each in found):
            raise RegardError(
                f"this model cannot identify {', '.join(missing)} (no profile in languages.json): say --from LANG (source=)"
            )
        if unknown and not missing:
            found = [self._add_profiles(text, each, unknown) for text, each in zip(texts, found, strict=True)]
        return [rename_languages(each, codes) for each in found]

    def _add_profiles(self, text: str, found: Identification, unknown: list[str]) -> Identification:
        """Return the language of a text, which may also be in languages that have only trigram profiles."""
        text = LITERAL.sub(" ", text)
        scores = score_languages(text, self.profiles)
        if not scores or "zh" in scores or is_unknown_language(text, self.profiles):
            return found
        best = max(scores.values())
        shares = {name: math.exp(score - best) for name, score in scores.items()}
        own = {name: shares[name] / sum(shares.values()) for name in unknown}
        rest = 1 - sum(own.values())
        merged = {name: value * rest for name, value in found.probabilities.items()} | own
        return choose_language(merged, found.letters or sum(map(len, WORD.findall(text))), found.script)

    def _score(self, found: Identification) -> Scores:
        """Return the log-probability of each language, of all the model's languages in the text's script at least."""
        if not found.language:
            return {}
        floor = FLOOR if found.letters >= MIN_LETTERS else SHORT_FLOOR
        classifier = load_classifiers().get(found.script)
        alike = classifier.languages if classifier else ()
        candidates = {name: 0.0 for name in self.sources if standard_code(name) in alike} | dict(found.probabilities)
        return {name: max(floor, math.log(max(value, LEAST_PROBABILITY))) for name, value in candidates.items()}

    def _choose(self, text: str, found: Identification, scores: Scores, to: str | None, shares: Scores) -> Direction:
        """Return the direction of one text, given its scores and the shares of languages among the other texts."""
        if not scores:
            names = ", ".join(language_name(name) for name in self.sources)
            has_letters = WORD.search(LITERAL.sub(" ", text))
            return Direction("", to or "", f"left as it is: in none of {names}" if has_letters else "")
        weighted = {
            name: score + CONTEXT_WEIGHT * shares.get(name, 0.0) + TARGET_WEIGHT * (f"{name}>{to}" in self.directions)
            for name, score in scores.items()
        }
        best = max(weighted.values())
        total = {name: math.exp(value - best) for name, value in weighted.items()}
        own = {name: value for name, value in total.items() if name in self.sources}
        foreign = {name: value for name, value in total.items() if name not in own}
        likeliest = max(foreign, key=foreign.__getitem__, default="")
        is_foreign = sum(foreign.values()) >= FOREIGN_SHARE * sum(total.values())
        is_sure = found.letters >= MIN_LETTERS or shares.get(likeliest, 0.0) > 0 or not own
        if is_foreign and is_sure:
            name = language_name(likeliest)
            note = f"left as it is: in {name}, which this model does not know (--from LANG translates it anyway)"
            return Direction("", to or "", note)
        source = max(own, key=own.__getitem__)
        if standard_code(source).startswith("zh"):
            simplified, traditional = count_script_characters(text)
            both = [name for name in self.sources if standard_code(name).startswith("zh")]
            wanted = "zh-Hant" if traditional > simplified else "zh"
            source = next((name for name in both if standard_code(name) == wanted), both[0])
        return Direction(source, to or self._default_target(source))


def is_same_language(one: str, other: str) -> bool:
    """Return whether two codes are of one language, in whatever script."""
    return standard_code(one).split("-")[0] == standard_code(other).split("-")[0]


def rename_languages(found: Identification, codes: Mapping[str, str]) -> Identification:
    """Return an identification with other language codes; probabilities of languages that become one are added."""
    if not any(name in codes and codes[name] != name for name in found.probabilities):
        return found
    merged: defaultdict[str, float] = defaultdict(float)
    for name, value in found.probabilities.items():
        merged[codes.get(name, name)] += value
    return choose_language(merged, found.letters, found.script)
