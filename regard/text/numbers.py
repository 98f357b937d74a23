"""Numbers of a text that its translation does not say.

4,523.50 is 4.523,50 and 4 523,50 elsewhere: what separates digits may change, and vanish before three of them. All else is
another number.
"""

from __future__ import annotations

import re

SPACE = " \u00a0\u202f"
SIGN = r"(?<![\w.,)\]])[-−](?=\d)"  # not that of a range
NUMBER = re.compile(rf"(?:{SIGN})?(?:\d{{1,3}}(?:[{SPACE}]\d{{3}})+\b(?:[.,]\d+)?|\d+(?:[.,:/'’]\d+)*)")
THOUSANDS = re.compile(rf"(?<=\d)[.,'’{SPACE}](?=\d{{3}}(?!\d))")
NEGATIVE = re.compile(rf"{SIGN}|minus|moins|negativ|négati|零下|[负負]", re.I)
BESIDE = r"[\s,;/–-]{1,3}"


def lost_numbers(source: str, translation: str) -> list[str]:
    """Those of two digits or a sign and more that are not in the translation."""
    said = f" {' '.join(group for number in NUMBER.findall(translation) for group in groups(number))} "
    below = NEGATIVE.search(translation)

    def found(number: str) -> bool:
        return f" {' '.join(groups(number))} " in said and bool(below or number[0].isdigit())

    return [number for number in dict.fromkeys(NUMBER.findall(source)) if len(number) > 1 and not found(number)]


def groups(number: str) -> list[str]:
    """Its digits before and behind every mark that must be there in some form."""
    return [digits(group) for group in re.findall(r"\d+", THOUSANDS.sub("", number))]


def digits(number: str) -> str:
    return "".join(str(int(char)) for char in number)  # full-width ones are the same


def kept_too(pattern: re.Pattern[str], numbers: list[str]) -> re.Pattern[str]:
    """What is kept, with these numbers; those beside one another are one."""
    exact = "|".join(rf"(?<!\d){re.escape(number)}(?!\d)" for number in sorted(numbers, key=len, reverse=True))
    return re.compile(f"{pattern.pattern}|(?:{exact})(?:{BESIDE}(?:{exact}))*")
