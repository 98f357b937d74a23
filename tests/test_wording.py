"""The words of the project: docstrings that begin with a full phrase, and no private words for things that have a name.

    python tests/test_wording.py regard/look docs/guides/inspect.md

prints what is wrong in these files and folders.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PLACES = ("regard", "tests", "recipes", "benchmarks", "docs", "README.md", "Makefile", "pyproject.toml")
EXCEPT = (Path(__file__).name, "toy_lexicon.py", "test_toy.py", "test_labelled_text.py", "judgements.toml")  # corpora
TEXTS = (".py", ".md", ".toml", ".js", ".css", ".html")

# Words that stood for well-known things: nobody can search for them. The right-hand side says what to write.
PRIVATE = {
    r"\b(comes?|came|brings?|brought|bring) along\b": "the bundled model; ships with",
    r"\b(goes|go|going|gone|went) on with\b": "continue, resume",
    r"\bgoes on\b": "continues",
    r"\b(is|are|was|were|be|being) found out\b": "is detected, is determined",
    r"\brecorded (steps?|decoding)\b": "CUDA graph, captured step",
    r"\b(weights|matrices|numbers|in|as|of) bytes each\b|\bin bytes\b": "int8 quantization; number of bytes",
    r"\bmay not be said\b|\bmust not be said\b|\bnever said\b": "disallowed tokens are masked",
    r"\b(hears?|heard|hearing)\b": "records, receives, is called with",
    r"\b(listens?|listening|listeners?)\b": "observes, observer",
    r"\blooks? the other way\b": "ignores",
    r"\bmend(s|ed|ing)?\b": "fixes, repairs, restores",
    r"\b[Ww]hoever\b": "the caller, a user",
    r"\bquarter of the room\b": "a quarter of the memory",
    r"\bshort-?lists?\b": "it is no longer there",
    r"\blocked dropout\b": "variational dropout",
}

# How the first line of a docstring must not begin: with a word that needs the line before it.
ELLIPTIC = {
    *("Of", "Those", "That", "These", "This", "It", "Its", "They", "Their", "And", "But", "Or", "Nor", "So", "Also"),
    *("With", "Without", "For", "From", "In", "On", "To", "At", "By", "As", "Where", "When", "While", "Which", "Who"),
    *("Above", "Below", "Beside", "Between", "After", "Before", "Else", "Otherwise", "Then", "There", "Here", "Like"),
    *(
        "Only",
        "Once",
        "Said",
        "Made",
        "Imported",
        "Looked",
        "True",
        "False",
        "None",
        "If",
        "Unless",
        "Because",
        "Rather",
    ),
}
# How the first line of a function must not begin: it is a verb phrase, "Return the ...", "Yield ...", "Train ...".
NO_VERB = {
    *(
        "A",
        "An",
        "The",
        "All",
        "Any",
        "Each",
        "Every",
        "Both",
        "Another",
        "One",
        "Two",
        "Several",
        "Some",
        "Many",
        "Few",
    ),
    *(
        "What",
        "Whether",
        "How",
        "Why",
        "Whatever",
        "Everything",
        "Nothing",
        "Something",
        "More",
        "Most",
        "Less",
        "Half",
    ),
}


def files(places: list[Path]) -> Iterator[Path]:
    for place in places:
        found = [place] if place.is_file() else sorted(place.rglob("*"))
        for path in found:
            hidden = any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(ROOT).parts)
            is_text = path.is_file() and (path.suffix in TEXTS or path.name == "Makefile")
            if is_text and not hidden and path.name not in EXCEPT and "pretrained" not in path.parts:
                yield path


def private_words(path: Path) -> Iterator[str]:
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), 1):
        for pattern, better in PRIVATE.items():
            if found := re.search(pattern, line):
                yield f"{path.relative_to(ROOT)}:{number}: '{found[0]}' (say: {better})"


def docstrings(path: Path) -> Iterator[str]:
    """Yield what is wrong with the docstrings of public classes, functions and methods of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    text = ast.get_docstring(tree) or ""
    where = f"{path.relative_to(ROOT)}"
    if path.name not in ("__init__.py", "__main__.py") or text:
        yield from wrong(f"{where}:1: the module", text, is_function=False)
    todo: list[tuple[ast.AST, bool]] = [(node, False) for node in tree.body]
    while todo:
        node, inside = todo.pop(0)
        if not isinstance(node, (ast.ClassDef, ast.FunctionDef)) or node.name.startswith("_"):
            continue
        text = ast.get_docstring(node) or ""
        is_function = isinstance(node, ast.FunctionDef)
        marks = {ast.unparse(mark).split("(")[0] for mark in node.decorator_list}
        noun = bool(marks & {"property", "cached_property", "functools.cached_property"})
        kernel = bool(marks & {"triton.jit", "jit", "njit", "compiled", "overload", "staticmethod"})
        if text or not (inside or kernel or "overload" in marks or len(node.body) < 3):
            yield from wrong(f"{where}:{node.lineno}: {node.name}", text, is_function and not noun)
        if isinstance(node, ast.ClassDef):
            todo = [(child, True) for child in node.body] + todo


def wrong(name: str, text: str, is_function: bool) -> Iterator[str]:
    words = re.findall(r"[\w'-]+", text.split("\n")[0])
    if not words:
        yield f"{name} has no docstring"
        return
    first = text.lstrip()[0]
    if words[0] in ELLIPTIC or " ".join(words[:2]) == "The same":
        yield f"{name} begins elliptically: {text.splitlines()[0][:70]!r}"
    elif is_function and words[0] in NO_VERB:
        yield f"{name} begins without a verb: {text.splitlines()[0][:70]!r}"
    elif not (first.isupper() or first in "`'\"(*$" or not first.isalpha() or (not is_function and len(words[0]) == 1)):
        yield f"{name} begins in the middle: {text.splitlines()[0][:70]!r}"


@pytest.mark.parametrize("place", PLACES)
def test_no_private_words(place: str) -> None:
    assert [line for path in files([ROOT / place]) for line in private_words(path)] == []


@pytest.mark.parametrize(
    "room", sorted(path.name for path in (ROOT / "regard").iterdir() if path.name != "__pycache__")
)
def test_docstrings_begin_with_a_full_phrase(room: str) -> None:
    found = [path for path in files([ROOT / "regard" / room]) if path.suffix == ".py"]
    assert [line for path in found for line in docstrings(path)] == []


if __name__ == "__main__":
    for path in files([Path(name).resolve() for name in sys.argv[1:]] or [ROOT / place for place in PLACES]):
        lines = [
            *private_words(path),
            *(docstrings(path) if path.suffix == ".py" and path.is_relative_to(ROOT / "regard") else ()),
        ]
        print(*lines, sep="\n", end="\n" if lines else "")
