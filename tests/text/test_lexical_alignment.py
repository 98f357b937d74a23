"""IBM model 1 with a diagonal prior: expectation maximization against plain loops, and alignments that are known."""

from __future__ import annotations

import math
import random
from collections import defaultdict

import numpy as np
import pytest

from regard.text import lexical_alignment
from regard.text.lexical_alignment import ITERATIONS, NULL_SHARE, TENSION, UNSEEN, WordAligner, position_prior

PAIRS = [
    (["the", "house", "is", "small"], ["das", "Haus", "ist", "klein"]),
    (["the", "book"], ["das", "Buch"]),
    (["a", "house"], ["ein", "Haus"]),
    (["a", "book", "is", "small"], ["klein", "ist", "ein", "Buch"]),
    ([], ["nichts"]),
]


def prior_by_hand(i: int, j: int, n_target: int, n_source: int) -> float:
    """The prior of a link from source word j, or from the null word (-1), to target word i."""
    if j < 0:
        return NULL_SHARE
    near = [math.exp(-TENSION * abs((i + 0.5) / n_target - (k + 0.5) / n_source)) for k in range(n_source)]
    return (1 - NULL_SHARE) * near[j] / sum(near)


def learn_by_loops(pairs: list[tuple[list[str], list[str]]]) -> dict[tuple[str, str], float]:
    table: dict[tuple[str, str], float] = defaultdict(lambda: 1.0)
    for _ in range(ITERATIONS):
        counts: dict[tuple[str, str], float] = defaultdict(float)
        totals: dict[str, float] = defaultdict(float)
        for source, target in pairs:
            if not source:
                continue
            for i, word in enumerate(target):
                links = [(s, table[s, word] * prior_by_hand(i, j - 1, len(target), len(source)))
                         for j, s in enumerate(["", *source])]  # fmt: skip
                total = sum(weight for _, weight in links)
                for s, weight in links:
                    counts[s, word] += weight / total
                    totals[s] += weight / total
        table = defaultdict(lambda: UNSEEN, {key: count / totals[key[0]] for key, count in counts.items()})
    return table


def test_the_table_is_that_of_plain_loops() -> None:
    aligner, table = WordAligner.train(PAIRS), learn_by_loops(PAIRS)
    for source, target in PAIRS[:4]:
        wanted = [[table[s, t] for s in ("", *source)] for t in target]
        np.testing.assert_allclose(aligner.probabilities(source, target), wanted, rtol=1e-12)
    assert (aligner.probabilities(["never"], ["gesehen"]) == UNSEEN).all()


@pytest.mark.parametrize(("n_source", "n_target"), [(1, 1), (3, 5), (7, 2)])
def test_priors_sum_to_one_and_are_those_of_the_formula(n_source: int, n_target: int) -> None:
    prior = position_prior(n_source, n_target)
    np.testing.assert_allclose(prior.sum(1), 1, rtol=1e-12)
    for i in range(n_target):
        wanted = [prior_by_hand(i, j, n_target, n_source) for j in range(-1, n_source)]
        np.testing.assert_allclose(prior[i], wanted, rtol=1e-12)


def test_words_that_occur_together_are_aligned_in_any_order() -> None:
    """Every source word has one translation, and the target has them in another order."""
    rng, pairs, right = random.Random(0), [], []
    for _ in range(400):
        words = rng.sample(range(30), rng.randint(2, 6))
        order = rng.sample(range(len(words)), len(words))
        pairs.append(([f"s{w}" for w in words], [f"t{words[j]}" for j in order]))
        right.append(order)
    aligner = WordAligner.train(pairs)
    found = [aligner.align(*pair) for pair in pairs]
    links = [(a, b) for own, wanted in zip(found, right, strict=True) for a, b in zip(own, wanted, strict=True)]
    assert sum(a == b for a, b in links) >= 0.99 * len(links)


def test_a_word_on_both_sides_is_aligned_to_itself_and_to_the_nearest_of_several() -> None:
    aligner = WordAligner.train([])
    assert aligner.align(["x", "Anna", "y"], ["u", "v", "w", "Anna"])[3] == 1
    assert aligner.align(["7", "a", "b", "c", "d", "7"], ["7", "e", "f", "g", "h", "7"])[::5] == [0, 5]
    assert aligner.align([], ["a"]) == [None]


def test_learning_stops_after_a_number_of_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lexical_alignment, "MAX_CELLS", 10)
    read = []
    WordAligner.train(pair for pair in PAIRS if not read.append(pair))
    assert len(read) == 1  # five source words with the null word, times four
