"""Fused attention with a Toeplitz bias, on CUDA devices: the bias of a score depends on the distance of key and query alone.

The bias is a table (H, 2T-1) of distances; a dense (T, T) matrix is never stored. torch's fused kernels need a bias as
a dense matrix, and FlexAttention looks the table up score by score and sums up its gradient by atomic operations. Here
a tile reads its few hundred biases from the cache. The learned parameters get exact gradients in the cheapest way:

- KERPLE has two parameters per head: two sums over the gradient of the scores.
- T5's table is constant from some distance on, and the gradient of a query's scores sums to zero. So the gradient of
  the far part is minus that of the near part, and only the few diagonals of tiles near the main one are read once more.
- FIRE's bias depends on the query's position as well: kernels/fire_attention.py.
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
TABLE_PADDING = 128  # distances beyond the ends of the table that a tile may read
TILE = 64  # queries and keys in a tile


@dataclass(frozen=True)
class IntervalMask:
    """A mask as the interval of keys that each query sees, made once for all layers."""

    first: Tensor  # (B, T) int32, the first key that each query sees
    last: Tensor  # (B, T) int32, the last one
    back: int  # no query sees further back than this
    ahead: int  # no query sees further ahead than this
    triangle: bool  # it is the plain causal mask


def interval_mask(mask: Mask, positions: Tensor) -> IntervalMask:
    """Return `mask` for tokens at positions (B, T)."""
    n = positions.shape[1]
    back = n if mask.back is None else mask.back
    ahead = 0 if mask.causal else mask.ahead or n  # a query before the end of a prefix sees ahead
    return IntervalMask(*key_intervals(mask, positions), back, ahead, mask.triangle)


class DistanceBias(Protocol):
    """The interface of a position scheme whose bias depends on the distance alone (layers/positions/relative.py)."""

    flat: int | None  # the bias is constant from this distance on, on either side

    def theta(self) -> Tensor | None:
        """Return the parameters (H, 2), the factor of the curve and its shape; None if the table itself is learned."""

    def curve(self, theta: Tensor, distance: Tensor) -> Tensor:
        """Return the bias (H, n) at n distances."""
        ...

    def table(self, n: int, device: torch.device) -> Tensor:
        """Return the bias (H, 2n - 1) at the distances 1 - n to n - 1."""
        ...


@dataclass(frozen=True)
class ToeplitzBias:
    """A bias table and its learned parameters: the table itself, or two numbers per head that define a curve."""

    mask: IntervalMask
    table: Tensor  # (H, WIDTH), the padded table, times log2 e
    learned: Tensor  # (H, 2T-1), the table; or (H, 2), the factor and the shape of the curve
    slope: Tensor | None  # (H, WIDTH), the derivative of the curve with respect to its shape
    flat: int | None  # the bias is constant from this distance on


def prepare(scheme: DistanceBias, mask: Mask, positions: Tensor) -> ToeplitzBias:
    """Return the bias of a position scheme under `mask` for tokens at positions (B, T), as the kernels need it."""
    n, device = positions.shape[1], positions.device
    theta = scheme.theta()
    if theta is None:
        values = scheme.table(n, device)
        return ToeplitzBias(
            interval_mask(mask, positions), pad_table(values.detach() * LOG2E), values, None, scheme.flat
        )
    fixed, distance = theta.detach(), torch.arange(1 - n, n, device=device)
    second = torch.zeros_like(fixed).index_fill_(1, torch.ones(1, dtype=torch.long, device=device), 1.0)
    values, slope = torch.func.jvp(lambda x: scheme.curve(x, distance), (fixed,), (second,))[:2]
    return ToeplitzBias(interval_mask(mask, positions), pad_table(values * LOG2E), theta, pad_table(slope), None)


def attend(q: Tensor, k: Tensor, v: Tensor, bias: ToeplitzBias, scale: float | None) -> Tensor:
    """Return the attention of q (B, H, T, D) over k and v (B, G, T, D) with a Toeplitz bias: (B, H, T, D)."""
    return ToeplitzAttention.apply(q, k, v, bias.learned, bias, scale or q.shape[-1] ** -0.5)


class ToeplitzAttention(torch.autograd.Function):
    """Autograd function of attention with a Toeplitz bias, differentiable by q, k, v and what the bias learns."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, learned: Tensor, bias: ToeplitzBias, scale: float) -> Tensor:
        out, lse = Launch(q, k, v, bias.table, bias.mask, scale).forward()
        ctx.save_for_backward(q, k, v, learned, out, lse)
        ctx.bias, ctx.scale, ctx.needed = bias, scale, learned.requires_grad
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, k, v, learned, out, lse = ctx.saved_tensors
        bias = ctx.bias
        score_gradient = Launch(q, k, v, bias.table, bias.mask, ctx.scale).backward(out, lse, grad)
        if not ctx.needed:
            return *score_gradient.input_gradients(), None, None, None
        if bias.slope is None:
            return *score_gradient.input_gradients(), score_gradient.table_gradient(bias.flat), None, None
        sums = torch.zeros_like(learned)
        gradients = score_gradient.input_gradients(curve=bias.slope, grad_theta=sums, theta=True)
        return *gradients, torch.stack([sums[:, 0] / (LOG2E * learned[:, 0]), sums[:, 1]], 1), None, None


