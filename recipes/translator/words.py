"""Words by themselves: a lexicon learned from the pairs, for a model that would else see whole sentences only.

An English word and another belong together if each is, of all words, the one that the other shares most sentences with
(Dice: twice the sentences with both, over those with the one and those with the other). Chinese has no spaces: there, all
strings of one to four characters are candidates, and one of a single character, often a part of a word, counts less.
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
MORE = re.compile("[的了把很]|[我你他她](?![们們]$)|^[在是本首个個只隻座封艘部条條张張匹辆輛杯件间間].")  # than a word
LONGEST = 4  # characters of a Chinese word
SINGLE = 0.8  # what the Dice of a single Chinese character counts beside that of a longer string
COUNT, DICE = 5, 0.5  # sentences with both, and their Dice, at least


def lexicon(pairs: list[Pair], lang: str) -> list[Pair]:
    """The words of the pairs as sentences, "Apple." and "Apfel.", surest first."""
    sides = [[set(units(pair[i], side)) for pair in pairs] for i, side in enumerate(("en", lang))]
    forms = [usual(pair[i] for pair in pairs) for i in range(2)]
    return [
        (sentence(forms[0].get(mine, mine)), sentence(forms[1].get(theirs, theirs)))
        for mine, theirs in matches(*sides)
        if "'" not in mine and "’" not in mine
    ]


def units(text: str, lang: str) -> Iterator[str]:
    """What may be a word of a language, in lower case."""
    if lang.startswith("zh"):
        for run in re.findall(f"{HAN.pattern}+", text):
            yield from (run[i : i + n] for n in range(1, LONGEST + 1) for i in range(len(run) - n + 1))
    else:
        yield from WORD.findall((ELISION.sub("", text) if lang == "fr" else text).lower())


def usual(texts: Iterator[str]) -> dict[str, str]:
    """How each word is written most often: TV, not Tv."""
    counts = Counter(word for text in texts for word in WORD.findall(ELISION.sub("", text)))
    return {word.lower(): word for word, _ in reversed(counts.most_common())}


def sentence(word: str) -> str:
    return f"{word}。" if HAN.match(word) else f"{word[0].upper()}{word[1:]}."


# ---- which belong together -------------------------------------------------------------------------------------------


def matches(mine: list[set[str]], theirs: list[set[str]]) -> list[Pair]:
    """Words that are each other's best, surest first, of what is in line with each other."""
    names, counts = zip(*(frequent(side) for side in (mine, theirs)), strict=True)
    first, second, both = in_line(mine, theirs, *names)
    dice = 2 * both / (counts[0][first] + counts[1][second])
    rank = dice * np.array([SINGLE if HAN.fullmatch(name) else 1.0 for name in names[1]])[second]
    lengths = np.array([len(name) for name in names[1]])[second]
    order = np.lexsort((-lengths, -rank))
    best = set(first_of(first[order])) & set(first_of(second[order]))
    return [(names[0][first[i]], names[1][second[i]]) for i in order[sorted(best)] if dice[i] >= DICE]


def frequent(side: list[set[str]]) -> tuple[list[str], np.ndarray]:
    """The words that are in enough sentences, and in how many."""
    counts = Counter(word for words in side for word in words)
    names = sorted(word for word, n in counts.items() if n >= COUNT and a_word(word))  # the same order in every run
    return names, np.array([counts[name] for name in names])


def a_word(name: str) -> bool:
    return bool(HAN.fullmatch(name)) or (len(name) > 1 and not MORE.search(name))


def in_line(
    mine: list[set[str]], theirs: list[set[str]], my_names: list[str], their_names: list[str]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pairs of words (their numbers) that are in line in enough sentences, and in how many."""
    numbers = [{name: i for i, name in enumerate(names)} for names in (my_names, their_names)]
    keys = [np.empty(0, np.int64)]  # of a pair: one number
    for words, others in zip(mine, theirs, strict=True):
        a, b = (
            np.array([own[word] for word in side if word in own], np.int64)
            for own, side in zip(numbers, (words, others), strict=True)
        )
        keys.append((a[:, None] * len(their_names) + b).ravel())
    found, both = np.unique(np.concatenate(keys), return_counts=True)
    enough = both >= COUNT
    return *np.divmod(found[enough], max(1, len(their_names))), both[enough]


def first_of(values: np.ndarray) -> list[int]:
    """Where each value is for the first time."""
    return list(np.unique(values, return_index=True)[1])
