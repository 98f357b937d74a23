"""Scores of sampled sentences: GLEU, BLEU or chrF of several samples against the reference of each sentence, all at once.

They are the scores of sentence_scores.py, which counts the n-grams of one pair in Python. Training on a reward scores
thousands of samples in every step, so here the matching n-grams are counted by compiled code (numba).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from numba import njit

from regard.metrics.sentence_scores import (
    CHRF_ORDER,
    WORD_ORDER,
    bleu_of_counts,
    chrf_of_counts,
    gleu_of_counts,
)

SCORES = {
    "gleu": (WORD_ORDER, gleu_of_counts),
    "bleu": (WORD_ORDER, bleu_of_counts),
    "chrf": (CHRF_ORDER, chrf_of_counts),
}


def score_samples(
    samples: Sequence[Sequence[Sequence[Hashable]]], references: Sequence[Sequence[Hashable]], metric: str
) -> np.ndarray:
    """Return the score (B, n), from 0 to 1, of n samples for each of B references.

    Samples and references are sequences of tokens: words for GLEU and BLEU, for chrF the characters without white space.
    """
    order, score = SCORES[metric]
    numbers: dict[Hashable, int] = {}
    flat, lengths = _number_tokens([own for several in samples for own in several], numbers)
    flat_references, reference_lengths = _number_tokens(references, numbers)
    matches = np.zeros((len(lengths), order), dtype=np.int64)
    count_ngram_matches(flat, lengths, flat_references, reference_lengths, matches)
    shape = (len(references), -1, order)
    totals, reference_totals = (_count_ngrams(each, order) for each in (lengths, reference_lengths))
    return score(matches.reshape(shape), totals.reshape(shape), reference_totals[:, None])


def _number_tokens(
    sequences: Sequence[Sequence[Hashable]], numbers: dict[Hashable, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all sequences as numbers, one after the other, and the lengths of the sequences."""
    lengths = np.array([len(own) for own in sequences], dtype=np.int64)
    flat = [numbers.setdefault(token, len(numbers)) for own in sequences for token in own]
    return np.array(flat, dtype=np.int64), lengths


def _count_ngrams(lengths: np.ndarray, order: int) -> np.ndarray:
    """Return how many n-grams sequences of these lengths (N,) have, for n = 1 to `order`, (N, order)."""
    return np.maximum(lengths[:, None] - np.arange(order), 0).astype(np.float64)


@njit(nogil=True, cache=True)
def count_ngram_matches(
    samples: np.ndarray,
    sample_lengths: np.ndarray,
    references: np.ndarray,
    reference_lengths: np.ndarray,
    matches: np.ndarray,
) -> None:
    """Add to `matches` (N, order) how many n-grams of each of N samples its reference has too, each occurrence once.

    Every reference belongs to as many samples as the others, which follow each other. `run[j]` is the number of tokens
    before and at place j of the reference that equal those before and at the present place of the sample, so the n-grams
    that end at both places are equal for n up to `run[j]`.
    """
    n, order = len(sample_lengths) // max(len(reference_lengths), 1), matches.shape[1]
    sample_begin = reference_begin = 0
    for b in range(len(reference_lengths)):
        length = reference_lengths[b]
        reference = references[reference_begin : reference_begin + length]
        reference_begin += length
        for row in range(b * n, b * n + n):
            run = np.zeros(length + 1, np.int64)  # shifted by one: run[j + 1] is of place j
            used = np.zeros((order, length), np.bool_)  # n-grams of the reference that have a match already
            for i in range(sample_begin, sample_begin + sample_lengths[row]):
                found = np.zeros(order, np.bool_)  # n-grams that end here and have a match
                for j in range(length - 1, -1, -1):
                    run[j + 1] = run[j] + 1 if samples[i] == reference[j] else 0
                    for k in range(min(run[j + 1], order)):
                        if not found[k] and not used[k, j]:
                            found[k] = used[k, j] = True
                            matches[row, k] += 1
            sample_begin += sample_lengths[row]
