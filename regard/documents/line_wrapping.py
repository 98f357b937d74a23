"""Hard-wrapped lines: which line breaks only wrap a paragraph, and wrapping a translation to the same width.

Widths are columns of a terminal: a Chinese character has two. Lines belong together where a paragraph was wrapped at a
common width, so that the first word of the next line would not have fitted on the line before it.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence

NO_LINE_BEGIN = set("，。、；：？！）》」』】〉〕”’…·%,.!?:;)]}»")
NO_LINE_END = set("（《「『【〈〔“‘([{«")
MIN_WIDTH = 36  # of a paragraph that counts as wrapped
MIN_WIDTH_OF_TWO = 52  # of a paragraph of two lines, which may be an address
MAX_VERSE = 60
KEY = re.compile(r"[^\W\d_][\w /-]{0,24}:(?:\s|$)")  # of a line "key: value"
SENTENCE_ENDS = tuple(".!?…:;。！？：；")
LINE = re.compile(r"([^\r\n]*)(\r\n|\r|\n|$)")


def split_lines(text: str) -> list[tuple[str, str]]:
    """Return the lines of a text, each with its line end; the last may have none. Joined, they are the text."""
    found = [(match[1], match[2]) for match in LINE.finditer(text)]
    return found[:-1] if found and found[-1] == ("", "") else found


def is_wide(char: str) -> bool:
    """Return whether a character takes two columns."""
    return unicodedata.east_asian_width(char) in "WF"


def display_width(text: str) -> int:
    """Return the number of columns of a text."""
    if text.isascii():
        return len(text)
    return sum(1 + is_wide(char) for char in text if not unicodedata.combining(char))


def joint(left: str, right: str) -> str:
    """Return what stands between two lines that are joined: a space, but nothing between Chinese characters."""

    def is_unspaced(char: str) -> bool:
        return is_wide(char) and not "\uac00" <= char <= "\ud7af"  # Korean has spaces

    return "" if left and right and is_unspaced(left[-1]) and is_unspaced(right[0]) else " "


# ---- wrapped paragraphs ----------------------------------------------------------------------------------------------


def find_wraps(
    lines: Sequence[str], begins: Sequence[str], document_width: int = 0, is_markup: bool = False
) -> list[bool]:
    """Return for each line but the last whether the next line continues it.

    Args:
        lines: Lines of a paragraph, with what stands before their text.
        begins: Their text, without indentation, quotation marks and list markers.
        document_width: The width of other paragraphs of the document, 0 where it is not known.
        is_markup: Line breaks mean nothing by themselves, as in Markdown: a sentence that is not at its end continues.
    """
    if len(lines) < 2:
        return []
    widths = [display_width(line.rstrip()) for line in lines]
    column = paragraph_width(lines, document_width)
    least = MIN_WIDTH if len(lines) > 2 else MIN_WIDTH_OF_TWO
    is_narrow = column < (min(least, 0.75 * document_width) if document_width else least)
    is_verse = len(lines) > 2 and all(text[:1].isupper() or not text[:1].isalpha() for text in begins)
    slack = max(4, column // 8)
    found = []
    for i, width in enumerate(widths[:-1]):
        before, after = begins[i].rstrip(), begins[i + 1]
        needed = width + (2 if joint(before, after) == "" else 1 + display_width(after.split(" ")[0]))
        is_wrap = needed > column - slack and not is_narrow and not (is_verse and column < MAX_VERSE)
        if is_markup and after[:1].islower() and before and not before.endswith(SENTENCE_ENDS):
            is_wrap = True
        is_key = KEY.match(after) and KEY.match(before)
        found.append(bool(is_wrap and not is_key and not lines[i].endswith("  ")))
    return found if 2 * sum(found) >= len(found) or document_width or is_markup else [False] * len(found)


def paragraph_width(lines: Sequence[str], document_width: int = 0) -> int:
    """Return the width at which a paragraph was wrapped: that of its longest line, unless this one is an exception.

    A line that is one long word, such as a link, may be wider than the paragraph, and so may one that ends in one.
    """
    widths = sorted(display_width(line.rstrip()) for line in lines)
    usual = [width for width in widths if width <= 1.1 * document_width] if document_width else widths
    if not usual:
        return document_width
    is_exception = len(usual) > 2 and usual[-1] > 1.25 * usual[-2]
    return usual[-2] if is_exception else usual[-1]


def common_width(paragraphs: Iterable[tuple[Sequence[str], Sequence[str]]]) -> int:
    """Return the width at which most paragraphs of a document are wrapped, 0 where they are not."""
    found = []
    for lines, begins in paragraphs:
        wraps = find_wraps(lines, begins)
        if (len(wraps) > 1 and all(wraps)) or (len(wraps) > 2 and all(wraps[1:])):  # the first line may be a heading
            found.append(paragraph_width(lines))
    return sorted(found)[len(found) // 2] if found else 0


# ---- wrapping --------------------------------------------------------------------------------------------------------


def split_words(chunks: Iterable[tuple[str, str]], breaks_chinese: bool) -> list[tuple[str, str]]:
    """Return the words of a text between which a line may be broken, each with what joins it to the one before.

    Chunks that are not text, such as tags and atoms, belong to the word that they touch.
    """
    words: list[tuple[str, str]] = []
    word, glue, previous = "", "", ""
    for chunk, kind in chunks:
        if kind != "text":
            word, previous = word + chunk, ""
            continue
        for char in chunk:
            if char == " ":
                if word:
                    words.append((word, glue))
                    word = ""
                glue, previous = " ", ""
                continue
            is_between = previous and (is_wide(previous) or is_wide(char)) and not "\uac00" <= char <= "\ud7af"
            if is_between and breaks_chinese and char not in NO_LINE_BEGIN and previous not in NO_LINE_END:
                words.append((word, glue))
                word, glue = "", ""
            word, previous = word + char, char
    return [*words, (word, glue)] if word else words


def fill_lines(
    words: Sequence[tuple[str, str]],
    width: int,
    first_indent: int = 0,
    indent: int = 0,
    may_begin: Callable[[str], bool] = lambda word: True,
) -> list[str]:
    """Return words as lines of at most `width` columns, except where one word is longer.

    Args:
        words: Words with what joins each to the one before.
        width: Columns of a line.
        first_indent: Columns that are taken before the first line.
        indent: Columns that are taken before every other line.
        may_begin: Whether a line may begin with a word; one that may not stays behind the word before it.
    """
    lines: list[str] = []
    line, column = "", first_indent
    for word, glue in words:
        head, *rest = word.split("\n")
        needed = display_width(glue + head)
        if line and column + needed > width and may_begin(word):
            lines.append(line)
            line, column, glue, needed = "", indent, "", display_width(head)
        line += (glue if line else "") + word
        column = display_width(rest[-1]) if rest else column + needed
    return [*lines, line] if line or not lines else lines


def balance_lines(words: Sequence[tuple[str, str]], count: int) -> list[str]:
    """Return words as `count` lines of similar widths, or fewer where there are not enough words."""
    total = sum(display_width(glue + word) for word, glue in words)
    for columns in range(max(1, total // count), total):
        if len(lines := fill_lines(words, columns)) <= count:
            return lines
    return fill_lines(words, total + 1)
