"""A lexicon learned from the pairs, since the model would otherwise see words only inside whole sentences.

An English word and a foreign one are translations if each is the other's best match by the Dice coefficient of the sentences
they occur in. Chinese has no spaces: there, all strings of one to four characters are candidates, and a single character,
which is often part of a word, counts less.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import numpy as np

from regard.text.language_identification import HAN

Pair = tuple[str, str]
WORD = re.compile(r"[^\W\d_]+(?:['’-][^\W\d_]+)*")
ELISION = re.compile(r"\b(?:[cdjlmnst]|(?:jus|lors|puis)?qu)['’]", re.IGNORECASE)  # l'homme is two words
NOT_A_WORD = re.compile(
    "[的了把很]|[我你他她](?![们們]$)|^[在是本首个個只隻座封艘部条條张張匹辆輛杯件间間]."
)  # strings with these are more than a word
LONGEST = 4  # characters of a Chinese word
SINGLE = 0.8  # weight of the Dice coefficient of a single Chinese character
COUNT, DICE = 5, 0.5  # least number of sentences with both words, and least Dice coefficient


def build_lexicon(pairs: list[Pair], lang: str) -> list[Pair]:
    """Return the words of the pairs as sentences, "Apple." and "Apfel.", best matches first."""
    sides = [[set(list_candidates(pair[i], side)) for pair in pairs] for i, side in enumerate(("en", lang))]
    forms = [find_usual_forms(pair[i] for pair in pairs) for i in range(2)]
    return [
        (make_sentence(forms[0].get(english, english)), make_sentence(forms[1].get(foreign, foreign)))
        for english, foreign in match_words(*sides)
        if "'" not in english and "’" not in english
    ]


def list_candidates(text: str, lang: str) -> Iterator[str]:
    """Yield the strings that may be words of a language, in lower case."""
    if lang.startswith("zh"):
        for run in re.findall(f"{HAN.pattern}+", text):
            yield from (run[i : i + n] for n in range(1, LONGEST + 1) for i in range(len(run) - n + 1))
    else:
        yield from WORD.findall((ELISION.sub("", text) if lang == "fr" else text).lower())


def find_usual_forms(texts: Iterator[str]) -> dict[str, str]:
    """Return the most frequent spelling of each word: TV, not Tv."""
    counts = Counter(word for text in texts for word in WORD.findall(ELISION.sub("", text)))
    return {word.lower(): word for word, _ in reversed(counts.most_common())}


def make_sentence(word: str) -> str:
    return f"{word}。" if HAN.match(word) else f"{word[0].upper()}{word[1:]}."


# ---- alignment by Dice coefficient -----------------------------------------------------------------------------------


def match_words(english: list[set[str]], foreign: list[set[str]]) -> list[Pair]:
    """Return the pairs of words that are each other's best match, best first."""
    names, counts = zip(*(find_frequent(side) for side in (english, foreign)), strict=True)
    first, second, both = count_cooccurrences(english, foreign, *names)
    dice = 2 * both / (counts[0][first] + counts[1][second])
    rank = dice * np.array([SINGLE if HAN.fullmatch(name) else 1.0 for name in names[1]])[second]
    lengths = np.array([len(name) for name in names[1]])[second]
    order = np.lexsort((-lengths, -rank))
    best = set(find_first(first[order])) & set(find_first(second[order]))
    return [(names[0][first[i]], names[1][second[i]]) for i in order[sorted(best)] if dice[i] >= DICE]


def find_frequent(side: list[set[str]]) -> tuple[list[str], np.ndarray]:
    """Return the words that occur in enough sentences, and in how many."""
    counts = Counter(word for words in side for word in words)
    names = sorted(
        word for word, n in counts.items() if n >= COUNT and is_word(word)
    )  # sorted, so that every run has the same order
    return names, np.array([counts[name] for name in names])


def is_word(name: str) -> bool:
    return bool(HAN.fullmatch(name)) or (len(name) > 1 and not NOT_A_WORD.search(name))


def count_cooccurrences(
    english: list[set[str]], foreign: list[set[str]], english_names: list[str], foreign_names: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the pairs of words (as indices) that occur together in enough sentences, and in how many."""
    numbers = [{name: i for i, name in enumerate(names)} for names in (english_names, foreign_names)]
    keys = [np.empty(0, np.int64)]  # one number for each pair of words
    for words, others in zip(english, foreign, strict=True):
        a, b = (
            np.array([own[word] for word in side if word in own], np.int64)
            for own, side in zip(numbers, (words, others), strict=True)
        )
        keys.append((a[:, None] * len(foreign_names) + b).ravel())
    found, both = np.unique(np.concatenate(keys), return_counts=True)
    enough = both >= COUNT
    return *np.divmod(found[enough], max(1, len(foreign_names))), both[enough]


def find_first(values: np.ndarray) -> list[int]:
    """Return the index of the first occurrence of each value."""
    return list(np.unique(values, return_index=True)[1])
