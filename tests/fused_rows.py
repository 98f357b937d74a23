"""Which rows of a fused matrix are whose, counted out by hand: an index that puts them one kind under the other.

`weight[qkv_rows(h, g, d)]` is all queries, all keys, all values, as most other libraries have them.
"""

import torch
from torch import Tensor


def qkv_rows(heads: int, groups: int, d: int) -> list[int]:
    """For each head of keys there are its heads of queries, its key, its value."""
    shared = heads // groups
    first = [g * (shared + 2) * d for g in range(groups)]  # row of each head of keys
    queries = [row + i for row in first for i in range(shared * d)]
    keys = [row + shared * d + i for row in first for i in range(d)]
    values = [row + shared * d + d + i for row in first for i in range(d)]
    return queries + keys + values


def kv_rows(groups: int, d: int) -> list[int]:
    keys = [2 * g * d + i for g in range(groups) for i in range(d)]
    return keys + [row + d for row in keys]


def gate_rows(d_ff: int) -> list[int]:
    """As many gates at a time as a power of two up to 32 that divides d_ff, then their values."""
    at_a_time = max(n for n in (1, 2, 4, 8, 16, 32) if d_ff % n == 0)
    gates = [2 * start + i for start in range(0, d_ff, at_a_time) for i in range(at_a_time)]
    return gates + [row + at_a_time for row in gates]


def fused(stacked: Tensor, rows: list[int]) -> Tensor:
    """Matrices one under the other, as the fused one whose `rows` they are."""
    found = torch.empty_like(stacked)
    found[rows] = stacked
    return found
