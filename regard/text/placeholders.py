"""What a translation must not touch, kept aside: links, addresses, code, scripts that the model cannot read.

Each is a placeholder while the text is translated, ⟦1⟧, ⟦2⟧, ...: the model has learned to carry them over
(recipes/translator/augmentation.py), whatever they stand for. Repetitions are bounded, so that no text takes long to look through.

MERGED: Numbers of a text that its translation does not say.

4,523.50 is 4.523,50 and 4 523,50 elsewhere: what separates digits may change, and vanish before three of them. All else is
another number.
"""

from __future__ import annotations

import re

NOT_LINK = r"\s<>\"“”»\u3000-\u9fff\uff00-\uffef"  # Chinese goes on behind a link without a space
BRACKETS = r"\([!-'*-;=?-~\u00a1-\u00ff]*\)"  # belong to a link in pairs
REST = rf"(?:[^{NOT_LINK}()]|{BRACKETS})+(?<![\].,;:!?'*])"  # of a link, without the punctuation behind it
WORD = "A-Za-z0-9"
ALONE, OVER = rf"(?<![{WORD}À-ÿ_.@-])", rf"(?![{WORD}À-ÿ_])"  # Chinese may stand beside it
LINK = rf"(?<![{WORD}])(?:[A-Za-z][a-z]{{1,9}}://|www\.|mailto:|[A-Za-z]:\\){REST}"
MAIL = rf"(?<![{WORD}._%+-])[{WORD}._%+-]{{1,64}}@[{WORD}-]+(?:\.[{WORD}-]+)+"
ENDINGS = "com|org|net|edu|gov|io|eu|de|fr|cn|uk|co|at|ch|info|dev|app"
SITE = rf"{ALONE}(?:[{WORD}-]{{1,63}}\.){{1,5}}(?:{ENDINGS}){OVER}(?:/{REST})?"
SUFFIXES = (
    "py|js|ts|css|html?|xml|json|toml|ya?ml|csv|tsv|txt|md|pdf|docx?|xlsx?|pptx?|jpe?g|png|gif|svg|zip|gz|mp[34]|sh|exe"
)
FILE = (
    rf"{ALONE}(?:[{WORD}_-]{{1,60}}\.){{1,4}}(?:{SUFFIXES}){OVER}"
    rf"|(?<![\w/.:)>])(?:~|\.\.?|/[{WORD}_.-]+)(?:/[{WORD}_.-]*[{WORD}_])+/?"
)
NAME = (  # of variables and options, and hashes
    rf"\$[A-Za-z_]\w+|(?<![\w-])--[a-z][\w-]+|{ALONE}[{WORD}]+(?:_[{WORD}]+)+"
    r"|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,64}\b"
)
TAG = r"</?[A-Za-z][^<>\n]{0,80}>"
CODE = r"(?<!`)`{1,3}[^`\n]+`{1,3}|\{\{[^{}\n]{0,80}\}\}|\$?\{\w*\}|%[sd]\b|&(?:[A-Za-z]{2,8}|#\d{1,6});"
CALL = r"[@#]\w{2,}"
BRACKET = r"⟦\d*⟧|[⟦⟧]"  # someone's own
MARKDOWN = r"!?\[(?=[^\[\]\n]{1,200}\]\()|\]\((?:[^()\s]|\([^()\s]*\))*\)"  # the words of a link are translated
DATE_OR_THOUSANDS = r"\d{1,2}\.\d{1,2}\.(?:\d\d){1,2}\b|\d{1,3}(?:\.\d{3})+\b(?!\.)"
VERSION = rf"\d{{1,3}}(?:\.\d{{1,3}}){{3}}|v?(?!{DATE_OR_THOUSANDS})\d+(?:\.\d+){{2,}}"  # and addresses of computers
PHONE = (
    r"\+\d[\d ()/-]{5,20}\d|\(\d{3}\) ?\d{3}-\d{4}"
    r"|(?=(?:\D{0,2}\d){7})\(?0\d{1,5}\)?(?:[ /-]\d{2,9}){1,5}"  # seven digits at least
)
DIGITS = rf"(?<![{WORD}.,])(?:{VERSION}|{PHONE}|\d+(?:-\d+){{2,}}(?:-X)?){OVER}"  # they count nothing; the last: ISBNs
MACHINE_MADE = (LINK, MAIL, FILE, SITE, TAG, MARKDOWN, CODE, CALL, BRACKET, NAME, DIGITS)
OTHER = r"\u0370-\u1dbf\u3041-\u30fa\u30fc-\u30ff\uac00-\ud7af"  # not Latin, not Han
HAN = r"\u3005\u3007\u3400-\u9fff"
EMOJI = r"[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\ufe0f\u200d\U000e0020-\U000e007f]+"
PRIVATE = r"[\ue000-\uf8ff\U000f0000-\U0010ffff]+"  # characters without a meaning


def pattern(scripts: str) -> re.Pattern[str]:
    foreign = rf"[{scripts}]+(?:[\s,.'、。，・-]+[{scripts}]+)*"
    return re.compile("|".join((*MACHINE_MADE, foreign, EMOJI, PRIVATE)))


MACHINE = re.compile("|".join(MACHINE_MADE))
KEPT, KEPT_AND_HAN = pattern(OTHER), pattern(OTHER + HAN)
WRAPPED = re.compile(rf"\w(?:{TAG}|\]\()|{TAG}\w")  # words inside tags and links
MARK = re.compile(r"⟦\d+⟧")
MOST = 4  # placeholders that the model knows


def kept_between(source: str, target: str) -> re.Pattern[str]:
    """What is kept on the way between two languages: Chinese too, where neither is."""
    return KEPT if source.startswith("zh") or target.startswith("zh") else KEPT_AND_HAN


def kept_aside(text: str, pattern: re.Pattern[str] = KEPT) -> tuple[str, list[str]]:
    """The text with placeholders, and what they stand for."""
    kept: list[str] = []

    def placeholder(found: re.Match[str]) -> str:
        kept.append(found[0])
        return f"⟦{len(kept)}⟧"

    return pattern.sub(placeholder, text), kept


def put_back(text: str, kept: list[str]) -> str | None:
    """The translation with everything in its place, or None where a placeholder is gone, broken, there twice, or made up."""
    marks = [f"⟦{i}⟧" for i in range(1, len(kept) + 1)]
    if sorted(MARK.findall(text)) != sorted(marks) or re.search("[⟦⟧]", MARK.sub("", text)):
        return None
    originals = dict(zip(marks, kept, strict=True))
    return MARK.sub(lambda found: originals[found[0]], text)


def between(text: str, pattern: re.Pattern[str]) -> list[str]:
    """What is kept, and what stands around each: every second one is kept."""
    at, parts = 0, []
    for found in pattern.finditer(text):
        parts += [text[at : found.start()], found[0]]
        at = found.end()
    return [*parts, text[at:]]


def translatable(text: str, pattern: re.Pattern[str] = KEPT) -> bool:
    """Whether there is a word in it, beside what is kept."""
    return bool(re.search(r"[^\W\d_]", pattern.sub(" ", text)))


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
