"""Forms of address: German du and Sie, French tu and vous, Chinese 你 and 您, where English has "you" alone.

A model that was trained with forms of address has language tokens for them, such as `<to-de-formal>` and `<to-de-familiar>`.
The form of a translation is that of the source where the source has one. English has none: it is translated formally, unless
it speaks to a friend, a child or a relative.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

FORMAL, FAMILIAR = "formal", "familiar"
FORMS = (FORMAL, FAMILIAR)

# Forms of address in languages that have them: (formal, familiar).
ADDRESS = {
    "de": (
        re.compile(
            r"(?<![.!?:…] )(?<!^)\b(?:Sie|Ihnen|Ihr|Ihre[nmrs]?)\b"
        ),  # at the beginning "Sie" may be she or they
        re.compile(r"\b(?:du|dich|dir|dein(?:e[nmrs]?)?|euch|euer|eure[nmrs]?)\b", re.IGNORECASE),
    ),
    "fr": (
        re.compile(r"\b(?:vous|votre|vos)\b", re.IGNORECASE),
        re.compile(r"\b(?:tu|toi|ton|ta|tes)\b|\bt['’]", re.IGNORECASE),
    ),
    "zh": (re.compile("您"), re.compile("你")),
}
# English that is said to friends, children and relatives.
FAMILIAR_ENGLISH = re.compile(
    r"\b(?:mom|mum|mommy|mummy|dad|daddy|grandma|grandpa|granny|auntie|honey|sweetie|sweetheart|darling|buddy|dude|bro|pal|mate|"
    r"kiddo|kids?|guys|love you|miss you|kisses|hugs|xoxo|see ya|wanna|gonna|gotta|lol|hey|yo)\b",
    re.IGNORECASE,
)


def split_form(language: str) -> tuple[str, str]:
    """Split "de-formal" (or "en>de-formal") into the language and the form of address, which is empty for "de"."""
    for form in FORMS:
        if language.endswith(f"-{form}"):
            return language.removesuffix(f"-{form}"), form
    return language, ""


def forms_of_address(directions: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Return the forms that a model has for each target language, given its directions ("en>de-formal", ...)."""
    found: dict[str, tuple[str, ...]] = {}
    for direction in directions:
        language, form = split_form(direction.split(">")[1])
        if form:
            found[language] = tuple(dict.fromkeys((*found.get(language, ()), form)))
    return found


def detect_form(texts: Sequence[str], language: str) -> str:
    """Return the form of address, formal or familiar, that some texts which belong together have.

    The form that occurs more often decides. Without any, and in English without signs of familiarity, it is formal.
    """
    if language == "en":
        return FAMILIAR if any(FAMILIAR_ENGLISH.search(text) for text in texts) else FORMAL
    patterns = ADDRESS.get(language.split("-")[0])
    if patterns is None:
        return FORMAL
    formal, familiar = (sum(len(pattern.findall(text)) for text in texts) for pattern in patterns)
    return FAMILIAR if familiar > formal else FORMAL
