"""Scores of predicted classes, numbers and tags: accuracy, F1, correlations.

The single functions return plain numbers (accuracy 0 to 1, correlations -1 to 1); `score_predictions` returns percent, as
papers print them. A score of 0/0 (no such class, no variance) is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from regard.errors import RegardError

OUTSIDE = "O"  # the BIO tag of words that belong to no entity


def score_predictions(
    task: str, predictions: Sequence[object], truths: Sequence[object], names: Sequence[str] = ()
) -> dict[str, float]:
    """Return all scores of a task by name, in percent.

    Predictions and truths are indices of `names` for classes and images, numbers for regression, and for tagging a list of
    indices for each sentence.
    """
    _check_counts(predictions, truths)
    if task == "tagging":
        found = _tag_scores(predictions, truths, names)  # type: ignore[arg-type]
    elif task == "regression":
        given, true = np.asarray(predictions, np.float64), np.asarray(truths, np.float64)
        found = {"pearson": pearson(given, true), "spearman": spearman(given, true)}
    else:
        table = confusion_matrix(predictions, truths, len(names))  # type: ignore[arg-type]
        found = {"accuracy": accuracy(table), "f1": f1(table), "matthews": matthews(table)}
    return {name: 100 * value for name, value in found.items()}


def _check_counts(predictions: Sequence[object], truths: Sequence[object]) -> None:
    if len(predictions) != len(truths):
        counts = f"{len(predictions):,} predictions and {len(truths):,} true labels"
        raise RegardError(f"scoring needs one true label for each prediction, got {counts}; check the files")
    if not len(predictions):
        raise RegardError("scoring needs at least one prediction, got none; check that the files are not empty")


# ---- classes -----------------------------------------------------------------------------------------------------


def confusion_matrix(predictions: Sequence[int], truths: Sequence[int], n_classes: int) -> np.ndarray:
    """Return the (n, n) counts of examples by true class (row) and predicted class (column)."""
    table = np.zeros((n_classes, n_classes), np.int64)
    np.add.at(table, (np.asarray(truths, np.int64), np.asarray(predictions, np.int64)), 1)
    return table


def accuracy(table: np.ndarray) -> float:
    """Return the share of examples on the diagonal of a confusion matrix."""
    return _ratio(table.trace(), table.sum())


def f1(table: np.ndarray) -> float:
    """Return F1 of the last of two classes, or macro F1 of more: the mean over classes that occur in truth or prediction."""
    right, true, given = table.diagonal(), table.sum(1), table.sum(0)
    each = [_ratio(2 * r, t + g) for r, t, g in zip(right, true, given, strict=True)]
    if len(table) == 2:
        return each[1]
    return _ratio(sum(each), np.count_nonzero(true + given))


def matthews(table: np.ndarray) -> float:
    """Return the Matthews correlation, in Gorodkin's form for any number of classes."""
    counts = table.astype(np.float64)
    n, true, given = counts.sum(), counts.sum(1), counts.sum(0)
    spread = np.sqrt((n * n - true @ true) * (n * n - given @ given))
    return _ratio(n * counts.trace() - true @ given, spread)


# ---- numbers -----------------------------------------------------------------------------------------------------


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Pearson correlation of two arrays; 0 where one of them is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0  # the mean of equal numbers may have a rounding error, and those errors would be correlated
    a, b = a - a.mean(), b - b.mean()
    return _ratio(a @ b, np.linalg.norm(a) * np.linalg.norm(b))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Return the Spearman correlation: Pearson's of the ranks."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Return the rank of each value, from 1; equal values have the mean of their ranks."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


# ---- tags --------------------------------------------------------------------------------------------------------


def extract_entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """Return (first word, last word, type) of each entity in BIO tags, by the rule of conlleval.

    An entity begins at a B, and also at an I after O or after an entity of another type.
    """
    starts = [i for i, (a, b) in enumerate(pairwise([OUTSIDE, *tags])) if _begins(a, b)]
    found = set()
    for start in starts:
        last = start
        while last + 1 < len(tags) and tags[last + 1] != OUTSIDE and not _begins(tags[last], tags[last + 1]):
            last += 1
        found.add((start, last, tags[start][2:]))
    return found


def _begins(before: str, tag: str) -> bool:
    return tag != OUTSIDE and (tag.startswith("B-") or before[2:] != tag[2:])  # O has no type


def _tag_scores(
    predictions: Sequence[Sequence[int]], truths: Sequence[Sequence[int]], names: Sequence[str]
) -> dict[str, float]:
    """Return the accuracy of single tags and, if they are BIO tags, precision, recall and F1 of whole entities."""
    right = words = found = true = hits = 0
    for number, (ours, theirs) in enumerate(zip(predictions, truths, strict=True), 1):
        if len(ours) != len(theirs):
            raise RegardError(f"sentence {number} has {len(theirs)} words, but {len(ours)} tags were predicted")
        right += sum(a == b for a, b in zip(ours, theirs, strict=True))
        words += len(theirs)
        if is_bio(names):
            a, b = extract_entities([names[i] for i in ours]), extract_entities([names[i] for i in theirs])
            found, true, hits = found + len(a), true + len(b), hits + len(a & b)
    result = {"accuracy": _ratio(right, words)}
    if is_bio(names):
        result |= {"precision": _ratio(hits, found), "recall": _ratio(hits, true), "f1": _ratio(2 * hits, found + true)}
    return result


def is_bio(names: Sequence[str]) -> bool:
    """Return whether all tag names have the form of BIO tags."""
    return all(name == OUTSIDE or name.startswith(("B-", "I-")) for name in names)


def _ratio(a: Any, b: Any) -> float:
    return float(a / b) if b else 0.0
