"""Attention of short rows: at most 128 keys, which fit into one tile. Regard's own kernels, for CUDA devices.

torch's fused kernels are made for long rows. They keep a softmax that is never finished, go over the keys in steps, and read
padding through a mask as large as the scores. Where a row is one tile there is nothing to keep: each of q, k, v and the
result passes through the processor once, forward and backward, and padding is not read at all. What is left is the time that
memory takes. Masks are the full one and the triangle, both with padding at the end of the keys.

The kernels are operators of torch, so a compiled block stays one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.kernels import short_attention_triton as kernels
from regard.kernels.attention_functions import SHORT_TILE
from regard.kernels.masks import PAD_POSITION
from regard.kernels.toeplitz_attention import LOG2E, strides


@dataclass(frozen=True)
class Rows:
    """Who sees whom, made once for all layers."""

    lengths: Tensor  # (B,) int32, the keys of each row that are no padding; they come first
    causal: bool  # a query sees the keys up to itself


def prepare(plan: Any) -> Rows:
    assert plan.index is not None or not plan.mask.causal, "the triangle is one of queries and their own keys"
    return Rows((plan.k > PAD_POSITION).sum(1, dtype=torch.int32), plan.mask.causal)


def attend(q: Tensor, k: Tensor, v: Tensor, rows: Rows, scale: float | None, dropout: float) -> Tensor:
    # Drawn on the device: each replay of a recorded step drops other weights.
    seed = torch.randint(1 << 62, (1,), device=q.device) if dropout else None
    return forward(q, k, v, rows.lengths, seed, rows.causal, scale, dropout)[0]


# ---- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("regard::short_attention", mutates_args=())
def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    seed: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """The result (B, H, T, D), which lies in memory as (B, T, H, D), and the log-sum-exp of the scores, (B, H, T) fp32."""
    q, k, v = dense(q, k, v)
    out, lse = results(q)
    b, h, t, _ = q.shape
    kernels.forward[(b * h,)](
        *(q, k, v, lengths, lengths if seed is None else seed, out, lse, t, h, int(causal)),
        *numbers(q, scale, dropout),
        *strides(q, k, v),
        **options(q, k, dropout),
    )
    return out, lse


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, seed: Any, causal: bool, scale: Any, dropout: float
) -> tuple[Tensor, Tensor]:
    return results(q)


@torch.library.custom_op("regard::short_attention_backward", mutates_args=())
def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    lse: Tensor,
    seed: Tensor | None,
    causal: bool,
    scale: float | None,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v; they lie in memory as the result does."""
    q, k, v, grad = dense(q, k, v, grad)
    dq, dk, dv = by_heads(q), by_heads(k), by_heads(v)
    b, h, t, _ = q.shape
    kernels.backward[(b * k.shape[1],)](
        *(q, k, v, grad, lengths, lengths if seed is None else seed, lse, dq, dk, dv, t, k.shape[2], h, int(causal)),
        *numbers(q, scale, dropout),
        *strides(q, k, v, grad),
        **options(q, k, dropout, limit=32),
    )
    return dq, dk, dv


@backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    lse: Tensor,
    seed: Any,
    causal: bool,
    scale: Any,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return by_heads(q), by_heads(k), by_heads(v)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, lengths, seed, *ctx.settings = inputs
    lse = output[1]
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, lengths, lse, seed)


def differentiate(ctx: Any, grad: Tensor, _: None) -> Any:
    return *backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


forward.register_autograd(differentiate, setup_context=save)


# ---- sizes ---------------------------------------------------------------------------------------------------------------


def by_heads(x: Tensor) -> Tensor:
    """Room for what is shaped as x (B, H, T, D), in the order (B, T, H, D): heads are merged without a copy."""
    b, h, t, d = x.shape
    return x.new_empty(b, t, h, d).transpose(1, 2)


def results(q: Tensor) -> tuple[Tensor, Tensor]:
    return by_heads(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def dense(*tensors: Tensor) -> list[Tensor]:
    """With a dense last dimension; views of a projection have it."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def numbers(q: Tensor, scale: float | None, dropout: float) -> tuple[float, int, float]:
    """The scale of scores; below which number of 31 bits a weight is dropped, and what the others are multiplied by."""
    return (scale or q.shape[-1] ** -0.5) * LOG2E, min(round(dropout * 2**31), 2**31 - 1), 1 / (1 - dropout)


def options(q: Tensor, k: Tensor, dropout: float, limit: int = SHORT_TILE) -> dict[str, Any]:
    """The tile: N keys, and M queries at a time, at most `limit`; a warp for every 1024 scores.

    Two sizes, for queries and keys alike, and one kernel for both masks: rows are read no further than they go, and every
    kind of kernel takes seconds to compile.
    """
    h, t, d = q.shape[1:]
    n = 64 if max(t, k.shape[2]) <= 64 else 128
    m = n if n <= 64 else limit
    if q.dtype == torch.float32:  # exact products are made in registers: few at a time
        m = 16
    warps = min(n * max(n, d) // 1024, 8)
    sizes = {"GROUP": h // k.shape[1], "D": d, "M": m, "N": n, "num_warps": warps, "num_stages": 1}
    # Long tiles of few queries: two programs on a processor, one of which waits for memory while the other works.
    tight = {"maxnreg": 128} if q.is_cuda and m == 32 < n and d <= 64 else {}
    return sizes | tight | {"DROPOUT": dropout > 0}
