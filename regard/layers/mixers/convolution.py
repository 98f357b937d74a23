"""A gated convolution in the place of self-attention, as in ConvS2S: v = sum_j W_j x[t + j] + b over the few tokens that
t sees, and a half of v opens and closes the other, A * sigmoid(B).

All taps are one matrix product, (B, T, K*C) x (K*C, 2C), of the tokens seen laid side by side, the earliest first; those
that are not there count as zero. Its parameters are `taps.weight` (2C, K*C) and `taps.bias` (2C). How far apart the taps
stand comes with the context (layers/mixers/convolution.py), so blocks of all dilations share one compiled form. A step needs the last
(K - 1) * dilation + 1 inputs of its row, which are kept in a ring: the input at position p in place p modulo its length.

MERGED: Which tokens a convolution sees: made once per forward for all blocks of one dilation, outside whatever is compiled.

A token sees `kernel` tokens that stand `dilation` apart: itself and those before it under a causal mask, else as many
ahead as back. Positions say which of them there are. Before a row's beginning, in padding and in another document of a
packed row there is none: a token o columns away is the right one only if its position is o away too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.kernels.masks import PAD_POSITION, Mask
from regard.layers.context import Context, Request
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.part import Mixer, Place


@register("convolution")
class Convolution(Mixer):
    """A gated convolution over a few tokens, as in ConvS2S (Gehring et al. 2017)."""

    @dataclass(frozen=True)
    class Settings:
        kernel: int = setting(3, "tokens that a convolution sees at once", least=1, most=1 << 16)
        dilations: tuple[int, ...] = setting(
            (1,), "steps between those tokens, convolution by convolution, over and over", least=1, most=1 << 16
        )

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if not settings.dilations:
            raise RegardError("model.convolution.dilations must be numbers from 1 on, not []")
        if not place.causal and settings.kernel % 2 == 0:
            raise RegardError(
                f"model.convolution.kernel must be odd, not {settings.kernel}: an encoder sees as far back as ahead"
            )

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.kernel, self.width = settings.kernel, config.d_model
        self.dilation = settings.dilations[place.index % len(settings.dilations)]
        self.share_key = self.kernel, self.dilation
        self.taps = nn.Linear(settings.kernel * config.d_model, 2 * config.d_model, bias=config.bias)

    has_heads: ClassVar[bool] = False

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"taps": (1, [self.width, self.width])}

    def prepare(self, request: Request) -> ConvIndices | None:
        own = request.keys is request.positions
        return make_conv_indices(request.mask, request.positions, self.kernel, self.dilation) if own else None

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return F.glu(self.taps(unfold(x, ctx.prepared)), dim=-1)

    @property
    def length(self) -> int:
        """Return how many inputs the ring holds."""
        return (self.kernel - 1) * self.dilation + 1

    def state(self) -> dict[str, Storage]:
        return {"inputs": PerRow((self.length, self.width))}

    def read(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        if ctx.prepared is None:  # these tokens continue what was read before
            return super().read(x, ctx, kept)
        last = ctx.positions.amax(1, keepdim=True)  # (B, 1), -1 in a row without tokens
        place = torch.arange(self.length, device=x.device)
        columns = last - (last - place) % self.length  # (B, length), the last position that stands in each place
        kept.inputs.copy_(gather_columns(x, columns.clamp(min=PAD_POSITION)))
        return self.forward(x, ctx)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        kept.inputs[rows, ctx.positions % self.length] = x.to(kept.inputs.dtype)
        taps = torch.arange(1 - self.kernel, 1, device=x.device) * self.dilation
        positions = ctx.positions[:, None] + taps  # (N, K)
        seen = kept.inputs[rows[:, None], positions % self.length].masked_fill((positions < 0)[..., None], 0)
        return F.glu(self.taps(seen.to(x.dtype).flatten(1)), dim=-1)


def unfold(x: Tensor, reach: ConvIndices) -> Tensor:
    """The tokens seen from each token side by side, (B, S, C) -> (B, T, K*C)."""
    if reach.seen_by is None:
        return torch.cat([gather_columns(x, columns) for columns in reach.columns], -1)
    return torch.cat([GatherColumns.apply(x, *both) for both in zip(reach.columns, reach.seen_by, strict=True)], -1)


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """(B, S, C) -> (B, T, C)"""
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x[rows, columns.clamp(min=0)].masked_fill((columns == PAD_POSITION)[..., None], 0)


class GatherColumns(torch.autograd.Function):
    """Backward is a look-up too: whom a token's gradient comes from is known, so nothing has to be added up atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, seen_by: Tensor) -> Tensor:
        ctx.save_for_backward(seen_by)
        return gather_columns(x, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_columns(gradient, *ctx.saved_tensors), None, None


@dataclass(frozen=True)
class ConvIndices:
    """For each of the K tokens seen a tensor (B, T)."""

    columns: tuple[Tensor, ...]  # where the one that token t sees stands among the inputs; NOWHERE: there is none
    seen_by: tuple[Tensor, ...] | None = None  # where the one stands that sees token t; None: no gradients asked for


def make_conv_indices(mask: Mask, positions: Tensor, kernel: int, dilation: int) -> ConvIndices:
    """Return the reach of tokens at these positions (B, T); the mask says whether they see what is ahead."""
    taps = torch.arange(kernel, device=positions.device)[:, None, None]
    steps = (taps - (kernel - 1 - count_ahead(mask, kernel))) * dilation  # (K, 1, 1)
    seen_by = apart(neighbor_columns(positions, -steps)) if torch.is_grad_enabled() else None
    return ConvIndices(apart(neighbor_columns(positions, steps)), seen_by)


def apart(columns: Tensor) -> tuple[Tensor, ...]:
    """(K, B, T) as K tensors: with K among the sizes, what compiles for any shape would take a B or T as large for it."""
    return tuple(x.clone() for x in columns)


def count_ahead(mask: Mask, kernel: int) -> int:
    """How many of the tokens seen stand ahead."""
    if mask.ahead == 0 and not mask.causal:
        raise RegardError("a convolution sees no prefix: read the text causally, or with a model of attention")
    return 0 if mask.causal else kernel // 2


def neighbor_columns(positions: Tensor, steps: Tensor) -> Tensor:
    """(K, B, T), where the inputs are the tokens themselves in their order: a step in position is one in columns. Beyond an
    end stands the end itself, whose position is never the right one."""
    length, wanted = positions.shape[1], positions + steps  # (K, B, T)
    columns = (torch.arange(length, device=positions.device) + steps).clamp(0, length - 1).expand_as(wanted)
    places = positions.expand_as(wanted).gather(2, columns)
    return columns.where((places == wanted) & (places > PAD_POSITION) & (positions > PAD_POSITION), PAD_POSITION)
