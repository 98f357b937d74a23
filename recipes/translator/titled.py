"""English sentences With Some Words in capitals: headings and terms are written so, everyday sentences are not."""

from __future__ import annotations

import random

Pair = tuple[str, str]
SHARE, LONGEST = 0.05, 3  # of the pairs; words


def titled(pairs: list[Pair]) -> list[Pair]:
    """Some pairs with a run of one to three words of the English in capitals; the other side stays as it is."""
    rng = random.Random(0)
    chosen = [pair for pair in pairs if rng.random() < SHARE]
    made = [(with_capitals(source, rng), target) for source, target in chosen]
    return [new for new, old in zip(made, chosen, strict=True) if new != old]


def with_capitals(text: str, rng: random.Random) -> str:
    """The run is in lower case before and inside the sentence, not its first word."""
    first, *words = text.split(" ")
    starts = [i for i, word in enumerate(words) if word[0].islower()]
    if not starts:
        return text
    begin = rng.choice(starts)
    for i in range(begin, min(begin + rng.randint(1, LONGEST), len(words))):
        if not words[i][0].islower():
            break
        words[i] = words[i][0].upper() + words[i][1:]
    return " ".join([first, *words])
