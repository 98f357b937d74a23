"""Scores of single sentences: chrF, BLEU and GLEU of one hypothesis and one reference, and of all pairs of some sentences.

All are fractions from 0 to 1; sacreBLEU gives percentages. They are what minimum-Bayes-risk decoding and rewards of training
need; a test set is scored by translation_scores.py.

- chrF (Popovic 2015) is chrF2 with sacreBLEU's defaults: the F-score, recall counting beta = 2 times as much as precision,
  of the mean precision and recall of character n-grams, n = 1 to 6, without white space.
- BLEU is sacreBLEU's `sentence_bleu`: n = 1 to 4, the k-th order without a match counts as 1 / 2^k matches (smoothing
  "exp"), and orders that a short hypothesis does not have are left out (effective order).
- GLEU (Wu et al. 2016) is the smaller of precision and recall of all n-grams, n = 1 to 4, taken together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np

UTILITIES = ("chrf", "bleu", "gleu")
CHRF_ORDER, CHRF_BETA, WORD_ORDER = 6, 2, 4
MATRIX_SIZE = 1 << 22  # numbers in a matrix of n-grams that are counted at a time


# ---- one pair ----------------------------------------------------------------------------------------------------------


def sentence_gleu(hypothesis: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """Return GLEU of two sequences of tokens: matching n-grams, n = 1 to 4, over those of the longer sequence.

    It is 0 where one of them is empty."""
    matches, totals = count_matches(hypothesis, reference, WORD_ORDER)
    return float(gleu_of_counts(matches, *totals))


def sentence_bleu(hypothesis: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """Return smoothed BLEU of two sequences of tokens; it is 0 where no token matches."""
    matches, totals = count_matches(hypothesis, reference, WORD_ORDER)
    return float(bleu_of_counts(matches, *totals))


def sentence_chrf(hypothesis: str, reference: str) -> float:
    """Return chrF2 of two texts."""
    matches, totals = count_matches(characters(hypothesis), characters(reference), CHRF_ORDER)
    return float(chrf_of_counts(matches, *totals))


def count_matches(
    hypothesis: Sequence[Hashable], reference: Sequence[Hashable], order: int
) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Return how many n-grams match, for n = 1 to `order`, and how many each side has, (order,) each.

    An n-gram matches as often as the side that has it less often has it."""
    matches, totals = [], []
    for n in range(1, order + 1):
        ours, theirs = (
            Counter(tuple(side[i : i + n]) for i in range(len(side) - n + 1)) for side in (hypothesis, reference)
        )
        matches.append((ours & theirs).total())
        totals.append((ours.total(), theirs.total()))
    return np.array(matches, dtype=np.float64), tuple(np.array(totals, dtype=np.float64).T)


def characters(text: str) -> str:
    """Return a text without white space."""
    return "".join(text.split())


# ---- scores of counts --------------------------------------------------------------------------------------------------
# matches (..., n) and the numbers of n-grams of hypotheses and references, which are broadcast to that shape, give (...).


