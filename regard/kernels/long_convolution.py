"""A causal convolution whose kernel is as long as the text: y[t] = sum over j <= t of K[t - j] u[j], channel by channel.

It is a product of Fourier transforms, O(T log T). Rows that hold several documents need more, since a transform knows no
borders: there the row is halved again and again. Of two neighbouring blocks of m tokens, the left one reaches the right one
only through the one document that lies across the border between them, so a convolution of the left block, masked to that
document, gives what the right block receives, masked to that document too. Every pair of tokens is separated at exactly one
level, so the levels add up to the exact result, O(T log^2 T), with shapes that do not depend on the documents.

The Fourier transforms are in fp32 at least. The backward pass transforms its inputs again, so that autograd keeps u and K
alone; it is written by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.device import without_autocast

SHORT = 16  # blocks of up to so many tokens are convolved by a product with a Toeplitz matrix


def long_convolution(u: Tensor, kernel: Tensor, starts: Tensor | None = None) -> Tensor:
    """Convolve u (B, T, H) with a kernel (H, T), causally; return (B, T, H) in fp32 at least.

    starts: (B, T), the column at which each token's document begins, where rows hold several documents
    (`kernels.masks.document_starts`); None: every row is one text."""
    return LongConvolution.apply(u, kernel, starts)


class LongConvolution(torch.autograd.Function):
    """The causal convolution, with a backward pass that transforms u and K again instead of keeping their transforms."""

    @staticmethod
    def forward(ctx: Any, u: Tensor, kernel: Tensor, starts: Tensor | None) -> Tensor:
        ctx.save_for_backward(u, kernel, starts)
        ours, kernel = to_rows(u), in_full_precision(kernel)  # (B, H, T), (H, T)
        if not u.numel():  # transforms of nothing are an error
            return torch.zeros_like(ours).mT
        y = convolve(ours, kernel) if starts is None else convolve_documents(ours, kernel, starts)
        return y.mT

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        u, kernel, starts = ctx.saved_tensors
        if not u.numel():
            return torch.zeros_like(u), torch.zeros_like(kernel), None
        ours, full, grad = to_rows(u), in_full_precision(kernel), to_rows(grad)
        if starts is None:
            grad_u, grad_kernel = convolve_backward(ours, full, grad)
        else:
            grad_u, grad_kernel = convolve_documents_backward(ours, full, starts, grad)
        return grad_u.mT.to(u.dtype), grad_kernel.to(kernel.dtype), None


def in_full_precision(x: Tensor) -> Tensor:
    """Return x in fp32, or in fp64 where it is fp64."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def to_rows(x: Tensor) -> Tensor:
    """Return (B, T, H) as contiguous rows (B, H, T) in full precision."""
    return in_full_precision(x).mT.contiguous()


# ---- one text a row ------------------------------------------------------------------------------------------------------


def transform_length(length: int) -> int:
    """Return the length of the transforms of a causal convolution: a power of 2 with room for zeros behind the text."""
    return 1 << (2 * length - 2).bit_length() if length > 1 else 2


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """Convolve rows u (B, H, T) with a kernel (H, T)."""
    length = u.shape[2]
    n = transform_length(length)
    return torch.fft.irfft(torch.fft.rfft(u, n) * torch.fft.rfft(kernel, n), n)[..., :length]


