"""Fused attention for short sequences, of at most 128 keys, on CUDA devices.

torch's fused kernels are made for long sequences: they loop over blocks of keys with an online softmax, and read
padding through a mask as large as the scores. If all keys fit into one tile, no online softmax is needed: q, k, v and
the result pass through the processor once, forward and backward, padding is not read at all, and the time is that of
the memory traffic. The masks supported are full and causal, both with padding at the end of the keys.

The kernels are registered as torch operators, so a compiled block stays one graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.kernels import short_attention_triton as kernels
from regard.kernels.attention_functions import SHORT_TILE
from regard.kernels.masks import PAD_POSITION
from regard.kernels.operators import operator
from regard.kernels.toeplitz_attention import LOG2E, strides


@dataclass(frozen=True)
class LengthMask:
    """A full or causal mask with padding at the end of each row, made once for all layers."""

    lengths: Tensor  # (B,) int32, the number of keys of each row before its padding
    causal: bool  # a query sees the keys up to its own


def prepare(plan: Any) -> LengthMask:
    """Return the mask of a plan (layers/attention_kernels.py) as these kernels need it."""
    assert plan.index is not None or not plan.mask.causal, "a causal mask is one of queries and their own keys"
    return LengthMask((plan.key_positions > PAD_POSITION).sum(1, dtype=torch.int32), plan.mask.causal)


def attend(q: Tensor, k: Tensor, v: Tensor, rows: LengthMask, scale: float | None, dropout: float) -> Tensor:
    """Return the attention of q (B, H, T, D) over k and v (B, G, S, D): (B, H, T, D)."""
    # Drawn on the device: every replay of a CUDA graph has another dropout mask.
    seed = torch.randint(1 << 62, (1,), device=q.device) if dropout else None
    return forward(q, k, v, rows.lengths, seed, rows.causal, scale, dropout)[0]


# ---- operators ---------------------------------------------------------------------------------------------------------


@operator("regard::short_attention")
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
    """Return the result (B, H, T, D), stored as (B, T, H, D), and the base-2 log-sum-exp of the scores, (B, H, T) fp32."""
    q, k, v = with_dense_rows(q, k, v)
    out, lse = allocate_outputs(q)
    b, h, t, _ = q.shape
    kernels.forward[(b * h,)](
        *(q, k, v, lengths, lengths if seed is None else seed, out, lse, t, h, int(causal)),
        *kernel_numbers(q, scale, dropout),
        *strides(q, k, v),
        **tile_options(q, k, dropout),
    )
    return out, lse


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, seed: Any, causal: bool, scale: Any, dropout: float
) -> tuple[Tensor, Tensor]:
    return allocate_outputs(q)


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
    """Return the gradients of q, k and v, stored like the result of `forward`."""
    q, k, v, grad = with_dense_rows(q, k, v, grad)
    dq, dk, dv = empty_bthd(q), empty_bthd(k), empty_bthd(v)
    b, h, t, _ = q.shape
    kernels.backward[(b * k.shape[1],)](
        *(q, k, v, grad, lengths, lengths if seed is None else seed, lse, dq, dk, dv, t, k.shape[2], h, int(causal)),
        *kernel_numbers(q, scale, dropout),
        *strides(q, k, v, grad),
        **tile_options(q, k, dropout, limit=32),
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
    return empty_bthd(q), empty_bthd(k), empty_bthd(v)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward pass needs (torch.library's `setup_context`)."""
    q, k, v, lengths, seed, *ctx.settings = inputs
    lse = output[1]
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, lengths, lse, seed)


def run_backward(ctx: Any, grad: Tensor, _: None) -> Any:
    return *backward(grad, *ctx.saved_tensors, *ctx.settings), None, None, None, None, None


forward.register_autograd(run_backward, setup_context=setup_context)


# ---- sizes ---------------------------------------------------------------------------------------------------------------


def empty_bthd(x: Tensor) -> Tensor:
    """Allocate a tensor shaped as x (B, H, T, D) and stored as (B, T, H, D), so that heads are merged without a copy."""
    b, h, t, d = x.shape
    return x.new_empty(b, t, h, d).transpose(1, 2)


def allocate_outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    return empty_bthd(q), q.new_empty(q.shape[:3], dtype=torch.float32)


def with_dense_rows(*tensors: Tensor) -> list[Tensor]:
    """Return the tensors, copied where the last dimension is not contiguous; views of a projection are not copied."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def kernel_numbers(q: Tensor, scale: float | None, dropout: float) -> tuple[float, int, float]:
    """Return the base-2 scale of scores, the threshold of 31 random bits for dropout, and the factor 1 / (1 - p)."""
    return (scale or q.shape[-1] ** -0.5) * LOG2E, min(round(dropout * 2**31), 2**31 - 1), 1 / (1 - dropout)


def tile_options(q: Tensor, k: Tensor, dropout: float, limit: int = SHORT_TILE) -> dict[str, Any]:
    """Return the tile sizes: N keys, M queries at a time, at most `limit`, and a warp for every 1024 scores.

    There are two tile sizes, and one kernel for both masks: shorter rows are not read beyond their end, and every
    variant of a kernel takes seconds to compile.
    """
    h, t, d = q.shape[1:]
    n = 64 if max(t, k.shape[2]) <= 64 else 128
    m = n if n <= 64 else limit
    if q.dtype == torch.float32:  # fp32 products use registers instead of tensor cores: small tiles
        m = 16
    warps = min(n * max(n, d) // 1024, 8)
    sizes = {"GROUP": h // k.shape[1], "D": d, "M": m, "N": n, "num_warps": warps, "num_stages": 1}
    # Few registers let two programs share a multiprocessor: one computes while the other waits for memory.
    tight = {"maxnreg": 128} if q.is_cuda and m == 32 < n and d <= 64 else {}
    return sizes | tight | {"DROPOUT": dropout > 0}
