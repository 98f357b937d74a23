"""Word alignment learned from sentence pairs alone: IBM model 1 with a preference for the diagonal (Dyer et al. 2013).

Each target word comes from one source word or from none (the null word):

    p(target word i comes from source word j) ~ t(target word | source word) * exp(-tension * |i / T - j / S|)

The table t is learned by expectation maximization: expected counts of links under the present t, then t as shares of these
counts. A word that both sentences have is linked to itself, which finds names and numbers that occur only once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

Words = Sequence[str]

TENSION = 4.0  # how much nearer to the diagonal a link is likelier
NULL_SHARE = 0.08  # prior probability that a target word has no source word
ITERATIONS = 5
MAX_CELLS = 20_000_000  # pairs of words that are learned from; about 100,000 sentence pairs
UNSEEN = 1e-7  # t of two words that were never in one pair


class WordAligner:
    """A table of translation probabilities t(target | source), made by `train`, and the alignments that follow from it."""

    def __init__(self, sources: dict[str, int], targets: dict[str, int], keys: np.ndarray, table: np.ndarray) -> None:
        """Take the numbers of words (the null word has number 0), and t of the sorted keys source * targets + target."""
        self.sources, self.targets, self.keys, self.table = sources, targets, keys, table

    @classmethod
    def train(cls, pairs: Iterable[tuple[Words, Words]]) -> WordAligner:
        """Learn from pairs of sentences, given as words; those after the first `MAX_CELLS` pairs of words are not read."""
        sources, targets = {"": 0}, {"": 0}
        rows: list[np.ndarray] = []  # source word, of each cell: a source word and a target word of one pair
        columns, priors, owners = list(rows), list(rows), list(rows)
        n_cells = n_words = 0
        for source, target in pairs:
            if not source or not target:
                continue
            s = np.array([0, *(sources.setdefault(word, len(sources)) for word in source)])
            t = np.array([targets.setdefault(word, len(targets)) for word in target])
            rows.append(np.tile(s, len(t)).astype(np.int32))
            columns.append(np.repeat(t, len(s)).astype(np.int32))
            priors.append(position_prior(len(s) - 1, len(t)).ravel())
            owners.append(np.repeat(np.arange(n_words, n_words + len(t), dtype=np.int32), len(s)))
            n_words += len(t)
            n_cells += len(s) * len(t)
            if n_cells > MAX_CELLS:
                break
        if not rows:
            return cls(sources, targets, np.zeros(0, np.int64), np.zeros(0))
        prior, owner = np.concatenate(priors), np.concatenate(owners)
        wanted = np.concatenate(rows).astype(np.int64) * len(targets) + np.concatenate(columns)
        del priors, owners, rows, columns  # as large as what was made of them
        keys, cells = np.unique(wanted, return_inverse=True)
        table = np.ones(len(keys))
        for _ in range(ITERATIONS):
            weight = table[cells] * prior
            weight /= np.bincount(owner, weight)[owner]  # the posterior of the links of each target word
            counts = np.bincount(cells, weight, len(keys))
            table = counts / np.bincount(keys // len(targets), counts)[keys // len(targets)]
        return cls(sources, targets, keys, table)

    def probabilities(self, source: Words, target: Words) -> np.ndarray:
        """Return t(target | source) of all words, the null word first, (T, 1 + S)."""
        s = np.array([0, *(self.sources.get(word, -1) for word in source)])
        t = np.array([self.targets.get(word, -1) for word in target])
        wanted = s[None] * len(self.targets) + t[:, None]
        at = np.searchsorted(self.keys, wanted).clip(max=max(0, len(self.keys) - 1))
        if not len(self.keys):
            return np.full(wanted.shape, UNSEEN)
        known = (self.keys[at] == wanted) & (s >= 0)[None] & (t >= 0)[:, None]
        return np.where(known, self.table[at], UNSEEN)

    def align(self, source: Words, target: Words) -> list[int | None]:
        """Return the position of the source word that each target word comes from, or None."""
        if not source or not target:
            return [None] * len(target)
        prior = position_prior(len(source), len(target))
        scores = self.probabilities(source, target) * prior
        same = np.array([[False, *(s == t for s in source)] for t in target])
        has_same = same.any(1, keepdims=True)
        best = np.where(has_same, same * prior, scores).argmax(1)
        return [None if j == 0 else int(j) - 1 for j in best]


def position_prior(n_source: int, n_target: int) -> np.ndarray:
    """Return the prior of each link from the positions of its words alone, the null word first, (T, 1 + S)."""
    i, j = (np.arange(n_target) + 0.5) / n_target, (np.arange(n_source) + 0.5) / n_source
    near = np.exp(-TENSION * np.abs(i[:, None] - j[None]))
    near *= (1 - NULL_SHARE) / near.sum(1, keepdims=True)
    return np.concatenate([np.full((n_target, 1), NULL_SHARE), near], 1)
