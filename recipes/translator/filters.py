"""Which pairs are worth learning from: by length, by letters, by script and by language."""

from __future__ import annotations

import re

from regard.text.language_identification import (
    HAN,
    Profiles,
    count_script_characters,
    extract_trigrams,
    learn_profile,
    score_languages,
)

Pair = tuple[str, str]
LETTER = re.compile(r"[^\W\d_]")
LONGEST = 400  # characters
SURE = 15.0  # of log-probability, between two languages
UNLIKELY = -8.2  # mean log-probability of a trigram: below, most lines are Polish, Swedish, Dutch ...
LEAD = 0.3  # of German before these: below are they and what German lines are full of foreign names


def good(pair: Pair, lang: str) -> bool:
    """Whether the sides look like their languages and like each other."""
    source, target = pair
    if not source or not target or source == target or max(map(len, pair)) > LONGEST:
        return False
    chinese = lang.startswith("zh")
    ratio = len(target) / len(source)
    if not (0.1 if chinese else 0.35) < ratio < (1.5 if chinese else 3.0) and max(map(len, pair)) > 20:
        return False
    return in_script(source, False) and in_script(target, chinese)


def in_script(text: str, chinese: bool) -> bool:
    """Half of its letters at least."""
    letters, han = len(LETTER.findall(text)), len(HAN.findall(text))
    return letters > 0 and (2 * han >= letters if chinese else han == 0)


# ---- Chinese ---------------------------------------------------------------------------------------------------------


def by_script(pairs: list[Pair]) -> dict[str, list[Pair]]:
    """Simplified and traditional Chinese; a line that could be either is in both, one that mixes them in neither."""
    return {
        "en-zh": [pair for pair in pairs if written_in("zh", pair[1])],
        "en-zh-Hant": [pair for pair in pairs if written_in("zh-Hant", pair[1])],
    }


def written_in(lang: str, text: str) -> bool:
    """Whether no character is of the other script."""
    simplified, traditional = count_script_characters(text)
    return {"zh": not traditional, "zh-Hant": not simplified}.get(lang, True)


# ---- German ----------------------------------------------------------------------------------------------------------


def german(pairs: list[Pair], profiles: Profiles) -> list[Pair]:
    """Europarl without the speeches that were left in the language they were held in.

    English and French are told by their own `profiles`; Dutch, to these, is just the nearest of them. What is unlikely in
    the German that they leave teaches how the other languages look, and a line must be likelier German than that.
    """
    nearest = [pair for pair in pairs if spoken(pair[1], "de", profiles)]
    own = learn_profile(pair[1] for pair in nearest)
    unlikely = [pair[1] for pair in nearest if mean(pair[1], {"own": own})["own"] < UNLIKELY]
    both = {"own": own, "foreign": learn_profile(unlikely)} if unlikely else {"own": own}
    return [pair for pair in nearest if lead(mean(pair[1], both)) >= LEAD]


def spoken(text: str, language: str, profiles: Profiles) -> bool:
    """Whether no other language is far likelier."""
    found = score_languages(text, profiles)
    return language in found and found[language] > max(found.values()) - SURE


def mean(text: str, profiles: Profiles) -> dict[str, float]:
    """The mean log-probability of its trigrams in each language."""
    found = score_languages(text, profiles)
    return {name: found.get(name, float("-inf")) / max(1, len(extract_trigrams(text))) for name in profiles}


def lead(means: dict[str, float]) -> float:
    """How far the own language is before the foreign ones."""
    return means["own"] - means.get("foreign", float("-inf"))
