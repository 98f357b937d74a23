"""What stands between two sublayers, as one operation: x + dropout(y), and the norm of that sum.

It is all memory and no arithmetic, so what counts is how often a row passes through the processor. On CUDA devices Regard's
own kernels read x and y once and write the sum and its norm once; backward they read the gradients and the sum once, write
the gradients of x and y once, and add up those of the norm's weights on the way. What was dropped is not stored but drawn
again from a seed. Elsewhere it is torch, operation by operation, which is also the definition; and where no gradients are
asked for: reading a sentence is limited by launches, and torch's cost less.

The kernels are operators of torch, so a compiled block stays one graph.
"""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.device import working_dtype

WIDEST = 8192  # numbers of a row, which one program holds
TRITON = importlib.util.find_spec("triton") is not None


def add_norm(x: Tensor, y: Tensor | None, norm: nn.Module, p: float) -> tuple[Tensor, Tensor]:
    """x + dropout(y, p) and the norm of it, for x and y (..., C) and an nn.LayerNorm or nn.RMSNorm.

    Without y it is x and its norm. The sum has x's dtype; its norm, which the next sublayer multiplies, that of autocast
    where it is on. With p = 0, as in evaluation, nothing is drawn.
    """
    if not (p or x.is_cuda or torch.is_autocast_enabled("cpu")) and (y is None or x.dtype == y.dtype):
        total = x if y is None else x + y  # a decoding step on a CPU: each further operation costs microseconds
        return total, norm(total)
    if x.dim() == 2 and x.is_cuda and not torch.is_grad_enabled() and not p and TRITON and is_plain(norm):
        # a decoding step, (N, C)
        from regard.kernels import step_linear

        return step_linear.add_norm(x, y, step_linear.norm_of(norm))
    dtype = working_dtype(x)
    if y is not None and x.is_cuda and torch.is_grad_enabled() and fits(x, y, norm):
        return fused(x, y, norm, p, dtype)
    total = x if y is None else (x + F.dropout(y, p)).to(x.dtype)
    return total, norm(total).to(dtype)


def is_plain(norm: nn.Module) -> bool:
    """Return whether a norm is exactly one of torch's two, with a weight: then kernels compute what it does."""
    return type(norm) in (nn.LayerNorm, nn.RMSNorm) and norm.weight is not None and norm.eps is not None


def fits(x: Tensor, y: Tensor, norm: nn.Module) -> bool:
    """Whether the kernels know what to do: one row after the other, a weight for each number, no float64."""
    known = isinstance(norm, nn.LayerNorm | nn.RMSNorm) and norm.weight is not None and norm.eps is not None
    whole = known and len(norm.weight.shape) == 1 and len(norm.weight) <= WIDEST  # type: ignore[arg-type]
    return TRITON and whole and torch.float64 not in (x.dtype, y.dtype)


