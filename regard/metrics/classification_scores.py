"""How good answers are: classes, numbers and tags.

The single measures are plain numbers (accuracy 0 to 1, correlations -1 to 1); `scores` gives them in percent, as papers
print them. Where a measure is 0/0 (no such class, no variance) it is 0: nothing was found.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from regard.errors import RegardError

OUTSIDE = "O"


def scores(
    task: str, predictions: Sequence[object], truths: Sequence[object], names: Sequence[str] = ()
) -> dict[str, float]:
    """All measures of a task, in percent.

    Classification and images: indices of `names`; regression: numbers; tagging: a list of such indices for each sentence.
    """
    _check_counts(predictions, truths)
    if task == "tagging":
        found = _tag_scores(predictions, truths, names)  # type: ignore[arg-type]
    elif task == "regression":
        given, true = np.asarray(predictions, np.float64), np.asarray(truths, np.float64)
        found = {"pearson": pearson(given, true), "spearman": spearman(given, true)}
    else:
        table = confusion(predictions, truths, len(names))  # type: ignore[arg-type]
        found = {"accuracy": accuracy(table), "f1": f1(table), "matthews": matthews(table)}
    return {name: 100 * value for name, value in found.items()}


def _check_counts(predictions: Sequence[object], truths: Sequence[object]) -> None:
    if len(predictions) != len(truths):
        counts = f"{len(predictions):,} predictions and {len(truths):,} true answers"
        raise RegardError(f"scoring needs one true answer for each prediction, got {counts}; check the files")
    if not len(predictions):
        raise RegardError("scoring needs at least one prediction, got none; check that the files are not empty")


# ---- classes -----------------------------------------------------------------------------------------------------


def confusion(predictions: Sequence[int], truths: Sequence[int], n_classes: int) -> np.ndarray:
    """(n, n) counts: row = the true class, column = the predicted one."""
    table = np.zeros((n_classes, n_classes), np.int64)
    np.add.at(table, (np.asarray(truths, np.int64), np.asarray(predictions, np.int64)), 1)
    return table


def accuracy(table: np.ndarray) -> float:
    return _ratio(table.trace(), table.sum())


def f1(table: np.ndarray) -> float:
    """Of two classes: of the last one. Of more: the mean over those that occur, in truth or prediction (macro)."""
    right, true, given = table.diagonal(), table.sum(1), table.sum(0)
    each = [_ratio(2 * r, t + g) for r, t, g in zip(right, true, given, strict=True)]
    if len(table) == 2:
        return each[1]
    return _ratio(sum(each), np.count_nonzero(true + given))


def matthews(table: np.ndarray) -> float:
    """Matthews correlation, in Gorodkin's form for any number of classes."""
    counts = table.astype(np.float64)
    n, true, given = counts.sum(), counts.sum(1), counts.sum(0)
    spread = np.sqrt((n * n - true @ true) * (n * n - given @ given))
    return _ratio(n * counts.trace() - true @ given, spread)


# ---- numbers -----------------------------------------------------------------------------------------------------


def pearson(a: np.ndarray, b: np.ndarray) -> float:
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0  # the mean of equal numbers may be off by a rounding error, and those would be correlated
    a, b = a - a.mean(), b - b.mean()
    return _ratio(a @ b, np.linalg.norm(a) * np.linalg.norm(b))


def spearman(a: np.ndarray, b: np.ndarray) -> float:
    """Pearson of the ranks."""
    return pearson(_ranks(a), _ranks(b))


def _ranks(values: np.ndarray) -> np.ndarray:
    """From 1 up; equal values share the mean of theirs."""
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[which]


# ---- tags --------------------------------------------------------------------------------------------------------


def entities(tags: Sequence[str]) -> set[tuple[int, int, str]]:
    """(first word, last word, kind) of each entity in BIO tags, by conlleval's rule.

    One begins at a B, and also at an I that goes on with nothing: after O or after another kind.
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
    return tag != OUTSIDE and (tag.startswith("B-") or before[2:] != tag[2:])  # O has no kind


def _tag_scores(
    predictions: Sequence[Sequence[int]], truths: Sequence[Sequence[int]], names: Sequence[str]
) -> dict[str, float]:
    """Accuracy of the words; and if the tags are BIO, precision, recall and F1 of whole entities."""
    right = words = found = true = hits = 0
    for number, (ours, theirs) in enumerate(zip(predictions, truths, strict=True), 1):
        if len(ours) != len(theirs):
            raise RegardError(f"sentence {number} has {len(theirs)} words, but {len(ours)} tags were predicted")
        right += sum(a == b for a, b in zip(ours, theirs, strict=True))
        words += len(theirs)
        if is_bio(names):
            a, b = entities([names[i] for i in ours]), entities([names[i] for i in theirs])
            found, true, hits = found + len(a), true + len(b), hits + len(a & b)
    result = {"accuracy": _ratio(right, words)}
    if is_bio(names):
        result |= {"precision": _ratio(hits, found), "recall": _ratio(hits, true), "f1": _ratio(2 * hits, found + true)}
    return result


def is_bio(names: Sequence[str]) -> bool:
    return all(name == OUTSIDE or name.startswith(("B-", "I-")) for name in names)


def _ratio(a: Any, b: Any) -> float:
    return float(a / b) if b else 0.0
