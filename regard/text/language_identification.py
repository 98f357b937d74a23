"""Which language a text is in: by its script, and among languages of one script by its letters, three at a time.

A profile is the log-probability of each frequent trigram in a language, learned from its text; a text belongs to the
language in which its trigrams are likeliest.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

HAN = re.compile(r"[\u3400-\u9fff]")
KANA = re.compile(r"[\u3041-\u30fa\uac00-\ud7af]")  # and Hangul: with many of these it is not Chinese
LETTERS = re.compile(r"[^\W\d_]+")
KEPT = 3000  # trigrams a language
ENOUGH = 15  # trigrams to judge by
STRANGE = -8.35  # log-probability a trigram: ordinary sentences are at -5 to -8

Profiles = dict[str, dict[str, float]]


def trigrams(text: str) -> list[str]:
    words = (f" {word} " for word in LETTERS.findall(text.lower()))
    return [word[i : i + 3] for word in words for i in range(len(word) - 2)]


def learn_profiles(texts: Iterable[str]) -> dict[str, float]:
    """The profile of the language that these are in."""
    counts = Counter(t for text in texts for t in trigrams(text))
    total = sum(counts.values())
    return {t: round(math.log(n / total), 3) for t, n in counts.most_common(KEPT)}


def scores(text: str, profiles: Profiles) -> dict[str, float]:
    """How likely a text is in each language (log-probabilities); "zh" for Chinese in either script. Empty: none of them."""
    letters = sum(map(len, LETTERS.findall(text)))
    if 3 * len(HAN.findall(text)) >= max(1, letters):  # a character says as much as some letters
        return {} if 4 * len(KANA.findall(text)) > len(HAN.findall(text)) else {"zh": 0.0}
    found = trigrams(text)
    if not any(t in profile for t in found for profile in profiles.values()):
        return {}
    floor = min(min(profile.values()) for profile in profiles.values()) - 1
    return {name: sum(profile.get(t, floor) for t in found) for name, profile in profiles.items()}


def strange(text: str, profiles: Profiles) -> bool:
    """Whether a text is likely in none of these languages. One in a thousand of their own seems so, and most others do."""
    found, n = scores(text, profiles), len(trigrams(text))
    return n >= ENOUGH and "zh" not in found and max(found.values(), default=-math.inf) / n < STRANGE


# ---- Chinese ---------------------------------------------------------------------------------------------------------


def script(text: str) -> tuple[int, int]:
    """How many of its characters only simplified and only traditional Chinese has: those of GB2312, and those of Big5."""
    known = [(can(char, "gb2312"), can(char, "cp950")) for char in HAN.findall(text)]
    return sum(gb and not big for gb, big in known), sum(big and not gb for gb, big in known)


@cache
def can(char: str, encoding: str) -> bool:
    try:
        return bool(char.encode(encoding))
    except UnicodeEncodeError:
        return False
