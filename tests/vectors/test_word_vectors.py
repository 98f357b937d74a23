"""Nearest words, analogies and similarities, against the formulas in float64 and against gensim."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import regard
from regard.errors import RegardError
from regard.vectors.word_vectors import WordVectors, similar_spellings, top_indices

ROYAL = {
    "king": [1.0, 1.0, 0.1],
    "queen": [1.0, -1.0, 0.1],
    "man": [0.1, 1.0, 0.0],
    "woman": [0.1, -1.0, 0.0],
    "boy": [0.0, 1.0, 0.4],
    "Paris": [0.0, 0.0, 3.0],
}


@pytest.fixture
def royal() -> WordVectors:
    return WordVectors(list(ROYAL), np.array(list(ROYAL.values()), np.float32))


@pytest.fixture
def many() -> WordVectors:
    rng = np.random.default_rng(0)
    return WordVectors([f"w{i}" for i in range(300)], rng.normal(size=(300, 20)).astype(np.float32))


def cosines(x: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    x, vectors = x.astype(np.float64), vectors.astype(np.float64)
    return vectors @ x / np.linalg.norm(vectors, axis=1) / np.linalg.norm(x)


def test_a_word_has_its_vector_and_is_looked_up_as_it_is_written(royal: WordVectors) -> None:
    assert royal["man"].tolist() == np.float32([0.1, 1.0, 0.0]).tolist()
    assert "Paris" in royal
    assert "paris" not in royal
    assert (len(royal), royal.dim) == (6, 3)


def test_similarity_is_the_cosine(royal: WordVectors) -> None:
    assert royal.similarity("king", "man") == pytest.approx(1.1 / (np.sqrt(2.01) * np.sqrt(1.01)), abs=1e-6)
    assert royal.similarity("Paris", "Paris") == pytest.approx(1.0)


def test_nearest_words_are_those_with_the_greatest_cosines_without_the_word_itself(many: WordVectors) -> None:
    truth = cosines(many["w7"], many.vectors)
    order = [i for i in np.argsort(-truth) if i != 7][:5]
    found = many.nearest("w7", 5)
    assert [word for word, _ in found] == [f"w{i}" for i in order]
    assert [score for _, score in found] == pytest.approx(truth[order], abs=1e-6)


def test_nearest_to_a_vector_leaves_nothing_out_and_does_not_ask_for_its_length(many: WordVectors) -> None:
    assert many.nearest(1000 * many["w7"], 1) == [("w7", pytest.approx(1.0))]


def test_more_words_than_there_are_gives_all_others(royal: WordVectors) -> None:
    assert {word for word, _ in royal.nearest("king", 100)} == set(ROYAL) - {"king"}


def test_man_is_to_king_as_woman_is_to_queen(royal: WordVectors) -> None:
    assert royal.analogy("man", "king", "woman", 1)[0][0] == "queen"
    assert royal.analogy("man", "king", "woman", 1, "mul")[0][0] == "queen"


def test_3cosmul_is_its_formula(many: WordVectors) -> None:
    a, b, c = ((1 + cosines(many[word], many.vectors)) / 2 for word in ("w1", "w2", "w3"))
    scores = b * c / (a + 0.001)
    order = [i for i in np.argsort(-scores) if i not in (1, 2, 3)][:8]
    found = many.analogy("w1", "w2", "w3", 8, "mul")
    assert [word for word, _ in found] == [f"w{i}" for i in order]
    assert [score for _, score in found] == pytest.approx(scores[order], rel=1e-4)


def test_answers_are_those_of_gensim(many: WordVectors) -> None:
    keyed = pytest.importorskip("gensim.models.keyedvectors").KeyedVectors(many.dim)
    keyed.add_vectors(many.words, many.vectors)
    for word in ("w0", "w99"):
        compare(many.nearest(word, 12), keyed.most_similar(word, topn=12))
    compare(many.analogy("w1", "w2", "w3", 12), keyed.most_similar(positive=["w2", "w3"], negative=["w1"], topn=12))
    assert many.rank("w4", "w5") == keyed.rank("w4", "w5")


def compare(ours: list[tuple[str, float]], theirs: list[tuple[str, float]]) -> None:
    assert [word for word, _ in ours] == [word for word, _ in theirs]
    assert [score for _, score in ours] == pytest.approx([score for _, score in theirs], abs=1e-5)


def test_a_vector_of_zeros_is_near_nothing() -> None:
    vectors = WordVectors(["a", "b", "nought"], np.array([[1, 0], [1, 1], [0, 0]], np.float32))
    assert vectors.nearest("a") == [("b", pytest.approx(0.5**0.5)), ("nought", 0.0)]


def test_of_a_word_that_is_there_twice_the_first_counts() -> None:
    vectors = WordVectors(["a", "b", "a"], np.eye(3, dtype=np.float32))
    assert vectors["a"].tolist() == [1, 0, 0]


def test_top_keeps_the_order_of_equal_scores() -> None:
    assert top_indices(np.array([1.0, 3.0, 2.0, 3.0, 2.0]), 4).tolist() == [1, 3, 2, 4]


# ---- what is not there -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"), [("quen", "queen"), ("PARIS", "Paris"), ("knig", "king"), ("womann", "woman")]
)
def test_an_unknown_word_is_an_error_that_names_the_nearest_spellings(
    royal: WordVectors, given: str, meant: str
) -> None:
    with pytest.raises(RegardError, match=f"{given!r} is not among the 6 words.*{meant!r}"):
        royal.nearest(given)


def test_where_no_spelling_is_near_the_error_says_how_words_are_looked_up(royal: WordVectors) -> None:
    with pytest.raises(RegardError, match="as they are written, case included"):
        royal.similarity("king", "xylophone")


def test_the_nearest_spelling_comes_first() -> None:
    assert similar_spellings("recive", ["relieve", "deceive", "receive", "table"])[0] == "receive"


def test_what_cannot_be_asked_is_an_error(royal: WordVectors) -> None:
    with pytest.raises(RegardError, match="at least 1 word"):
        royal.nearest("king", 0)
    with pytest.raises(RegardError, match="choose add or mul"):
        royal.analogy("man", "king", "woman", method="plus")
    with pytest.raises(RegardError, match=r"shape \(2,\)"):
        royal.nearest(np.zeros(2))
    with pytest.raises(RegardError, match="two words"):
        royal.rank("king", "king")
    with pytest.raises(RegardError, match="do not go together"):
        WordVectors(["a"], np.zeros((2, 3), np.float32))


# ---- from Python -----------------------------------------------------------------------------------------------------


def test_regard_load_gives_word_vectors_from_a_file_or_a_folder(royal: WordVectors, tmp_path: Path) -> None:
    for name in ("words.bin", "words"):
        royal.save(tmp_path / name)
        loaded = regard.load(tmp_path / name)
        assert isinstance(loaded, regard.WordVectors)
        assert loaded.words == royal.words


def test_a_folder_keeps_counts_outside_vectors_and_how_they_were_made(royal: WordVectors, tmp_path: Path) -> None:
    counts, outside = np.arange(6, 0, -1), np.ones((5, 3), np.float32)
    WordVectors(royal.words, royal.vectors, counts, outside, {"model": "cbow"}).save(tmp_path / "v")
    loaded = WordVectors.load(tmp_path / "v")
    assert loaded.counts is not None
    assert loaded.outside is not None
    assert loaded.counts.tolist() == counts.tolist()
    assert loaded.outside.tolist() == outside.tolist()
    assert loaded.about == {"model": "cbow"}
    about = json.loads((tmp_path / "v" / "config.json").read_text())
    assert about == {"kind": "word-vectors", "words": 6, "dim": 3, "model": "cbow"}