class Launch:
    """One call of the kernels: its tensors, sizes and strides."""

    def __init__(
        self, q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: IntervalMask, scale: float, fire: Any = None
    ) -> None:
        self.q, self.k, self.v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        self.table, self.mask, self.scale = table, mask, scale * LOG2E  # (H or 1, WIDTH)
        self.fire = fire or (table, table, table, table)  # rate, pieces, lines, knots (kernels/fire_attention.py)
        self.h, self.t, self.d = q.shape[1:]
        self.groups = k.shape[1]
        self.tiles = -(-self.t // TILE)
        stride = table.stride(0) if table.shape[0] > 1 else 0
        self.sizes = (self.t, self.h, self.h // self.groups, table.shape[1], stride)
        self.fp32 = q.dtype == torch.float32  # twice the size: prefetched tiles would not fit into shared memory
        self.options = {"D": self.d, "N": TILE, "DIRECT": q.is_cuda and not torch.version.hip, "num_warps": 4}
        self.fire_options = {"FIRE": fire is not None, "K": fire[3].shape[0] if fire is not None else 1}

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return the result (B, H, T, D) and the base-2 log-sum-exp of the scores (B, H, T) fp32."""
        q, mask = self.q, self.mask
        out = q.new_empty(q.shape)
        lse = q.new_empty(q.shape[:3], dtype=torch.float32)
        kernels.forward[(self.tiles, q.shape[0] * self.h)](
            *(q, self.k, self.v, self.table, mask.first, mask.last, *self.fire, out, lse, *self.sizes, self.scale),
            *strides(q, self.k, self.v),
            **(self.options | self.fire_options),
            num_stages=1 if self.fp32 else 2,
        )
        return out, lse

    def backward(self, out: Tensor, lse: Tensor, grad: Tensor) -> ScoreGradient:
        return ScoreGradient(self, out, lse, grad if grad.stride(-1) == 1 else grad.contiguous())


class ScoreGradient:
    """The backward pass of one call. Each of its kernels recomputes the gradient of the scores, tile by tile."""

    def __init__(self, launch: Launch, out: Tensor, lse: Tensor, grad: Tensor) -> None:
        self.launch, self.grad, self.lse, self.delta = launch, grad, lse, torch.empty_like(lse)
        self.where = (launch.scale, *strides(launch.q, launch.k, launch.v, grad))
        self.b = out.shape[0]
        kernels.compute_delta[(launch.tiles, self.b * launch.h)](
            *(out, grad, self.delta, launch.t, launch.h, *strides(grad)), D=launch.d, N=TILE
        )

    def input_gradients(
        self,
        curve: Tensor | None = None,
        grad_theta: Tensor | None = None,
        fire: tuple[Tensor, Tensor, Tensor] | None = None,
        theta: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of q, k and v; sums for learned parameters are added to `grad_theta` and `fire`."""
        call, mask, unused = self.launch, self.launch.mask, self.delta
        q, k, v = call.q, call.k, call.v
        dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        dk, dv = (torch.empty(k.shape, dtype=q.dtype, device=q.device) for _ in range(2))
        tight = q.is_cuda and call.d <= 64 and fire is None  # few registers: more programs per multiprocessor
        shared = (q, k, v, call.table, mask.first, mask.last, *call.fire, self.grad, self.lse, self.delta)
        kernels.backward_keys[(call.tiles, self.b * call.groups)](
            *(*shared, dk, dv, *call.sizes, mask.back, mask.ahead, *self.where),
            **(call.options | call.fire_options),
            M=TILE // 2,
            TRIANGLE=mask.triangle,
            num_stages=1,
            **({"maxnreg": 128} if tight else {}),
        )
        sums = (curve if curve is not None else call.table, grad_theta if grad_theta is not None else unused)
        kernels.backward_queries[(call.tiles, self.b * call.h)](
            *(*shared, dq, *sums, *(fire or (unused,) * 3), *call.sizes, *self.where),
            **(call.options | call.fire_options),
            THETA=theta,
            num_stages=1 if call.fp32 else 2 if fire is None else 3,
        )
        return dq, dk, dv

    def table_gradient(self, flat: int | None) -> Tensor:
        """Return the gradient of the table, (H, 2T-1)."""
        call, mask = self.launch, self.launch.mask
        least, most = (min(-(-reach // TILE), call.tiles - 1) for reach in (mask.back, mask.ahead))
        near = -(-flat // TILE) if flat is not None and mask.ahead == 0 else call.tiles
        dtable = torch.zeros_like(call.table)
        share = 16  # tiles of a diagonal per program
        kernels.backward_table[(min(least, near) + most + 1, self.b * call.h, -(-call.tiles // share))](
            *(call.q, call.k, call.v, call.table, mask.first, mask.last, self.grad, self.lse, self.delta, dtable),
            *(*call.sizes, -min(least, near), share, *self.where),
            **call.options,
            num_stages=1 if call.fp32 else 3,
        )
        centre = call.table.shape[1] // 2
        result = dtable[:, centre - call.t + 1 : centre + call.t]
        if flat is not None and near < least:  # the gradients sum to zero: the rest belongs to `flat`
            result[:, call.t - 1 - flat] -= result.sum(1)
        return result


def pad_table(table: Tensor) -> Tensor:
    """Return a table (H, 2T-1) as (H, WIDTH) fp32: distance 0 at WIDTH // 2, and padding at both ends."""
    return F.pad(table.float(), (TABLE_PADDING + 1, TABLE_PADDING)).contiguous()


def strides(*tensors: Tensor) -> list[int]:
    """Return the strides of batch, head and row of each tensor; the last dimension must be contiguous."""
    return [s for x in tensors for s in x.stride()[:3]]
