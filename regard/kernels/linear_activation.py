"""A projection and what is made of it, as one operation: f(x W^T + b), or gated, f(gate) * value.

The products are the library's; what counts is how often their wide result passes through memory besides. On CUDA devices, in
training, the product itself cuts where f is ReLU, and the signs of the result say later what was cut; for others one kernel
reads x W^T + b and writes the result. Backward one kernel reads the gradient and what was kept, writes the gradient of
x W^T + b, gates and values in one tensor, and adds up that of b on the way. Elsewhere it is torch, operation by
operation, which is also the definition.

The kernels are operators of torch, so a compiled block stays one graph. The product is inside because only the library's
kernel can add b and cut; after a product of the compiler's that is a pass of its own. The backward's products are outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.device import working_dtype
from regard.kernels.residual_norm import TRITON, processors
from regard.kernels.weight_layout import gate_block, split_gates

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2's: cheaper once, kept since
    "silu": F.silu,
}


def linear_activation(x: Tensor, linear: nn.Module, activation: str, gated: bool) -> Tensor:
    """f(linear(x)), (..., C) -> (..., F). Gated, `linear` gives gates and values in turns (kernels/weight_layout.py), 2F numbers.

    It is an nn.Linear, or whatever stands for one.
    """
    if x.is_cuda and torch.is_grad_enabled() and fits(x, linear):
        return fused(x, linear, activation, gated)
    if x.dim() == 2 and x.is_cuda and cut_by_product(activation, gated) and fits(x, linear):
        assert isinstance(linear, nn.Linear)
        if linear.bias is not None and linear.weight.dtype == x.dtype:
            return torch._addmm_activation(
                linear.bias, x, linear.weight.t()
            )  # a decoding step: the product adds and cuts
    y = linear(x)
    if not gated:
        return ACTIVATIONS[activation](y)
    gate, value = split_gates(y)
    return (ACTIVATIONS[activation](gate) * value).flatten(-2)


def fits(x: Tensor, linear: nn.Module) -> bool:
    """Whether the kernels know what to do: a plain matrix, and no float64."""
    return TRITON and type(linear) is nn.Linear and working_dtype(x) != torch.float64


def fused(x: Tensor, linear: nn.Module, activation: str, gated: bool) -> Tensor:
    assert isinstance(linear, nn.Linear)
    dtype = working_dtype(x)
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    result, _ = forward(rows, linear.weight.to(dtype), linear.bias, activation, gated)
    return result.view(*x.shape[:-1], result.shape[-1])


# ---- operators ---------------------------------------------------------------------------------------------------------


@torch.library.custom_op("regard::activated", mutates_args=())
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    """The result (M, F) of x (M, C), and what the backward needs besides: x W^T + b, or nothing where the result will do."""
    bias = None if bias is None else bias.to(x.dtype)
    if cut_by_product(activation, gated):
        bias = x.new_zeros(len(weight)) if bias is None else bias
        return torch._addmm_activation(bias, x, weight.t()), x.new_empty(0)
    from regard.kernels import linear_activation_triton as kernels

    kept = F.linear(x, weight, bias)
    result, _ = results(x, weight, activation, gated)
    rows, f = result.shape
    blocks = -(-rows // ROWS) * -(-f // WIDTH)
    kernels.forward[(blocks,)](kept, result, rows, **options(f, activation, gated))
    return result, kept


@forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    return results(x, weight, activation, gated)


@torch.library.custom_op("regard::activated_backward", mutates_args=())
def backward(grad: Tensor, kept: Tensor, activation: str, gated: bool, bias: bool) -> tuple[Tensor, Tensor]:
    """The gradients of x W^T + b, (M, N), and of b, (N,) fp32, or nothing where there is none."""
    from regard.kernels import linear_activation_triton as kernels

    by_product, by_bias = gradients(kept, bias)
    rows, f = grad.shape
    blocks = -(-f // WIDTH)
    programs = min(-(-rows // ROWS), -(-PROGRAMS * processors(kept) // blocks))
    parts = by_bias.new_empty(programs, len(by_bias))
    kernels.backward[(blocks, programs)](
        *(grad.contiguous(), kept, by_product, parts, rows),
        **(options(f, activation, gated) | {"BIAS": bias, "STAGES": STAGES}),
    )
    torch.sum(parts, 0, out=by_bias)
    return by_product, by_bias


@backward.register_fake
def _(grad: Tensor, kept: Tensor, activation: str, gated: bool, bias: bool) -> tuple[Tensor, Tensor]:
    return gradients(kept, bias)


def save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, activation, gated = inputs
    result, kept = output
    ctx.mark_non_differentiable(kept)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, result if cut_by_product(activation, gated) else kept)
    ctx.settings = activation, gated, bias is not None
    ctx.dtype = None if bias is None else bias.dtype


def differentiate(ctx: Any, grad: Tensor, _: None) -> Any:
    x, weight, kept = ctx.saved_tensors
    by_product, by_bias = backward(grad, kept, *ctx.settings)
    by_x = by_product @ weight if ctx.needs_input_grad[0] else None
    by_weight = by_product.t() @ x if ctx.needs_input_grad[1] else None
    return by_x, by_weight, by_bias.to(ctx.dtype) if ctx.dtype else None, None, None


forward.register_autograd(differentiate, setup_context=save)


def cut_by_product(activation: str, gated: bool) -> bool:
    return activation == "relu" and not gated


# ---- sizes ---------------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 16, 128  # of a tile
WARPS = 4
PROGRAMS = 8  # of the backward, for each processor; each walks over its share of the rows
STAGES = 1  # in which it does so


def results(x: Tensor, weight: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    rows, n = x.shape[0], weight.shape[0]
    kept = x.new_empty(0) if cut_by_product(activation, gated) else x.new_empty(rows, n)
    return x.new_empty(rows, n // (1 + gated)), kept


def gradients(kept: Tensor, bias: bool) -> tuple[Tensor, Tensor]:
    return kept.new_empty(kept.shape), kept.new_empty(kept.shape[1] if bias else 0, dtype=torch.float32)


def options(f: int, activation: str, gated: bool) -> dict[str, Any]:
    block = gate_block(f) if gated else 0
    return {"F": f, "NAME": activation, "GATES": block, "ROWS": ROWS, "WIDTH": WIDTH, "num_warps": WARPS}
