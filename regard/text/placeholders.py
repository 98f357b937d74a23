"""Placeholders for what a translation must not change: links, addresses, code, and scripts that the model cannot read.

Each is a placeholder while the text is translated, ⟦1⟧, ⟦2⟧, ...: the model has learned to carry them over
(recipes/translator/augmentation.py), whatever they stand for. Repetitions in the patterns are bounded, so that no text
takes long to search.

Numbers that are missing in a translation can be made placeholders too. 4,523.50 is written 4.523,50 or 4 523,50 in other
languages: the character between digits may change, and may vanish before three digits. Any other difference is another
number. The same is done for symbols such as €.
"""

from __future__ import annotations

import re

# ---- patterns --------------------------------------------------------------------------------------------------------

NOT_LINK = r"\s<>\"“”»\u3000-\u9fff\uff00-\uffef"  # Chinese text may follow a link without a space
BRACKETS = r"\([!-'*-;=?-~\u00a1-\u00ff]*\)"  # a pair of parentheses inside a link
LINK_REST = rf"(?:[^{NOT_LINK}()]|{BRACKETS})+(?<![\].,;:!?'*])"  # without the punctuation after a link
WORD = "A-Za-z0-9"
BEGIN, END = rf"(?<![{WORD}À-ÿ_.@-])", rf"(?![{WORD}À-ÿ_])"  # word boundaries that Chinese characters do not affect
LINK = rf"(?<![{WORD}])(?:[A-Za-z][a-z]{{1,9}}://|www\.|mailto:|[A-Za-z]:\\){LINK_REST}"
MAIL = rf"(?<![{WORD}._%+-])[{WORD}._%+-]{{1,64}}@[{WORD}-]+(?:\.[{WORD}-]+)+"
TOP_LEVEL_DOMAINS = "com|org|net|edu|gov|io|eu|de|fr|cn|uk|co|at|ch|info|dev|app"
SITE = rf"{BEGIN}(?:[{WORD}-]{{1,63}}\.){{1,5}}(?:{TOP_LEVEL_DOMAINS}){END}(?:/{LINK_REST})?"
FILE_SUFFIXES = (
    "py|js|ts|css|html?|xml|json|toml|ya?ml|csv|tsv|txt|md|pdf|docx?|xlsx?|pptx?|jpe?g|png|gif|svg|zip|gz|mp[34]|sh|exe"
)
FILE = (
    rf"{BEGIN}(?:[{WORD}_-]{{1,60}}\.){{1,4}}(?:{FILE_SUFFIXES}){END}"
    rf"|(?<![\w/.:)>])(?:~|\.\.?|/[{WORD}_.-]+)(?:/[{WORD}_.-]*[{WORD}_])+/?"
)
IDENTIFIER = (  # names of variables and options, and hashes
    rf"\$[A-Za-z_]\w+|(?<![\w-])--[a-z][\w-]+|{BEGIN}[{WORD}]+(?:_[{WORD}]+)+|\b__\w+__\b"
    r"|\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{7,64}\b"
)
TAG = r"</?[A-Za-z][^<>\n]{0,80}>"
CODE = r"(?<!`)`{1,3}[^`\n]+`{1,3}|\{\{[^{}\n]{0,80}\}\}|\$?\{\w*\}|%[sd]\b|&(?:[A-Za-z]{2,8}|#\d{1,6});"
MENTION = r"[@#]\w{2,}"
STRAY_MARK = r"\*+|_+"  # asterisks and underscores that are no marks around words (text/inline_marks.py)
APOSTROPHE_NAME = r"\bO['’][A-ZÀ-Þ][^\W\d_]+"  # O'Neill
BRACKET = r"⟦\d*⟧|[⟦⟧]"  # placeholders and their brackets in the text itself
MARKDOWN = r"!?\[(?=[^\[\]\n]{1,200}\]\()|\]\((?:[^()\s]|\([^()\s]*\))*\)"  # the words of a link are translated
DATE_OR_THOUSANDS = r"\d{1,2}\.\d{1,2}\.(?:\d\d){1,2}\b|\d{1,3}(?:\.\d{3})+\b(?!\.)"
VERSION = rf"\d{{1,3}}(?:\.\d{{1,3}}){{3}}|v?(?!{DATE_OR_THOUSANDS})\d+(?:\.\d+){{2,}}"  # and IP addresses
PHONE = (
    r"\+\d[\d ()/-]{5,20}\d|\(\d{3}\) ?\d{3}-\d{4}"
    r"|(?=(?:\D{0,2}\d){7})\(?0\d{1,5}\)?(?:[ /-]\d{2,9}){1,5}"  # seven digits at least
)
CODE_NUMBER = rf"(?<![{WORD}.,])(?:{VERSION}|{PHONE}|\d+(?:-\d+){{2,}}(?:-X)?){END}"  # the last is an ISBN
LITERALS = (LINK, MAIL, FILE, SITE, TAG, MARKDOWN, CODE, MENTION, BRACKET, IDENTIFIER, CODE_NUMBER)
OTHER_SCRIPTS = r"\u0370-\u1dbf\u3041-\u30fa\u30fc-\u30ff\uac00-\ud7af"  # neither Latin nor Han
HAN = r"\u3005\u3007\u3400-\u9fff"
EMOJI = r"[\U0001f000-\U0001faff\u2600-\u27bf\u2b00-\u2bff\ufe0f\u200d\U000e0020-\U000e007f]+"
PRIVATE_USE = r"[\ue000-\uf8ff\U000f0000-\U0010ffff]+"  # Unicode's private use areas


