"""Pairs once more, with a name or number that both sides share as another one, or as a placeholder.

What should be copied is then learned as something to copy, whatever it says. `regard.text.placeholders` puts placeholders in place
of links and the like.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

Pair = tuple[str, str]
NUMBER, NAME = re.compile(r"\d[\d.,:]*\d|\d"), re.compile(r"\b[A-Z][a-z]{2,}\b")
LOWER = re.compile(r"\b[a-z]{3,}\b")
OTHER = r"[^\W\u3400-\u9fff]"  # a letter or digit that is not Chinese: Chinese has no spaces around names
WHOLE = (
    rf"(?<!{OTHER})(?<!['’])(?<!{OTHER}[-./:,]){{}}(?!{OTHER})(?![-./:,]{OTHER})"  # not CO2, 9/11, Anna-Lena, d'Anna
)
NAMES = {  # that Chinese writes in its own characters
    "Tom": ("汤姆", "湯姆"),
    "Mary": ("玛丽", "瑪麗", "瑪莉"),
    "John": ("约翰", "約翰"),
    "Boston": ("波士顿", "波士頓"),
    "Japan": ("日本",),
    "Tokyo": ("东京", "東京"),
    "China": ("中国", "中國"),
    "America": ("美国", "美國"),
}
SHARE, SHARE_ZH = 0.1, 0.4  # of the pairs with something to copy; Chinese has few of these
OFTEN = 5
SYLLABLES = ("ka", "ro", "min", "tel", "da", "su", "vor", "lin", "be", "xa", "jo", "wen", "pri", "gu", "ny")


def copies(pairs: list[Pair], lang: str, ordinary: set[str]) -> list[Pair]:
    """Some pairs with one or two names or numbers replaced on both sides."""
    rng, made = random.Random(0), []
    share = SHARE_ZH if lang.startswith("zh") else SHARE
    for source, target in pairs:
        found = shared(source, target, ordinary)
        if found and rng.random() < share:
            chosen = rng.sample(found, min(len(found), rng.choice((1, 1, 2))))
            new = [other(mine, mark, rng) for (mine, _), mark in zip(chosen, rng.sample(range(1, 5), 2), strict=False)]
            mine, theirs = (dict(zip(side, new, strict=True)) for side in zip(*chosen, strict=True))
            made.append((replaced(source, mine), replaced(target, theirs)))
    return made


def ordinary_words(texts: Iterable[str]) -> set[str]:
    """What is often written in lower case is no name: Union, Minister, The."""
    counts = Counter(word for text in texts for word in LOWER.findall(text))
    return {word for word, n in counts.items() if n >= OFTEN}


def shared(source: str, target: str, ordinary: set[str]) -> list[Pair]:
    """Names and numbers that are once on either side, as each writes them; none is a part of another."""
    words = [word for pattern in (NUMBER, NAME) for word in dict.fromkeys(pattern.findall(source))]
    both = [
        (word, theirs)
        for word in words
        for theirs in (word, *NAMES.get(word, ()))
        if word.lower() not in ordinary and once(word, source) and once(theirs, target)
    ]
    return [pair for pair in both if not any(pair != rest and pair[0] in rest[0] for rest in both)]


def once(word: str, text: str) -> bool:
    """Whether it is there as a whole word, and nowhere else: "Toms" keeps its Tom, so no Tom beside it is replaced."""
    return text.count(word) == 1 and bool(whole(word).search(text))


@cache
def whole(word: str) -> re.Pattern[str]:
    return re.compile(WHOLE.format(re.escape(word)))


def replaced(text: str, new: dict[str, str]) -> str:
    """All in one go: the 2 of a placeholder is not a number of the text."""
    return re.sub("|".join(map(re.escape, new)), lambda found: new[found[0]], text)


def other(word: str, mark: int, rng: random.Random) -> str:
    if rng.random() < 0.5:
        return f"⟦{mark}⟧"
    if word[0].isdigit():
        return re.sub(r"\d", lambda _: str(rng.randrange(10)), word)
    return "".join(rng.choice(SYLLABLES) for _ in range(rng.randrange(2, 4))).capitalize()
