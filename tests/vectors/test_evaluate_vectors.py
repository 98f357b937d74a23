"""Analogies and similarity sets: numbers worked by hand, scipy's correlations, and gensim's results on the same vectors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.evaluate import word_similarity as score
from regard.evaluate.word_similarity import AnalogySection, SimilarityResult
from regard.vectors.word_vectors import WordVectors

# In this plane "queen" is exactly king - man + woman, and "Queen" is the same word in another case.
PLANE = {"king": (2, 2), "man": (1, 2), "woman": (1, -2), "queen": (2, -2), "child": (-1, 0.2), "Queen": (-2, 2)}
QUESTIONS = """: family
man king woman queen
MAN KING WOMAN QUEEN
man king woman child
man king woman aunt
: gram1-plural
man woman king queen
"""


@pytest.fixture
def plane() -> WordVectors:
    return WordVectors(list(PLANE), np.array(list(PLANE.values()), np.float32))


def written(folder: Path, text: str, name: str = "given.txt") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def test_analogies_are_counted_by_section_with_unknown_words_apart(plane: WordVectors, tmp_path: Path) -> None:
    sections = score.evaluate_analogies(plane, written(tmp_path, QUESTIONS))
    assert sections == [AnalogySection("family", 2, 3, 1), AnalogySection("gram1-plural", 1, 1, 0)]
    assert [s.accuracy for s in sections] == [pytest.approx(2 / 3), 1.0]
    assert score.summarize(sections) == [
        AnalogySection("semantic", 2, 3, 1),
        AnalogySection("syntactic", 1, 1, 0),
        AnalogySection("total", 3, 4, 1),
    ]


def test_words_beyond_the_cut_are_neither_asked_nor_answers(plane: WordVectors, tmp_path: Path) -> None:
    path = written(tmp_path, QUESTIONS)
    assert score.evaluate_analogies(plane, path, cut=3)[0] == AnalogySection("family", 0, 0, 4)
    assert score.evaluate_analogies(plane, path, cut=3)[0].accuracy is None
    with pytest.raises(RegardError, match="at least 1 word"):
        score.evaluate_analogies(plane, path, cut=0)


def test_an_input_in_another_case_is_no_answer(tmp_path: Path) -> None:
    vectors = WordVectors(
        ["a", "b", "c", "C", "d"], np.float32([[1, 0, 0], [1, 0, 0.1], [0, 1, 0], [0, 1, 0], [0, 1, 1]])
    )
    assert score.evaluate_analogies(vectors, written(tmp_path, ": s\na b c d\n")) == [AnalogySection("s", 1, 1, 0)]


@pytest.mark.parametrize(
    ("text", "said"), [("a b c d\n", "no ': SECTION' line"), (": s\na b c\n", "line 2: 3 words instead of 4")]
)
def test_questions_that_are_none_are_errors(plane: WordVectors, tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(RegardError, match=said):
        score.evaluate_analogies(plane, written(tmp_path, text))


# ---- similarity ------------------------------------------------------------------------------------------------------


def test_correlations_of_a_set_worked_by_hand(tmp_path: Path) -> None:
    vectors = WordVectors(["a", "b", "c", "d"], np.float32([[1, 0], [1, 1], [0, 1], [-1, 0]]))
    path = written(tmp_path, "# pairs\nA\tb\t3\na\tc\t1\na\td\t2\na\tzebra\t9\n", "SET-3.txt")
    found = score.evaluate_similarity(vectors, path)  # cosines 0.707, 0, -1; ranks 3 2 1 beside 3 1 2
    assert found == SimilarityResult(
        "SET-3", pytest.approx(0.5), pytest.approx(np.corrcoef([0.5**0.5, 0, -1], [3, 1, 2])[0, 1]), 3, 1
    )


def test_where_no_correlation_is_defined_there_is_none(plane: WordVectors, tmp_path: Path) -> None:
    assert score.evaluate_similarity(plane, written(tmp_path, "man\tking\t3\nx\ty\t1\n")) == SimilarityResult(
        "given", None, None, 1, 1
    )


def test_names_of_columns_are_skipped_and_other_lines_without_a_number_are_errors(
    plane: WordVectors, tmp_path: Path
) -> None:
    assert (
        score.evaluate_similarity(plane, written(tmp_path, "Word 1\tWord 2\tMean\nman\tking\t3\nman\twoman\t1\n")).asked
        == 2
    )
    with pytest.raises(RegardError, match="line 2: a pair looks like"):
        score.evaluate_similarity(plane, written(tmp_path, "man\tking\t3\nman\twoman\n"))


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=3, max_size=30))
def test_ranks_share_ties_as_scipys_do(pairs: list[tuple[int, int]]) -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = np.array(pairs, np.float64).T
    if np.ptp(a) and np.ptp(b):
        assert score.spearman(a, b) == pytest.approx(stats.spearmanr(a, b)[0], abs=1e-12)
        assert score.pearson(a, b) == pytest.approx(stats.pearsonr(a, b)[0], abs=1e-12)


# ---- gensim ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed() -> WordVectors:
    """Words of real test sets, some in several cases, with related words near each other."""
    rng = np.random.default_rng(3)
    nouns = [f"w{i}" for i in range(60)]
    base = rng.normal(size=(60, 12))
    shift = rng.normal(size=12)
    words = [*nouns, *(f"{n}s" for n in nouns), *(n.upper() for n in nouns[::3]), *(n.title() for n in nouns[::4])]
    rows = [base, base + shift, base[::3], base[::4]]
    noisy = np.concatenate(rows) + rng.normal(size=(len(words), 12)) * 0.5
    order = rng.permutation(len(words))
    kept = list(dict.fromkeys(words[i] for i in order))
    return WordVectors(kept, np.stack([noisy[words.index(w)] for w in kept]).astype(np.float32))


def keyed(vectors: WordVectors) -> Any:
    theirs = pytest.importorskip("gensim.models.keyedvectors").KeyedVectors(vectors.dim)
    theirs.add_vectors(vectors.words, vectors.vectors)
    return theirs


@pytest.mark.parametrize("cut", [100, 300_000])
def test_analogies_are_scored_exactly_as_gensim_scores_them(mixed: WordVectors, tmp_path: Path, cut: int) -> None:
    rng = np.random.default_rng(4)
    lines = [f"w{i} W{i}s w{j} w{j}s" for i, j in rng.integers(0, 64, (300, 2)) if i != j]
    path = written(tmp_path, ": one\n" + "\n".join(lines[:150]) + "\n: gram2\n" + "\n".join(lines[150:]) + "\n")
    ours = score.evaluate_analogies(mixed, path, cut)
    overall, theirs = keyed(mixed).evaluate_word_analogies(str(path), restrict_vocab=cut)
    for mine, other in zip([*ours, score.sum_sections(ours)], theirs, strict=True):
        assert mine.correct == len(other["correct"])
        assert mine.asked == len(other["correct"]) + len(other["incorrect"])
    assert score.sum_sections(ours).accuracy == overall
    assert 0.05 < overall < 0.95  # a test that could not fail would be none


@pytest.mark.parametrize("cut", [100, 300_000])
def test_pairs_are_scored_exactly_as_gensim_scores_them(mixed: WordVectors, tmp_path: Path, cut: int) -> None:
    rng = np.random.default_rng(5)
    lines = [f"w{i}\tW{j}s\t{rng.integers(0, 10)}" for i, j in rng.integers(0, 64, (200, 2))]
    path = written(tmp_path, "\n".join(lines) + "\n")
    ours = score.evaluate_similarity(mixed, path, cut)
    pearson, spearman, unknown = keyed(mixed).evaluate_word_pairs(str(path), restrict_vocab=cut)
    assert ours.spearman == pytest.approx(spearman[0], abs=1e-9)
    assert ours.pearson == pytest.approx(pearson[0], abs=1e-6)
    assert 100 * ours.skipped / (ours.asked + ours.skipped) == pytest.approx(unknown)
    assert 0 < ours.skipped < 200


def test_the_published_questions_have_14_sections(mixed: WordVectors, data_folder: Path) -> None:
    sections = score.evaluate_analogies(mixed, data_folder / "wordsim" / "questions-words.txt.xz")
    assert len(sections) == 14
    semantic, syntactic, everything = score.summarize(sections)
    assert (semantic.skipped, syntactic.skipped, everything.skipped) == (8869, 10675, 19544)


def test_batches_of_any_size_give_the_same(mixed: WordVectors, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, ": s\n" + "".join(f"w{i} w{i}s w{i + 1} w{i + 1}s\n" for i in range(50)))
    whole = score.evaluate_analogies(mixed, path)
    monkeypatch.setattr(score, "MAX_SCORES", 7 * len(mixed))
    assert score.evaluate_analogies(mixed, path) == whole
    assert whole[0].correct


def test_3cosmul_solves_analogies_too(plane: WordVectors, tmp_path: Path) -> None:
    assert score.evaluate_analogies(plane, written(tmp_path, QUESTIONS), method="mul")[0].correct == 2
