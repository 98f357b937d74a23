"""Grouped products: the definition and the Triton kernels (interpreted on a CPU) against one product a group in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.kernels import grouped_linear
from regard.kernels.grouped_linear import TILE

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SIZES = [2 * TILE, 0, TILE, 3 * TILE]
K, N = 40, 72
KERNEL_DTYPES = [torch.float32, *([torch.bfloat16] if CUDA else [])]  # the interpreter has no products in bf16


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")
    from regard.kernels import grouped_linear_triton

    return grouped_linear_triton


def tensors(dtype: torch.dtype = torch.float32, extra: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(sum(SIZES) + extra, K, device=DEVICE, dtype=dtype)
    weight = torch.randn(len(SIZES), N, K, device=DEVICE, dtype=dtype)
    return x, weight, torch.tensor(SIZES, device=DEVICE).cumsum(0).to(torch.int32)


def by_hand(x: Tensor, weight: Tensor) -> Tensor:
    rows = x.double().split([*SIZES, len(x) - sum(SIZES)])
    return torch.cat([part @ matrix.double().T for part, matrix in zip(rows, weight, strict=False)])


def tolerance(dtype: torch.dtype, terms: int) -> dict[str, float]:
    """Sums of products of standard normal numbers are about sqrt(terms) large; each of `terms` sums in fp32 is rounded at
    that size, which adds up to terms * eps, and the result once more in its dtype."""
    rounded = 4 * terms * torch.finfo(torch.float32).eps
    return {"atol": rounded + 4 * terms**0.5 * torch.finfo(dtype).eps, "rtol": 0.0}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_each_group_has_its_matrix(dtype: torch.dtype) -> None:
    x, weight, ends = tensors(dtype, extra=5)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    y = grouped_linear.grouped_linear(x, weight, ends)[: sum(SIZES)]
    torch.testing.assert_close(y.double(), by_hand(x, weight), **tolerance(dtype, K))
    grad = torch.randn_like(y)
    found = torch.autograd.grad(y, (x, weight), grad)
    wanted = torch.autograd.grad(by_hand(x, weight), (x, weight), grad.double())
    torch.testing.assert_close(found[0][: len(y)].double(), wanted[0][: len(y)].double(), **tolerance(dtype, N))
    torch.testing.assert_close(found[1].double(), wanted[1].double(), **tolerance(dtype, len(x)))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_kernel_of_the_product(kernels: Any, dtype: torch.dtype, transposed: bool) -> None:
    x, weight, ends = tensors(dtype, extra=TILE + 3)
    matrices = weight.transpose(1, 2)  # (G, K, N), with strides of both orders
    matrices = matrices.contiguous() if transposed else matrices
    y = kernels.run_product(x, matrices, ends, TILE)
    torch.testing.assert_close(y[: sum(SIZES)].double(), by_hand(x, weight), **tolerance(dtype, K))


@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_kernel_of_the_weights_gradient(kernels: Any, dtype: torch.dtype) -> None:
    x, _, ends = tensors(dtype)
    grad = torch.randn(len(x), N, device=DEVICE).to(dtype)
    found = kernels.run_weight_gradient(grad, x, ends, TILE)
    pairs = zip(grad.double().split(SIZES), x.double().split(SIZES), strict=True)
    torch.testing.assert_close(found.double(), torch.stack([g.T @ rows for g, rows in pairs]), **tolerance(dtype, 96))
    assert not found[1].any(), "a group without rows has a gradient of zeros"
