"""Triton kernels of kernels/grouped_linear.py: products of groups of rows with a matrix each, and the weights' gradient.

Groups end at multiples of TILE rows, so all rows of a tile have one matrix. Products are summed in fp32; fp32 inputs are
multiplied as `torch.set_float32_matmul_precision` says: exactly, or in TF32.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WIDTH, DEPTH = 64, 32  # columns of a tile of the result, and how many products are summed at a time


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, ends, result, rows, group_stride, in_stride, out_stride,
    GROUPS: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    TILE: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of TILE rows and WIDTH columns of the result; tiles after the last group are left as they are."""
    first = tl.program_id(0) * TILE
    group = 0
    for g in range(GROUPS):
        group += (tl.load(ends + g) <= first).to(tl.int32)
    if group < GROUPS:
        row = (first + tl.arange(0, TILE)).to(tl.int64)[:, None]
        n = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
        matrix = weight + group.to(tl.int64) * group_stride
        total = tl.zeros((TILE, WIDTH), tl.float32)
        for start in range(0, K, DEPTH):
            k = start + tl.arange(0, DEPTH)
            a = tl.load(x + row * K + k[None, :], mask=(row < rows) & (k[None, :] < K), other=0.0)
            at = matrix + k[:, None] * in_stride + n * out_stride
            b = tl.load(at, mask=(k[:, None] < K) & (n < N), other=0.0)
            total = tl.dot(a, b, total, input_precision=PRECISION)
        tl.store(result + row * N + n, total.to(result.dtype.element_ty), mask=(row < rows) & (n < N))


@triton.jit
def weight_gradient(
    grad, x, ends, result,
    K: tl.constexpr, N: tl.constexpr, TILE: tl.constexpr, WIDTH: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile (WIDTH, WIDTH) of the gradient of one group's matrix, which is summed over the group's rows."""
    group = tl.program_id(0)
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    end = tl.load(ends + group)
    n = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    k = (tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)).to(tl.int64)
    total = tl.zeros((WIDTH, WIDTH), tl.float32)
    for start in range(begin, end, TILE):
        row = (start + tl.arange(0, TILE)).to(tl.int64)
        a = tl.load(grad + row[None, :] * N + n[:, None], mask=n[:, None] < N, other=0.0)
        b = tl.load(x + row[:, None] * K + k[None, :], mask=k[None, :] < K, other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    at = result + (group.to(tl.int64) * N + n[:, None]) * K + k[None, :]
    tl.store(at, total.to(result.dtype.element_ty), mask=(n[:, None] < N) & (k[None, :] < K))


def precision() -> str:
    """Return how `tl.dot` multiplies fp32 numbers."""
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def run_product(x: Tensor, weight: Tensor, ends: Tensor, tile: int) -> Tensor:
    """Return the products of the rows of x (P, K) with the matrices (G, K, N) of their groups, (P, N)."""
    groups, k, n = weight.shape
    result = x.new_empty(len(x), n)
    grid = (triton.cdiv(len(x), tile), triton.cdiv(n, WIDTH))
    product[grid](
        *(x, weight, ends, result, len(x), *weight.stride()),
        GROUPS=groups, K=k, N=n, TILE=tile, WIDTH=WIDTH, DEPTH=DEPTH, PRECISION=precision(),
    )  # fmt: skip
    return result


def run_weight_gradient(grad: Tensor, x: Tensor, ends: Tensor, tile: int) -> Tensor:
    """Return the sum of grad_p x_p^T over the rows p of each group, (G, N, K), for grad (P, N) and x (P, K)."""
    n, k = grad.shape[1], x.shape[1]
    result = x.new_empty(len(ends), n, k)
    grid = (len(ends), triton.cdiv(n, WIDTH), triton.cdiv(k, WIDTH))
    weight_gradient[grid](grad, x, ends, result, K=k, N=n, TILE=tile, WIDTH=WIDTH, PRECISION=precision())
    return result
