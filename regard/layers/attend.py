"""The kernels of attention: softmax(q k^T / sqrt(D) + mask) v, one signature for all, chosen once per forward.

`reference` spells the formula out and is the definition; `sdpa` is torch's fused kernel. A `Plan` says which of them runs
and over which mask; it is made outside the layers, so a layer has no branch on features.

Shapes: q (B, H, T, D), k and v (B, H, S, D), mask (B, 1, T or 1, S), result (B, H, T, D).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.layers.masks import Mask, dense

Kernel = Callable[[Tensor, Tensor, Tensor, "Plan", float], Tensor]


@dataclass(frozen=True)
class Plan:
    """How one kind of attention runs in this forward."""

    kernel: Kernel
    mask: Tensor | None = None  # (B, 1, T or 1, S), True = attend; None: all keys, or all up to the query if causal
    causal: bool = False  # the kernel applies the causal triangle itself; queries and keys start at the same position

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return self.kernel(q, k, v, self, dropout)


def weights(q: Tensor, k: Tensor, plan: Plan) -> Tensor:
    """The attention weights themselves, (B, H, T, S), in fp32. A query that may look nowhere gets zeros, not NaN."""
    scores = (q @ k.transpose(-2, -1)).float() * q.shape[-1] ** -0.5  # (B, H, T, S)
    mask = plan.mask
    if plan.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is None:
        return scores.softmax(-1)
    scores = scores.masked_fill(~mask, -torch.inf)
    return scores.softmax(-1).masked_fill(~mask.any(-1, keepdim=True), 0.0)


def reference(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """The formula as written."""
    return F.dropout(weights(q, k, plan), dropout).to(v.dtype) @ v  # (B, H, T, D)


def sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """torch's fused kernels (flash, memory-efficient, cuDNN, or its own CPU one)."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=plan.mask, dropout_p=dropout, is_causal=plan.causal)


def make_plan(mask: Mask, q: Tensor, k: Tensor, *, kernel: Kernel = sdpa) -> Plan:
    """The plan for queries at positions q (B, T) and keys at positions k (B, S).

    - Causal with the keys being the queries' own (no cache): the fused triangle. Padding stands at the end of a row, after
      every real query, so the triangle hides it already.
    - Otherwise the dense mask; a causal query that stands after all keys (one step of decoding) needs no more than that.
    """
    if mask.causal and k is q:
        return Plan(kernel, causal=True)
    return Plan(kernel, mask=dense(mask, q, k))
