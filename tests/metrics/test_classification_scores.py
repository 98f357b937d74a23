"""Classification scores against fractions worked by hand and float64 formulas written another way."""

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.metrics.classification_scores import (
    accuracy,
    confusion_matrix,
    extract_entities,
    f1,
    matthews,
    pearson,
    score_predictions,
    spearman,
)

BIO = ("B-LOC", "B-PER", "I-LOC", "I-PER", "O")
NUMBERS = st.lists(st.tuples(st.integers(-5, 5), st.integers(-5, 5)), min_size=1, max_size=30)
SENTENCES = st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), max_size=12), min_size=1, max_size=4)


# ---- classes -----------------------------------------------------------------------------------------------------


def test_two_classes_by_hand() -> None:
    # 3 of 4 positive found, 2 false alarms among 6 negative: precision 3/5, recall 3/4, F1 = 6/9.
    truths, given_ = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 1, 1, 0, 0, 0, 0]
    table = confusion_matrix(given_, truths, 2)
    assert table.tolist() == [[4, 2], [1, 3]]
    assert accuracy(table) == pytest.approx(7 / 10)
    assert f1(table) == pytest.approx(2 / 3)
    assert matthews(table) == pytest.approx((3 * 4 - 2 * 1) / math.sqrt(5 * 4 * 6 * 5))
    percent = score_predictions("classification", given_, truths, ("bad", "good"))
    assert percent == pytest.approx({"accuracy": 70, "f1": 200 / 3, "matthews": 1000 / math.sqrt(600)})
    assert score_predictions("image-classification", given_, truths, ("bad", "good")) == percent


def test_three_classes_by_hand() -> None:
    # F1 of a class: twice the right ones over true and predicted ones.
    table = confusion_matrix([0, 0, 1, 1, 1, 2], [0, 0, 0, 1, 1, 2], 3)
    assert table.tolist() == [[2, 1, 0], [0, 2, 0], [0, 0, 1]]
    assert f1(table) == pytest.approx((2 * 2 / (3 + 2) + 2 * 2 / (2 + 3) + 2 * 1 / (1 + 1)) / 3)


def test_classes_that_do_not_occur_do_not_lower_macro_f1() -> None:
    assert f1(confusion_matrix([0, 1, 1], [0, 1, 1], 5)) == 1.0
    assert f1(confusion_matrix([0, 1, 3], [0, 1, 1], 5)) == pytest.approx((1 + 2 / 3 + 0) / 3)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=40))
def test_matthews_is_the_correlation_of_one_hot_vectors(pairs: list[tuple[int, int]]) -> None:
    x, y = (np.eye(4)[[pair[side] for pair in pairs]] for side in (0, 1))
    x, y = x - x.mean(0), y - y.mean(0)
    spread = math.sqrt((x * x).sum() * (y * y).sum())
    expected = (x * y).sum() / spread if spread > 1e-12 else 0.0
    table = confusion_matrix([a for a, _ in pairs], [b for _, b in pairs], 4)
    assert matthews(table) == pytest.approx(expected, abs=1e-9)


def test_a_constant_answer_scores_no_correlation_and_no_f1() -> None:
    assert score_predictions("classification", [0, 0, 0], [0, 1, 1], "ab") == pytest.approx(
        {"accuracy": 100 / 3, "f1": 0.0, "matthews": 0.0}
    )


# ---- numbers -----------------------------------------------------------------------------------------------------


def test_correlations_by_hand() -> None:
    a, b = np.array([1.0, 2.0, 3.0, 4.0, 5.0]), np.array([1.0, 3.0, 2.0, 5.0, 4.0])
    assert spearman(a, b) == pytest.approx(1 - 6 * 4 / (5 * 24))  # four differences of one
    assert spearman(a, np.exp(a)) == pytest.approx(1.0)
    assert pearson(a, np.exp(a)) < 0.95
    # Ties: ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4 make 4.5 / sqrt(4.5 * 5).
    assert spearman(np.array([0.0, 7.0, 7.0, 9.0]), np.array([1.0, 2.0, 3.0, 4.0])) == pytest.approx(math.sqrt(0.9))
    assert score_predictions("regression", [3, 1, 2], [6, 2, 4]) == pytest.approx({"pearson": 100.0, "spearman": 100.0})
    assert score_predictions("regression", [1, 2], [4.0, 2.5]) == pytest.approx({"pearson": -100.0, "spearman": -100.0})


def ranks(values: Sequence[float]) -> list[float]:
    return [sum(w < v for w in values) + (sum(w == v for w in values) + 1) / 2 for v in values]


