"""Links between words: words of texts, pieces of words, weights by hand, and composition by way of a third text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.alignment import Link, compose_links, link_words, merge_weights, pieces_of_words, word_spans


def words(text: str) -> list[str]:
    return [text[begin:end] for begin, end in word_spans(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Don't stop, O'Neill!", ["Don", "'", "t", "stop", ",", "O", "'", "Neill", "!"]),
        ("我有2个USB端口。", ["我", "有", "2", "个", "USB", "端", "口", "。"]),
        ("a\ue000b \U000f0001\U000f0002", ["a", "\ue000", "b", "\U000f0001", "\U000f0002"]),
        ("x_y 3.5 €", ["x", "_", "y", "3", ".", "5", "€"]),
        (" \r\n", []),
    ],
)
def test_words(text: str, expected: list[str]) -> None:
    assert words(text) == expected


@given(st.text(max_size=40))
def test_words_are_all_characters_but_white_space(text: str) -> None:
    assert "".join(words(text)) == "".join(text.split())


def test_pieces_belong_to_the_words_they_cover() -> None:
    text = "unhappy  men."
    pieces = [(0, 2), (2, 7), (7, 8), (8, 11), (11, 13)]  # un|happy| | me|n.
    assert pieces_of_words(word_spans(text), pieces, text) == [[0, 1], [3, 4], [4]]


def test_sources_sum_their_pieces_and_targets_are_the_mean_of_theirs() -> None:
    weights = np.array([[0.1, 0.2, 0.7], [0.3, 0.4, 0.3], [0.0, 0.0, 1.0]])
    merged = merge_weights(weights, [("ab", [0, 1]), ("c", [2])], [("xy", [0, 1]), ("z", [2])])
    np.testing.assert_allclose(merged, [[0.5, 0.5], [0.0, 1.0]])


def test_links_are_normalised_and_do_not_mix_words_with_punctuation() -> None:
    """das: 0.6 and 0.2 of words, 0.2 of the full stop, which do not count: 0.75 and 0.25."""
    source, target = "the house.", "das Haus."
    weights = np.array([[0.6, 0.2, 0.2], [0.05, 0.85, 0.1], [0.5, 0.4, 0.1]])
    found = link_words(source, target, word_spans(source), word_spans(target), weights)
    assert found == [
        Link(0, 3, 0, 3, 0.75),
        Link(4, 9, 0, 3, 0.25),
        Link(4, 9, 4, 8, round(0.85 / 0.9, 4)),  # 0.05 / 0.9 is too little
        Link(9, 10, 8, 9, 1.0),
    ]


def test_a_number_or_name_on_both_sides_is_linked_to_itself() -> None:
    source, target = "in 1992 Anna", "Anna 1992 in"
    found = link_words(source, target, word_spans(source), word_spans(target), np.full((3, 3), 1 / 3))
    assert Link(8, 12, 0, 4, 1.0) in found
    assert Link(3, 7, 5, 9, 1.0) in found
    assert sum(link.target_begin == 10 for link in found) == 3  # "in" is no name


def test_words_without_any_weight_have_no_link() -> None:
    assert link_words("a", ".", [(0, 1)], [(0, 1)], np.ones((1, 1))) == []
    assert link_words("", "a", [], [(0, 1)], np.ones((1, 0))) == []


def test_links_are_composed_by_sums_of_products() -> None:
    """a - x - z: 0.5 * 0.8; a - y - z: 0.9 * 0.2; b - x - z: 0.5 * 0.8."""
    first = [Link(0, 1, 0, 1, 0.5), Link(2, 3, 0, 1, 0.5), Link(0, 1, 2, 3, 0.9)]
    second = [Link(0, 1, 0, 1, 0.8), Link(2, 3, 0, 1, 0.2)]
    found = {link[:4]: link.weight for link in compose_links(first, second)}
    assert found == pytest.approx({(0, 1, 0, 1): 0.58, (2, 3, 0, 1): 0.4})
