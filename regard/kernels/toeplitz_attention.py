"""Attention with a bias made of a table of distances, without a (T, T) matrix: Regard's own kernels, for CUDA devices.

torch's fused kernels take a bias only as a dense matrix, and FlexAttention looks a table up score by score and adds its
gradient up one atomic operation at a time. Here a tile reads its few hundred biases from the cache. What is learned gets its
gradient in the cheapest way that is exact:

- KERPLE's curves have two numbers each: two sums over the scores' gradient;
- T5's table is one number from some distance on, and the gradient of a query's scores sums to zero: so the far part is minus
  the near part, and only the few diagonals of tiles near the main one are read once more;
- FIRE is not a table of distances alone: kernels/fire_attention.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels import toeplitz_attention_triton as kernels
from regard.kernels.masks import Mask, key_intervals

LOG2E = 1 / math.log(2)
ROOM = 128  # distances beyond the table that a tile may reach for
TILE = 64  # queries and keys in a tile


@dataclass(frozen=True)
class Spans:
    """Who sees whom, made once for all layers."""

    first: Tensor  # (B, T) int32, the first key that each query sees
    last: Tensor
    back: int  # no query sees further back than this, ...
    ahead: int  # ... nor further ahead
    triangle: bool  # it is the plain causal mask


def spans(mask: Mask, positions: Tensor) -> Spans:
    n = positions.shape[1]
    back = n if mask.back is None else mask.back
    ahead = 0 if mask.causal else mask.ahead or n  # a prefix is seen from before as well
    return Spans(*key_intervals(mask, positions), back, ahead, mask.triangle)


class DistanceBias(Protocol):
    """What the kernels ask of a position scheme whose bias depends on the distance alone (layers/positions/relative.py)."""

    flat: int | None  # from this distance on, the numbers of a side are one

    def theta(self) -> Tensor | None:
        """Return (H, 2): what multiplies the curve, and what shapes it; None where every distance has its own number."""

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        """Return the bias (H, n) at these distances."""
        ...

    def table(self, n: int, device: torch.device) -> Tensor:
        """Return the bias (H, 2n - 1) at the distances 1 - n to n - 1."""
        ...


@dataclass(frozen=True)
class ToeplitzBias:
    """A bias of distance, whose numbers are learned as they are, or made by two numbers of each head."""

    spans: Spans
    bias: Tensor  # (H, WIDTH), as the kernels want it
    learned: Tensor  # (H, 2T-1), the numbers themselves; or (H, 2), of which the first multiplies the curve
    slope: Tensor | None  # (H, WIDTH), the derivative of the curve by the second
    flat: int | None  # from this distance on, the numbers of a side are one


def prepare(scheme: DistanceBias, mask: Mask, positions: Tensor) -> ToeplitzBias:
    n, device = positions.shape[1], positions.device
    theta = scheme.theta()
    if theta is None:
        values = scheme.table(n, device)
        return ToeplitzBias(spans(mask, positions), padded(values.detach() * LOG2E), values, None, scheme.flat)
    fixed, distance = theta.detach(), torch.arange(1 - n, n, device=device)
    second = torch.zeros_like(fixed).index_fill_(1, torch.ones(1, dtype=torch.long, device=device), 1.0)
    values, slope = torch.func.jvp(lambda x: scheme.curve(x, distance), (fixed,), (second,))[:2]
    return ToeplitzBias(spans(mask, positions), padded(values * LOG2E), theta, padded(slope), None)


def attend(q: Tensor, k: Tensor, v: Tensor, table: ToeplitzBias, scale: float | None) -> Tensor:
    return Toeplitz.apply(q, k, v, table.learned, table, scale or q.shape[-1] ** -0.5)


class Toeplitz(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, learned: Tensor, table: ToeplitzBias, scale: float
    ) -> Tensor:
        out, lse = Launch(q, k, v, table.bias, table.spans, scale).forward()
        ctx.save_for_backward(q, k, v, learned, out, lse)
        ctx.table, ctx.scale, ctx.needed = table, scale, learned.requires_grad
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, learned, out, lse = ctx.saved_tensors
        table = ctx.table
        by_score = Launch(q, k, v, table.bias, table.spans, ctx.scale).backward(out, lse, grad)
        if not ctx.needed:
            return *by_score.finish(), None, None, None
        if table.slope is None:
            return *by_score.finish(), by_score.of_table(table.flat), None, None
        sums = torch.zeros_like(learned)
        gradients = by_score.finish(curve=table.slope, by_theta=sums, theta=True)
        return *gradients, torch.stack([sums[:, 0] / (LOG2E * learned[:, 0]), sums[:, 1]], 1), None, None


class Launch:
    """One call of the kernels: its tensors, sizes and strides."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, spans: Spans, scale: float, fire: Any = None
    ) -> None:
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.table, self.spans, self.scale = table, spans, scale * LOG2E  # (H or 1, WIDTH)
        self.fire = fire or (table, table, table, table)  # rate, pieces, lines, knots
        self.h, self.t, self.d = q.shape[1:]
        self.groups = k.shape[1]
        self.tiles = -(-self.t // TILE)
        stride = table.stride(0) if table.shape[0] > 1 else 0
        self.sizes = (self.t, self.h, self.h // self.groups, table.shape[1], stride)
        self.fp32 = q.dtype == torch.float32  # twice the size: tiles loaded ahead would not fit
        self.options = {"D": self.d, "N": TILE, "DIRECT": q.is_cuda and not torch.version.hip, "num_warps": 4}
        self.fired = {"FIRE": fire is not None, "K": fire[3].shape[0] if fire is not None else 1}

    def forward(self) -> tuple[Tensor, Tensor]:
        q, spans = self.q, self.spans
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        kernels.forward[(self.tiles, q.shape[0] * self.h)](
            *(q, self.k, self.v, self.table, spans.first, spans.last, *self.fire, out, lse, *self.sizes, self.scale),
            *strides(q, self.k, self.v),
            **(self.options | self.fired),
            num_stages=1 if self.fp32 else 2,
        )
        return out, lse

    def backward(self, out: Tensor, lse: Tensor, grad: Tensor) -> ScoreGradient:
        return ScoreGradient(self, out, lse, grad if grad.stride(-1) == 1 else grad.contiguous())


class ScoreGradient:
    """What the backward kernels share: all of them work the gradient of the scores out again, tile by tile."""

    def __init__(self, launch: Launch, out: Tensor, lse: Tensor, grad: Tensor) -> None:
        self.launch, self.grad, self.lse, self.delta = launch, grad, lse, torch.empty_like(lse)
        self.where = (launch.scale, *strides(launch.q, launch.k, launch.v, grad))
        self.b = out.shape[0]
        kernels.agreement[(launch.tiles, self.b * launch.h)](
            *(out, grad, self.delta, launch.t, launch.h, *strides(grad)), D=launch.d, N=TILE
        )

    def finish(
        self,
        curve: Tensor | None = None,
        by_theta: Tensor | None = None,
        fire: tuple[Tensor, Tensor, Tensor] | None = None,
        theta: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The gradients of q, k and v; the sums for what is learned go into `by_theta` and `fire`."""
        call, spans, unused = self.launch, self.launch.spans, self.delta
        q, k, v = call.q, call.k, call.v
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.empty(k.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        tight = q.is_cuda and call.d <= 64 and fire is None  # few registers: more tiles at a time on a processor
        shared = (q, k, v, call.table, spans.first, spans.last, *call.fire, self.grad, self.lse, self.delta)
        kernels.backward_keys[(call.tiles, self.b * call.groups)](
            *(*shared, dk, dv, *call.sizes, spans.back, spans.ahead, *self.where),
            **(call.options | call.fired),
            M=TILE // 2,
            TRIANGLE=spans.triangle,
            num_stages=1,
            **({"maxnreg": 128} if tight else {}),
        )
        sums = (curve if curve is not None else call.table, by_theta if by_theta is not None else unused)
        kernels.backward_queries[(call.tiles, self.b * call.h)](
            *(*shared, dq, *sums, *(fire or (unused,) * 3), *call.sizes, *self.where),
            **(call.options | call.fired),
            THETA=theta,
            num_stages=1 if call.fp32 else 2 if fire is None else 3,
        )
        return dq, dk, dv

    def of_table(self, flat: int | None) -> Tensor:
        """The gradient of the table itself, (H, 2T-1)."""
        call, spans = self.launch, self.launch.spans
        least, most = (min(-(-reach // TILE), call.tiles - 1) for reach in (spans.back, spans.ahead))
        near = -(-flat // TILE) if flat is not None and spans.ahead == 0 else call.tiles
        dtable = torch.zeros_like(call.table)
        share = 16  # tiles of a diagonal that one program adds up
        kernels.backward_table[(min(least, near) + most + 1, self.b * call.h, -(-call.tiles // share))](
            *(call.q, call.k, call.v, call.table, spans.first, spans.last, self.grad, self.lse, self.delta, dtable),
            *(*call.sizes, -min(least, near), share, *self.where),
            **call.options,
            num_stages=1 if call.fp32 else 3,
        )
        centre = call.table.shape[1] // 2
        result = dtable[:, centre - call.t + 1 : centre + call.t]
        if flat is not None and near < least:  # from `flat` on all is one number: there goes what is missing to zero
            result[:, call.t - 1 - flat] -= result.sum(1)
        return result


def padded(table: Tensor) -> Tensor:
    """(H, 2T-1) -> (H, WIDTH) fp32, distance 0 in the middle and room on both sides."""
    return F.pad(table.float(), (ROOM + 1, ROOM)).contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """Of batch, head and row: the last dimension is dense."""
    return [s for x in tensors for s in x.stride()[:3]]
