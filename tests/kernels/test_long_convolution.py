"""The long convolution against the double sum over pairs of tokens."""

from __future__ import annotations

import pytest
import torch
from formula import packed, ragged
from torch import Tensor

from regard.kernels.long_convolution import full_precision_product, long_convolution
from regard.kernels.masks import document_starts


def pair_by_pair(u: Tensor, kernel: Tensor, starts: Tensor) -> Tensor:
    """The convolution by its definition, from the (T, T) matrix of one channel at a time."""
    length = u.shape[1]
    apart = torch.arange(length)[:, None] - torch.arange(length)
    seen = (apart >= 0) & (torch.arange(length) >= starts[:, :, None])  # (B, T, T)
    weights = kernel[:, apart.clamp(min=0)] * seen[:, None]  # (B, H, T, T)
    return torch.einsum("bhij,bjh->bih", weights, u)


def inputs(rows: int, length: int, width: int = 3, dtype: torch.dtype = torch.double) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    u, kernel = torch.randn(rows, length, width, generator=generator), torch.randn(width, length, generator=generator)
    return u.to(dtype).requires_grad_(), kernel.to(dtype).requires_grad_()


def check(u: Tensor, kernel: Tensor, starts: Tensor, documents: bool) -> None:
    found = long_convolution(u, kernel, starts if documents else None)
    wanted = pair_by_pair(u, kernel, starts)
    torch.testing.assert_close(found, wanted, atol=1e-11, rtol=1e-11)
    grads = (torch.autograd.grad(y.sin().sum(), (u, kernel)) for y in (found, wanted))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, atol=1e-10, rtol=1e-10)


@pytest.mark.parametrize("length", [1, 2, 3, 16, 37, 130])
def test_one_text_a_row_forward_and_backward(length: int) -> None:
    check(*inputs(2, length), document_starts(ragged(length, max(1, length // 2))), documents=False)


@pytest.mark.parametrize(
    "rows", [[(1,)], [(3, 4), (5,)], [(1, 1, 1, 6, 7)], [(40, 17, 70, 3), (130,), (64, 66), (1, 1, 63, 33)]]
)
def test_packed_documents_forward_and_backward(rows: list[tuple[int, ...]]) -> None:
    positions = packed(*rows)
    check(*inputs(len(rows), positions.shape[1]), document_starts(positions), documents=True)


def test_texts_that_continue_and_documents_after_them() -> None:
    """Negative starts, as of a prompt that continues a text, see every column up to their own."""
    positions = torch.tensor([[7, 8, 9, 0, 1, 2, 3, -1, -1], [4, 5, 6, 7, 8, 9, 10, 11, 12]])
    check(*inputs(2, 9), document_starts(positions), documents=True)


@pytest.mark.parametrize("documents", [False, True])
def test_gradients_by_finite_differences(documents: bool) -> None:
    u, kernel = inputs(1, 37, width=1)
    starts = document_starts(packed((3, 34)))
    assert torch.autograd.gradcheck(lambda u, k: long_convolution(u, k, starts if documents else None), (u, kernel))


def test_half_precision_is_transformed_in_fp32() -> None:
    u, kernel = inputs(2, 50, dtype=torch.float32)
    low = u.detach().bfloat16().requires_grad_()
    starts = document_starts(ragged(50, 50))
    for given in (None, starts):
        found = long_convolution(low, kernel, given)
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, pair_by_pair(low.float(), kernel, starts), atol=1e-4, rtol=1e-4)
        assert torch.autograd.grad(found.sum(), low)[0].dtype == torch.bfloat16


def test_full_precision_products_have_the_gradients_of_products() -> None:
    a = torch.randn(3, 1, 4, 5, dtype=torch.double, requires_grad=True)
    b = torch.randn(2, 5, 6, dtype=torch.double, requires_grad=True)
    torch.testing.assert_close(full_precision_product(a, b), a @ b)
    for found, wanted in zip(
        *(torch.autograd.grad(y.sin().sum(), (a, b)) for y in (full_precision_product(a, b), a @ b)), strict=True
    ):
        torch.testing.assert_close(found, wanted)


def test_full_precision_products_ignore_autocast_and_leave_the_setting_as_it_was() -> None:
    usual = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        with torch.autocast("cpu", torch.bfloat16):
            assert full_precision_product(torch.ones(2, 2), torch.ones(2, 2)).dtype == torch.float32
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(usual)
