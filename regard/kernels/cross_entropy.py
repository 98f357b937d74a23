"""Chunked linear cross-entropy: output projection and loss in one function that never stores all logits.

The logits (M, V) of a batch would be the largest tensor of training. Here they are computed for a chunk of rows at a
time, in the precision of the matrix product. The forward pass already computes the gradient of each chunk, in place of
its logits, and multiplies it into the gradients of the hidden vectors and of the weight. The backward pass only scales
these by the incoming gradient.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.text.special_tokens import PAD

CHUNK_BYTES = {"cuda": 800 << 20, "cpu": 32 << 20}  # logits of one chunk
TILE = {"cuda": 64, "cpu": 1}  # the vocabulary is padded to a multiple: several times faster products on a GPU


@dataclass(frozen=True)
class LossTerms:
    """Settings of the loss of a row: (1 - e) nll + e (log Z - mean logit) + z (log Z)^2.

    e is the label smoothing, z the weight of the z-loss, and log Z the log-sum-exp of the logits.
    """

    label_smoothing: float
    z_loss: float
    vocabulary: int  # V, without padding
    dtype: torch.dtype  # of the matrix products


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    shares: Tensor | None = None,
) -> Tensor:
    """Return three sums over the rows, (3,): training loss, negative log-likelihood and number of scored labels.

    The logits are x (M, C) times weight (V, C) transposed, plus bias (V,); labels (M,) of PAD are not scored. `shares`
    (M,) is the weight of each label in the training loss (1 by default), which is the only sum that has a gradient.
    """
    scored = labels != PAD
    low = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if low else x.dtype
    exact = torch.promote_types(dtype, torch.float32)
    weights = scored.to(exact) if shares is None else (shares * scored).to(exact)
    terms = LossTerms(label_smoothing, z_loss, len(weight), dtype)
    given = (x, weight, bias, labels.clamp(min=0), weights, terms)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return LinearCrossEntropy.apply(*given)
    return compute_in_chunks(*given, (False, False, False))[0]


class LinearCrossEntropy(torch.autograd.Function):
    """Autograd function whose forward pass computes the gradients as well, and whose backward pass scales them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shares: Tensor, terms: LossTerms
    ) -> Tensor:
        sums, gradients = compute_in_chunks(x, weight, bias, labels, shares, terms, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if d is None else scale_gradient(d, grad[:1], dtype) for d, dtype in pairs), None, None, None


def scale_gradient(gradient: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return gradient * factor in `dtype`: one kernel, which multiplies in fp32 and rounds once."""
    return torch.mul(gradient, factor, out=torch.empty_like(gradient, dtype=dtype))


def compute_in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shares: Tensor,
    terms: LossTerms,
    needs_grad: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """Return the three sums, and the gradients of x, weight and bias where `needs_grad` says so."""
    matrix, padded_bias = pad_vocabulary(weight, bias, terms)
    x = x.to(terms.dtype)
    (m, c), v = x.shape, len(matrix)
    dx = torch.empty_like(x) if needs_grad[0] else None
    dw = shares.new_empty(v, c) if needs_grad[1] else None
    db = shares.new_zeros(v) if needs_grad[2] else None
    losses = shares.new_empty(m, 2)
    rows = chunk_rows(m, v * x.element_size(), x.device)
    buffer, losses_and_gradient = x.new_empty(min(rows, m), v), select_row_losses(x)
    for start in range(0, max(m, 1), rows):
        part = slice(start, start + rows)
        logits = buffer[: len(x[part])]
        if padded_bias is None:
            torch.mm(x[part], matrix.t(), out=logits)
        else:
            torch.addmm(padded_bias, x[part], matrix.t(), out=logits)
        losses_and_gradient(logits, labels[part], shares[part], terms, losses[part], any(needs_grad))
        if dx is not None:
            torch.mm(logits, matrix, out=dx[part])
        if dw is not None:
            accumulate_matmul(dw, logits.t(), x[part], overwrite=start == 0)
        if db is not None:
            db += logits.sum(0, dtype=db.dtype)
    sums = torch.stack([*losses.sum(0), (shares != 0).sum()])
    return sums, [dx, None if dw is None else dw[: len(weight)], None if db is None else db[: len(weight)]]


def pad_vocabulary(weight: Tensor, bias: Tensor | None, terms: LossTerms) -> tuple[Tensor, Tensor | None]:
    """Return the weight in the dtype of the product, padded to a multiple of TILE rows, and the bias of its logits, if any.

    Padding has a bias of minus infinity, so that its probability is zero.
    """
    v = len(weight)
    more = -v % TILE.get(weight.device.type, 1)
    matrix = weight.to(terms.dtype)
    if more:
        matrix = torch.nn.functional.pad(matrix, (0, 0, 0, more))
    if bias is None and not more:
        return matrix, None
    padded_bias = matrix.new_full((v + more,), -torch.inf)
    padded_bias[:v] = 0.0 if bias is None else bias
    return matrix, padded_bias


def chunk_rows(m: int, row_bytes: int, device: torch.device) -> int:
    """Return the rows of a chunk: chunks of equal size, as few as CHUNK_BYTES allows, rounded up to a multiple of 128 rows,
    which may exceed CHUNK_BYTES."""
    count = max(1, -(-m * row_bytes // CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])))
    return 128 * max(1, -(-m // (128 * count)))


def accumulate_matmul(total: Tensor, a: Tensor, b: Tensor, overwrite: bool) -> None:
    """Add a @ b to `total`, in fp32 even where a and b are not; `overwrite` ignores what `total` held."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=1 - overwrite, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=1 - overwrite, out=total)
    elif overwrite:
        total.copy_(a @ b)
    else:
        total += a @ b


def select_row_losses(x: Tensor) -> Callable[[Tensor, Tensor, Tensor, LossTerms, Tensor, bool], None]:
    """Return the function that computes losses and gradients: the fused Triton kernel on a GPU, else the torch reference."""
    if x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton"):
        from regard.kernels.cross_entropy_triton import row_losses as fused

        return fused
    return row_losses


def row_losses(
    logits: Tensor, labels: Tensor, shares: Tensor, terms: LossTerms, losses: Tensor, with_gradient: bool
) -> None:
    """Write the training loss and the negative log-likelihood of each row into `losses` (R, 2).

    With `with_gradient`, `logits` (R, V) are overwritten by the gradient of the summed training loss.
    """
    e, z, n = terms.label_smoothing, terms.z_loss, terms.vocabulary
    scores = logits.to(losses.dtype)
    real = scores > -torch.inf if n < scores.shape[1] else None  # False on padding of the vocabulary
    log_z = scores.logsumexp(1)
    nll = log_z - scores.gather(1, labels[:, None]).squeeze(1)
    nll = nll.where(shares != 0, 0)
    loss = nll
    if e:  # label smoothing
        mean = (scores if real is None else scores.where(real, 0)).sum(1) / n
        loss = (1 - e) * nll + e * (log_z - mean)
    losses[:, 0] = (loss + z * log_z**2) * shares
    losses[:, 1] = nll
    if not with_gradient:
        return
    scores.sub_(log_z[:, None]).exp_().mul_((shares * (1 + 2 * z * log_z))[:, None])  # the softmax, scaled
    if e:
        uniform = (shares * (e / n))[:, None]
        scores.sub_(uniform if real is None else uniform * real)
    scores.scatter_add_(1, labels[:, None], ((e - 1) * shares)[:, None])
    logits.copy_(scores)
