"""Huffman's tree over the words: frequent ones near the root, so that a prediction takes few decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Tree:
    """Each word's way down from the root: word w decides at nodes[start[w]:start[w + 1]], by the bits of the same places.

    There are V - 1 inner nodes, the root being the last.
    """

    start: np.ndarray  # (V + 1,) int64
    nodes: np.ndarray  # (total,) int32
    bits: np.ndarray  # (total,) int8

    @property
    def lengths(self) -> np.ndarray:
        return np.diff(self.start)


def huffman(counts: np.ndarray) -> Tree:
    """Of counts sorted downwards; two queues, leaves and inner nodes, both hold what is rarest in front."""
    n = len(counts)
    parent, bit = _merge(counts)
    ways: list[list[tuple[int, int]]] = []
    for word in range(n):
        way, node = [], word
        while node < 2 * n - 2:
            way.append((parent[node] - n, bit[node]))
            node = parent[node]
        ways.append(way[::-1])
    flat = np.array([step for way in ways for step in way], np.int64).reshape(-1, 2)
    start = np.cumsum([0, *map(len, ways)], dtype=np.int64)
    return Tree(start, flat[:, 0].astype(np.int32), flat[:, 1].astype(np.int8))


def _merge(counts: np.ndarray) -> tuple[list[int], list[int]]:
    """The parent of every node (leaves 0..V-1, then inner ones as they are made) and its bit: 1 for the heavier child."""
    n = len(counts)
    weight = [*map(int, counts)]
    parent, bit = [0] * (2 * n - 1), [0] * (2 * n - 1)
    leaf, inner = n - 1, n
    for made in range(n, 2 * n - 1):
        weight.append(0)
        for side in (0, 1):
            if leaf >= 0 and (inner == made or weight[leaf] < weight[inner]):
                child, leaf = leaf, leaf - 1
            else:
                child, inner = inner, inner + 1
            parent[child], bit[child] = made, side
            weight[made] += weight[child]
    return parent, bit
