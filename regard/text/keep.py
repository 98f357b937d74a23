"""What a translation must not touch, kept aside: links, addresses, scripts that the model cannot read.

Each is a placeholder while the text is translated, ⟦1⟧, ⟦2⟧, ...: the model has learned to carry them over
(recipes/translator/prepare.py), whatever they stand for.
"""

from __future__ import annotations

import re

NOT_LINK = r"\s<>\"“”»\u3000-\u9fff\uff00-\uffef"  # Chinese goes on behind a link without a space
LINK = rf"(?:https?://|www\.)[^{NOT_LINK}]*[^{NOT_LINK}.,;:!?)\]]"
MAIL = r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+"
PATH = rf"(?:/[^{NOT_LINK}]*[^{NOT_LINK}.,;:!?)\]])?"
SITE = rf"\b[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)*\.(?:com|org|net|edu|gov|io|eu|de|fr|cn)\b{PATH}"
CODE = r"`[^`\n]+`|</?[A-Za-z][^<>\n]{0,80}>|\{\w*\}|%[sd]\b|[@#]\w{2,}|⟦\d*⟧"
OTHER = r"\u0370-\u1dbf\u3041-\u30fa\u30fc-\u30ff\uac00-\ud7af"  # not Latin, not Han
FOREIGN = rf"[{OTHER}]+(?:[\s,.'-]+[{OTHER}]+)*"
EMOJI = r"[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\ufe0f\u200d\U000e0020-\U000e007f]+"
PRIVATE = r"[\ue000-\uf8ff\U000f0000-\U0010ffff]+"  # characters without a meaning
MACHINE = re.compile("|".join((LINK, MAIL, SITE, CODE)))
KEPT = re.compile("|".join((LINK, MAIL, SITE, CODE, FOREIGN, EMOJI, PRIVATE)))
NUMBER = re.compile(r"\d{1,3}(?:[ \u00a0\u202f]\d{3})+\b|\d+(?:[.,:/]\d+)*")
MARK = re.compile(r"⟦\d+⟧")
MOST = 4  # placeholders that the model knows


def kept_aside(text: str, pattern: re.Pattern[str] = KEPT) -> tuple[str, list[str]]:
    """The text with placeholders, and what they stand for."""
    kept: list[str] = []

    def placeholder(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"⟦{len(kept)}⟧"

    return pattern.sub(placeholder, text), kept


def put_back(text: str, kept: list[str]) -> str | None:
    """The translation with everything in its place, or None where a placeholder is gone, there twice, or made up."""
    marks = [f"⟦{i}⟧" for i in range(1, len(kept) + 1)]
    if sorted(MARK.findall(text)) != sorted(marks):
        return None
    originals = dict(zip(marks, kept, strict=True))
    return MARK.sub(lambda found: originals[found[0]], text)


def lost_numbers(source: str, translation: str) -> list[str]:
    """Numbers of two digits and more that the translation does not say, whatever separates their digits."""
    said = {digits(number) for number in NUMBER.findall(translation)}
    numbers = {number: digits(number) for number in NUMBER.findall(source)}
    return [number for number, own in numbers.items() if len(own) > 1 and own not in said]


def digits(number: str) -> str:
    return "".join(str(int(char)) for char in number if char.isdecimal())  # full-width ones are the same
