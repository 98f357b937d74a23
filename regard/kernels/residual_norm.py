"""Residual connection and norm as one fused operation: x + dropout(y), and the LayerNorm or RMSNorm of that sum.

It is bound by memory bandwidth, so the number of passes over a row counts. In training on a CUDA device, the forward
kernel reads x and y once and writes the sum and its norm once; the backward kernel reads the gradients and the sum
once, writes the gradients of x and y once, and sums up the gradients of the norm's parameters on the way. The dropout
mask is not stored: the backward pass draws it again from the seed. Elsewhere it is plain torch, which is also the
definition. Without gradients it is torch too: encoding a sentence is bound by kernel launches, and torch's launches
cost less.

The kernels are registered as torch operators, so a compiled block stays one graph.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.device import working_dtype
from regard.kernels.operators import operator

MAX_WIDTH = 8192  # numbers of a row: one program holds a whole row
TRITON = importlib.util.find_spec("triton") is not None


def add_norm(x: Tensor, y: Tensor | None, norm: nn.Module, p: float) -> tuple[Tensor, Tensor]:
    """Return x + dropout(y, p) and the norm of it, (..., C) each, for an nn.LayerNorm or nn.RMSNorm.

    Without y it is x and its norm. The sum has the dtype of x. The norm, which is the input of the next matrix product,
    has the dtype of autocast where that is on. With p = 0, as in evaluation, no random numbers are drawn.
    """
    if not (p or x.is_cuda or torch.is_autocast_enabled("cpu")) and (y is None or x.dtype == y.dtype):
        total = x if y is None else x + y  # a decoding step on a CPU: every operation costs microseconds
        return total, norm(total)
    if x.dim() == 2 and x.is_cuda and not torch.is_grad_enabled() and not p and TRITON and is_plain(norm):
        # a decoding step, (N, C)
        from regard.kernels import step_linear

        return step_linear.add_norm(x, y, step_linear.norm_of(norm))
    dtype = working_dtype(x)
    if y is not None and x.is_cuda and torch.is_grad_enabled() and can_fuse(x, y, norm):
        return fused(x, y, norm, p, dtype)
    total = x if y is None else (x + F.dropout(y, p)).to(x.dtype)
    return total, norm(total).to(dtype)


def is_plain(norm: nn.Module) -> bool:
    """Return whether `norm` is exactly nn.LayerNorm or nn.RMSNorm, with a weight: fused kernels may replace it."""
    return type(norm) in (nn.LayerNorm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None


def can_fuse(x: Tensor, y: Tensor, norm: nn.Module) -> bool:
    """Return whether the fused kernels support this norm: over the last dimension, with a weight, and no float64."""
    known = isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.weight is not None and norm.eps is not None
    whole = known and len(norm.weight.shape) == 1 and len(norm.weight) <= MAX_WIDTH  # type: ignore[arg-type]
    return TRITON and whole and torch.float64 not in (x.dtype, y.dtype)


def fused(x: Tensor, y: Tensor, norm: nn.Module, p: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return what `add_norm` defines, by the fused operators; the norm is in `dtype`."""
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    rms = isinstance(norm, nn.RMSNorm)
    bias = None if rms else norm.bias
    # Drawn on the device: every replay of a CUDA graph has another dropout mask.
    seed = torch.randint(1 << 62, (1,), device=x.device) if p else None
    total, normal, _ = forward(x, y, norm.weight, bias, seed, rms, norm.eps, p, dtype)
    return total, normal


# ---- operators ---------------------------------------------------------------------------------------------------------


