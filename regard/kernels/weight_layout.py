"""Row order of fused weight matrices: interleaved in blocks, so that tensor parallelism can split them.

Queries, keys and values are one matrix product, and so are the gates and values of a gated feed-forward layer. A rank
of a tensor-parallel group takes a contiguous range of rows: were all queries stored before all keys, the first rank
would get queries only. So rows come in blocks, each with its share of every matrix:

| layer                | one block                                                           |
|----------------------|---------------------------------------------------------------------|
| self-attention       | the H/G query heads that share a key/value head, its key, its value |
| cross-attention      | the key and the value of one head                                   |
| gated feed-forward   | c gates, then their c values (`gate_block`)                         |
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_GATE_BLOCK = 32  # short enough to split d_ff 11008 (LLaMA) in 8, long enough for vectorised loads


def gate_block(d_ff: int) -> int:
    """Return how many gates are in a block: the largest power of two up to MAX_GATE_BLOCK that divides d_ff."""
    return min(d_ff & -d_ff, MAX_GATE_BLOCK)


def split_gates(y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gates and the values of y (..., 2F) as views (..., F/c, c), where c is the size of a block."""
    gate, value = y.unflatten(-1, (-1, 2, gate_block(y.shape[-1] // 2))).unbind(-2)
    return gate, value


def interleave_rows(parts: Sequence[Tensor], blocks: int) -> Tensor:
    """Interleave the rows of several matrices (R_i, C) or biases (R_i,): block 0 of each, then block 1 of each, and so on.

    Every part is split into `blocks` blocks, so its number of rows must be a multiple of that.
    """
    return torch.cat([part.unflatten(0, (blocks, -1)) for part in parts], 1).flatten(0, 1)


def deinterleave_rows(x: Tensor, blocks: int, shares: Sequence[int]) -> list[Tensor]:
    """Return the parts that `interleave_rows` joined into x; `shares` is the ratio of their numbers of rows."""
    unit = len(x) // (blocks * sum(shares))
    parts = x.unflatten(0, (blocks, -1)).split([unit * share for share in shares], 1)
    return [part.flatten(0, 1) for part in parts]
