"""Forms of address: pairs whose German or French says du or Sie, tu or vous, where English says "you" alone.

They are trained once more as translations to de-formal, de-familiar, fr-formal and fr-familiar, beside the ordinary de and
fr. So the model can be asked for a form of address. Some pairs without a second person are in every set: there the form
changes nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable

Pair = tuple[str, str]
FORMS = ("formal", "familiar")
YOU = re.compile(r"\b(?:you|your|yours|yourself|yourselves)\b", re.IGNORECASE)
FORMAL = {
    # "Sie" at the beginning of a sentence may be "she" or "they" and does not count.
    "de": re.compile(r"(?<![.!?:] )(?<!^)\b(?:Sie|Ihnen|Ihr|Ihre[nmrs]?)\b"),
    "fr": re.compile(r"\b(?:vous|votre|vos|vôtres?)\b", re.IGNORECASE),
}
FAMILIAR = {
    "de": re.compile(r"\b(?:du|dich|dir|dein(?:e[nmrs]?)?|euch|euer|eure[nmrs]?)\b", re.IGNORECASE),
    "fr": re.compile(r"\b(?:tu|te|toi|ton|ta|tes|tien(?:ne)?s?)\b|\bt'", re.IGNORECASE),
}
MOST = 60_000  # pairs of each form and set
NEUTRAL_SHARE = 0.05  # of the pairs without a second person


def split_by_formality(sets: dict[str, list[Pair]], forms: Iterable[str] = FORMS) -> dict[str, dict[str, list[Pair]]]:
    """Return, for German and French, the pairs of each form of address."""
    found: dict[str, dict[str, list[Pair]]] = {}
    for lang in FORMAL:
        found[lang] = {form: [] for form in forms}
        for name, pairs in sets.items():
            if name.endswith(f"en-{lang}"):
                for form, own in select_forms(pairs, lang).items():
                    found[lang][form] += own
    return found


def select_forms(pairs: list[Pair], lang: str) -> dict[str, list[Pair]]:
    """Return some of the pairs of one set by their form of address."""
    rng = random.Random(0)
    found: dict[str, list[Pair]] = {form: [] for form in FORMS}
    for pair in rng.sample(pairs, len(pairs)):
        form = find_form(*pair, lang)
        neutral = not form and not YOU.search(pair[0]) and rng.random() < NEUTRAL_SHARE
        for each in (form,) if form else FORMS if neutral else ():
            if len(found[each]) < MOST:
                found[each].append(pair)
    return found


def find_form(english: str, foreign: str, lang: str) -> str:
    """Return "formal" or "familiar", or the empty string where there is no second person or both."""
    formal, familiar = bool(FORMAL[lang].search(foreign)), bool(FAMILIAR[lang].search(foreign))
    if formal == familiar or (not YOU.search(english) and not is_imperative(foreign, lang)):
        return ""
    return "formal" if formal else "familiar"


def is_imperative(foreign: str, lang: str) -> bool:
    """Return whether a German sentence begins with a verb and "Sie": "Schließen Sie die Tür." English has no "you" there."""
    return lang == "de" and bool(re.match(r"(?:Bitte )?\w+(?:en|ern|eln) Sie\b", foreign))