@given(NUMBERS)
def test_correlations_are_numpys(pairs: list[tuple[int, int]]) -> None:
    a, b = ([float(pair[side]) for pair in pairs] for side in (0, 1))
    constant = len(set(a)) == 1 or len(set(b)) == 1
    for ours, x, y in ((pearson, a, b), (spearman, ranks(a), ranks(b))):
        expected = 0.0 if constant else np.corrcoef(x, y)[0, 1]
        assert ours(np.array(a), np.array(b)) == pytest.approx(expected, abs=1e-12)


def test_two_constants_are_not_correlated() -> None:
    constants = np.full(6, 0.1), np.full(6, 0.7)  # their means are not exactly 0.1 and 0.7
    assert pearson(*constants) == spearman(*constants) == 0.0


# ---- tags --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tags", "found"),
    [
        ("O O", set()),
        ("", set()),
        ("B-PER I-PER O B-LOC", {(0, 1, "PER"), (3, 3, "LOC")}),
        ("B-PER B-PER I-PER", {(0, 0, "PER"), (1, 2, "PER")}),
        ("I-PER I-PER O I-LOC", {(0, 1, "PER"), (3, 3, "LOC")}),  # begins without a B
        ("B-PER I-LOC I-LOC", {(0, 0, "PER"), (1, 2, "LOC")}),  # another kind begins
    ],
)
def test_entities_by_hand(tags: str, found: set[tuple[int, int, str]]) -> None:
    assert extract_entities(tags.split()) == found


def conlleval(truths: Sequence[Sequence[str]], guesses: Sequence[Sequence[str]]) -> tuple[int, int, int]:
    """Return the numbers of right, true and predicted entities, counted by word as the Perl script of CoNLL-2000 does."""

    def split(tag: str) -> tuple[str, str]:
        return (tag[0], tag[2:]) if tag != "O" else ("O", "")

    def ends(before: tuple[str, str], tag: tuple[str, str]) -> bool:
        if before[0] in "BI" and tag[0] in "BO":
            return True
        return before[0] != "O" and before[1] != tag[1]

    def starts(before: tuple[str, str], tag: tuple[str, str]) -> bool:
        if tag[0] == "B" or (before[0] == "O" and tag[0] == "I"):
            return True
        return tag[0] != "O" and before[1] != tag[1]

    right = n_true = n_guessed = 0
    for truth, guess in zip(truths, guesses, strict=True):
        inside, last_t, last_g = False, ("O", ""), ("O", "")
        for t, g in zip([*map(split, truth), ("O", "")], [*map(split, guess), ("O", "")], strict=True):
            if inside:
                end_t, end_g = ends(last_t, t), ends(last_g, g)
                if end_t and end_g:
                    inside, right = False, right + 1
                elif end_t != end_g or t[1] != g[1]:
                    inside = False
            start_t, start_g = starts(last_t, t), starts(last_g, g)
            inside = inside or (start_t and start_g and t[1] == g[1])
            n_true, n_guessed = n_true + start_t, n_guessed + start_g
            last_t, last_g = t, g
    return right, n_true, n_guessed


@given(SENTENCES)
def test_entity_scores_are_conllevals(sentences: list[list[tuple[int, int]]]) -> None:
    truths, guesses = ([[pair[side] for pair in sentence] for sentence in sentences] for side in (0, 1))
    right, n_true, n_guessed = conlleval(*([[BIO[i] for i in s] for s in side] for side in (truths, guesses)))
    words = sum(map(len, truths))
    same = sum(a == b for sentence in sentences for a, b in sentence)
    assert score_predictions("tagging", guesses, truths, BIO) == pytest.approx(
        {
            "accuracy": 100 * same / max(words, 1),
            "precision": 100 * right / max(n_guessed, 1),
            "recall": 100 * right / max(n_true, 1),
            "f1": 200 * right / max(n_true + n_guessed, 1),
        }
    )


def test_entities_of_one_sentence_do_not_match_those_of_another() -> None:
    assert score_predictions("tagging", [[1, 4], [4, 4]], [[4, 4], [1, 4]], BIO)["f1"] == 0.0


def test_tags_that_are_not_bio_have_accuracy_alone() -> None:
    assert score_predictions("tagging", [[0, 1], [1]], [[0, 0], [1]], ("NOUN", "VERB")) == pytest.approx(
        {"accuracy": 200 / 3}
    )


# ---- what cannot be scored ---------------------------------------------------------------------------------------


def test_counts_that_differ_and_nothing_at_all_are_refused() -> None:
    with pytest.raises(RegardError, match="2 predictions and 1 true labels"):
        score_predictions("classification", [0, 1], [0], ("a", "b"))
    with pytest.raises(RegardError, match="at least one prediction"):
        score_predictions("regression", [], [])
    with pytest.raises(RegardError, match="sentence 2 has 1 words, but 2 tags"):
        score_predictions("tagging", [[0], [0, 1]], [[0], [1]], BIO)
