"""Scores of samples by hand, against sacreBLEU, and against the counting of single pairs."""

from __future__ import annotations

import numpy as np
import pytest
import sacrebleu
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.metrics.sample_scores import score_samples
from regard.metrics.sentence_scores import characters, sentence_bleu, sentence_gleu

TOLERANCE = 1e-12  # float64, at most a few dozen operations
REFERENCE = "the cat sat on the mat"


@pytest.mark.parametrize(
    ("sample", "expected"),
    [
        (REFERENCE, 1.0),
        ("the cat sat on mat", 11 / 18),  # 5 + 3 + 2 + 1 matches, and 6 + 5 + 4 + 3 n-grams of the reference
        ("the the the the", 2 / 18),  # the reference has two "the"
        ("mat the on sat cat the", 6 / 18),  # every word, and no two of them together
        ("the cat sat on the mat the cat sat on the mat", 18 / 42),  # 12 + 11 + 10 + 9 n-grams of the sample
        ("a dog", 0.0),
        ("", 0.0),
    ],
)
def test_gleu_by_hand(sample: str, expected: float) -> None:
    (((found,),)) = score_samples([[sample.split()]], [REFERENCE.split()], "gleu")
    assert found == pytest.approx(expected, rel=TOLERANCE)


tokens = st.lists(st.integers(0, 3), max_size=9)


@settings(max_examples=60)
@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(st.tuples(tokens, st.lists(tokens, min_size=n, max_size=n)), min_size=1)
    )
)
def test_they_are_the_scores_of_single_pairs(rows: list[tuple[list[int], list[list[int]]]]) -> None:
    """Few different tokens, so that n-grams repeat; empty samples and references among them."""
    references, samples = [row[0] for row in rows], [row[1] for row in rows]
    for metric, single in (("gleu", sentence_gleu), ("bleu", sentence_bleu)):
        expected = [[single(sample, reference) for sample in own] for reference, own in rows]
        np.testing.assert_allclose(score_samples(samples, references, metric), expected, rtol=TOLERANCE)


TEXTS = [
    "ein Hund sieht die Katze .",
    "ein Hund , ein Hund sieht ein Ei !",
    "Hunde sehen Katzen .",
    "das Ei ist rot",
    "rot",
]


def test_chrf_and_bleu_are_those_of_sacrebleu() -> None:
    samples = [[characters(text) for text in TEXTS] for _ in TEXTS]
    found = score_samples(samples, [characters(text) for text in TEXTS], "chrf")
    expected = [[sacrebleu.sentence_chrf(ours, [theirs]).score / 100 for ours in TEXTS] for theirs in TEXTS]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    found = score_samples([[text.split() for text in TEXTS] for _ in TEXTS], [text.split() for text in TEXTS], "bleu")
    expected = [[sacrebleu.sentence_bleu(ours, [theirs]).score / 100 for ours in TEXTS] for theirs in TEXTS]
    np.testing.assert_allclose(found, expected, rtol=1e-9, atol=1e-12)
