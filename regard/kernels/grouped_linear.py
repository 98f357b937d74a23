"""Grouped matrix products: the rows of x come in groups, and each group is multiplied with a matrix of its own.

A mixture of experts (layers/experts.py) sorts its tokens by expert, so that the tokens of an expert are a group. How many
rows a group has is known on the device alone. No product here asks the host for it on a GPU, so that a step can be captured
in a CUDA graph:

| device and dtype                       | product                                                                       |
|----------------------------------------|-------------------------------------------------------------------------------|
| CPU                                    | one product a group; reading the sizes costs nothing there                    |
| GPU from compute capability 9.0, bf16  | torch's grouped GEMM                                                          |
| other GPUs, fp32                       | a Triton kernel, which looks up the matrix of each tile of rows               |
| meta                                   | the product of all rows with one matrix, which counts the same FLOPs          |

On a GPU the size of every group is a multiple of TILE rows (`TILE` is a multiple of the 8 rows that torch's grouped GEMM
reads at a time, and all rows of a tile of the Triton kernel have one matrix); rows that fill a group up are zeros. Rows
after the last group belong to none, and their result may hold anything.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.operators import operator
from regard.kernels.residual_norm import TRITON

TILE = 32  # rows


def uses_torch(x: Tensor, *sizes: int) -> bool:
    """Return whether torch's grouped GEMM multiplies these: bf16 on Hopper or later, with rows of whole 16 bytes."""
    capable = x.is_cuda and x.dtype == torch.bfloat16 and torch.cuda.get_device_capability(x.device)[0] >= 9
    return capable and hasattr(torch, "_grouped_mm") and all(n % 8 == 0 for n in sizes)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return x W_g^T for the rows of each group g, (P, K) -> (P, N).

    weight: (G, N, K), in the dtype of x. ends: (G,) int32, the row after the last one of each group."""
    if x.is_meta:
        return F.linear(x, weight[0])
    if not x.is_cuda:
        sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
        groups = x.split([*sizes, len(x) - sum(sizes)])
        products = [F.linear(rows, matrix) for rows, matrix in zip(groups, weight, strict=False)]
        return torch.cat([*products, x.new_zeros(len(groups[-1]), weight.shape[1])])
    if TRITON and x.dtype != torch.float64:
        return grouped_product(x, weight, ends, False)
    row, begin, result = torch.arange(len(x), device=x.device)[:, None], 0, x.new_zeros(len(x), weight.shape[1])
    for matrix, end in zip(weight, ends, strict=True):  # float64: every product in full, which needs no sizes
        result, begin = torch.where((row >= begin) & (row < end), F.linear(x, matrix), result), end
    return result


@operator("regard::grouped_product")
def grouped_product(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    """Return x W_g^T of each group, (P, K) and (G, N, K) -> (P, N); transposed, x W_g, (P, N) -> (P, K)."""
    if uses_torch(x, *weight.shape[1:]):
        return torch._grouped_mm(x.contiguous(), weight if transposed else weight.transpose(1, 2), ends)
    from regard.kernels import grouped_linear_triton as kernels

    return kernels.run_product(x.contiguous(), weight if transposed else weight.transpose(1, 2), ends, TILE)


@grouped_product.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, transposed: bool) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2 if transposed else 1])


@torch.library.custom_op("regard::grouped_weight_gradient", mutates_args=())
def grouped_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the weight, the sum of grad_p x_p^T over the rows p of each group, (G, N, K)."""
    if uses_torch(x, grad.shape[1], x.shape[1]):
        return torch._grouped_mm(grad.contiguous().t(), x.contiguous(), ends)
    from regard.kernels import grouped_linear_triton as kernels

    return kernels.run_weight_gradient(grad.contiguous(), x.contiguous(), ends, TILE)


@grouped_weight_gradient.register_fake
def _(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, ends, transposed = inputs
    assert not transposed
    ctx.save_for_backward(x, weight, ends)


def _run_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    grad_x = grouped_product(grad, weight, ends, True) if ctx.needs_input_grad[0] else None
    grad_weight = grouped_weight_gradient(grad, x, ends) if ctx.needs_input_grad[1] else None
    return grad_x, grad_weight, None, None


grouped_product.register_autograd(_run_backward, setup_context=_setup_context)
