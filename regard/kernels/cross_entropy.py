"""Cross-entropy over a vocabulary, straight from the vectors that its matrix multiplies.

The logits (M, V) of a batch would be the largest tensor of training. Here some rows are worked out at a time, in the
precision of the product: their losses are read off, the gradient takes the place of the logits, and goes at once into
those of the vectors and of the matrix. The backward pass has only to multiply by what comes in, and nothing of size
M x V is ever there.
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

CHUNK_BYTES = {"cuda": 800 << 20, "cpu": 32 << 20}  # of logits at a time: on a GPU large enough for fast products
TILE = {"cuda": 64, "cpu": 1}  # products with a vocabulary of whole tiles are several times faster on a GPU


@dataclass(frozen=True)
class Terms:
    """What the loss of a row is made of: (1 - e) nll + e (log Z - mean logit) + z (log Z)^2."""

    smoothing: float
    z_loss: float
    answers: int  # how many there are
    dtype: torch.dtype  # of the products


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    *,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    shares: Tensor | None = None,
) -> Tensor:
    """x (M, C), weight (V, C), labels (M,) -> three sums, (3,): the loss to descend, the plain one, and how many are scored.

    `shares` (M,) is how much each answer weighs in the loss to descend, which alone has a gradient.
    """
    scored = labels != PAD
    low = torch.is_autocast_enabled(x.device.type)
    dtype = torch.get_autocast_dtype(x.device.type) if low else x.dtype
    exact = torch.promote_types(dtype, torch.float32)
    weights = scored.to(exact) if shares is None else (shares * scored).to(exact)
    terms = Terms(smoothing, z_loss, len(weight), dtype)
    given = (x, weight, bias, labels.clamp(min=0), weights, terms)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias)):
        return LinearCrossEntropy.apply(*given)
    return in_chunks(*given, (False, False, False))[0]


class LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, shares: Tensor, terms: Terms
    ) -> Tensor:
        sums, gradients = in_chunks(x, weight, bias, labels, shares, terms, ctx.needs_input_grad[:3])
        ctx.save_for_backward(*gradients)
        ctx.dtypes = [x.dtype, weight.dtype, weight.dtype if bias is None else bias.dtype]
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return *(None if d is None else scaled(d, grad[:1], dtype) for d, dtype in pairs), None, None, None


def scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """In one go, multiplied in fp32 and rounded once."""
    return torch.mul(gradient, by, out=torch.empty_like(gradient, dtype=dtype))


def in_chunks(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    shares: Tensor,
    terms: Terms,
    wanted: tuple[bool, ...],
) -> tuple[Tensor, list[Tensor | None]]:
    """The three sums, and the gradients of x, weight and bias where they are wanted."""
    matrix, added = prepare(weight, bias, terms)
    x = x.to(terms.dtype)
    (m, c), v = x.shape, len(matrix)
    dx = torch.empty_like(x) if wanted[0] else None
    dw = shares.new_empty(v, c) if wanted[1] else None
    db = shares.new_zeros(v) if wanted[2] else None
    losses = shares.new_empty(m, 2)
    rows = chunk_rows(m, v * x.element_size(), x.device)
    buffer, work = x.new_empty(min(rows, m), v), worker(x)
    for start in range(0, max(m, 1), rows):
        part = slice(start, start + rows)
        logits = buffer[: len(x[part])]
        multiply(x[part], matrix, added, logits)
        work(logits, labels[part], shares[part], terms, losses[part], any(wanted))
        if dx is not None:
            torch.mm(logits, matrix, out=dx[part])
        if dw is not None:
            add_product(dw, logits.t(), x[part], blank=start == 0)
        if db is not None:
            db += logits.sum(0, dtype=db.dtype)
    sums = torch.stack([*losses.sum(0), (shares != 0).sum()])
    return sums, [dx, None if dw is None else dw[: len(weight)], None if db is None else db[: len(weight)]]


def prepare(weight: Tensor, bias: Tensor | None, terms: Terms) -> tuple[Tensor, Tensor | None]:
    """The matrix in the precision of the product, filled up with rows to whole tiles, and what is added to its logits.

    An answer that only fills up has a bias of minus infinity.
    """
    v = len(weight)
    more = -v % TILE.get(weight.device.type, 1)
    matrix = weight.to(terms.dtype)
    if more:
        matrix = torch.nn.functional.pad(matrix, (0, 0, 0, more))
    if bias is None and not more:
        return matrix, None
    added = matrix.new_full((v + more,), -torch.inf)
    added[:v] = 0.0 if bias is None else bias
    return matrix, added


def chunk_rows(m: int, row_bytes: int, device: torch.device) -> int:
    """Chunks of one size, as few as the memory allows; whole tiles of rows."""
    count = max(1, -(-m * row_bytes // CHUNK_BYTES.get(device.type, CHUNK_BYTES["cuda"])))
    return 128 * max(1, -(-m // (128 * count)))


def multiply(x: Tensor, matrix: Tensor, added: Tensor | None, logits: Tensor) -> None:
    if added is None:
        torch.mm(x, matrix.t(), out=logits)
    else:
        torch.addmm(added, x, matrix.t(), out=logits)


def add_product(total: Tensor, a: Tensor, b: Tensor, blank: bool) -> None:
    """total += a @ b in fp32 even where a and b are not; where it is blank, whatever it held is overwritten."""
    if total.dtype == a.dtype:
        torch.addmm(total, a, b, beta=1 - blank, out=total)
    elif total.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=1 - blank, out=total)
    elif blank:
        total.copy_(a @ b)
    else:
        total += a @ b


def worker(x: Tensor) -> Callable[[Tensor, Tensor, Tensor, Terms, Tensor, bool], None]:
    """On a GPU one kernel that reads a row once and writes it once; elsewhere the same in torch."""
    if x.is_cuda and x.dtype != torch.float64 and importlib.util.find_spec("triton"):
        from regard.kernels.cross_entropy_triton import row_losses as fused

        return fused
    return row_losses


def row_losses(
    logits: Tensor, labels: Tensor, shares: Tensor, terms: Terms, losses: Tensor, with_gradient: bool
) -> None:
    """Loss and plain loss of each row into `losses` (R, 2); `logits` (R, V) become the gradient of the summed loss."""
    e, z, n = terms.smoothing, terms.z_loss, terms.answers
    scores = logits.to(losses.dtype)
    given = scores > -torch.inf if n < scores.shape[1] else None
    log_z = scores.logsumexp(1)
    nll = log_z - scores.gather(1, labels[:, None]).squeeze(1)
    nll = nll.where(shares != 0, 0)
    loss = nll
    if e:
        mean = (scores if given is None else scores.where(given, 0)).sum(1) / n
        loss = (1 - e) * nll + e * (log_z - mean)
    losses[:, 0] = (loss + z * log_z**2) * shares
    losses[:, 1] = nll
    if not with_gradient:
        return
    scores.sub_(log_z[:, None]).exp_().mul_((shares * (1 + 2 * z * log_z))[:, None])  # the softmax, scaled
    if e:
        even = (shares * (e / n))[:, None]
        scores.sub_(even if given is None else even * given)
    scores.scatter_add_(1, labels[:, None], ((e - 1) * shares)[:, None])
    logits.copy_(scores)