def _compile_protected(scripts: str) -> re.Pattern[str]:
    foreign = rf"[{scripts}]+(?:[\s,.'、。，・-]+[{scripts}]+)*"
    return re.compile("|".join((*LITERALS, STRAY_MARK, APOSTROPHE_NAME, foreign, EMOJI, PRIVATE_USE)))


LITERAL = re.compile("|".join(LITERALS))  # text made by and for machines
PROTECTED, PROTECTED_WITH_HAN = _compile_protected(OTHER_SCRIPTS), _compile_protected(OTHER_SCRIPTS + HAN)
PLACEHOLDER = re.compile(r"⟦\d+⟧")
MAX_PLACEHOLDERS = 4  # in one sentence; the model was trained with no more


def protected_pattern(source: str, target: str) -> re.Pattern[str]:
    """Return the pattern of what stays unchanged between two languages; Chinese too, where neither is Chinese."""
    return PROTECTED if source.startswith("zh") or target.startswith("zh") else PROTECTED_WITH_HAN


# ---- placeholders ----------------------------------------------------------------------------------------------------


def insert_placeholders(text: str, pattern: re.Pattern[str] = PROTECTED) -> tuple[str, list[str]]:
    """Return the text with a placeholder for each match of `pattern`, and the matches."""
    originals: list[str] = []

    def placeholder(found: re.Match[str]) -> str:
        originals.append(found[0])
        return f"⟦{len(originals)}⟧"

    return pattern.sub(placeholder, text), originals


def restore_placeholders(text: str, originals: list[str]) -> str | None:
    """Return the translation with the originals in place of placeholders.

    The result is None where a placeholder is missing, broken, repeated or invented.
    """
    placeholders = [f"⟦{i}⟧" for i in range(1, len(originals) + 1)]
    if sorted(PLACEHOLDER.findall(text)) != sorted(placeholders) or re.search("[⟦⟧]", PLACEHOLDER.sub("", text)):
        return None
    original_of = dict(zip(placeholders, originals, strict=True))
    return PLACEHOLDER.sub(lambda found: original_of[found[0]], text)


