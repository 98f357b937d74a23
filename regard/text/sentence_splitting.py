"""Sentence splitting (sentence segmentation, sentence boundary detection), and joining sentences to a text again.

Nothing between the sentences is lost. Translation models are trained on single sentences. A full stop ends a sentence
where a space and a capital follow, unless it belongs to an abbreviation, an initial or a German ordinal number. Chinese
punctuation ends a sentence by itself. Table cells are split like lines, and code blocks between ``` hold no sentences.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from regard.text.placeholders import LITERAL

HAN = "\u3400-\u9fff"
CLOSING_QUOTES = "\"'”’»)\\]」』）"
OPENING_QUOTES = "\"'“„«(\\[¿¡‘‚「『（"
EMOJI = "\U0001f000-\U0001faff\u2600-\u27bf"
# What follows a sentence: a capital, a digit, a character without case, a quotation mark, an emoji, or nothing.
NEXT_SENTENCE = rf"\s+(?:[^\Wa-zß-öø-ÿœ]|[{OPENING_QUOTES}])|\s*(?:[{EMOJI}]|$)"
LATIN_END = rf"(?<![.!?…])[.!?…]++(?:[{CLOSING_QUOTES}“*_]|[ \u00a0\u202f]»)*(?={NEXT_SENTENCE})"
CHINESE_END = (
    rf"(?<![。！？])[。！？]++…*+(?:(?![{CLOSING_QUOTES}])|[{CLOSING_QUOTES}]+(?=\s|[「『（“]|$))"
    rf"|(?<=[{HAN}])[.!?]++(?=[{HAN}])"
)
SENTENCE_END = re.compile(f"{LATIN_END}|{CHINESE_END}")
TABS, BARS = re.compile(r"\t+"), re.compile(r"[\t|]+")
CODE_FENCE = re.compile(r"\s*```[^`]*$")  # before and after a code block
ABBREVIATIONS = {
    *("mr", "mrs", "ms", "dr", "prof", "st", "ste", "jr", "sr", "vs", "inc", "ltd", "bros", "messrs", "gen", "col", "capt"),
    *("lt", "sgt", "sen", "gov", "rep", "rev", "mt"),
    *("hr", "fr", "str", "bzw", "ca", "vgl", "bsp", "evtl", "ggf", "inkl", "geb", "gest", "sog", "dipl", "dipl.-ing", "ing"),
    *("med", "mio", "mrd", "tsd", "mm", "mme", "mlle", "mgr", "env", "etc", "cf"),
}  # fmt: skip
ABBREVIATIONS_BEFORE_NUMBERS = {
    *("no", "nos", "nr", "vol", "pp", "fig", "abb", "art", "abs", "kap", "bd", "chap", "tel", "approx", "ft", "av"),
    *("jan", "feb", "febr", "mar", "apr", "jun", "jul", "aug", "sep", "sept", "oct", "okt", "nov", "dec", "dez"),
}
MONTHS = "Januar|Februar|März|April|Mai|Juni|Juli|August|September|Oktober|November|Dezember|Jahrhundert"
LIST_MARKER = re.compile(  # at the beginning of a line: bullets, numbers, letters, check boxes
    rf"\s*(?:(?:[-*+•◦▪■●○‣·–—>→✓✔✗]|#{{1,6}}|\(?\d{{1,3}}(?:\.\d{{1,3}}){{0,3}}(?:\)|\.(?!\s(?:{MONTHS})\b))"
    rf"|\(?[A-Za-z]\)|\(?[ivx]{{1,5}}\))\s+(?:\[[ xX]\]\s+)?|\d{{1,3}}、\s*|（\d{{1,3}}）\s*)*"
)
ORDINAL = re.compile(
    r"(?i:\b(?:(?<!I )am|d(?:er|ie|as|en|em|es)|(?:[msdk]?ein|ihr|unser|jed|dies)(?:e[rsnm]?)?|vo[mn]|zu[mr]?"
    r"|beim|im|ab|bis|seit|und)\s+)\d{1,2}$"
)
INITIAL = re.compile(r"(?:[^\W\d_]{1,2}\.)*[^\W\d_]")
PAR_EXEMPLE = re.compile(r"\bp\. ?ex$", re.I)
PRONOUN_I = re.compile(r"\b(?:do|did|am|was|can|could|will|would|should|have|had|than|as) I$")
LETTER_AFTER_WORD = re.compile(r"[^\W\d_A-ZÀ-Þ] [A-Z]$")  # as in: vitamin C
SENTENCE_OPENER = re.compile(  # words that begin sentences and are no names
    r"(?:I|You|He|She|It|We|They|The|This|That|There|Do|Does|Did|Is|Are|What|Who|Why|How|And|But|Ich|Er|Sie|Es|Wir|Das|Der|Die|Aber"
    r"|Je|Tu|Il|Elle|Nous|Vous|Ils|Elles|Mais)\b"
)
CONTEXT = 40  # characters on either side of a full stop that are looked at


@dataclass(frozen=True)
class Sentence:
    """A sentence of a text and what stands before it; `before` and `text` of all sentences, joined, are the text."""

    before: str  # white space and list markers; lines without a sentence, such as code
    text: str  # empty where `ends_line`
    ends_line: bool = False  # holds only the rest of a line after its last sentence
    is_upper_case: bool = False  # the sentence was written in capitals
    written: str = ""  # as it was before it got standard casing, where it did


def split_sentences(text: str) -> list[Sentence]:
    """Return the sentences of a text in order."""
    found = []
    lines = text.splitlines(keepends=True)
    for line, is_code in zip(lines, find_code_lines(lines), strict=True):
        bare, at = line.rstrip(), 0
        for begin, end in [] if is_code else sentence_spans(bare):
            found.append(Sentence(bare[at:begin], bare[begin:end]))
            at = end
        if rest := line[at:]:
            found.append(Sentence(rest, "", True))
    return found


def find_code_lines(lines: Iterable[str]) -> list[bool]:
    """Return for each line whether it belongs to a code block; the lines with ``` do."""
    inside, found = False, []
    for line in lines:
        is_fence = bool(CODE_FENCE.match(line))
        found.append(inside or is_fence)
        inside ^= is_fence
    return found


def sentence_spans(line: str) -> Iterator[tuple[int, int]]:
    """Yield where each sentence of a line begins and ends."""
    line = LITERAL.sub(lambda found: "X" * len(found[0]), line)  # a full stop in an address or in code ends no sentence
    for at, cell_end in table_cells(line):
        for end in [*(at + stop for stop in sentence_ends(line[at:cell_end])), cell_end]:
            inner = line[at:end]
            if inner.strip():
                yield end - len(inner.lstrip()), at + len(inner.rstrip())
                at = end


def table_cells(line: str) -> Iterator[tuple[int, int]]:
    """Yield the spans between tabs, or between the bars of a table; most lines are one cell after the list marker."""
    found = LIST_MARKER.match(line)
    assert found is not None  # the match may be empty
    at = found.end()
    for edge in (BARS if line[at : at + 1] == "|" else TABS).finditer(line, at):
        yield at, edge.start()
        at = edge.end()
    yield at, len(line)


def sentence_ends(line: str) -> list[int]:
    """Return the places in a line after which a sentence is over, without the end of the line."""
    ends = SENTENCE_END.finditer(line)
    return [m.end() for m in ends if m.end() < len(line) and not is_inside_sentence(line, m.start())]


def is_inside_sentence(line: str, dot: int) -> bool:
    """Return whether the full stop at `dot` belongs to an abbreviation, an initial, or a German ordinal number."""
    if line[dot] != "." or line[dot : dot + 2] == "..":
        return False
    before, rest = line[max(0, dot - CONTEXT) : dot], line[dot + 1 : dot + 1 + CONTEXT].lstrip()
    word = re.search(r"[^\s(\"'“„«\[]*$", before)[0].lower()  # type: ignore[index]
    if word.isdigit():
        return bool(ORDINAL.search(before) or (len(word) < 3 and re.match(MONTHS, rest)))
    if word in ABBREVIATIONS or PAR_EXEMPLE.search(before):
        return True
    if word in ABBREVIATIONS_BEFORE_NUMBERS or word.endswith("str"):
        return rest[:1].isdigit()
    if not INITIAL.fullmatch(word) or re.match(f"[{HAN}]", word):
        return False
    return not (LETTER_AFTER_WORD.search(before) and SENTENCE_OPENER.match(rest)) and not PRONOUN_I.search(before)


def join_sentences(parts: Sequence[Sentence], translations: Sequence[str], spaced: bool) -> str:
    """Return the text of translated sentences, with what stood between them.

    A target language with spaces between sentences (`spaced`) gets one where the source has none; one without spaces
    loses them after full-width characters.
    """
    return join_with_begins(parts, translations, spaced)[0]


def join_with_begins(parts: Sequence[Sentence], translations: Sequence[str], spaced: bool) -> tuple[str, list[int]]:
    """Return the text of translated sentences, and where in it each begins."""
    made, begins = "", []
    for part, text in zip(parts, translations, strict=True):
        inside = made and not made[-1].isspace() and not part.ends_line
        gap = part.before
        if inside and spaced:
            gap = part.before or " "
        elif inside and is_full_width(made[-1]) and not gap.strip() and "\t" not in gap:
            gap = ""
        begins.append(len(made) + len(gap))
        made += gap + ("" if part.ends_line else text)
    return made, begins


def is_full_width(char: str) -> bool:
    """Return whether a character is a Chinese character or Chinese punctuation."""
    return "\u3000" <= char <= "\u9fff" or "\uff00" <= char <= "\uffef" or char in "”’…"


# ---- long sentences --------------------------------------------------------------------------------------------------

# Where a long sentence is split, best places first: semicolons and colons, commas, spaces, anywhere.
SPLIT_POINTS = (r"[;；：](?=\s|[^\x00-\x7f])|[:—–](?=\s)", r"[,，、](?=\s|[^\x00-\x7f])", r"\s(?=\S)", "")


def split_long_sentence(sentence: Sentence, fits: Callable[[str], bool]) -> Iterator[Sentence]:
    """Yield a sentence in parts for which `fits` is true, by splitting it in two until they are short enough."""
    text = sentence.text
    if len(text) < 2 or fits(text):
        yield sentence
        return
    at = find_split_point(text)
    first, rest = text[:at].rstrip(), text[at:].lstrip()
    yield from split_long_sentence(replace(sentence, text=first), fits)
    gap = text[len(first) : len(text) - len(rest)]
    yield from split_long_sentence(replace(sentence, before=gap, text=rest), fits)


def find_split_point(text: str) -> int:
    """Return the split point of the best kind nearest to the middle, at least a fifth of the text from both ends."""
    for pattern in SPLIT_POINTS:
        places = [m.end() for m in re.finditer(pattern, text)] if pattern else [len(text) // 2]
        inner = [at for at in places if len(text) // 5 <= at <= len(text) - len(text) // 5 and 0 < at < len(text)]
        if inner:
            return min(inner, key=lambda at: abs(at - len(text) // 2))
    return len(text) // 2
