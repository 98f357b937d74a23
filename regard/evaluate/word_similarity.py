"""Evaluation of word vectors: analogies (Mikolov et al. 2013), and correlation with human similarity judgements.

Only the first `cut` words take part, as questions and as answers (`restrict_vocab` in gensim). A small cut removes rare
words and wrong answers, so only accuracies at the same cut are comparable (300,000 here and in gensim, 30,000 in the demo
of word2vec). Case is folded as in gensim: words are compared in upper case, and the first of equal words represents them
all. Questions and pairs with an unknown word are skipped and counted.
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
MAX_SCORES = 1 << 25  # in memory at a time


@dataclass(frozen=True)
class AnalogySection:
    """The result on one section of analogies."""

    name: str
    correct: int
    asked: int  # questions whose four words are known
    skipped: int

    @property
    def accuracy(self) -> float | None:
        """The share of correct answers; None if no question could be asked."""
        return self.correct / self.asked if self.asked else None

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "accuracy": self.accuracy}


@dataclass(frozen=True)
class SimilarityResult:
    """The correlation of cosine similarities with human judgements on one set of word pairs."""

    name: str
    spearman: float | None  # None: fewer than two pairs, or all equal
    pearson: float | None
    asked: int
    skipped: int

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


class FoldedVocabulary:
    """The first words of a vocabulary, with folded case."""

    def __init__(self, vectors: WordVectors, cut: int) -> None:
        if cut < 1:
            raise RegardError(f"the cut must leave at least 1 word, not {cut}")
        self.words = [word.upper() for word in vectors.words[:cut]]
        self.variants: dict[str, list[int]] = {}  # the rows of each folded word, in order
        for row, word in enumerate(self.words):
            self.variants.setdefault(word, []).append(row)

    def rows(self, *words: str) -> list[int] | None:
        """Return the first row of each word; None if one is unknown."""
        found = [self.variants.get(word.upper()) for word in words]
        return [rows[0] for rows in found if rows] if all(found) else None


# ---- analogies ---------------------------------------------------------------------------------------------------


def evaluate_analogies(vectors: WordVectors, path: Path, cut: int = CUT, method: str = "add") -> list[AnalogySection]:
    """Evaluate analogies of a file like questions-words.txt: lines ": SECTION", and lines "a b c d", where d is the answer.

    The prediction is the best word that is not a, b or c in any case. (gensim takes it from the best five words.)
    """
    folded = FoldedVocabulary(vectors, cut)
    names, questions, skipped = read_questions(path, folded)
    right = check_answers(vectors.unit[:cut], folded, questions[:, 1:], method)
    sections = []
    for number, name in enumerate(names):
        here = questions[:, 0] == number
        sections.append(AnalogySection(name, int(right[here].sum()), int(here.sum()), skipped[number]))
    return sections


def read_questions(path: Path, folded: FoldedVocabulary) -> tuple[list[str], np.ndarray, list[int]]:
    """Return the names of the sections, section and rows of a, b, c, d (Q, 5), and the skipped questions of each section."""
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


def check_answers(unit: np.ndarray, folded: FoldedVocabulary, questions: np.ndarray, method: str) -> np.ndarray:
    """Return whether the best word is d, in any case, for each question: rows of a, b, c, d (Q, 4)."""
    right = np.zeros(len(questions), bool)
    size = max(1, MAX_SCORES // len(unit))
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


def sum_sections(sections: list[AnalogySection], name: str = "total") -> AnalogySection:
    """Sum the counts of several sections."""
    return AnalogySection(name, *(sum(getattr(s, what) for s in sections) for what in ("correct", "asked", "skipped")))


def summarize(sections: list[AnalogySection]) -> list[AnalogySection]:
    """Sum up the semantic and the syntactic sections (named gram...), if there are both, and all sections."""
    syntactic = [s for s in sections if s.name.startswith("gram")]
    semantic = [s for s in sections if s not in syntactic]
    both = [sum_sections(semantic, "semantic"), sum_sections(syntactic, "syntactic")] if semantic and syntactic else []
    return [*both, sum_sections(sections)]


# ---- similarity --------------------------------------------------------------------------------------------------


def evaluate_similarity(vectors: WordVectors, path: Path, cut: int = CUT) -> SimilarityResult:
    """Correlate the cosines of word pairs with the scores of a file of `word<TAB>word<TAB>score`, such as WordSim-353."""
    folded = FoldedVocabulary(vectors, cut)
    rows, judged, skipped = list[list[int]](), list[float](), 0
    for a, b, score in read_pairs(path):
        known = folded.rows(a, b)
        if known:
            rows.append(known)
            judged.append(score)
        else:
            skipped += 1
    cosines, truth = pair_cosines(vectors, np.array(rows, np.int64).reshape(-1, 2)), np.array(judged)
    undefined = len(judged) < 2 or np.ptp(cosines) == 0 or np.ptp(truth) == 0
    ranked, linear = (None, None) if undefined else (spearman(cosines, truth), pearson(cosines, truth))
    name = path.name.removesuffix(path.suffix) if path.suffix in (".xz", ".gz", ".zst") else path.name
    return SimilarityResult(name.removesuffix(".txt"), ranked, linear, len(judged), skipped)


def read_pairs(path: Path) -> Iterator[tuple[str, str, float]]:
    """Yield the pairs of a file; lines that begin with # and a header line are skipped."""
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
    """Return the cosines of pairs of rows (n, 2), in float64, so that rounding does not change their ranks."""
    a, b = (vectors.vectors[column].astype(np.float64) for column in rows.T)
    lengths = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return (a * b).sum(axis=1) / np.where(lengths == 0, 1.0, lengths)


# ---- as text -----------------------------------------------------------------------------------------------------


def format_table(
    vectors: WordVectors, cut: int, analogy: dict[str, list[AnalogySection]], pairs: list[SimilarityResult]
) -> str:
    """Return the table that `regard vectors evaluate` prints."""
    lines = [f"{len(vectors):,} words of {vectors.dim} numbers; the first {min(cut, len(vectors)):,} take part"]
    for name, sections in analogy.items():
        lines += ["", f"{name:<32} {'accuracy':>8} {'correct':>8} {'asked':>8} {'unknown':>8}"]
        for s in [*sections, *summarize(sections)]:
            share = "-" if s.accuracy is None else f"{100 * s.accuracy:.1f}%"
            lines.append(f"{s.name:<32} {share:>8} {s.correct:>8,} {s.asked:>8,} {s.skipped:>8,}")
    if pairs:
        lines += ["", f"{'similarity':<32} {'Spearman':>8} {'Pearson':>8} {'pairs':>8} {'unknown':>8}"]
        for p in pairs:
            shown = ("-" if x is None else f"{x:.4f}" for x in (p.spearman, p.pearson))
            lines.append(" ".join([f"{p.name:<32}", *(f"{x:>8}" for x in shown), f"{p.asked:>8,} {p.skipped:>8,}"]))
    return "\n".join(lines)
