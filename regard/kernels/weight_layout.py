"""How matrices that are multiplied as one share their rows: in turns, so that tensor parallelism can cut them.

A rank of a tensor-parallel group gets a contiguous run of rows. Of queries, keys and values one under the other the first
rank would get queries alone; so the rows come in blocks, each with its share of every matrix. A block of self-attention is a
head of keys with the H/G heads of queries that read it, in the order queries, key, value; of cross-attention, key and value.
A block of a gated feed-forward layer is a few gates, then as many values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

GATES = 32  # the most in a block: short enough to cut d_ff 11008 (LLaMA) in 8, long enough for vectorised loads


def gate_block(d_ff: int) -> int:
    """Return how many gates are in a block: the largest power of two up to GATES that divides d_ff."""
    return min(d_ff & -d_ff, GATES)


def split_gates(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return views of the gates and the values in (..., 2F), both (..., F/c, c)."""
    gate, value = y.unflatten(-1, (-1, 2, gate_block(y.shape[-1] // 2))).unbind(-2)
    return gate, value


def interleave_rows(parts: Sequence[Tensor], blocks: int) -> Tensor:
    """Return one matrix or bias of several, each cut by rows into as many blocks, with block i of all of them together."""
    return torch.cat([part.unflatten(0, (blocks, -1)) for part in parts], 1).flatten(0, 1)


def deinterleave_rows(x: Tensor, blocks: int, shares: Sequence[int]) -> list[Tensor]:
    """Return the parts that `in_turns` joined, whose rows in a block are in the ratio `shares`."""
    unit = len(x) // (blocks * sum(shares))
    parts = x.unflatten(0, (blocks, -1)).split([unit * share for share in shares], 1)
    return [part.flatten(0, 1) for part in parts]
