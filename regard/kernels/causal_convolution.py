"""A causal depthwise convolution over the last K tokens, for K of a few: what Mamba reads its channels through.

    y[t, c] = f(bias[c] + sum over i < K of weight[c, K - 1 - i] x[t - i, c]),   f(v) = v or silu(v) = v sigmoid(v)

Tokens of other documents count as zero: starts[t] is the column at which the document of token t begins
(kernels/masks.py). On a GPU one kernel does it, with all sums in fp32; its backward pass computes the sums before f again
from x, so that x is all that is kept (kernels/causal_convolution_triton.py). Elsewhere torch does it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.operators import MOST_ROWS, operator
from regard.kernels.residual_norm import TRITON

MOST = 8  # tokens that the kernels see: a program holds all of them in registers
# Channels of a program, one for each lane of its warp; tokens of a tile; tiles that a program walks through.
SIZES = {"BLOCK": 32, "TOKENS": 16, "TILES": 4}


def causal_convolution(
    x: Tensor,  # (B, T, C)
    weight: Tensor,  # (C, K)
    bias: Tensor | None,  # (C,)
    starts: Tensor,  # (B, T)
    silu: bool,
    earlier: Tensor | None = None,  # (B, K - 1, C), the tokens before the first column; None: zeros
) -> Tensor:
    """Return y (B, T, C) in the dtype of x."""
    if uses_kernels(x, weight) and (earlier is None or not torch.is_grad_enabled()):
        return forward(x, weight, bias, starts, silu, earlier)
    return torch_form(x, weight, bias, starts, silu, earlier)


def uses_kernels(x: Tensor, weight: Tensor) -> bool:
    """Return whether the Triton kernels compute the convolution of this x."""
    few = weight.shape[1] <= MOST and len(x) <= MOST_ROWS
    return x.is_cuda and TRITON and x.dtype != torch.float64 and few


def torch_form(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool, earlier: Tensor | None = None
) -> Tensor:
    """Return y by one shifted product after the other."""
    k, length = weight.shape[1], x.shape[1]
    earlier = x.new_zeros(len(x), k - 1, x.shape[2]) if earlier is None else earlier.to(x.dtype)
    before, weight = torch.cat([earlier, x], 1), weight.to(x.dtype)  # (B, K - 1 + T, C)
    index = torch.arange(length, device=x.device)
    y = x * weight[:, -1] if bias is None else torch.addcmul(bias.to(x.dtype), x, weight[:, -1])
    for back in range(1, k):
        seen = (index - back >= starts)[..., None]  # (B, T, 1)
        y = y + torch.where(seen, before[:, k - 1 - back : k - 1 - back + length], 0) * weight[:, k - 1 - back]
    return F.silu(y) if silu else y


def step(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, inputs: Tensor) -> Tensor:
    """Convolve one more token of each row, (N, C) -> (N, C), and move `inputs` (N, K - 1, C) on by one, in place."""
    if uses_kernels(x, weight) and inputs.is_contiguous():
        from regard.kernels import causal_convolution_triton as kernels

        return kernels.run_step(x, weight, bias, silu, inputs)
    seen = torch.cat([inputs, x[:, None].to(inputs.dtype)], 1)  # (N, K, C)
    inputs.copy_(seen[:, 1:])
    y = (seen * weight.t().to(seen.dtype)).sum(1)
    y = y if bias is None else y + bias.to(y.dtype)
    return (F.silu(y) if silu else y).to(x.dtype)


# ---- operators ---------------------------------------------------------------------------------------------------------


@operator("regard::causal_convolution")
def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool, earlier: Tensor | None
) -> Tensor:
    """Return y (B, T, C), by the Triton kernel; `earlier` has no gradient."""
    from regard.kernels import causal_convolution_triton as kernels

    return kernels.run_forward(x, weight, bias, starts, silu, earlier, SIZES)


@forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool, earlier: Tensor | None) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("regard::causal_convolution_backward", mutates_args=())
def backward(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool) -> list[Tensor]:
    """Return the gradients of x and of the weight, and that of the bias where there is one."""
    from regard.kernels import causal_convolution_triton as kernels

    return kernels.run_backward(grad, x, weight, bias, starts, silu, SIZES)


@backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool) -> list[Tensor]:
    return [each.new_empty(each.shape) for each in (x, weight, bias) if each is not None]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save what the backward pass needs (torch.library's `setup_context`)."""
    *tensors, ctx.silu, _ = inputs
    ctx.save_for_backward(*tensors)


def run_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the inputs of `forward`."""
    x, weight, bias, starts = ctx.saved_tensors
    dx, dweight, *dbias = backward(grad, x, weight, bias, starts, ctx.silu)
    return dx, dweight, dbias[0] if dbias else None, None, None, None


forward.register_autograd(run_backward, setup_context=setup_context)
