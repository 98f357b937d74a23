"""What tests of documents share: fake translators and alignments, and the structure of a document by other parsers."""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import lxml.html
import polib
from markdown_it import MarkdownIt
from markdown_it.token import Token

from regard.documents import format_of, parse_document, translate_document
from regard.text.alignment import Link

CORPUS = Path(__file__).parent / "corpus"
FILES = sorted(path for path in CORPUS.glob("*.*") if path.name != "README.md" and not path.name.startswith("."))
PRIVATE_USE = re.compile("[\ue000-\uf8ff\U000f0000-\U0010ffff]")
GARBAGE = "*<b>& _x_ [y](z) `q` # 1. - + > | ~~ </p> <i \\ {\\an8} --> %s &amp; \ue0ff **"

# ---- fake translators and alignments ---------------------------------------------------------------------------------


def reverse_words(text: str) -> str:
    return " ".join(reversed(text.split()))


def random_words(text: str) -> str:
    chance = random.Random(text)
    atoms = PRIVATE_USE.findall(text)
    words = [chance.choice(("Wort", "und", "Haus", "schön", "3", "非常", "好。")) for _ in range(chance.randint(1, 30))]
    for atom in atoms:
        words.insert(chance.randint(0, len(words)), atom)
    return " ".join(words)


def chinese(text: str) -> str:
    return re.sub(r"[^\W\d_]+", lambda found: "字" * (len(found[0]) // 3 + 1), text).replace(" ", "").replace(".", "。")


TRANSLATORS: dict[str, Callable[[str], str]] = {
    "identity": lambda text: text,
    "reverse": reverse_words,
    "upper": str.upper,
    "random": random_words,
    "chinese": chinese,
    "drop atoms": lambda text: PRIVATE_USE.sub("", text) + " x",
    "double atoms": lambda text: PRIVATE_USE.sub(lambda found: found[0] * 2, text) + " " + text,
    "empty": lambda text: "",
    "one word": lambda text: "Wort",
    "garbage": lambda text: GARBAGE + text[::-1],
}


def spans_of_words(text: str) -> list[tuple[int, int]]:
    return [found.span() for found in re.finditer(r"\w+|[^\w\s]", text)]


def align_monotone(source: str, target: str) -> list[Link]:
    pairs = zip(spans_of_words(source), spans_of_words(target), strict=False)
    return [Link(*left, *right, 1.0) for left, right in pairs]


def align_reversed(source: str, target: str) -> list[Link]:
    pairs = zip(spans_of_words(source), reversed(spans_of_words(target)), strict=False)
    return [Link(*left, *right, 0.7) for left, right in pairs]


def align_nonsense(source: str, target: str) -> list[Link]:
    chance = random.Random(source + target)
    number = [float("nan"), -1.0, 0.0, 1e30, 0.5]
    return [
        Link(*(chance.randint(-5, len(source) + 9) for _ in range(4)), chance.choice(number))
        for _ in range(chance.randint(0, 20))
    ]


ALIGNMENTS: dict[str, Callable[[str, str], list[Link]]] = {
    "none": lambda source, target: [],
    "monotone": align_monotone,
    "reversed": align_reversed,
    "nonsense": align_nonsense,
}


def translate(text: str, format: str, translator: str, alignment: str) -> str:
    return translate_document(
        parse_document(text, format),
        lambda texts: [TRANSLATORS[translator](each) for each in texts],
        lambda sources, targets: [ALIGNMENTS[alignment](*pair) for pair in zip(sources, targets, strict=True)],
    )


def read(path: Path) -> tuple[str, str]:
    """Return the text of a file with its line ends, and its format."""
    text = path.read_bytes().decode()
    return text, format_of(path, text)


# ---- structure -------------------------------------------------------------------------------------------------------

TRANSLATED_ATTRIBUTES = {"alt", "title", "placeholder", "aria-label", "aria-description", "content", "value", "label"}
KEPT_ELEMENTS = {"code", "pre", "script", "style", "kbd", "samp", "var", "textarea"}


def html_structure(text: str) -> Any:
    """Return the tree of elements by lxml, with their attributes; the order of siblings may change in a translation."""
    if not text.strip():
        return text

    def describe(node: Any) -> Any:
        if not isinstance(node.tag, str):
            return ("comment", node.text)
        fixed = {name: value for name, value in node.attrib.items() if name not in TRANSLATED_ATTRIBUTES}
        content = node.text_content() if node.tag in KEPT_ELEMENTS else None
        children = sorted((describe(child) for child in node), key=repr)
        return (node.tag, sorted(fixed.items()), sorted(node.attrib), content, children)

    return describe(lxml.html.fromstring(f"<div>{text}</div>" if "<html" not in text.lower() else text.encode()))


class TagCounter(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: Counter[Any] = Counter()
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found[tag, tuple(each for each in attrs if each[0] not in TRANSLATED_ATTRIBUTES)] += 1

    def handle_endtag(self, tag: str) -> None:
        self.found["/" + tag] += 1


def inline_structure(tokens: list[Token]) -> Any:
    """Return the tree of inline elements, of which siblings may change their order."""
    path: list[list[Any]] = [[]]
    names: list[Any] = []
    for token in tokens:
        if token.nesting == 1:
            names.append((token.tag, token.attrs.get("href"), token.attrs.get("title")))
            path.append([])
        elif token.nesting == -1:
            children = path.pop()
            path[-1].append((names.pop(), sorted(children, key=repr)))
        elif token.type in ("code_inline", "html_inline"):
            path[-1].append((token.type, token.content))
        elif token.type == "image":
            path[-1].append(("image", token.attrs["src"], token.attrs.get("title")))
        elif token.type == "hardbreak":
            path[-1].append("hardbreak")
    return sorted(path[0], key=repr)


def markdown_structure(text: str) -> Any:
    """Return the blocks in order and the inline elements of each; CommonMark does not know footnotes."""
    found: list[Any] = [Counter(re.findall(r"\[\^\w+\]:?", text))]
    text = re.sub(r"\[\^(\w+)\]", r"(\1)", text)
    for token in MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(text):
        if token.type == "inline":
            found.append(("inline", inline_structure(token.children or [])))
        elif token.type == "html_block":
            found.append(("html", TagCounter(token.content).found))
        else:
            found.append((token.type, token.tag, token.info, token.content, token.attrs.get("style")))
    return found


PLACEHOLDER = re.compile(r"%%|%(?:\d+\$)?(?:\(\w+\))?[-+#0]*\d*(?:\.\d+)?(?:l|ll|h)?[dsuxfgc]|\{\w*\}|<[^<>]+>")


def po_structure(text: str) -> Any:
    found = []
    catalogue = polib.pofile(text.lstrip("\ufeff") + "\n")
    for entry in catalogue:
        strings = list(entry.msgstr_plural.values()) or [entry.msgstr]
        for i, string in enumerate(strings):
            if string and not entry.obsolete and not entry.fuzzy:
                source = entry.msgid_plural if entry.msgid_plural and (i or len(strings) == 1) else entry.msgid
                assert Counter(PLACEHOLDER.findall(source)) == Counter(PLACEHOLDER.findall(string)), (source, string)
        about = (entry.msgid, entry.msgid_plural, entry.msgctxt, entry.flags, entry.occurrences, entry.comment)
        found.append((*about, entry.tcomment, entry.obsolete, entry.previous_msgid, sorted(entry.msgstr_plural)))
    return found, catalogue.metadata, catalogue.header


def subtitle_structure(text: str) -> Any:
    """Return each cue: what stands above the time, the time, its tags, and whether it has text."""
    found = []
    for block in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip("\n")):
        lines = block.split("\n")
        times = [i for i, line in enumerate(lines) if "-->" in line]
        if not times:
            found.append(("other", block))
            continue
        assert len(times) == 1, block
        cue = "\n".join(lines[times[0] + 1 :])
        tags = Counter(re.findall(r"</?(?:[a-z]|\d\d)[^<>]*>|\{\\[^}]*\}", cue))
        found.append((lines[: times[0] + 1], tags, bool(cue.strip())))
    return found


def text_structure(text: str) -> Any:
    """Return what stands at the beginning of lines and between words: quotations, lists, links, rules, empty lines."""
    lines = text.replace("\r\n", "\n").split("\n")
    links = Counter(re.findall(r"https?://[^\s<>]*[^\s<>.,;:!?)]|[\w.-]+@[\w-]+(?:\.[\w-]+)+", text, re.A))
    rules = [line for line in lines if line.strip(" >") and not re.search(r"\w", line)]
    depths = [key for key, _ in _runs([re.match(r"[> ]*", line)[0].count(">") for line in lines])]  # type: ignore[index]
    return links, rules, depths, sum(not line.strip() for line in lines)


def _runs(values: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for value in values:
        if found and found[-1][0] == value:
            found[-1] = (value, found[-1][1] + 1)
        else:
            found.append((value, 1))
    return found


STRUCTURES: dict[str, Callable[[str], Any]] = {
    "text": text_structure,
    "markdown": markdown_structure,
    "html": html_structure,
    "srt": subtitle_structure,
    "vtt": subtitle_structure,
    "po": po_structure,
}
