"""Glossaries: terms and the words that a translation must have for them.

A glossary is a file of lines `source<TAB>target`, optionally with a direction in a third column (`en>de`); a line that
begins with # is a comment. A term is found where it stands as whole words, in Chinese anywhere. Upper and lower case are
the same, unless the term has a capital after a letter (iPhone, USB). Of overlapping terms the longest is taken.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from regard.errors import RegardError
from regard.files import read_text

HAN = "\u3005\u3007\u3400-\u9fff"
CAPITAL_INSIDE = re.compile(r"[^\W_][A-ZÀ-ÖØ-Þ]")
DIRECTION = re.compile(r"[A-Za-z][\w-]*>[A-Za-z][\w-]*")


@dataclass(frozen=True)
class Term:
    """A term and its translation."""

    source: str
    target: str
    direction: str = ""  # such as "en>de"; empty: every direction

    @cached_property
    def folded(self) -> str:
        """The term in lower case, with single spaces."""
        return " ".join(self.source.casefold().split())

    def pattern(self, ignore_case: bool = False) -> str:
        """Return a regular expression for the term as whole words; in Chinese there are no spaces between words."""
        words = r"\s+".join(map(re.escape, self.source.split()))
        letter = rf"[^\W_{HAN}]"
        begin = rf"(?<!{letter})" if re.match(letter, self.source) else ""
        end = rf"(?!{letter})" if re.match(letter, self.source[-1]) else ""
        exact = CAPITAL_INSIDE.search(self.source) and not ignore_case
        return f"{begin}{words}{end}" if exact else f"(?i:{begin}{words}{end})"


class Glossary:
    """Terms with their translations. `translate(..., glossary=Glossary.load("terms.tsv"))` uses them."""

    def __init__(self, terms: Iterable[Term] | Mapping[str, str]) -> None:
        """Take terms, or a mapping of source to target that holds for every direction."""
        own = [Term(*pair) for pair in terms.items()] if isinstance(terms, Mapping) else terms
        self.terms: tuple[Term, ...] = tuple(own)

    @classmethod
    def load(cls, path: str | Path, name: str = "the glossary") -> Glossary:
        """Read a glossary file, which errors call `name`. A line that is no term is an error that names file and line."""
        path = Path(path)
        try:
            lines = read_text(path).removeprefix("\ufeff").splitlines()
        except OSError as error:
            raise RegardError(f"cannot read {name} {path}: {error.strerror or error}") from None
        except ValueError as error:
            raise RegardError(f"cannot read {name} {path}: {error}") from None
        return cls(
            [term for number, line in enumerate(lines, 1) if (term := parse_line(line, f"{path}, line {number}"))]
        )

    def find(self, text: str, source: str, target: str, ignore_case: bool = False) -> list[str]:
        """Return the translations of the terms in a text, in their order, once for each time that a term occurs.

        `ignore_case` is for a text that was written in capitals, in which iPhone is IPHONE."""
        folded = " ".join(text.casefold().split())
        own = [term for term in self.terms if term.direction.lower() in ("", f"{source}>{target}".lower())]
        near = [term for term in own if term.folded in folded]  # a pattern for each of many terms would take long
        near.sort(key=lambda term: (-len(term.source), not term.direction))
        found: list[tuple[int, int, str]] = []
        for term in near:
            for begin, end in (match.span() for match in re.finditer(term.pattern(ignore_case), text)):
                if all(end <= b or e <= begin for b, e, _ in found):
                    found.append((begin, end, term.target))
        return [translation for _, _, translation in sorted(found)]

    def with_directions(self) -> Glossary:
        """Return the glossary of the terms that name a direction: the others are not for a translation in two steps."""
        return Glossary([term for term in self.terms if term.direction])

    def __len__(self) -> int:
        return len(self.terms)


def parse_line(line: str, where: str) -> Term | None:
    """Return the term of a line, or None for a comment or an empty line."""
    if not line.strip() or line.lstrip().startswith("#"):
        return None
    columns = [column.strip() for column in line.rstrip("\r\n").split("\t")]
    while len(columns) > 2 and not columns[-1]:
        columns.pop()
    if not 2 <= len(columns) <= 3 or not columns[0] or not columns[1]:
        raise RegardError(
            f"{where}: a term is source<TAB>target, or source<TAB>target<TAB>direction, not {line[:60]!r}"
        )
    if len(columns) == 3 and not DIRECTION.fullmatch(columns[2]):
        raise RegardError(f"{where}: the third column is a direction such as en>de, not {columns[2]!r}")
    return Term(*columns)
