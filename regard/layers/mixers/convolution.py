"""A gated convolution in the place of self-attention, as in ConvS2S: [A; B] = sum_j W_j x[t + j] + b, y = A * sigmoid(B).

A token sees `kernel` tokens at a spacing of `dilation`: itself and earlier ones under a causal mask, otherwise as many after
it as before it. Tokens that do not exist count as zero: before the beginning of a row, in padding, and in another document
of a packed row. `ConvIndices` hold the columns of the tokens seen; they are made once per forward pass for all blocks of one
dilation, outside of compiled code, so that blocks of all dilations share one compiled form.

The tokens seen are concatenated, the earliest first, and multiplied in one product, (B, T, K*C) x (K*C, 2C). The parameters
are `taps.weight` (2C, K*C) and `taps.bias` (2C). A decoding step needs the last (K - 1) * dilation + 1 inputs of its row,
which are kept in a ring buffer: the input at position p is at index p modulo its length.
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
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import PerRow, Storage
from regard.layers.part import Mixer, Place


@dataclass(frozen=True)
class ConvIndices:
    """The columns of the K tokens that each token sees, as K tensors (B, T)."""

    columns: tuple[Tensor, ...]  # the column of the token that token t sees; PAD_POSITION: none
    seen_by: tuple[Tensor, ...] | None = None  # the column of the token that sees token t; None without gradients


def make_conv_indices(mask: Mask, positions: Tensor, kernel: int, dilation: int) -> ConvIndices:
    """Return the indices for tokens at these positions (B, T); the mask decides whether they see later tokens."""
    taps = torch.arange(kernel, device=positions.device)[:, None, None]
    steps = (taps - (kernel - 1 - count_ahead(mask, kernel))) * dilation  # (K, 1, 1)
    seen_by = neighbor_columns(positions, -steps) if torch.is_grad_enabled() else None
    return ConvIndices(neighbor_columns(positions, steps), seen_by)


def count_ahead(mask: Mask, kernel: int) -> int:
    """Return how many of the tokens seen come after the token itself."""
    if mask.ahead == 0 and not mask.causal:
        raise RegardError("a convolution sees no prefix: read the text causally, or with a model of attention")
    return 0 if mask.causal else kernel // 2


def neighbor_columns(positions: Tensor, steps: Tensor) -> tuple[Tensor, ...]:
    """Return the columns (B, T) of the tokens that are `steps` (K, 1, 1) positions away, PAD_POSITION if there is none.

    A token some columns away is the right one only if its position is as far away. Beyond an end of the row the column is
    that of the end, whose position never matches.

    The result is K tensors: with a dimension of size K, dynamic-shape compilation would confuse it with a B or T of the
    same size."""
    length, wanted = positions.shape[1], positions + steps  # (K, B, T)
    columns = (torch.arange(length, device=positions.device) + steps).clamp(0, length - 1).expand_as(wanted)
    places = positions.expand_as(wanted).gather(2, columns)
    exists = (places == wanted) & (places > PAD_POSITION) & (positions > PAD_POSITION)
    return tuple(x.clone() for x in columns.where(exists, PAD_POSITION))


def unfold(x: Tensor, indices: ConvIndices) -> Tensor:
    """Concatenate the K tokens that each token sees, (B, S, C) -> (B, T, K*C)."""
    if indices.seen_by is None:
        return torch.cat([gather_columns(x, columns) for columns in indices.columns], -1)
    return torch.cat([GatherColumns.apply(x, *both) for both in zip(indices.columns, indices.seen_by, strict=True)], -1)


def gather_columns(x: Tensor, columns: Tensor) -> Tensor:
    """Gather columns (B, T) of x, (B, S, C) -> (B, T, C), with zeros where there is no column."""
    rows = torch.arange(len(x), device=x.device)[:, None]
    return x[rows, columns.clamp(min=0)].masked_fill((columns == PAD_POSITION)[..., None], 0)


class GatherColumns(torch.autograd.Function):
    """`gather_columns` whose backward pass is a gather too, instead of a scatter with atomic additions."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, seen_by: Tensor) -> Tensor:
        ctx.save_for_backward(seen_by)
        return gather_columns(x, columns)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gather_columns(gradient, *ctx.saved_tensors), None, None


@register("convolution")
class Convolution(Mixer):
    """A gated convolution over a few tokens, as in ConvS2S (Gehring et al. 2017)."""

    @dataclass(frozen=True)
    class Settings:
        kernel: int = setting(3, "tokens that a convolution sees at once", least=1, most=1 << 16)
        dilations: tuple[int, ...] = setting(
            (1,), "steps between those tokens, convolution by convolution, over and over", least=1, most=1 << 16
        )

    reads: ClassVar[tuple[str, ...]] = ()

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

    @classmethod
    def activation_bytes(cls, settings: Settings, config: ModelConfig) -> int:
        # The tokens in the window, and both halves before the gate; its input only where a parallel layer reads it too.
        return (2 * settings.kernel + 4 + (2 if config.parallel else 0)) * config.d_model

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"taps": (1, [self.width, self.width])}

    def prepare(self, request: PrepareRequest) -> ConvIndices | None:
        if request.continues:  # the ring buffer holds earlier tokens
            return None
        return make_conv_indices(request.mask, request.positions, self.kernel, self.dilation)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Convolve whole rows, (B, T, C) -> (B, T, C)."""
        return F.glu(self.taps(unfold(x, ctx.prepared)), dim=-1)

    @property
    def length(self) -> int:
        """The number of inputs in the ring buffer."""
        return (self.kernel - 1) * self.dilation + 1

    def state(self) -> dict[str, Storage]:
        return {"inputs": PerRow((self.length, self.width))}

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Convolve prompts, (B, T, C) -> (B, T, C), and keep the last inputs of each row in the ring buffer."""
        if ctx.prepared is None:  # the tokens continue a text that was read before
            return super().prefill(x, ctx, kept)
        last = ctx.positions.amax(1, keepdim=True)  # (B, 1), -1 in a row without tokens
        place = torch.arange(self.length, device=x.device)
        columns = last - (last - place) % self.length  # (B, length), the last position with each index
        kept.inputs.copy_(gather_columns(x, columns.clamp(min=PAD_POSITION)))
        return self.forward(x, ctx)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Convolve one more token of each row with the inputs in the ring buffer, (N, C) -> (N, C)."""
        rows = torch.arange(len(x), device=x.device)
        kept.inputs[rows, ctx.positions % self.length] = x.to(kept.inputs.dtype)
        taps = torch.arange(1 - self.kernel, 1, device=x.device) * self.dilation
        positions = ctx.positions[:, None] + taps  # (N, K)
        seen = kept.inputs[rows[:, None], positions % self.length].masked_fill((positions < 0)[..., None], 0)
        return F.glu(self.taps(seen.to(x.dtype).flatten(1)), dim=-1)
