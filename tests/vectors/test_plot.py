"""Words in the plane: principal components against an eigendecomposition, and pictures that hold what was asked for."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest

from regard.errors import RegardError
from regard.look.word_vector_plot import overlap, plot_words, principal_components
from regard.vectors.word_vectors import WordVectors

WORDS = ["man", "woman", "king", "queen", "3:1", "$x_1$", "犬"]


@pytest.fixture
def vectors() -> WordVectors:
    return WordVectors(WORDS, np.random.default_rng(1).normal(size=(7, 5)).astype(np.float32))


def test_points_are_the_two_first_principal_components() -> None:
    x = np.random.default_rng(0).normal(size=(30, 6)) * [5, 1, 3, 1, 1, 1] + 10
    points, shares = principal_components(x)
    values, axes = np.linalg.eigh(np.cov(x.T))
    expected = (x - x.mean(0)) @ axes[:, [-1, -2]]
    np.testing.assert_allclose(np.abs(points), np.abs(expected), atol=1e-9)
    np.testing.assert_allclose(shares, values[[-1, -2]] / values.sum())
    assert (points.max(0) >= -points.min(0)).all()  # the sign is settled, so a picture is the same every time


def test_vectors_of_one_number_lie_on_a_line() -> None:
    points, shares = principal_components(np.array([[1.0], [2.0], [6.0]]))
    np.testing.assert_allclose(points, [[-2, 0], [-1, 0], [3, 0]], atol=1e-12)
    assert shares == pytest.approx((1.0, 0.0))


def test_pairs_are_joined_and_each_word_is_there_once(vectors: WordVectors) -> None:
    drawn = plot_words(vectors, ["man:woman", "king:queen", "man:king", "3:1"])
    assert drawn.words == ("man", "woman", "king", "queen", "3:1")
    assert drawn.numbers()["lines"] == [["man", "woman"], ["king", "queen"], ["man", "king"]]


def test_without_words_the_most_frequent_are_drawn(vectors: WordVectors) -> None:
    assert plot_words(vectors, n=4).words == tuple(WORDS[:4])


def test_too_few_or_unknown_words_are_errors(vectors: WordVectors) -> None:
    with pytest.raises(RegardError, match="at least 3"):
        plot_words(vectors, ["man:woman"])
    with pytest.raises(RegardError, match="did you mean 'queen'"):
        plot_words(vectors, ["man:woman", "quene"])


def test_an_svg_holds_every_label_and_a_png_is_one(vectors: WordVectors, tmp_path: Path) -> None:
    drawn = plot_words(vectors, ["man:woman", *WORDS[:-1]])  # the usual fonts have no Chinese
    drawn.save(tmp_path / "a" / "words.svg")
    drawn.save(tmp_path / "words.png")
    root = ElementTree.parse(tmp_path / "a" / "words.svg").getroot()
    assert root.tag.endswith("svg")
    comments = (tmp_path / "a" / "words.svg").read_text(encoding="utf-8")
    assert all(f"<!-- {word} -->" in comments for word in WORDS[:-1])
    assert (tmp_path / "words.png").read_bytes().startswith(b"\x89PNG")


def test_overlap_is_the_area_shared_with_all_others() -> None:
    others = np.array([[1.0, 1.0, 3.0, 3.0], [5.0, 5.0, 6.0, 6.0], [0.0, 0.0, 1.0, 2.0]])
    assert overlap(np.array([0.0, 0.0, 2.0, 2.0]), others) == 1 + 0 + 2


def test_a_notebook_shows_the_words(vectors: WordVectors) -> None:
    assert plot_words(vectors)._repr_png_()[:4] == b"\x89PNG"