def fused(x: Tensor, y: Tensor, norm: nn.Module, p: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
    rms = isinstance(norm, nn.RMSNorm)
    bias = None if rms else norm.bias
    # Drawn on the device: each replay of a recorded step drops other numbers.
    seed = torch.randint(1 << 62, (1,), device=x.device) if p else None
    total, normal, _ = forward(x, y, norm.weight, bias, seed, rms, norm.eps, p, dtype)
    return total, normal


# ---- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("regard::add_norm", mutates_args=())
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
    """The sum and its norm, (..., C), and for the backward 1 / sqrt(variance + eps) and the mean of each row, fp32."""
    from regard.kernels import residual_norm_triton as kernels

    total, normal, stats = results(x, rms, dtype)
    rows, sizes = stats.shape[1], tile(x.shape[-1], *FORWARD)
    kernels.forward[(-(-rows // sizes["ROWS"]),)](
        *(x.contiguous(), y.contiguous(), weight, bias, seed, total, normal, stats, rows, eps),
        *chances(p),
        **(sizes | {"RMS": rms, "SHIFT": bias is not None, "DROPOUT": seed is not None}),
    )
    return total, normal, stats


@forward.register_fake
def _(
    x: Tensor, y: Tensor, weight: Tensor, bias: Any, seed: Any, rms: bool, eps: float, p: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    return results(x, rms, dtype)


@torch.library.custom_op("regard::add_norm_backward", mutates_args=())
def backward(
    by_total: Tensor | None,
    by_normal: Tensor,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    seed: Tensor | None,
    shift: bool,
    p: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """The gradients of weight and bias, (1 or 2, C) fp32, that of x, and that of y, in `dtype`, where it is another."""
    from regard.kernels import residual_norm_triton as kernels

    found = gradients(total, shift, seed, dtype)
    rows, (count, c), sizes = stats.shape[1], found[0].shape, tile(total.shape[-1], *BACKWARD)
    programs = min(-(-rows // sizes["ROWS"]), PROGRAMS * processors(total))
    parts = found[0].new_empty(programs, count, c)
    kernels.backward[(programs,)](
        *(None if by_total is None else by_total.contiguous(), by_normal.contiguous(), total, stats, weight, seed),
        *(found[1], found[-1], parts, rows),
        *chances(p),
        **(sizes | {"RMS": len(stats) == 1, "SHIFT": shift, "TOTAL": by_total is not None, "APART": len(found) == 3}),
        **{"DROPOUT": seed is not None, "STAGES": STAGES},
    )
    torch.sum(parts, 0, out=found[0])
    return found


@backward.register_fake
def _(
    by_total: Any,
    by_normal: Tensor,
    total: Tensor,
    stats: Tensor,
    weight: Tensor,
    seed: Any,
    shift: bool,
    p: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    return gradients(total, shift, seed, dtype)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    _, y, weight, bias, seed, _, _, p, _ = inputs
    total, _, stats = output
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(total, stats, weight, seed)
    ctx.settings = bias is not None, p, y.dtype


def differentiate(ctx: Any, by_total: Tensor | None, by_normal: Tensor | None, _: None) -> Any:
    total, stats, weight, seed = ctx.saved_tensors
    if by_normal is None:  # nobody asks for the sum alone often enough for a kernel of its own
        by_normal = torch.zeros_like(total)
    weights, *rest = backward(by_total, by_normal, total, stats, weight, seed, *ctx.settings)
    by_weight, by_bias = [*weights.to(weight.dtype), None][:2]
    return rest[0], rest[-1], by_weight, by_bias, None, None, None, None, None


forward.register_autograd(differentiate, setup_context=save)


# ---- sizes ---------------------------------------------------------------------------------------------------------------

FORWARD = 1024, 1024  # numbers for a program and for a warp: up to 1024, a row is no matter of two warps
BACKWARD = 2048, 512  # half as many for a warp, which keeps sums beside them
PROGRAMS = 4  # of the backward, for each processor; each walks over its share of the rows
STAGES = 1  # in which it does so; more: rows are on their way while others are worked on


def results(x: Tensor, rms: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    stats = x.new_empty(1 if rms else 2, math.prod(x.shape[:-1]), dtype=torch.float32)
    return x.new_empty(x.shape), x.new_empty(x.shape, dtype=dtype), stats


def gradients(total: Tensor, shift: bool, seed: Tensor | None, dtype: torch.dtype) -> list[Tensor]:
    """Room for what `backward` gives. Where nothing is dropped or rounded otherwise, x and y share one gradient."""
    weights = total.new_empty(1 + shift, total.shape[-1], dtype=torch.float32)
    by_x = total.new_empty(total.shape)
    apart = seed is not None or dtype != total.dtype
    return [weights, by_x, total.new_empty(total.shape, dtype=dtype)] if apart else [weights, by_x]


def tile(c: int, numbers: int, each: int) -> dict[str, int]:
    """Rows for a program: so many `numbers` or one row, and a warp for `each` of them."""
    width = max(16, 1 << (c - 1).bit_length())
    rows = max(1, numbers // width)
    return {"C": c, "ROWS": rows, "WIDTH": width, "num_warps": rows * width // each}


def chances(p: float) -> tuple[int, float]:
    """Below which number of 31 bits something is dropped, and what the rest is multiplied by."""
    return min(round(p * 2**31), 2**31 - 1), 1 / (1 - p) if p < 1 else 0.0


def processors(x: Tensor) -> int:
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
