"""Attention of single queries on a CPU, compiled by numba: each query reads its keys one after the other.

A result depends on its own query, keys and values alone, to the last bit: neither padding nor the other rows of a batch
change the order of a sum. torch's kernels choose their order by the shapes of whole batches. One query after the other is
slow for whole rows, and fast for decoding steps, which are limited by reading keys and values.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor


def row_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the attention (B, H, T, D) of q (B, H, T, D) to k and v (B, G, S, D), all fp32, with an additive mask.

    The mask (B or 1, H or 1, T or 1, S) is -inf where a query does not see a key, and None where all see all. A query that
    sees no key gets zeros."""
    batch, heads, queries, width = q.shape
    keys = k.shape[2]
    out = torch.empty((batch, heads, queries, width))
    shape = (batch, heads, queries, keys)
    allowed = torch.zeros(1) if mask is None else mask.float()
    strides = (0, 0, 0, 0) if mask is None else allowed.expand(shape).stride()
    memory, group = (*flat(k), *flat(v), flat_view(allowed), strides), heads // k.shape[1]
    attend_rows(q.contiguous().numpy(), *memory, np.float32(scale), group, keys, out.numpy())
    return out


def flat(x: Tensor) -> tuple[np.ndarray, tuple[int, ...]]:
    """Return the memory of (B, G, S, D) from its first number on, and the strides of B, G and S; D must be contiguous."""
    x = x if x.stride(3) == 1 else x.contiguous()
    return flat_view(x), x.stride()[:3]


def flat_view(x: Tensor) -> np.ndarray:
    """Return the memory that a tensor lies in, from its first number on, as an array of one dimension."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    return x.as_strided((span,), (1,)).numpy()


# Sums may be vectorized, in an order that is fixed when the function is compiled; infinities are kept.
@njit(cache=True, fastmath={"reassoc", "contract", "nsz", "arcp"})
def attend_rows(q, k, k_strides, v, v_strides, mask, mask_strides, scale, group, keys, out):
    """Fill `out` (B, H, T, D); k, v and mask are flat memory with the strides of their axes."""
    batch, heads, queries, width = q.shape
    scores = np.empty(keys, dtype=np.float32)
    seen = np.empty(keys, dtype=np.int64)
    for b in range(batch):
        for h in range(heads):
            first_key = b * k_strides[0] + (h // group) * k_strides[1]
            first_value = b * v_strides[0] + (h // group) * v_strides[1]
            for t in range(queries):
                query, result = q[b, h, t], out[b, h, t]
                result[:] = 0.0
                at = b * mask_strides[0] + h * mask_strides[1] + t * mask_strides[2]
                n, largest = 0, np.float32(-np.inf)
                for j in range(keys):
                    added = mask[at + j * mask_strides[3]]
                    if added == -np.inf:
                        continue
                    start = first_key + j * k_strides[2]
                    total = np.float32(0.0)
                    for d in range(width):
                        total += query[d] * k[start + d]
                    score = total * scale + added
                    scores[n], seen[n] = score, j
                    largest = max(largest, score)
                    n += 1
                weights = np.float32(0.0)
                for i in range(n):
                    weight = np.float32(math.exp(scores[i] - largest))
                    weights += weight
                    start = first_value + seen[i] * v_strides[2]
                    for d in range(width):
                        result[d] += weight * v[start + d]
                for d in range(width if n else 0):
                    result[d] /= weights
