"""Triton kernel of kernels/cross_entropy.py: the losses of a row of logits and, in place of the logits, their gradient.

A program handles one row and reads it twice: once for the log-sum-exp (online softmax), once for the gradient. Few rows
are in flight at a time, so the second read mostly hits the L2 cache. (Keeping a whole row in registers is slower: too
few rows are in flight then.)
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.cross_entropy import LossTerms

BLOCK = 4096  # logits at a time
WARPS = 8


def row_losses(
    logits: Tensor, labels: Tensor, shares: Tensor, terms: LossTerms, losses: Tensor, with_gradient: bool
) -> None:
    """Write the training loss and the negative log-likelihood of each row into `losses` (R, 2), as the torch reference does.

    With `with_gradient`, `logits` (R, V) are overwritten by the gradient of the summed training loss.
    """
    rows, v = logits.shape
    block = min(BLOCK, triton.next_power_of_2(v))
    row_loss_kernel[(rows,)](
        *(logits, labels, shares, losses, v),
        *(terms.label_smoothing, terms.label_smoothing / terms.vocabulary, terms.z_loss),
        SMOOTH=terms.label_smoothing > 0,
        GRADIENT=with_gradient,
        N=block,
        num_warps=max(1, WARPS * block // BLOCK),
    )


@triton.jit
def gradient(x, is_label, log_z, share, smoothing, uniform, z, SMOOTH: tl.constexpr):
    """Return the gradient of the loss with respect to the logits x (N,)."""
    g = share * (1 + 2 * z * log_z) * tl.exp(x - log_z)
    if SMOOTH:
        g -= tl.where(x > -float("inf"), share * uniform, 0.0)  # padding of the vocabulary has logits of -inf
    return g - tl.where(is_label, share * (1 - smoothing), 0.0)


@triton.jit
def row_loss_kernel(
    logits, labels, shares, losses, V, smoothing, uniform, z,
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
        label_logit = tl.load(logits + label).to(tl.float32)
        log_z, total = log_sum_exp(logits, V, SMOOTH, N)
        nll = log_z - label_logit
        loss = nll
        if SMOOTH:  # label smoothing
            loss = (1 - smoothing) * nll + smoothing * log_z - uniform * total
        tl.store(losses + 2 * row, share * (loss + z * log_z * log_z))
        tl.store(losses + 2 * row + 1, nll)
        if GRADIENT:
            tl.debug_barrier()  # every thread must have read the label's logit before it is overwritten
            write_gradient(logits, label, V, log_z, share, smoothing, uniform, z, SMOOTH, N)


@triton.jit
def log_sum_exp(logits, V, SMOOTH: tl.constexpr, N: tl.constexpr):
    """Return the log-sum-exp of a row (online softmax), and the sum of its logits other than minus infinity."""
    m = -1e30
    z = tl.zeros((N,), tl.float32)
    total = tl.zeros((N,), tl.float32)
    for start in range(0, V, N):
        at = start + tl.arange(0, N)
        x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
        m_new = tl.maximum(m, tl.max(x, 0))
        z = z * tl.exp(m - m_new) + tl.exp(x - m_new)
        if SMOOTH:  # label smoothing
            total += tl.where(x > -float("inf"), x, 0.0)
        m = m_new
    return m + tl.log(tl.sum(z, 0)), tl.sum(total, 0)


@triton.jit
def write_gradient(logits, label, V, log_z, share, smoothing, uniform, z, SMOOTH: tl.constexpr, N: tl.constexpr):
    for start in range(0, V, N):
        at = start + tl.arange(0, N)
        x = tl.load(logits + at, mask=at < V, other=-float("inf")).to(tl.float32)
        g = gradient(x, at == label, log_z, share, smoothing, uniform, z, SMOOTH)
        tl.store(logits + at, g.to(logits.dtype.element_ty), mask=at < V)
