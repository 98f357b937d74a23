"""Filters for sentence pairs: by length, by letters, by script and by language."""

from __future__ import annotations

import re

from regard.text.language_identification import HAN, count_script_characters, identify_languages

Pair = tuple[str, str]
LETTER = re.compile(r"[^\W\d_]")
LONGEST = 500  # characters


def is_plausible(pair: Pair, lang: str) -> bool:
    """Return whether the sides look like their languages and like translations of each other."""
    source, target = pair
    if not source or not target or source == target or max(map(len, pair)) > LONGEST:
        return False
    chinese = lang.startswith("zh")
    ratio = len(target) / len(source)
    if not (0.1 if chinese else 0.35) < ratio < (1.5 if chinese else 3.0) and max(map(len, pair)) > 20:
        return False
    return uses_script(source, False) and uses_script(target, chinese)


def uses_script(text: str, chinese: bool) -> bool:
    """Return whether at least half of the letters are Chinese, or none is."""
    letters, han = len(LETTER.findall(text)), len(HAN.findall(text))
    return letters > 0 and (2 * han >= letters if chinese else han == 0)


# ---- Chinese ---------------------------------------------------------------------------------------------------------


def split_by_script(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Return the pairs in simplified and in traditional Chinese.

    A line that could be either is in both sets, one that mixes the scripts is in neither.
    """
    return {
        "en-zh": [pair for pair in pairs if is_written_in("zh", pair[1])],
        "en-zh-Hant": [pair for pair in pairs if is_written_in("zh-Hant", pair[1])],
    }


def is_written_in(lang: str, text: str) -> bool:
    """Return whether no character belongs to the other Chinese script."""
    simplified, traditional = count_script_characters(text)
    return {"zh": not traditional, "zh-Hant": not simplified}.get(lang, True)


# ---- speeches that were not translated -------------------------------------------------------------------------------


def filter_language(pairs: list[Pair], lang: str) -> list[Pair]:
    """Return the pairs whose other side is in its language or too short to tell.

    Europarl holds speeches that were left in the language in which they were given.
    """
    found = identify_languages([pair[1] for pair in pairs])
    return [pair for pair, one in zip(pairs, found, strict=True) if one.language == lang or not one.is_certain]
