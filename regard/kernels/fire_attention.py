"""FIRE inside Regard's own kernels: f(psi(q - k) / psi(max(L, q))) depends on the query's position and on the distance.

x = psi(distance) * rate(query) is a table of distances after all, times one number a query. And f, a network with one
hidden layer of ReLUs, is a broken line: with knots n_p = -b_p / w_p, sorted,

    f_h(x) = const + a_h x + sum_p jump_hp max(x - n_p, 0).

The constant drops out of the softmax. A tile of scores holds so few different x that it mostly lies between two knots; so
the gradients need two sums of each piece of the line, sum(ds) and sum(ds x), and the same beyond those knots that cross a
tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.masks import Mask
from regard.kernels.toeplitz_attention import LOG2E, TILE, Launch, Spans, padded, spans


class FIREBias(Protocol):
    """What the kernels ask of the position scheme FIRE (layers/positions/relative.py)."""

    c: Tensor
    threshold: Tensor
    stretch: Any
    inner: nn.Linear
    outer: nn.Linear


@dataclass(frozen=True)
class BrokenLine:
    """FIRE's bias for T tokens. P knots, K = P + 1 pieces."""

    spans: Spans
    learned: tuple[Tensor, ...]  # a (H,), jump (H, P), knots (P,), rate (T,), c
    psi: Tensor  # (1, WIDTH), of every distance
    by_c: Tensor  # the same, its derivative by c
    pieces: Tensor  # (tiles, tiles, 2) int32: the piece at a tile's smallest x, the one at its largest
    lines: Tensor  # (H, 3, K): slope and offset of each piece, jump of each knot


def prepare(scheme: FIREBias, mask: Mask, positions: Tensor) -> BrokenLine:
    n, device = positions.shape[1], positions.device
    c = scheme.c.abs()
    index = torch.arange(n, device=device, dtype=torch.float32)
    rate = 1 / (torch.log1p(c * index.maximum((scheme.threshold * scheme.stretch).abs())) + 1e-6)  # (T,)
    a, jump, knots = broken_line(scheme)
    with torch.no_grad():
        distance = torch.arange(1 - n, n, device=device).abs().float()
        psi = torch.log1p(c * distance)
        by_c = distance / (c * distance + 1)
        slope = a[:, None] + F.pad(jump.cumsum(1), (1, 0))  # (H, K)
        offset = F.pad(-(jump * knots).cumsum(1), (1, 0))
        lines = torch.stack([slope, offset, F.pad(jump, (0, 1))], 1) * LOG2E
        pieces = tile_pieces(psi[n - 1 :], rate, knots)
    where, learned = spans(mask, positions), (a, jump, knots, rate, c)
    return BrokenLine(where, learned, padded(psi[None]), padded(by_c[None]), pieces, lines.contiguous())


def broken_line(scheme: FIREBias) -> tuple[Tensor, Tensor, Tensor]:
    """a (H,), jump (H, P) and the sorted knots (P,) of the network w2 relu(w x + b)."""
    w, b, w2 = scheme.inner.weight[:, 0], scheme.inner.bias, scheme.outer.weight
    w = torch.where(w.abs() < 1e-6, torch.copysign(torch.full_like(w, 1e-6), w), w)
    knots = -b / w
    order = knots.detach().argsort()
    # a falling unit, w < 0, is the line w x + b minus its own mirror image: |w| max(x - n, 0) + w x + b
    a = (w2 * w.clamp(max=0)).sum(1) + 0 * scheme.outer.bias  # the constant has a gradient too: zero
    return a, (w2 * w.abs())[:, order], knots[order]


def tile_pieces(psi: Tensor, rate: Tensor, knots: Tensor) -> Tensor:
    """How many knots lie below the smallest and below the largest x of each tile, (tiles, tiles, 2) int32."""
    t = len(rate)
    first = torch.arange(0, t, TILE, device=rate.device)  # of each tile
    last = (first + TILE - 1).clamp(max=t - 1)
    nearest = (first[:, None] - last).clamp(min=0)  # (tiles, tiles)
    furthest = (last[:, None] - first).clamp(min=0)
    low = torch.searchsorted(knots, psi[nearest] * rate[last][:, None])
    high = torch.searchsorted(knots, psi[furthest] * rate[first][:, None], right=True)
    return torch.stack([low, high.maximum(low)], -1).int().contiguous()


def attend(q: Tensor, k: Tensor, v: Tensor, line: BrokenLine, scale: float | None) -> Tensor:
    return FireAttention.apply(q, k, v, *line.learned, line, scale or q.shape[-1] ** -0.5)


class FireAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        _, jump, knots, rate, _, line, scale = rest
        out, lse = launch(q, k, v, knots, rate, line, scale).forward()
        ctx.save_for_backward(q, k, v, jump, knots, rate, out, lse)
        ctx.line, ctx.scale = line, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, jump, knots, rate, out, lse = ctx.saved_tensors
        lines = ctx.line.lines
        by_piece, by_knot = (lines.new_zeros(lines.shape[0], 2, lines.shape[2]) for _ in range(2))
        by_rate, by_c = torch.zeros_like(rate), rate.new_zeros(())
        gradients = (
            launch(q, k, v, knots, rate, ctx.line, ctx.scale)
            .backward(out, lse, grad)
            .finish(curve=ctx.line.by_c, by_theta=by_c, fire=(by_piece, by_knot, by_rate))
        )
        # beyond each knot: the pieces after it, and what crosses it within a tile
        after = by_piece.flip(-1).cumsum(-1).flip(-1)[..., 1:] + by_knot[..., :-1]  # (H, 2, P)
        plain, times_x = after.unbind(1)
        by_jump = times_x - knots * plain
        return *gradients, by_piece[:, 1].sum(1), by_jump, -(jump * plain).sum(0), by_rate, by_c, None, None


def launch(q: Tensor, k: Tensor, v: Tensor, knots: Tensor, rate: Tensor, line: BrokenLine, scale: float) -> Launch:
    fire = (rate.contiguous(), line.pieces, line.lines, F.pad(knots, (0, 1)).contiguous())
    return Launch(q, k, v, line.psi, line.spans, scale, fire)
