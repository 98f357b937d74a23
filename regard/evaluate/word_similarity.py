"""Word vectors against two kinds of tests: analogies, and what people say about how close two words are.

Only the first `cut` words take part, as questions and as answers: a small cut leaves out rare words and wrong answers, so
accuracies go together only at the same cut (300,000 here and in gensim; the C program's demonstration has 30,000). Case is
folded as in gensim: words are compared in upper case, and the first of those that are equal then stands for them all.
What has a word that is not there is left out of the score, and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from regard.data.parallel_corpus import read_lines
from regard.errors import RegardError
from regard.metrics.classification_scores import pearson, spearman
from regard.vectors.word_vectors import WordVectors, analogy_scores

CUT = 300_000
BATCH_NUMBERS = 1 << 25  # scores that are in memory at a time


@dataclass(frozen=True)
class Section:
    """Analogies of one kind."""

    name: str
    correct: int
    asked: int  # whose four words are known
    skipped: int

    @property
    def accuracy(self) -> float | None:
        """A share; None where nothing could be asked."""
        return self.correct / self.asked if self.asked else None

    def numbers(self) -> dict[str, Any]:
        return {**vars(self), "accuracy": self.accuracy}


@dataclass(frozen=True)
class Pairs:
    """How the cosines of one set of pairs go with what people say."""

    name: str
    spearman: float | None  # None: fewer than two pairs, or all the same
    pearson: float | None
    asked: int
    skipped: int

    def numbers(self) -> dict[str, Any]:
        return dict(vars(self))


class Folded:
    """The first words of a vocabulary, case folded."""

    def __init__(self, vectors: WordVectors, cut: int) -> None:
        if cut < 1:
            raise RegardError(f"the cut must leave at least 1 word, not {cut}")
        self.words = [word.upper() for word in vectors.words[:cut]]
        self.variants: dict[str, list[int]] = {}  # of each word its rows, the first first
        for row, word in enumerate(self.words):
            self.variants.setdefault(word, []).append(row)

    def rows(self, *words: str) -> list[int] | None:
        """The first row of each; None if one is not there."""
        found = [self.variants.get(word.upper()) for word in words]
        return [rows[0] for rows in found if rows] if all(found) else None


# ---- analogies ---------------------------------------------------------------------------------------------------


def analogies(vectors: WordVectors, path: Path, cut: int = CUT, method: str = "add") -> list[Section]:
    """A file like questions-words.txt: after a line ": SECTION", lines of a b c d, where d is what is asked for.

    The answer is the best word that is not a, b or c, in whatever case. (gensim looks for it among the best five.)
    """
    folded = Folded(vectors, cut)
    names, questions, skipped = read_questions(path, folded)
    right = answers(vectors.unit[:cut], folded, questions[:, 1:], method)
    sections = []
    for number, name in enumerate(names):
        here = questions[:, 0] == number
        sections.append(Section(name, int(right[here].sum()), int(here.sum()), skipped[number]))
    return sections


def read_questions(path: Path, folded: Folded) -> tuple[list[str], np.ndarray, list[int]]:
    """Names of the sections, (Q, 5) section and rows of a, b, c, d, and how many questions of each section are left out."""
    names, rows, skipped = list[str](), list[list[int]](), list[int]()
    for number, line in enumerate(read_lines(path), 1):
        words = line.split()
        if line.startswith(":"):
            names.append(line.lstrip(":").strip())
            skipped.append(0)
        elif words:
            if len(words) != 4 or not names:
                what = "no ': SECTION' line comes before it" if len(words) == 4 else f"{len(words)} words instead of 4"
                raise RegardError(f"{path} line {number}: {what}; analogies look like 'Athens Greece Oslo Norway'")
            known = folded.rows(*words)
            if known:
                rows.append([len(names) - 1, *known])
            else:
                skipped[-1] += 1
    return names, np.array(rows, np.int64).reshape(-1, 5), skipped


def answers(unit: np.ndarray, folded: Folded, questions: np.ndarray, method: str) -> np.ndarray:
    """(Q, 4) rows of a, b, c, d -> whether the best word is d, in any case."""
    right = np.zeros(len(questions), bool)
    size = max(1, BATCH_NUMBERS // len(unit))
    for start in range(0, len(questions), size):
        part = questions[start : start + size]
        a, b, c, d = part.T
        scores = analogy_scores(unit, unit[a], unit[b], unit[c], method)  # (q, V)
        for row, given in zip(scores, part[:, :3], strict=True):
            for word in given:
                row[folded.variants[folded.words[word]]] = -np.inf
        best = scores.argmax(axis=1)
        right[start : start + size] = [folded.words[i] == folded.words[j] for i, j in zip(best, d, strict=True)]
    return right


def total(sections: list[Section], name: str = "total") -> Section:
    return Section(name, *(sum(getattr(s, what) for s in sections) for what in ("correct", "asked", "skipped")))


def summary(sections: list[Section]) -> list[Section]:
    """Semantic and syntactic (sections named gram...) questions, where there are both, and all of them."""
    syntactic = [s for s in sections if s.name.startswith("gram")]
    semantic = [s for s in sections if s not in syntactic]
    both = [total(semantic, "semantic"), total(syntactic, "syntactic")] if semantic and syntactic else []
    return [*both, total(sections)]


# ---- similarity --------------------------------------------------------------------------------------------------


def similarity(vectors: WordVectors, path: Path, cut: int = CUT) -> Pairs:
    """A file of `word<TAB>word<TAB>score`, such as WordSim-353: its correlations with the cosines of the pairs."""
    folded = Folded(vectors, cut)
    rows, said, skipped = list[list[int]](), list[float](), 0
    for a, b, score in read_pairs(path):
        known = folded.rows(a, b)
        if known:
            rows.append(known)
            said.append(score)
        else:
            skipped += 1
    cosines, truth = pair_cosines(vectors, np.array(rows, np.int64).reshape(-1, 2)), np.array(said)
    plain = len(said) < 2 or np.ptp(cosines) == 0 or np.ptp(truth) == 0
    ranked, linear = (None, None) if plain else (spearman(cosines, truth), pearson(cosines, truth))
    name = path.name.removesuffix(path.suffix) if path.suffix in (".xz", ".gz", ".zst") else path.name
    return Pairs(name.removesuffix(".txt"), ranked, linear, len(said), skipped)


def read_pairs(path: Path) -> Iterator[tuple[str, str, float]]:
    """Lines that begin with # and a first line without a number, which names the columns, say nothing."""
    for number, line in enumerate(read_lines(path), 1):
        fields = line.split("\t") if "\t" in line else line.split()
        if not line.strip() or line.startswith("#"):
            continue
        try:
            a, b, score = fields[0].strip(), fields[1].strip(), float(fields[2])
        except (IndexError, ValueError):
            if number == 1:
                continue
            raise RegardError(f"{path} line {number}: a pair looks like 'tiger<TAB>cat<TAB>7.35'") from None
        yield a, b, score


