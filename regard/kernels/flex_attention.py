"""FlexAttention: torch's compiled block-sparse kernel, which skips the blocks of scores that a mask hides.

The intervals of `masks.key_intervals` say which blocks those are, without a dense (T, T) mask.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # queries and keys in a block


@dataclass(frozen=True)
class Blocks:
    """The block-sparse mask and the position bias of a batch, made once for all layers."""

    mask: BlockMask
    table: Tensor | None  # (H, 2T-1), the bias at the distances 1 - T to T - 1


def prepare(first: Tensor, last: Tensor, table: Tensor | None) -> Blocks:
    """Return the block-sparse mask in which each query sees the keys `first` to `last`, int32 (B, T), and the bias table."""

    def sees(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (j >= first[b, i]) & (j <= last[b, i])

    some, every = block_spans(first, last)
    mask = BlockMask.from_kv_blocks(
        *count_and_order(some & ~every),
        *count_and_order(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=sees,
        seq_lengths=(first.shape[1],) * 2,
    )
    return Blocks(mask, table)


def block_spans(first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return which blocks of keys some query of a block sees, and which every query sees whole: (B, 1, n, n) bool each."""
    t = first.shape[1]
    n = -(-t // BLOCK)
    pad = (0, n * BLOCK - t)

    def blocks(x: Tensor, beyond: int) -> Tensor:
        """Return x as (B, n, BLOCK), padded by a value that changes no minimum or maximum."""
        return torch.nn.functional.pad(x, pad, value=beyond).unflatten(1, (n, BLOCK))

    start = torch.arange(n, device=first.device) * BLOCK  # first key of each block
    lowest, highest = blocks(first, t).amin(2)[..., None], blocks(last, -1).amax(2)[..., None]
    some = (lowest < start + BLOCK) & (highest >= start)  # an upper bound: may include a block that no query sees
    every = (blocks(first, 0).amax(2)[..., None] <= start) & (blocks(last, t).amin(2)[..., None] >= start + BLOCK - 1)
    return some[:, None], every[:, None]


def count_and_order(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many blocks of each row are True, and all block numbers, those that are True first (BlockMask's format)."""
    return blocks.sum(-1).int(), blocks.int().argsort(dim=-1, descending=True, stable=True).int()


@functools.cache
def compiled() -> Callable[..., Any]:
    """Return FlexAttention compiled with static shapes: it is compiled anew for every shape."""
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, 256)  # beyond torch's default of 8 shapes it would run unfused
    return torch.compile(flex_attention, dynamic=False)


def flex_attend(q: Tensor, k: Tensor, v: Tensor, blocks: Blocks, scale: float | None) -> Tensor:
    """Return the attention of q (B, H, T, D) over k and v (B, G, T, D): (B, H, T, D)."""
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


# Looking up a bias takes shared memory, so the tiles are smaller than FlexAttention's defaults.
LOOKUP_OPTIONS = {
    "fwd_BLOCK_M": 64, "fwd_BLOCK_N": 64, "fwd_num_stages": 2, "fwd_num_warps": 4,
    "bwd_BLOCK_M1": 64, "bwd_BLOCK_N1": 64, "bwd_BLOCK_M2": 64, "bwd_BLOCK_N2": 64, "bwd_num_stages": 1, "bwd_num_warps": 4,
}  # fmt: skip
