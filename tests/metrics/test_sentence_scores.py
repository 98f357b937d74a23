"""Scores of single sentences against sacreBLEU, against their definitions, and all pairs against single pairs."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import sacrebleu

from regard.metrics.sentence_scores import (
    UTILITIES,
    pairwise_scores,
    sentence_bleu,
    sentence_chrf,
    sentence_gleu,
)

TOLERANCE = 1e-12  # float64, at most a few dozen operations


def random_texts(n: int, seed: int) -> list[str]:
    """Return variants of a few sentences: words dropped, doubled and swapped, so that n-grams repeat and match."""
    draw = random.Random(seed)
    words = ["der", "Hund", ",", "die", "die", "Katze", "sieht", "und", "sieht", ",", "schläft", ".", "Ein", "Ei", "!"]
    made = []
    for _ in range(n):
        own = [w for w in words for _ in range(draw.choice((0, 1, 1, 1, 2)))]
        i = draw.randrange(max(1, len(own)))
        made.append(" ".join(own[i:] + own[:i]))
    return made


TEXTS = [*random_texts(12, 0), "", "a", "ab a", "  Hallo\tWelt ", "aaa aaa aaa", "Hund", "日本語 です", "x y z w"]


def test_gleu_by_hand() -> None:
    # hypothesis a b a: n-grams a a b | ab ba | aba; reference a b c: a b c | ab bc | abc. Matches: a, b, ab of 6 and 6.
    assert sentence_gleu("aba", "abc") == 3 / 6
    # A longer reference: 4 + 3 + 2 + 1 = 10 n-grams; all 3 + 2 + 1 = 6 of the hypothesis match.
    assert sentence_gleu(["a", "b", "c"], ["a", "b", "c", "d"]) == 6 / 10
    assert sentence_gleu([1, 2, 3, 4], [1, 2, 3]) == 6 / 10  # symmetric
    assert sentence_gleu([], [1]) == sentence_gleu([1], []) == sentence_gleu([], []) == 0
    assert sentence_gleu((7,), (7,)) == 1


def test_bleu_by_hand() -> None:
    # 1 of 2 unigrams match; no bigram: half a match of 1. Higher orders do not exist. No brevity penalty.
    assert sentence_bleu("ab", "ac") == pytest.approx(math.sqrt(0.5 * 0.5), rel=TOLERANCE)
    # All n-grams match, but 2 tokens stand against 4: exp(1 - 4 / 2).
    assert sentence_bleu([1, 2], [1, 2, 3, 4]) == pytest.approx(math.exp(-1), rel=TOLERANCE)
    assert sentence_bleu([1], [2]) == sentence_bleu([], [2]) == sentence_bleu([2], []) == 0


@pytest.mark.parametrize("hypothesis", TEXTS)
def test_scores_are_those_of_sacrebleu(hypothesis: str) -> None:
    for reference in TEXTS:
        chrf = sacrebleu.sentence_chrf(hypothesis, [reference]).score / 100
        assert sentence_chrf(hypothesis, reference) == pytest.approx(chrf, rel=TOLERANCE)
        bleu = sacrebleu.sentence_bleu(hypothesis, [reference], tokenize="none").score / 100
        assert sentence_bleu(hypothesis.split(), reference.split()) == pytest.approx(bleu, rel=TOLERANCE)


def test_pairwise_scores_are_those_of_sacrebleu() -> None:
    expected = {
        "chrf": lambda h, r: sacrebleu.sentence_chrf(h, [r]).score / 100,
        "bleu": lambda h, r: sacrebleu.sentence_bleu(h, [r]).score / 100,
    }
    for utility, score in expected.items():
        wanted = np.array([[score(h, r) for r in TEXTS] for h in TEXTS])
        np.testing.assert_allclose(pairwise_scores(TEXTS, utility, "de"), wanted, rtol=TOLERANCE)
    zh = np.array([[sacrebleu.sentence_bleu(h, [r], tokenize="zh").score / 100 for r in TEXTS] for h in TEXTS])
    np.testing.assert_allclose(pairwise_scores(TEXTS, "bleu", "zh-CN"), zh, rtol=TOLERANCE)


def test_pairwise_gleu_is_that_of_single_pairs() -> None:
    texts = [text.replace(",", "").replace(".", "").replace("!", "") for text in TEXTS]  # words alone: any tokenizer
    wanted = np.array([[sentence_gleu(h.split(), r.split()) for r in texts] for h in texts])
    np.testing.assert_allclose(pairwise_scores(texts, "gleu", "de"), wanted, rtol=TOLERANCE)


@pytest.mark.parametrize("utility", UTILITIES)
def test_counting_in_pieces_changes_nothing(utility: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = pairwise_scores(TEXTS, utility, "de")
    monkeypatch.setattr("regard.metrics.sentence_scores.MATRIX_SIZE", 3 * len(TEXTS))
    np.testing.assert_array_equal(pairwise_scores(TEXTS, utility, "de"), whole)


@pytest.mark.parametrize("utility", UTILITIES)
def test_pairs_of_no_text_and_of_one(utility: str) -> None:
    assert pairwise_scores([], utility, "de").shape == (0, 0)
    assert pairwise_scores([""], utility, "de").tolist() == [[0]]
    assert pairwise_scores(["ein Haus"], utility, "de") == pytest.approx(1)
