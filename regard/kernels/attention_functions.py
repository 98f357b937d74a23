"""The functions that attention is made of: pure functions of tensors, shared by layers and kernels."""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

SHORT_TILE = 128  # queries and keys up to which short attention (kernels/short_attention.py) is one tile
Rotation = tuple[Tensor, Tensor]  # cosines and sines, (B, 1, T, D/2) each


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.view(*x.shape[:2], -1, d_head).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


def split_qkv(y: Tensor, heads: int, groups: int, d_head: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, T, (H+2G)*D) -> q (B, H, T, D), k and v (B, G, T, D).

    The numbers come by head of keys: the H/G heads of queries that read it, its key, its value (kernels/weight_layout.py). With as
    many heads of keys as of queries all three are views; with fewer, q alone is a copy. The backward pass is one
    concatenation.
    """
    shared = heads // groups
    if shared == 1 and not torch.is_grad_enabled():  # fewer operations; its gradient would be laid out otherwise
        q, k, v = y.view(*y.shape[:2], groups, 3, d_head).permute(3, 0, 2, 1, 4).unbind()
        return q, k, v
    parts = y.view(*y.shape[:2], groups, shared + 2, d_head).split([shared, 1, 1], 3)
    q, k, v = (part.flatten(2, 3).transpose(1, 2) for part in parts)
    return q, k, v


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn the pairs of x (B, H, T, D), in fp32."""
    if rotation is None:
        return x
    cos, sin = rotation
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, D/2) each
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def masked_softmax(scores: Tensor, seen: Tensor | None) -> Tensor:
    """exp(e_i) / sum exp(e_j), over the keys that may be seen. A query that may look nowhere gets zeros, not NaN."""
    if seen is None:
        return scores.softmax(-1)
    nowhere = ~seen.any(-1, keepdim=True)
    return scores.masked_fill(~seen & ~nowhere, -torch.inf).softmax(-1).masked_fill(nowhere, 0.0)


def repeat_kv(x: Tensor, q: Tensor) -> Tensor:
    """Each of the G heads of keys or values stands before its H/G heads of queries."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], dim=1)


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
