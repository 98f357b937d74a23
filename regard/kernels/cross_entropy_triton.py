"""The Triton side of kernels/cross_entropy.py: a row of logits to its losses and, in their place, to its gradient.

A program has one row. It goes over it twice, and so few rows are in work at a time that the second reading finds much of
them in the second-level cache. (Holding a whole row in registers is slower: too few rows are in work then.)
"""

# mypy: ignore-errors
# Triton's language is not Python's

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.cross_entropy import Terms

BLOCK = 4096  # logits at a time
WARPS = 8


def row_losses(
    logits: Tensor, labels: Tensor, shares: Tensor, terms: Terms, losses: Tensor, with_gradient: bool
) -> None:
    """Loss and plain loss of each row into `losses` (R, 2); `logits` (R, V) become the gradient of the summed loss."""
    rows, v = logits.shape
    block = min(BLOCK, triton.next_power_of_2(v))
    of_row[(rows,)](
        *(logits, labels, shares, losses, v),
        *(terms.smoothing, terms.smoothing / terms.answers, terms.z_loss),
        SMOOTH=terms.smoothing > 0,
        GRADIENT=with_gradient,
        N=block,
        num_warps=max(1, WARPS * block // BLOCK),
    )


@triton.jit
def gradient(x, right, log_z, share, smoothing, even, z, SMOOTH: tl.constexpr):
    """Of the loss by the logits x, of which `right` is the right one."""
    g = share * (1 + 2 * z * log_z) * tl.exp(x - log_z)
    if SMOOTH:
        g -= tl.where(x > -float("inf"), share * even, 0.0)
    return g - tl.where(right, share * (1 - smoothing), 0.0)


@triton.jit
def of_row(
    logits, labels, shares, losses, V, smoothing, even, z,
    SMOOTH: tl.constexpr, GRADIENT: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * V
    share = tl.load(shares + row)
    if share == 0.0:
        tl.store(losses + 2 * row, 0.0)
        tl.store(losses + 2 * row + 1, 0.0)
        if GRADIENT:
            for start in range(0, V, N):
                at = start + tl.arange(0, N)
                tl.store(logits + at, tl.zeros((N,), logits.dtype.element_ty), mask=at < V)
    else:
        label = tl.load(labels + row)
        right = tl.load(logits + label).to(tl.float32)
        log_z, total = sums(logits, V, SMOOTH, N)
        nll = log_z - right
        loss = nll
        if SMOOTH:
            loss = (1 - smoothing) * nll + smoothing * log_z - even * total
        tl.store(losses + 2 * row, share * (loss + z * log_z * log_z))
        tl.store(losses + 2 * row + 1, nll)
        if GRADIENT:
            tl.debug_barrier()  # every thread has read the right answer's logit
            differentiate(logits, label, V, log_z, share, smoothing, even, z, SMOOTH, N)


@triton.jit
def sums(logits, V, SMOOTH: tl.constexpr, N: tl.constexpr):
    """log Z, and the sum of the logits that are not minus infinity."""
    m = -1e30
    z = tl.zeros((N,), tl.float32)
    total = tl.zeros((N,), tl.float32)
    for start in range(0, V, N):
        at = start + tl.arange(0, N)
        x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        z = z * tl.exp(m - m_new) + tl.exp(x - m_new)
        if SMOOTH:
            total += tl.where(x > -float("inf"), x, 0.0)
        m = m_new
    return m + tl.log(tl.sum(z, 0)), tl.sum(total, 0)


@triton.jit
def differentiate(logits, label, V, log_z, share, smoothing, even, z, SMOOTH: tl.constexpr, N: tl.constexpr):
    for start in range(0, V, N):
        at = start + tl.arange(0, N)
        x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
        g = gradient(x, at == label, log_z, share, smoothing, even, z, SMOOTH)
        tl.store(logits + at, g.to(logits.dtype.element_ty), mask=at < V)
