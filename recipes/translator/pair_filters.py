"""Filters for sentence pairs: by length, by letters, by script and by language."""

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
LONGEST = 500  # characters
LANGUAGE_MARGIN = 15.0  # of log-probability, by which another language must be likelier
FOREIGN_BELOW = -8.2  # mean log-probability of a trigram; most lines below it are Polish, Swedish, Dutch ...
GERMAN_MARGIN = (
    0.3  # of the mean log-probability of German over foreign; below are foreign lines and many foreign names
)


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


# ---- German ----------------------------------------------------------------------------------------------------------


def filter_german(pairs: list[Pair], profiles: Profiles) -> list[Pair]:
    """Return the pairs of Europarl without the speeches that were left in their original language.

    The given `profiles` identify English and French. Dutch, for which there is none, may look nearest to German. So the
    lines that are unlikely in the remaining German train a profile of foreign languages, and a line must be likelier
    German than that.
    """
    nearest = [pair for pair in pairs if is_language(pair[1], "de", profiles)]
    own = learn_profile(pair[1] for pair in nearest)
    unlikely = [pair[1] for pair in nearest if mean_log_prob(pair[1], {"own": own})["own"] < FOREIGN_BELOW]
    both = {"own": own, "foreign": learn_profile(unlikely)} if unlikely else {"own": own}
    return [pair for pair in nearest if get_margin(mean_log_prob(pair[1], both)) >= GERMAN_MARGIN]


def is_language(text: str, language: str, profiles: Profiles) -> bool:
    """Return whether no other language is far likelier."""
    found = score_languages(text, profiles)
    return language in found and found[language] > max(found.values()) - LANGUAGE_MARGIN


def mean_log_prob(text: str, profiles: Profiles) -> dict[str, float]:
    """Return the mean log-probability of the trigrams of a text in each language."""
    found = score_languages(text, profiles)
    return {name: found.get(name, float("-inf")) / max(1, len(extract_trigrams(text))) for name in profiles}


def get_margin(means: dict[str, float]) -> float:
    """Return by how much the own language is likelier than the foreign ones."""
    return means["own"] - means.get("foreign", float("-inf"))