@operator("regard::add_norm")
def forward(
    x: Tensor,
    y: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    seed: Tensor | None,
    rms: bool,
    eps: float,
    p: float,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the sum and its norm, (..., C) each, and the statistics of each row for the backward pass, (1 or 2, rows) fp32.

    These are 1 / sqrt(variance + eps) and, for LayerNorm, the mean.
    """
    from regard.kernels import residual_norm_triton as kernels

    total, normal, stats = allocate_outputs(x, rms, dtype)
    rows, sizes = stats.shape[1], tile_sizes(x.shape[-1], *FORWARD)
    kernels.forward[(-(-rows // sizes["ROWS"]),)](
        *(x.contiguous(), y.contiguous(), weight, bias, seed, total, normal, stats, rows, eps),
        *dropout_numbers(p),
        **(sizes | {"RMS": rms, "SHIFT": bias is not None, "DROPOUT": seed is not None}),
    )
    return total, normal, stats


@forward.register_fake
def _(
    x: Tensor, y: Tensor, weight: Tensor, bias: Any, seed: Any, rms: bool, eps: float, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return allocate_outputs(x, rms, dtype)


@torch.library.custom_op("regard::add_norm_backward", mutates_args=())
def backward(
    grad_total: Tensor | None,
    grad_normal: Tensor,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    shift: bool,
    p: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Return the gradients of weight and bias, (1 or 2, C) fp32; of x; and of y in `dtype`, if it differs from that of x."""
    from regard.kernels import residual_norm_triton as kernels

    found = allocate_gradients(total, shift, seed, dtype)
    rows, (count, c), sizes = stats.shape[1], found[0].shape, tile_sizes(total.shape[-1], *BACKWARD)
    programs = min(-(-rows // sizes["ROWS"]), PROGRAMS * multiprocessors(total))
    partial_sums = found[0].new_empty(programs, count, c)
    kernels.backward[(programs,)](
        *(
            None if grad_total is None else grad_total.contiguous(),
            grad_normal.contiguous(),
            total,
            stats,
            weight,
            seed,
        ),
        *(found[1], found[-1], partial_sums, rows),
        *dropout_numbers(p),
        **(sizes | {"RMS": len(stats) == 1, "SHIFT": shift, "TOTAL": grad_total is not None, "APART": len(found) == 3}),
        **{"DROPOUT": seed is not None, "STAGES": STAGES},
    )
    torch.sum(partial_sums, 0, out=found[0])
    return found


@backward.register_fake
def _(
    grad_total: Any,
    grad_normal: Tensor,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    seed: Any,
    shift: bool,
    p: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    return allocate_gradients(total, shift, seed, dtype)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what the backward pass needs (torch.library's `setup_context`)."""
    _, y, weight, bias, seed, _, _, p, _ = inputs
    total, _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, stats, weight, seed)
    ctx.settings = bias is not None, p, y.dtype


def run_backward(ctx: Any, grad_total: Tensor | None, grad_normal: Tensor | None, _: None) -> Any:
    """Return the gradients of the inputs of `forward`, None for those that have none."""
    total, stats, weight, seed = ctx.saved_tensors
    if grad_normal is None:  # only the sum was used: too rare for a kernel of its own
        grad_normal = torch.zeros_like(total)
    weights, *rest = backward(grad_total, grad_normal, total, stats, weight, seed, *ctx.settings)
    grad_weight, grad_bias = [*weights.to(weight.dtype), None][:2]
    return rest[0], rest[-1], grad_weight, grad_bias, None, None, None, None, None


forward.register_autograd(run_backward, setup_context=setup_context)


# ---- sizes ---------------------------------------------------------------------------------------------------------------

FORWARD = 1024, 1024  # numbers per program and per warp: a row of up to 1024 needs no reduction across warps
BACKWARD = 2048, 512  # half as many per warp, since it keeps sums in registers as well
PROGRAMS = 4  # of the backward kernel, per multiprocessor; each loops over its share of the rows
STAGES = 1  # software pipeline stages of that loop


def allocate_outputs(x: Tensor, rms: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Allocate the outputs of `forward`."""
    stats = x.new_empty(1 if rms else 2, math.prod(x.shape[:-1]), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), stats


def allocate_gradients(total: Tensor, shift: bool, seed: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Allocate the outputs of `backward`. Without dropout, and with equal dtypes, x and y share one gradient."""
    weights = total.new_empty(1 + shift, total.shape[-1], dtype=torch.float32)
    grad_x = total.new_empty(total.shape)
    apart = seed is not None or dtype != total.dtype
    return [weights, grad_x, total.new_empty(total.shape, dtype=dtype)] if apart else [weights, grad_x]


def tile_sizes(c: int, numbers: int, per_warp: int) -> dict[str, int]:
    """Return the tile of a program: rows of c numbers, `numbers` in all but at least one row; a warp per `per_warp`."""
    width = max(16, 1 << (c - 1).bit_length())
    rows = max(1, numbers // width)
    return {"C": c, "ROWS": rows, "WIDTH": width, "num_warps": rows * width // per_warp}


def dropout_numbers(p: float) -> tuple[int, float]:
    """Return the threshold of 31 random bits below which an element is dropped, and the factor 1 / (1 - p) of the others."""
    return min(round(p * 2**31), 2**31 - 1), 1 / (1 - p) if p < 1 else 0.0


def multiprocessors(x: Tensor) -> int:
    """Return the number of streaming multiprocessors of the GPU that x is on, 1 on a CPU."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
