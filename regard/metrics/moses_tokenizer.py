"""The Moses punctuation normalizer and tokenizer, for scores that are compared with papers.

Many published BLEU scores (all of Multi30k's) are computed on text prepared by the Moses scripts of 2017: lower-cased,
`normalize_punctuation`, then `moses_tokenize` without splitting hyphens. These two functions follow those rules, quirks
included, because scores are only comparable if the same tokens are counted. XML entities are never escaped: escaping
renames tokens one to one and changes no count.

English, German and French have their own rules. Every other language gets the general rules with the English
abbreviations; scripts with vowels as combining marks, or without spaces between words, are not supported.
"""

import re
from functools import cache
from itertools import pairwise
from typing import NamedTuple

_LETTER = r"[^\W\d_]"
_NOT_LETTER = r"[\W\d_]"
_NO_BREAK_SPACE = "\u00a0"
# These are digits in Unicode but symbols in Moses: superscripts, subscripts, fractions and circled numbers.
_OTHER_NUMBERS = "²³¹¼½¾\u2070\u2074-\u2079\u2080-\u2089\u2150-\u215f\u2460-\u249b"

Rule = tuple[re.Pattern[str], str]


def _rule(pattern: str, replacement: str) -> Rule:
    return re.compile(pattern.replace("~", _NO_BREAK_SPACE)), replacement


