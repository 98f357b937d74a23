"""Huffman codes are optimal prefix codes."""

from __future__ import annotations

import heapq
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from regard.vectors.huffman import HuffmanTree, huffman_tree

COUNTS = st.lists(st.integers(1, 1000), min_size=2, max_size=60).map(lambda counts: sorted(counts, reverse=True))


def code(tree: HuffmanTree, word: int) -> str:
    return "".join(map(str, tree.bits[tree.start[word] : tree.start[word + 1]]))


def least_total(counts: list[int]) -> int:
    """Return the bits of the whole text under an optimal code: the sum of all merged weights."""
    heap, total = list(counts), 0
    heapq.heapify(heap)
    while len(heap) > 1:
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        heapq.heappush(heap, merged)
        total += merged
    return total


@given(COUNTS)
def test_no_code_is_shorter(counts: list[int]) -> None:
    assert int(huffman_tree(np.array(counts)).lengths @ np.array(counts)) == least_total(counts)


@given(COUNTS)
def test_no_code_begins_another_and_none_is_wasted(counts: list[int]) -> None:
    tree = huffman_tree(np.array(counts))
    codes = sorted(code(tree, word) for word in range(len(counts)))
    assert not any(b.startswith(a) for a, b in pairwise(codes))
    assert sum(0.5 ** len(c) for c in codes) == 1


@given(COUNTS)
def test_words_with_the_same_beginning_pass_the_same_nodes(counts: list[int]) -> None:
    tree = huffman_tree(np.array(counts))
    seen: dict[str, int] = {}
    for word in range(len(counts)):
        for depth, node in enumerate(tree.nodes[tree.start[word] : tree.start[word + 1]]):
            assert seen.setdefault(code(tree, word)[:depth], node) == node
    assert sorted(seen.values()) == list(range(len(counts) - 1))
    assert seen[""] == len(counts) - 2  # the root is the last


def test_a_small_tree_by_hand() -> None:
    tree = huffman_tree(np.array([5, 2, 1]))
    assert [code(tree, word) for word in range(3)] == ["1", "01", "00"]
    assert tree.nodes.tolist() == [1, 1, 0, 1, 0]