def convolve_backward(u: Tensor, kernel: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of u (B, H, T) and of the kernel (H, T): both are correlations with the gradient of y."""
    length = u.shape[2]
    n = transform_length(length)
    of_grad, of_u = torch.fft.rfft(grad, n), torch.fft.rfft(u, n)
    grad_u = torch.fft.irfft(of_grad * torch.fft.rfft(kernel, n).conj(), n)[..., :length]
    grad_kernel = torch.fft.irfft((of_grad * of_u.conj()).sum(0), n)[..., :length]
    return grad_u, grad_kernel


# ---- several documents a row ---------------------------------------------------------------------------------------------


class Level(NamedTuple):
    """Blocks of 2m tokens, each with a left and a right half, and what of the halves belongs to the document across them."""

    half: int  # m
    left: Tensor  # (B, 1, blocks, m), True for tokens of that document
    right: Tensor  # (B, 1, blocks, m)


def padded_length(length: int) -> int:
    """Return the next power of 2."""
    return 1 << (length - 1).bit_length()


def levels_of(starts: Tensor) -> Iterator[Level]:
    """Yield the levels of rows whose tokens' documents begin at `starts` (B, T), T a power of 2."""
    length, half = starts.shape[1], 1
    index = torch.arange(length, device=starts.device)
    while half < length:
        blocks, at = starts.unflatten(1, (-1, 2, half)), index.view(-1, 2, half)
        begin = blocks[:, :, 1, :1]  # (B, blocks, 1), where the document of the first token on the right begins
        left = at[:, 0] >= begin
        right = (blocks[:, :, 1] == begin) & (begin < at[:, 1, :1])
        yield Level(half, left[:, None], right[:, None])
        half *= 2


def toeplitz_matrix(kernel: Tensor, half: int) -> Tensor:
    """Return the matrices (H, m, m) that take m tokens to the m tokens after them: entry (i, j) is K[m + i - j]."""
    index = torch.arange(half, device=kernel.device)
    return kernel[:, half + index[:, None] - index]


def toeplitz_backward(grad: Tensor) -> Tensor:
    """Sum the gradient of such matrices (H, m, m) over their diagonals: the gradient of K[0 .. 2m - 1], (H, 2m)."""
    half = grad.shape[1]
    index = torch.arange(half, device=grad.device)
    places = (half + index[:, None] - index).flatten()
    return grad.new_zeros(len(grad), 2 * half).index_add_(1, places, grad.flatten(1))


def pad_documents(starts: Tensor, *rows: Tensor) -> tuple[Tensor, ...]:
    """Pad starts (B, T) and rows (..., T) to a power of 2; what is appended is a document of its own."""
    length = starts.shape[1]
    more = padded_length(length) - length
    return F.pad(starts, (0, more), value=length), *(F.pad(x, (0, more)) for x in rows)


def convolve_documents(u: Tensor, kernel: Tensor, starts: Tensor) -> Tensor:
    """Convolve rows u (B, H, T) of several documents with a kernel (H, T)."""
    length = u.shape[2]
    starts, u, kernel = pad_documents(starts, u, kernel)
    y = u * kernel[:, :1]
    for half, left, right in levels_of(starts):
        blocks = y.unflatten(2, (-1, 2, half))
        given = u.unflatten(2, (-1, 2, half))[:, :, :, 0] * left  # (B, H, blocks, m)
        if half <= SHORT:
            found = multiply_exactly(given, toeplitz_matrix(kernel, half).mT)
        else:
            # Of a circular convolution of 2m tokens the second half is free of what wraps around.
            of_kernel = torch.fft.rfft(kernel[:, None, : 2 * half])
            found = torch.fft.irfft(torch.fft.rfft(given, 2 * half) * of_kernel, 2 * half)[..., half:]
        blocks[:, :, :, 1] += found * right
    return y[..., :length]


def convolve_documents_backward(u: Tensor, kernel: Tensor, starts: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of u (B, H, T) and of the kernel (H, T)."""
    length = u.shape[2]
    starts, u, kernel, grad = pad_documents(starts, u, kernel, grad)
    grad_u, grad_kernel = grad * kernel[:, :1], torch.zeros_like(kernel)
    grad_kernel[:, 0] = (grad * u).sum((0, 2))
    for half, left, right in levels_of(starts):
        given = u.unflatten(2, (-1, 2, half))[:, :, :, 0] * left
        received = grad.unflatten(2, (-1, 2, half))[:, :, :, 1] * right  # (B, H, blocks, m)
        if half <= SHORT:
            back = multiply_exactly(received, toeplitz_matrix(kernel, half))
            rows = received.permute(1, 3, 0, 2).flatten(2)  # (H, m, B * blocks)
            of_level = toeplitz_backward(multiply_exactly(rows, given.transpose(0, 1).flatten(1, 2)))
        else:
            of_kernel, of_given = torch.fft.rfft(kernel[:, None, : 2 * half]), torch.fft.rfft(given, 2 * half)
            of_received = torch.fft.rfft(F.pad(received, (half, 0)))
            back = torch.fft.irfft(of_received * of_kernel.conj(), 2 * half)[..., :half]
            of_level = torch.fft.irfft((of_received * of_given.conj()).sum((0, 2)), 2 * half)
        grad_u.unflatten(2, (-1, 2, half))[:, :, :, 0] += back * left
        grad_kernel[:, 1 : 2 * half] += of_level[:, 1:]
    return grad_u[..., :length], grad_kernel[:, :length]


# ---- products in full precision -----------------------------------------------------------------------------------------


class FullPrecisionProduct(torch.autograd.Function):
    """A matrix product in true fp32, also where training lets fp32 products run in TF32, forward and backward."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return multiply_exactly(a, b)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        grad_a, grad_b = multiply_exactly(grad, b.mT), multiply_exactly(a.mT, grad)
        return grad_a.sum_to_size(a.shape), grad_b.sum_to_size(b.shape)  # over what was broadcast


def full_precision_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b for a (..., m, k) and b (..., k, n), without TF32 and autocast.

    The powers of a transition matrix need it: TF32 has 10 bits of mantissa, and the errors of a power add up."""
    return FullPrecisionProduct.apply(a, b)


def multiply_exactly(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b without TF32 and autocast."""
    usual = torch.get_float32_matmul_precision()
    if usual != "highest":
        torch.set_float32_matmul_precision("highest")
    try:
        with without_autocast(a.device):
            return a @ b
    finally:
        if usual != "highest":
            torch.set_float32_matmul_precision(usual)