def split_protected(text: str, pattern: re.Pattern[str]) -> list[str]:
    """Return the text in parts that alternate: text outside of matches (may be empty), match, text outside, ..."""
    at, parts = 0, []
    for found in pattern.finditer(text):
        parts += [text[at : found.start()], found[0]]
        at = found.end()
    return [*parts, text[at:]]


def has_words(text: str, pattern: re.Pattern[str] = PROTECTED) -> bool:
    """Return whether a text has a letter outside of matches of `pattern`, so that there is something to translate."""
    return bool(re.search(r"[^\W\d_]", pattern.sub(" ", text)))


# ---- numbers ---------------------------------------------------------------------------------------------------------

SPACE = " \u00a0\u202f"
SIGN = r"(?<![\w.,)\]])[-−](?=\d)"  # not the dash of a range
NUMBER = re.compile(rf"(?:{SIGN})?(?:\d{{1,3}}(?:[{SPACE}]\d{{3}})+\b(?:[.,]\d+)?|\d+(?:[.,:/'’]\d+)*)")
THOUSANDS_SEPARATOR = re.compile(rf"(?<=\d)[.,'’{SPACE}](?=\d{{3}}(?!\d))")
NEGATIVE = re.compile(rf"{SIGN}|minus|moins|negativ|négati|零下|[负負]", re.I)
LIST_SEPARATOR = r"[\s,;/–-]{1,3}"


def find_missing_numbers(source: str, translation: str) -> list[str]:
    """Return the numbers of a text that its translation lacks; unsigned numbers of one digit are not looked for."""
    translated = f" {' '.join(group for number in NUMBER.findall(translation) for group in digit_groups(number))} "
    negative = NEGATIVE.search(translation)

    def found(number: str) -> bool:
        return f" {' '.join(digit_groups(number))} " in translated and bool(negative or number[0].isdigit())

    return [number for number in dict.fromkeys(NUMBER.findall(source)) if len(number) > 1 and not found(number)]


# Symbols that a translation must have too, or one of the words for it.
SYMBOLS = {
    "€": r"eur|欧元|歐元",
    "$": r"dollar|usd|美元|美金",
    "£": r"pound|pfund|livre|gbp|英镑|英鎊",
    "¥": r"yen|yuan|元",
    "%": r"percent|per cent|prozent|pour cent|百分",
    "°": r"degree|grad|degré|度",
    "§": r"section|paragra|article|条|條",
}


def find_missing_symbols(source: str, translation: str) -> list[str]:
    """Return the symbols of a text, such as €, that its translation has less often and does not write in words."""
    if source.isascii() and "$" not in source and "%" not in source:
        return []
    return [
        symbol
        for symbol, words in SYMBOLS.items()
        if source.count(symbol) > translation.count(symbol) and not re.search(words, translation, re.I)
    ]


def digit_groups(number: str) -> list[str]:
    """Return the digits of a number between its separators, those of thousands left out: 4,523.50 -> 4523, 50."""
    groups = re.findall(r"\d+", THOUSANDS_SEPARATOR.sub("", number))
    return ["".join(str(int(char)) for char in group) for group in groups]  # int() also reads full-width digits


def add_numbers_to_pattern(pattern: re.Pattern[str], numbers: list[str]) -> re.Pattern[str]:
    """Return a pattern that also matches these numbers and symbols; several numbers in a row are one match, and so are a
    symbol and the numbers beside it."""
    digits = sorted((number for number in numbers if number not in SYMBOLS), key=len, reverse=True)
    exact = "|".join(rf"(?<!\d){re.escape(number)}(?!\d)" for number in digits)
    several = [f"(?:{exact})(?:{LIST_SEPARATOR}(?:{exact}))*"] if digits else []
    symbols = "".join(number for number in numbers if number in SYMBOLS)
    beside = [rf"(?:{NUMBER.pattern}[{SPACE}]?)?[{symbols}](?:[{SPACE}]?{NUMBER.pattern})?"] if symbols else []
    return re.compile("|".join([pattern.pattern, *beside, *several]))
