"""Huffman tree of a vocabulary, for hierarchical softmax: frequent words are near the root and need few decisions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HuffmanTree:
    """The path of each word from the root: word w passes the inner nodes[start[w]:start[w + 1]] and takes bits[...] there.

    There are V - 1 inner nodes; the root is the last.
    """

    start: np.ndarray  # (V + 1,) int64
    nodes: np.ndarray  # (total,) int32
    bits: np.ndarray  # (total,) int8

    @property
    def lengths(self) -> np.ndarray:
        """The length of each word's code, (V,)."""
        return np.diff(self.start)


def huffman_tree(counts: np.ndarray) -> HuffmanTree:
    """Return the Huffman tree of words with these counts (V,), sorted in descending order."""
    n = len(counts)
    parent, bit = _merge(counts)
    paths: list[list[tuple[int, int]]] = []
    for word in range(n):
        path, node = [], word
        while node < 2 * n - 2:
            path.append((parent[node] - n, bit[node]))
            node = parent[node]
        paths.append(path[::-1])
    flat = np.array([step for path in paths for step in path], np.int64).reshape(-1, 2)
    start = np.cumsum([0, *map(len, paths)], dtype=np.int64)
    return HuffmanTree(start, flat[:, 0].astype(np.int32), flat[:, 1].astype(np.int8))


def _merge(counts: np.ndarray) -> tuple[list[int], list[int]]:
    """Return the parent of every node (leaves 0..V-1, then inner nodes in the order of merging) and its bit.

    The two lightest nodes are merged again and again; bit 1 is the heavier one. Leaves and inner nodes are two queues,
    each with its lightest node in front, so that no heap is needed.
    """
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
