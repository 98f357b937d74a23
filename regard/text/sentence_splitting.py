"""A text as its sentences, and sentences as a text again: nothing between them is lost.

A model learned single sentences, so that is what it is given. A full stop ends one where a space and a capital follow,
unless a short word stands before it that is usually followed by more: titles, days, initials. Chinese marks end one by
themselves. Cells of a table are sentences of their own, and what is between ``` is none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from regard.text.placeholders import MACHINE

HAN = "\u3400-\u9fff"
QUOTES = "\"'”’»)\\]」』）"  # that close
OPENING = "\"'“„«(\\[¿¡‘‚「『（"
PICTURES = "\U0001f000-\U0001faff\u2600-\u27bf"
FOLLOWS = rf"\s+(?:[^\Wa-zß-öø-ÿœ]|[{OPENING}])|\s*(?:[{PICTURES}]|$)"  # a capital, a digit, a character without case
LATIN = rf"(?<![.!?…])[.!?…]++(?:[{QUOTES}“]|[ \u00a0\u202f]»)*(?={FOLLOWS})"
CHINESE = rf"(?<![。！？])[。！？]++…*+(?:(?![{QUOTES}])|[{QUOTES}]+(?=\s|[「『（“]|$))|(?<=[{HAN}])[.!?]++(?=[{HAN}])"
END = re.compile(f"{LATIN}|{CHINESE}")
MARKER = re.compile(  # what a line of a list begins with
    r"\s*(?:(?:[-*+•–—>]|#{1,6}|\(?\d{1,3}[.)]|[a-z]\))\s+(?:\[[ xX]\]\s+)?|\d{1,3}、\s*|（\d{1,3}）\s*)*"
)
TABS, BARS = re.compile(r"\t+"), re.compile(r"[\t|]+")
FENCE = re.compile(r"\s*```[^`]*$")  # before and behind lines of code
SHORT = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "ste", "jr", "sr", "vs", "inc", "ltd", "bros", "messrs", "gen", "col", "capt"),
    *("lt", "sgt", "sen", "gov", "rep", "rev", "mt"),
    *("hr", "fr", "str", "bzw", "ca", "vgl", "bsp", "evtl", "ggf", "inkl", "geb", "gest", "sog", "dipl", "dipl.-ing", "ing"),
    *("med", "mio", "mrd", "tsd", "mm", "mme", "mlle", "mgr", "env", "etc", "cf"),
}  # fmt: skip
BEFORE_NUMBERS = {
    *("no", "nos", "nr", "vol", "pp", "fig", "abb", "art", "abs", "kap", "bd", "chap", "tel", "approx", "ft", "av"),
    *("jan", "feb", "febr", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "okt", "nov", "dec", "dez"),
}
MONTHS = "Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember|Jahrhundert"
ORDINAL = re.compile(
    r"(?i:\b(?:(?<!I )am|d(?:er|ie|as|en|em|es)|(?:[msdk]?ein|ihr|unser|jed|dies)(?:e[rsnm]?)?|vo[mn]|zu[mr]?"
    r"|beim|im|ab|bis|seit|und)\s+)\d{1,2}$"
)
INITIALS = re.compile(r"(?:[^\W\d_]{1,2}\.)*[^\W\d_]")
EXAMPLE = re.compile(r"\bp\. ?ex$", re.I)
SO_DO_I = re.compile(r"\b(?:do|did|am|was|can|could|will|would|should|have|had|than|as) I$")
LETTER = re.compile(r"[^\W\d_A-ZÀ-Þ] [A-Z]$")  # behind a word, as in: vitamin C
OPENER = re.compile(  # words that begin sentences, and no names
    r"(?:I|You|He|She|It|We|They|The|This|That|There|Do|Does|Did|Is|Are|What|Who|Why|How|And|But|Ich|Er|Sie|Es|Wir|Das|Der|Die|Aber"
    r"|Je|Tu|Il|Elle|Nous|Vous|Ils|Elles|Mais)\b"
)
NEAR = 40  # characters on either side of a full stop that tell what it is


@dataclass(frozen=True)
class Sentence:
    before: str  # white space, and the mark of a list
    text: str  # empty at the end of a text that ends in white space
    ends_line: bool = False
    loud: bool = False  # all in capitals


def sentences(text: str) -> list[Sentence]:
    """What is before each and what it says, one after the other, is the text."""
    found = []
    lines = text.splitlines(keepends=True)
    for line, code in zip(lines, fenced(lines), strict=True):
        bare, at = line.rstrip(), 0
        for begin, end in [] if code else spans(bare):
            found.append(Sentence(bare[at:begin], bare[begin:end]))
            at = end
        if rest := line[at:]:
            found.append(Sentence(rest, "", True))
    return found


def fenced(lines: Iterable[str]) -> list[bool]:
    """Which lines belong to a block of code."""
    inside, found = False, []
    for line in lines:
        edge = bool(FENCE.match(line))
        found.append(inside or edge)
        inside ^= edge
    return found


def spans(line: str) -> Iterator[tuple[int, int]]:
    """Where each sentence of a line begins and ends."""
    line = MACHINE.sub(lambda found: "X" * len(found[0]), line)  # a full stop in an address or in code ends nothing
    for at, cell_end in cells(line):
        for end in [*(at + stop for stop in ends(line[at:cell_end])), cell_end]:
            inner = line[at:end]
            if inner.strip():
                yield end - len(inner.lstrip()), at + len(inner.rstrip())
                at = end


def cells(line: str) -> Iterator[tuple[int, int]]:
    """What is between tabs, and between the bars of a table; most lines are one cell, behind the mark of a list."""
    found = MARKER.match(line)
    assert found is not None  # it may be empty
    at = found.end()
    for edge in (BARS if line[at : at + 1] == "|" else TABS).finditer(line, at):
        yield at, edge.start()
        at = edge.end()
    yield at, len(line)


def ends(line: str) -> list[int]:
    """Places after which a sentence is over, the last one of the line left out."""
    return [m.end() for m in END.finditer(line) if m.end() < len(line) and not goes_on(line, m.start())]


def goes_on(line: str, dot: int) -> bool:
    """Whether a full stop belongs to a short word, an initial, or a German ordinal number."""
    if line[dot] != "." or line[dot : dot + 2] == "..":
        return False
    before, rest = line[max(0, dot - NEAR) : dot], line[dot + 1 : dot + 1 + NEAR].lstrip()
    word = re.search(r"[^\s(\"'“„«\[]*$", before)[0].lower()  # type: ignore[index]
    if word.isdigit():
        return bool(ORDINAL.search(before) or (len(word) < 3 and re.match(MONTHS, rest)))
    if word in SHORT or EXAMPLE.search(before):
        return True
    if word in BEFORE_NUMBERS or word.endswith("str"):
        return rest[:1].isdigit()
    if not INITIALS.fullmatch(word) or re.match(f"[{HAN}]", word):
        return False
    return not (LETTER.search(before) and OPENER.match(rest)) and not SO_DO_I.search(before)


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
        elif inside and wide(made[-1]) and not gap.strip() and "\t" not in gap:
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
