"""Fused attention with FIRE's position bias (Li et al. 2023): f(psi(q - k) / psi(max(L, q))).

The bias depends on the distance and on the query's position, but x = psi(distance) * rate(query) is a Toeplitz table
times one number per query, so the kernels of kernels/toeplitz_attention.py apply. f is a network with one hidden layer
of P ReLU units, so the bias of head h is piecewise linear in x, with the sorted knots n_p = -b_p / w_p:

    f_h(x) = const + a_h x + sum_p jump_hp max(x - n_p, 0).

The softmax cancels the constant. x varies so little within a tile of scores that the tile mostly lies between two
knots. So the gradients need two sums per piece of f, sum(ds) and sum(ds x) with ds the gradient of the scores, and the
same two sums beyond each knot that lies within a tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.masks import Mask
from regard.kernels.toeplitz_attention import LOG2E, TILE, IntervalMask, Launch, interval_mask, pad_table


class FIREBias(Protocol):
    """The attributes of the position scheme FIRE (layers/positions/relative.py) that the kernels need."""

    c: Tensor
    threshold: Tensor
    stretch: Any
    inner: nn.Linear
    outer: nn.Linear


@dataclass(frozen=True)
class PiecewiseLinearBias:
    """FIRE's bias for T tokens as a piecewise linear function, with P knots and K = P + 1 pieces."""

    mask: IntervalMask
    learned: tuple[Tensor, ...]  # a (H,), jump (H, P), knots (P,), rate (T,), c
    psi: Tensor  # (1, WIDTH), psi of every distance
    psi_slope: Tensor  # (1, WIDTH), its derivative with respect to c
    pieces: Tensor  # (tiles, tiles, 2) int32: the piece of a tile's smallest x, and that of its largest
    lines: Tensor  # (H, 3, K): slope and offset of each piece, jump of the slope at each knot


def prepare(scheme: FIREBias, mask: Mask, positions: Tensor) -> PiecewiseLinearBias:
    """Return FIRE's bias under `mask` for tokens at positions (B, T), as the kernels need it."""
    n, device = positions.shape[1], positions.device
    c = scheme.c.abs()
    index = torch.arange(n, device=device, dtype=torch.float32)
    rate = 1 / (torch.log1p(c * index.maximum((scheme.threshold * scheme.stretch).abs())) + 1e-6)  # (T,)
    a, jump, knots = piecewise_linear(scheme)
    with torch.no_grad():
        distance = torch.arange(1 - n, n, device=device).abs().float()
        psi = torch.log1p(c * distance)
        psi_slope = distance / (c * distance + 1)
        slope = a[:, None] + F.pad(jump.cumsum(1), (1, 0))  # (H, K)
        offset = F.pad(-(jump * knots).cumsum(1), (1, 0))
        lines = torch.stack([slope, offset, F.pad(jump, (0, 1))], 1) * LOG2E
        pieces = tile_pieces(psi[n - 1 :], rate, knots)
    intervals, learned = interval_mask(mask, positions), (a, jump, knots, rate, c)
    tables = pad_table(psi[None]), pad_table(psi_slope[None])
    return PiecewiseLinearBias(intervals, learned, *tables, pieces, lines.contiguous())


def piecewise_linear(scheme: FIREBias) -> tuple[Tensor, Tensor, Tensor]:
    """Return a (H,), jump (H, P) and the sorted knots (P,) of the network w2 relu(w x + b)."""
    w, b, w2 = scheme.inner.weight[:, 0], scheme.inner.bias, scheme.outer.weight
    w = torch.where(w.abs() < 1e-6, torch.copysign(torch.full_like(w, 1e-6), w), w)
    knots = -b / w
    order = knots.detach().argsort()
    # For w < 0, relu(w x + b) = |w| max(x - n, 0) + w x + b: a jump like the others, and a part of the linear term.
    a = (w2 * w.clamp(max=0)).sum(1) + 0 * scheme.outer.bias  # the constant gets a gradient of zero, not None
    return a, (w2 * w.abs())[:, order], knots[order]


def tile_pieces(psi: Tensor, rate: Tensor, knots: Tensor) -> Tensor:
    """Return how many knots lie below the smallest and the largest x of each tile of scores, (tiles, tiles, 2) int32."""
    t = len(rate)
    first = torch.arange(0, t, TILE, device=rate.device)  # row of each tile
    last = (first + TILE - 1).clamp(max=t - 1)
    nearest = (first[:, None] - last).clamp(min=0)  # (tiles, tiles)
    furthest = (last[:, None] - first).clamp(min=0)
    low = torch.searchsorted(knots, psi[nearest] * rate[last][:, None])
    high = torch.searchsorted(knots, psi[furthest] * rate[first][:, None], right=True)
    return torch.stack([low, high.maximum(low)], -1).int().contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, bias: PiecewiseLinearBias, scale: float | None) -> Tensor:
    """Return the attention of q (B, H, T, D) over k and v (B, G, T, D) with FIRE's bias: (B, H, T, D)."""
    return FireAttention.apply(q, k, v, *bias.learned, bias, scale or q.shape[-1] ** -0.5)


class FireAttention(torch.autograd.Function):
    """Autograd function of attention with FIRE's bias, differentiable by q, k, v and all that FIRE learns."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        _, jump, knots, rate, _, bias, scale = rest
        out, lse = launch(q, k, v, knots, rate, bias, scale).forward()
        ctx.save_for_backward(q, k, v, jump, knots, rate, out, lse)
        ctx.bias, ctx.scale = bias, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, jump, knots, rate, out, lse = ctx.saved_tensors
        lines = ctx.bias.lines
        piece_sums, knot_sums = (lines.new_zeros(lines.shape[0], 2, lines.shape[2]) for _ in range(2))
        grad_rate, grad_c = torch.zeros_like(rate), rate.new_zeros(())
        gradients = (
            launch(q, k, v, knots, rate, ctx.bias, ctx.scale)
            .backward(out, lse, grad)
            .input_gradients(curve=ctx.bias.psi_slope, grad_theta=grad_c, fire=(piece_sums, knot_sums, grad_rate))
        )
        # Sums over all x beyond each knot: the pieces after it, and the parts of tiles that contain it.
        beyond = piece_sums.flip(-1).cumsum(-1).flip(-1)[..., 1:] + knot_sums[..., :-1]  # (H, 2, P)
        sum_ds, sum_ds_x = beyond.unbind(1)
        grad_jump = sum_ds_x - knots * sum_ds
        grad_knots = -(jump * sum_ds).sum(0)
        return *gradients, piece_sums[:, 1].sum(1), grad_jump, grad_knots, grad_rate, grad_c, None, None


def launch(
    q: Tensor, k: Tensor, v: Tensor, knots: Tensor, rate: Tensor, bias: PiecewiseLinearBias, scale: float
) -> Launch:
    """Return the kernel call for these inputs."""
    fire = (rate.contiguous(), bias.pieces, bias.lines, F.pad(knots, (0, 1)).contiguous())
    return Launch(q, k, v, bias.psi, bias.mask, scale, fire)
