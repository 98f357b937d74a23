"""Building blocks of attention: pure functions of tensors, shared by layers, kernels and the tools that inspect a model.

Shapes use these letters: B rows of a batch, T queries, S keys, H query heads, G key/value heads (G = H in multi-head
attention, 1 < G < H in grouped-query attention, G = 1 in multi-query attention), D numbers of one head.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

SHORT_TILE = 128  # most queries and keys for which short attention (kernels/short_attention.py) needs one tile only
Rotation = tuple[Tensor, Tensor]  # cosines and sines of rotary position embeddings, (B, 1, T, D/2) each


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """Split the last dimension into heads: (B, T, H*D) -> (B, H, T, D), a view."""
    return x.view(*x.shape[:2], -1, d_head).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """Concatenate the heads of every token: (B, H, T, D) -> (B, T, H*D)."""
    return x.transpose(1, 2).flatten(2)


def split_qkv(y: Tensor, heads: int, groups: int, d_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """Split a fused projection (B, T, (H+2G)*D) into q (B, H, T, D), k (B, G, T, D) and v (B, G, T, D).

    The last dimension is ordered by key/value head: the H/G query heads that share it, then its key, then its value
    (kernels/weight_layout.py). With H = G all three are views; with H > G only q is a copy. The backward pass is one
    concatenation.
    """
    shared = heads // groups
    if shared == 1 and not torch.is_grad_enabled():  # fewer operations, but its gradient would have other strides
        q, k, v = y.view(*y.shape[:2], groups, 3, d_head).permute(3, 0, 2, 1, 4).unbind()
        return q, k, v
    parts = y.view(*y.shape[:2], groups, shared + 2, d_head).split([shared, 1, 1], 3)
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in parts)
    return q, k, v


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Apply rotary position embeddings to x (B, H, T, D); return x itself where `rotation` is None.

    The neighbouring numbers (x_2m, x_2m+1) of a head are rotated as one point of the plane, in fp32.
    """
    if rotation is None:
        return x
    cos, sin = rotation
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, D/2) each
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def masked_softmax(scores: Tensor, seen: Tensor | None) -> Tensor:
    """Return the softmax of scores (B, H, T, S) over the keys where `seen`, which broadcasts to the scores, is True.

    A query that sees no key at all gets weights of zero instead of NaN. `seen` = None means that every key is seen.
    """
    if seen is None:
        return scores.softmax(-1)
    nowhere = ~seen.any(-1, keepdim=True)
    return scores.masked_fill(~seen & ~nowhere, -torch.inf).softmax(-1).masked_fill(nowhere, 0.0)


def repeat_kv(x: Tensor, q: Tensor) -> Tensor:
    """Repeat keys or values x (B, G, S, D) for grouped-query attention with queries q (B, H, T, D): (B, H, S, D).

    Query heads h*H/G to (h+1)*H/G - 1 share key/value head h.
    """
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None
