"""A text as its sentences, and sentences as a text again: nothing between them is lost.

A model learned single sentences, so that is what it is given. A full stop ends one where a space and a capital follow,
unless a short word stands before it that is usually followed by more: titles, days, initials. Chinese marks end one by
themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

HAN = "\u3400-\u9fff"
QUOTES = "\"'”’»)\\]」』）"  # that close
OPENING = "\"'“„«(\\[¿¡‘‚「『（"
PICTURES = "\U0001f000-\U0001faff\u2600-\u27bf"
FOLLOWS = rf"\s+(?:[^\Wa-zß-öø-ÿœ]|[{OPENING}])|\s*(?:[{PICTURES}]|$)"  # a capital, a digit, a character without case
LATIN = rf"[.!?…]+(?:[{QUOTES}“]|[ \u00a0\u202f]»)*(?={FOLLOWS})"
CHINESE = rf"[。！？]+…*(?![。！？…{QUOTES}])|[。！？]+…*[{QUOTES}]+(?=\s|[「『（“]|$)|(?<=[{HAN}])[.!?]+(?=[{HAN}])"
END = re.compile(f"{LATIN}|{CHINESE}")
MARKER = re.compile(r"\s*(?:(?:[-*•–—>]|#{1,6}|\(?\d{1,3}[.)]|[a-z]\))\s+)?")  # what a line of a list begins with
SHORT = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "jr", "sr", "vs", "inc", "ltd", "messrs", "gen", "col", "capt", "lt", "rev"),
    *("hr", "fr", "str", "bzw", "ca", "vgl", "bsp", "evtl", "ggf", "inkl", "geb", "gest", "sog", "dipl", "ing"),
    *("mm", "mme", "mlle", "mgr", "env", "etc", "cf"),
}  # fmt: skip
BEFORE_NUMBERS = {"no", "nos", "nr", "vol", "pp", "fig", "art", "abs", "kap", "bd", "chap", "tel"} | {
    *("jan", "feb", "febr", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "okt", "nov", "dec", "dez", "av"),
}
MONTHS = "Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember|Jahrhundert"
ORDINAL = re.compile(
    r"(?i:\b(?:(?<!I )am|der|die|das|den|dem|des|vom|zum|zur|im|ab|bis|seit|und|ihr|sein|mein|unser|jede[rsnm]?)\s+)\d{1,2}$"
)


@dataclass(frozen=True)
class Sentence:
    before: str  # white space, and the mark of a list
    text: str  # empty at the end of a text that ends in white space
    ends_line: bool = False
    loud: bool = False  # all in capitals


def sentences(text: str) -> list[Sentence]:
    """What is before each and what it says, one after the other, is the text."""
    found = []
    for line in text.splitlines(keepends=True):
        bare = line.rstrip()
        at = begin = marker(bare)
        for end in [*ends(bare), len(bare)]:
            if end > at and bare[at:end].strip():
                inner = bare[at:end].lstrip()
                found.append(Sentence(bare[at - begin : end - len(inner)], inner))
                at, begin = end, 0
        if rest := bare[at - begin :] + line[len(bare) :]:
            found.append(Sentence(rest, "", True))
    return found


def marker(line: str) -> int:
    """Where the first sentence of a line begins."""
    found = MARKER.match(line)
    assert found is not None  # it may be empty
    return found.end()


def ends(line: str) -> list[int]:
    """Places after which a sentence is over, the last one of the line left out."""
    return [m.end() for m in END.finditer(line) if m.end() < len(line) and not goes_on(line, m.start())]


def goes_on(line: str, dot: int) -> bool:
    """Whether a full stop belongs to a short word, an initial, or a German ordinal number."""
    if line[dot] != "." or line[dot : dot + 2] == "..":
        return False
    rest = line[dot + 1 :].lstrip()
    word = re.search(r"[^\s(\"'“„«\[]*$", line[:dot])[0].lower()  # type: ignore[index]
    if word.isdigit():
        return bool(ORDINAL.search(line[:dot]) or (len(word) < 3 and re.match(MONTHS, rest)))
    if word in BEFORE_NUMBERS:
        return rest[:1].isdigit()
    return word in SHORT or bool(re.fullmatch(r"(?:[^\W\d_]{1,2}\.)*[^\W\d_]", word) and not re.match(f"[{HAN}]", word))


def join(parts: list[Sentence], translations: list[str], spaced: bool) -> str:
    """Sentences in another language: with spaces between them where that has any, without behind what has none."""
    made = ""
    for part, text in zip(parts, translations, strict=True):
        if part.ends_line:
            made += part.before
            continue
        inside = made and not made[-1].isspace()
        gap = part.before
        if inside and spaced:
            gap = part.before or " "
        elif inside and wide(made[-1]):
            gap = ""
        made += gap + text
    return made


def wide(char: str) -> bool:
    """Chinese characters and their punctuation."""
    return "\u3000" <= char <= "\u9fff" or "\uff00" <= char <= "\uffef" or char in "”’…"


# ---- what is too long ------------------------------------------------------------------------------------------------

BREAKS = (r"[;；：](?=\s|[^\x00-\x7f])|[:—–](?=\s)", r"[,，、](?=\s|[^\x00-\x7f])", r"\s(?=\S)", "")


def clauses(sentence: Sentence, fits: Callable[[str], bool]) -> Iterator[Sentence]:
    """A sentence in parts that fit, cut near the middle: at semicolons, else commas, else between words, else anywhere."""
    text = sentence.text
    if len(text) < 2 or fits(text):
        yield sentence
        return
    at = middle(text)
    first, rest = text[:at].rstrip(), text[at:].lstrip()
    yield from clauses(replace(sentence, text=first), fits)
    yield from clauses(replace(sentence, before=text[len(first) : len(text) - len(rest)], text=rest), fits)


def middle(text: str) -> int:
    """Where to cut: of the best marks that are not near its ends, the one nearest to its middle."""
    for pattern in BREAKS:
        places = [m.end() for m in re.finditer(pattern, text)] if pattern else [len(text) // 2]
        inner = [at for at in places if len(text) // 5 <= at <= len(text) - len(text) // 5 and 0 < at < len(text)]
        if inner:
            return min(inner, key=lambda at: abs(at - len(text) // 2))
    return len(text) // 2