def _apply(rules: tuple[Rule, ...], text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


# Punctuation ----------------------------------------------------------------------------------------------------------

_ONE_SPACE = _rule(" +", " ")

# "~" stands for a no-break space in these patterns.
_PUNCTUATION = (
    _rule(r"\r", ""),
    # One space outside a bracket, none inside, none between a bracket and punctuation after it.
    _rule(r"\(", " ("),
    _rule(r"\)", ") "),
    _ONE_SPACE,
    _rule(r"\( ", "("),
    _rule(r" ?\)(?: (?=[.!:?;,]))?", ")"),
    _rule(r"(?<=\d) (?=%)| (?=[:;])", ""),
    # Quotation marks and dashes become ASCII.
    _rule("`", "'"),
    _rule("''", ' " '),
    _rule("[„“”]", '"'),
    _rule("–", "-"),
    _rule("—", " - "),
    _ONE_SPACE,
    _rule("([A-Za-z])[‘’]([A-Za-z])", r"\1'\2"),
    _rule("’", '"'),
    _rule("[´‘‚]", "'"),
    _rule("''", '"'),
    _rule("…", "..."),
    _rule("~«~", ' "'),
    _rule("~»~", '" '),
    _rule("«~?|~?»", '"'),
    # No-break spaces of typography, which would change the tokens.
    _rule("~(?=[%:?!;])", ""),
    _rule("(?<=nº)~|(?<=,)~|~(?=ºC|cm)", " "),
    _ONE_SPACE,
)

_COMMA_INSIDE_QUOTES = (_rule(r'"([,.]+)', r'\1"'),)
_COMMA_OUTSIDE_QUOTES = (_rule(',"', '",'), _rule(r'(\.+)"(?!<)', r'"\1'))
_DECIMAL_COMMA = {"cs", "de", "es", "fr"}


@cache
def _punctuation_rules(language: str) -> tuple[Rule, ...]:
    quotes: dict[str, tuple[Rule, ...]] = {"en": _COMMA_INSIDE_QUOTES, "cs": ()}
    point = "," if language in _DECIMAL_COMMA else "."
    return _PUNCTUATION + quotes.get(language, _COMMA_OUTSIDE_QUOTES) + (_rule(r"(?<=\d)~(?=\d)", point),)


def normalize_punctuation(text: str, language: str) -> str:
    """Return the text with ASCII quotation marks and dashes, and regular spaces at punctuation.

    A comma beside a closing quotation mark is moved inside or outside, as is usual in `language`.
    """
    return _apply(_punctuation_rules(language), text).strip()


# Tokens ---------------------------------------------------------------------------------------------------------------

_CLEAN = (_rule(r"\s+", " "), _rule(r"[\x00-\x1f]", ""))
_SYMBOLS = (_rule(rf"([^\w\s.'`,-]|[_{_OTHER_NUMBERS}])", r" \1 "),)
# Several dots are one token; a comma is a token unless there are digits on both sides.
_DOTS_AND_COMMAS = (_rule(r"(\.{2,})", r" \1 "), _rule(r"(?<=\D),|,(?=\D)|(?<=\d),$", " , "))

# An apostrophe between letters splits before it in English (it 's), after it in French (l' eau). The second letter is
# part of the match, so that rock'n'roll becomes "rock 'n'roll", as in Moses.
_QUOTE = rf"(?<={_NOT_LETTER})'(?={_NOT_LETTER})|(?<={_LETTER})'(?={_NOT_LETTER})"
_ENGLISH_APOSTROPHE = (
    _rule(rf"{_QUOTE}|(?<=[\W_])'(?={_LETTER})", " ' "),
    _rule(rf"({_LETTER})'({_LETTER})", r"\1 '\2"),
    _rule(r"(?<=\d)'(?=s)", " '"),
)
_FRENCH_APOSTROPHE = (
    _rule(rf"{_QUOTE}|(?<={_NOT_LETTER})'(?={_LETTER})", " ' "),
    _rule(rf"({_LETTER})'({_LETTER})", r"\1' \2"),
)
_APOSTROPHES = {"en": _ENGLISH_APOSTROPHE, "fr": _FRENCH_APOSTROPHE}
_GENERAL_APOSTROPHE = (_rule("'", " ' "),)
_FINAL_QUOTE = (_rule(r"\.'$", " . '"),)


class Abbreviations(NamedTuple):
    """Abbreviations that end in a period: always, only before a number, and those that match a pattern."""

    always: frozenset[str]
    before_number: frozenset[str]
    pattern: re.Pattern[str]


def _abbreviations(always: str, before_number: str, pattern: str) -> Abbreviations:
    return Abbreviations(frozenset(always.split()), frozenset(before_number.split()), re.compile(pattern))


_TITLES = """Adm Brig Bros Capt Cmdr Col Corp Cpl DR Dr Gen Gov Hon Insp Lt MM MR MRS MS Maj Messrs Mlle Mme Mr Mrs Ms
    Op Ph Prof Rep Reps Rev Sen Sens Sgt Sr St Supt v vs Nos"""
_ENGLISH = _abbreviations(
    _TITLES + " Drs Hr Nr Rs rev Jan Feb Mar Apr Jun Jul Aug Sep Oct Nov Dec", "No Art pp", "[A-Z]"
)
_ABBREVIATIONS = {
    "en": _ENGLISH,
    # Single letters, ordinals to 99 (der 3. Mann) and Roman numerals to XX. Dotted abbreviations (z.B.) need no entry.
    "de": _abbreviations(
        _TITLES
        + """ Art Buchst Ca Chr Co Ltd Mio Mrd MwSt No Nr Std Zt bzgl bzw ca dergl dgl etc evtl ff ggf jun pp sen sog
        sogen usf usw vgl zzt""",
        "",
        "[A-Za-z]|[1-9][0-9]?|X?(?:IX|IV|V?I{0,3})|XX|x?(?:ix|iv|v?i{0,3})|xx",
    ),
    "fr": _abbreviations(
        """MM al ann apr art auj av boul ca cf chap dir env etc ex fasc fig hab ibid id inf ms pl pp sec sect sing sq
        suiv sup suppl tél vol vs éd""",
        "",
        "[A-Zb-z]",
    ),
}


def _keeps_period(stem: str, following: str, known: Abbreviations) -> bool:
    """Return whether the period after `stem` is part of the word; `following` is the next word or empty."""
    return (
        ("." in stem and any(map(str.isalpha, stem)))
        or stem in known.always
        or known.pattern.fullmatch(stem) is not None
        or following[:1].islower()
        or (stem in known.before_number and following[:1].isdigit())
    )


def _split_periods(words: list[str], known: Abbreviations) -> str:
    tokens = []
    for word, following in pairwise([*words, ""]):
        stem = word[:-1]
        whole = not word.endswith(".") or not stem.strip(".") or _keeps_period(stem, following, known)
        tokens.append(word if whole else f"{stem} .")
    return " ".join(tokens)


def moses_tokenize(text: str, language: str) -> str:
    """Return the tokens of a text joined by single spaces; words with hyphens stay whole."""
    text = _apply(_SYMBOLS, _apply(_CLEAN, text).strip())
    text = _apply(_DOTS_AND_COMMAS, text)
    text = _apply(_APOSTROPHES.get(language, _GENERAL_APOSTROPHE), text)
    text = _split_periods(text.split(), _ABBREVIATIONS.get(language, _ENGLISH))
    return " ".join(_apply(_FINAL_QUOTE, text).split())
