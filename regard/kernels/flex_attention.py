"""FlexAttention over spans of keys: torch's compiled kernel, which visits only the blocks that a mask leaves.

The spans of `masks.intervals` say which blocks those are without ever writing a (T, T) mask down.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


@dataclass(frozen=True)
class Blocks:
    """What FlexAttention needs to know of a forward, made once for all layers."""

    mask: BlockMask
    table: Tensor | None  # (H, 2T-1), the bias of every distance


def prepare(first: Tensor, last: Tensor, table: Tensor | None) -> Blocks:
    """From the first and last key that each query sees, int32 (B, T)."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= first[b, i]) & (j <= last[b, i])

    some, every = block_spans(first, last)
    mask = BlockMask.from_kv_blocks(
        *ordered(some & ~every), *ordered(every), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(first.shape[1],) * 2
    )
    return Blocks(mask, table)


def block_spans(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Which blocks of keys some query of a block of queries sees, and which ones every query sees, (B, 1, n, n) each."""
    t = first.shape[1]
    n = -(-t // BLOCK)
    pad = (0, n * BLOCK - t)

    def blocks(x: Tensor, beyond: int) -> Tensor:
        """(B, n, BLOCK); queries beyond the end have a value that changes nothing."""
        return torch.nn.functional.pad(x, pad, value=beyond).unflatten(1, (n, BLOCK))

    start = torch.arange(n, device=first.device) * BLOCK  # of each block of keys
    lowest, highest = blocks(first, t).amin(2)[..., None], blocks(last, -1).amax(2)[..., None]
    some = (lowest < start + BLOCK) & (highest >= start)  # may count a block too many
    every = (blocks(first, 0).amax(2)[..., None] <= start) & (blocks(last, t).amin(2)[..., None] >= start + BLOCK - 1)
    return some[:, None], every[:, None]


def ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their numbers before all others."""
    return blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


@functools.cache
def compiled() -> Callable[..., Any]:
    """Once for every shape: FlexAttention's kernels are made for sizes that are known."""
    limit = torch._dynamo.config
    limit.recompile_limit = max(limit.recompile_limit, 256)  # torch's own, 8, would then run it unfused
    return torch.compile(flex_attention, dynamic=False)


def flex_attend(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float | None) -> Tensor:
    table = blocks.table

    def with_bias(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        assert table is not None
        return score + table[h, j - i + table.shape[1] // 2]

    return compiled()(
        q,
        k,
        v,
        score_mod=None if table is None else with_bias,
        block_mask=blocks.mask,
        scale=scale,
        enable_gqa=k.shape[1] != q.shape[1],
        kernel_options=None if table is None else LOOKUP_OPTIONS,
    )


# A looked-up bias takes shared memory: smaller tiles than FlexAttention's own choice.
LOOKUP_OPTIONS = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 4,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_stages": 1, "bwd_num_warps": 4,
}  # fmt: skip