def gleu_of_counts(matches: np.ndarray, hypothesis: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the smaller of precision and recall of the n-grams of all orders together."""
    return matches.sum(-1) / np.maximum(np.maximum(hypothesis.sum(-1), reference.sum(-1)), 1)


def bleu_of_counts(matches: np.ndarray, hypothesis: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the geometric mean of the precisions, times the brevity penalty exp(1 - r / h) of a hypothesis that is shorter.

    The k-th order without a match counts as 1 / 2^k matches."""
    exists = np.broadcast_to(hypothesis > 0, matches.shape)
    halvings = np.cumsum(exists & (matches == 0), -1)
    smoothed = np.where(matches == 0, 0.5**halvings, matches)
    log_precision = np.where(exists, np.log(smoothed / np.maximum(hypothesis, 1)), 0)
    mean = log_precision.sum(-1) / np.maximum(exists.sum(-1), 1)
    brevity = np.minimum(1 - reference[..., 0] / np.maximum(hypothesis[..., 0], 1), 0)
    return np.where(matches.any(-1), np.exp(mean + brevity), 0.0)


def chrf_of_counts(matches: np.ndarray, hypothesis: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the F-score of mean precision and mean recall over the orders that both sides have n-grams of."""
    both = np.broadcast_to((hypothesis > 0) & (reference > 0), matches.shape)
    orders = np.maximum(both.sum(-1), 1)
    precision = np.where(both, matches / np.maximum(hypothesis, 1), 0).sum(-1) / orders
    recall = np.where(both, matches / np.maximum(reference, 1), 0).sum(-1) / orders
    factor = CHRF_BETA**2
    below = factor * precision + recall
    return (1 + factor) * precision * recall / np.where(below > 0, below, 1)


# ---- all pairs ---------------------------------------------------------------------------------------------------------


def pairwise_scores(texts: Sequence[str], utility: str, language: str) -> np.ndarray:
    """Return the score (N, N) of each of N texts (rows) with each as the reference (columns).

    `utility` is chrf, bleu or gleu; the words of the last two are those of sacreBLEU's tokenizer for the language."""
    if utility == "chrf":
        matches, totals = count_pairwise_matches([characters(text) for text in texts], CHRF_ORDER)
        return chrf_of_counts(matches, totals[:, None], totals[None])
    from regard.metrics.translation_scores import bleu_tokenizer  # with Moses' patterns, which chrF does not need

    tokenize = bleu_tokenizer(language)
    matches, totals = count_pairwise_matches([tokenize(text.rstrip()).split() for text in texts], WORD_ORDER)
    score = {"bleu": bleu_of_counts, "gleu": gleu_of_counts}[utility]
    return score(matches, totals[:, None], totals[None])


def count_pairwise_matches(sequences: Sequence[Sequence[Hashable]], order: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the matching n-grams of all pairs of N sequences, (N, N, order), and the n-grams of each, (N, order).

    The first, second, ... occurrence of an n-gram in a sequence are different things, so two sequences have as many matches
    as their sets of occurrences have in common. These are products of matrices of zeros and ones: a row for each sequence, a
    column for each occurrence that several sequences have."""
    n = len(sequences)
    lengths = np.array([len(own) for own in sequences], dtype=np.int64)
    rows = np.repeat(np.arange(n), lengths)
    numbers: dict[Hashable, int] = {}
    tokens = np.array([numbers.setdefault(token, len(numbers)) for own in sequences for token in own], dtype=np.int64)
    left = np.concatenate([np.arange(length, 0, -1) for length in lengths]) if n else lengths  # tokens up to the end
    totals = np.maximum(lengths[:, None] - np.arange(order), 0)
    matches = np.zeros((n, n, order))
    grams = tokens  # the number of the n-gram that begins at each token
    for i in range(order):
        if i:  # an n-gram is an (n-1)-gram and the token after it
            fits = np.flatnonzero(left > i)
            longer = grams[fits] * len(numbers) + tokens[fits + i]
            grams = np.full_like(tokens, -1)
            grams[fits] = np.unique(longer, return_inverse=True)[1].reshape(-1)
        fits = np.flatnonzero(left > i)
        matches[:, :, i] = _common_occurrences(grams[fits], rows[fits], n)
        matches[np.arange(n), np.arange(n), i] = totals[:, i]
    return matches, totals.astype(np.float64)


def _common_occurrences(grams: np.ndarray, rows: np.ndarray, n: int) -> np.ndarray:
    """Return how many occurrences of n-grams each two of N rows have in common, (N, N); the diagonal is not complete."""
    if not len(grams):
        return np.zeros((n, n))
    order = np.lexsort((rows, grams))
    grams, rows = grams[order], rows[order]
    first = np.r_[True, (grams[1:] != grams[:-1]) | (rows[1:] != rows[:-1])]
    begins = np.flatnonzero(first)
    occurrence = np.arange(len(grams)) - begins[np.cumsum(first) - 1]  # 0, 1, ... of an n-gram in a row
    columns = grams * (occurrence.max() + 1) + occurrence
    _, columns, counts = np.unique(columns, return_inverse=True, return_counts=True)
    columns = columns.reshape(-1)
    shared = counts > 1  # an occurrence that only one row has matches nothing
    columns, rows = (np.cumsum(shared) - 1)[columns][shared[columns]], rows[shared[columns]]
    found, size = np.zeros((n, n)), max(1, MATRIX_SIZE // n)
    for start in range(0, int(shared.sum()), size):
        chunk = (columns >= start) & (columns < start + size)
        matrix = np.zeros((n, min(size, int(shared.sum()) - start)), dtype=np.float32)
        matrix[rows[chunk], columns[chunk] - start] = 1
        found += matrix @ matrix.T  # exact: counts far below 2^24
    return found