def pair_cosines(vectors: WordVectors, rows: np.ndarray) -> np.ndarray:
    """Of pairs of rows (n, 2), in float64, so that ranks do not hang on rounding."""
    a, b = (vectors.vectors[column].astype(np.float64) for column in rows.T)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(axis=1) / np.where(lengths == 0, 1.0, lengths)


# ---- as text -----------------------------------------------------------------------------------------------------


def table(vectors: WordVectors, cut: int, analogy: dict[str, list[Section]], pairs: list[Pairs]) -> str:
    """What `regard vectors evaluate` prints."""
    lines = [f"{len(vectors):,} words of {vectors.dim} numbers; the first {min(cut, len(vectors)):,} take part"]
    for name, sections in analogy.items():
        lines += ["", f"{name:<32} {'accuracy':>8} {'correct':>8} {'asked':>8} {'unknown':>8}"]
        for s in [*sections, *summary(sections)]:
            share = "-" if s.accuracy is None else f"{100 * s.accuracy:.1f}%"
            lines.append(f"{s.name:<32} {share:>8} {s.correct:>8,} {s.asked:>8,} {s.skipped:>8,}")
    if pairs:
        lines += ["", f"{'similarity':<32} {'Spearman':>8} {'Pearson':>8} {'pairs':>8} {'unknown':>8}"]
        for p in pairs:
            shown = ("-" if x is None else f"{x:.4f}" for x in (p.spearman, p.pearson))
            lines.append(" ".join([f"{p.name:<32}", *(f"{x:>8}" for x in shown), f"{p.asked:>8,} {p.skipped:>8,}"]))
    return "\n".join(lines)
