"""Linear layer and activation as one fused operation: f(x W^T + b), or gated, f(gate) * value.

The matrix products are cuBLAS's; the fused kernels save passes of their wide result through memory. This is how
training on a CUDA device works:

- Forward, ReLU is part of the epilogue of the product, like the bias; the backward pass needs only the sign of the
  result. For other activations one kernel reads x W^T + b, which is saved, and writes the result.
- Backward, one kernel reads the gradient and the saved tensor, writes the gradient of x W^T + b (gates and values in
  one tensor), and sums up the gradient of b on the way.

Elsewhere it is plain torch, which is also the definition.

The kernels are registered as torch operators, so a compiled block stays one graph. The forward product is inside the
operator because only cuBLAS has a bias + ReLU epilogue: torch.compile would spend a pass of its own on it. The products
of the backward pass are outside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.device import working_dtype
from regard.kernels.operators import operator
from regard.kernels.residual_norm import TRITON, multiprocessors
from regard.kernels.weight_layout import gate_block, split_gates

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2's approximation
    "silu": F.silu,
}


def linear_activation(x: Tensor, linear: nn.Module, activation: str, gated: bool) -> Tensor:
    """Return f(linear(x)) for x (..., C): (..., F).

    Gated, it is f(gate) * value, and `linear` has 2F outputs, gates and values interleaved (kernels/weight_layout.py).
    `linear` is an nn.Linear, or a module that replaces one, such as a quantized matrix.
    """
    if x.is_cuda and torch.is_grad_enabled() and can_fuse(x, linear):
        return fused(x, linear, activation, gated)
    if x.dim() == 2 and x.is_cuda and relu_in_epilogue(activation, gated) and can_fuse(x, linear):
        assert isinstance(linear, nn.Linear)
        if linear.bias is not None and linear.weight.dtype == x.dtype:  # a decoding step: ReLU in the epilogue
            return torch._addmm_activation(linear.bias, x, linear.weight.t())
    y = linear(x)
    if not gated:
        return ACTIVATIONS[activation](y)
    gate, value = split_gates(y)
    return (ACTIVATIONS[activation](gate) * value).flatten(-2)


def can_fuse(x: Tensor, linear: nn.Module) -> bool:
    """Return whether the fused kernels support this layer: exactly an nn.Linear with a whole matrix, and no float64."""
    plain = type(linear) is nn.Linear and not hasattr(linear.weight, "full_tensor")  # not cut by tensor parallelism
    return TRITON and plain and working_dtype(x) != torch.float64


def fused(x: Tensor, linear: nn.Module, activation: str, gated: bool) -> Tensor:
    """Return what `linear_activation` defines, by the fused operators."""
    assert isinstance(linear, nn.Linear)
    dtype = working_dtype(x)
    rows = x.to(dtype).reshape(-1, x.shape[-1])
    result, _ = forward(rows, linear.weight.to(dtype), linear.bias, activation, gated)
    return result.view(*x.shape[:-1], result.shape[-1])


# ---- operators ---------------------------------------------------------------------------------------------------------


@operator("regard::activated")
def forward(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    """Return the result (M, F) for x (M, C), and for the backward pass x W^T + b, or (0,) where the result suffices."""
    bias = None if bias is None else bias.to(x.dtype)
    if relu_in_epilogue(activation, gated):
        bias = x.new_zeros(len(weight)) if bias is None else bias
        return torch._addmm_activation(bias, x, weight.t()), x.new_empty(0)
    from regard.kernels import linear_activation_triton as kernels

    saved = F.linear(x, weight, bias)
    result, _ = allocate_outputs(x, weight, activation, gated)
    rows, f = result.shape
    blocks = -(-rows // ROWS) * -(-f // WIDTH)
    kernels.forward[(blocks,)](saved, result, rows, **kernel_options(f, activation, gated))
    return result, saved


@forward.register_fake
def _(x: Tensor, weight: Tensor, bias: Any, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    return allocate_outputs(x, weight, activation, gated)


@torch.library.custom_op("regard::activated_backward", mutates_args=())
def backward(grad: Tensor, saved: Tensor, activation: str, gated: bool, has_bias: bool) -> tuple[Tensor, Tensor]:
    """Return the gradients of x W^T + b, (M, N), and of b, (N,) fp32, or (0,) without a bias.

    `saved` is what `forward` saved: x W^T + b, or the result where that suffices.
    """
    from regard.kernels import linear_activation_triton as kernels

    grad_linear, grad_bias = allocate_gradients(saved, has_bias)
    rows, f = grad.shape
    blocks = -(-f // WIDTH)
    programs = min(-(-rows // ROWS), -(-PROGRAMS * multiprocessors(saved) // blocks))
    partial_sums = grad_bias.new_empty(programs, len(grad_bias))
    kernels.backward[(blocks, programs)](
        *(grad.contiguous(), saved, grad_linear, partial_sums, rows),
        **(kernel_options(f, activation, gated) | {"BIAS": has_bias, "STAGES": STAGES}),
    )
    torch.sum(partial_sums, 0, out=grad_bias)
    return grad_linear, grad_bias


@backward.register_fake
def _(grad: Tensor, saved: Tensor, activation: str, gated: bool, has_bias: bool) -> tuple[Tensor, Tensor]:
    return allocate_gradients(saved, has_bias)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save what the backward pass needs (torch.library's `setup_context`)."""
    x, weight, bias, activation, gated = inputs
    result, saved = output
    ctx.mark_non_differentiable(saved)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, result if relu_in_epilogue(activation, gated) else saved)
    ctx.settings = activation, gated, bias is not None
    ctx.dtype = None if bias is None else bias.dtype


def run_backward(ctx: Any, grad: Tensor, _: None) -> Any:
    """Return the gradients of the inputs of `forward`, None for those that have none."""
    x, weight, saved = ctx.saved_tensors
    grad_linear, grad_bias = backward(grad, saved, *ctx.settings)
    grad_x = grad_linear @ weight if ctx.needs_input_grad[0] else None
    grad_weight = grad_linear.t() @ x if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, grad_bias.to(ctx.dtype) if ctx.dtype else None, None, None


forward.register_autograd(run_backward, setup_context=setup_context)


def relu_in_epilogue(activation: str, gated: bool) -> bool:
    """Return whether the epilogue of the matrix product can apply the activation: ReLU, not gated."""
    return activation == "relu" and not gated


# ---- sizes ---------------------------------------------------------------------------------------------------------------

ROWS, WIDTH = 16, 128  # of a tile
WARPS = 4
PROGRAMS = 8  # of the backward kernel, per multiprocessor; each loops over its share of the rows
STAGES = 1  # software pipeline stages of that loop


def allocate_outputs(x: Tensor, weight: Tensor, activation: str, gated: bool) -> tuple[Tensor, Tensor]:
    """Allocate the outputs of `forward`."""
    rows, n = x.shape[0], weight.shape[0]
    saved = x.new_empty(0) if relu_in_epilogue(activation, gated) else x.new_empty(rows, n)
    return x.new_empty(rows, n // (1 + gated)), saved


def allocate_gradients(saved: Tensor, has_bias: bool) -> tuple[Tensor, Tensor]:
    """Allocate the outputs of `backward`."""
    return saved.new_empty(saved.shape), saved.new_empty(saved.shape[1] if has_bias else 0, dtype=torch.float32)


def kernel_options(f: int, activation: str, gated: bool) -> dict[str, Any]:
    block = gate_block(f) if gated else 0
    return {"F": f, "NAME": activation, "GATES": block, "ROWS": ROWS, "WIDTH": WIDTH, "num_warps": WARPS}
