"""Normalisation, and where it stands around a sublayer.

Inside a stack the residual stream is a pair: x, and y that is still to be added to it, or None. Every sum is made by the
norm that follows it, in this block or the next: one pass through memory for both. A sublayer with an auxiliary loss returns
that too, so what wraps a sublayer returns (x, y, loss), where the loss is None for all others.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.residual_norm import add_norm, is_plain
from regard.layers.context import Context

Stream = tuple[Tensor, Tensor | None, Tensor | None]  # x, what is still to be added to it, an auxiliary loss


def make_norm(config: ModelConfig) -> nn.Module:
    """Return a LayerNorm, gamma (x - mean) / sqrt(var + eps) + beta, or an RMSNorm, gamma x / sqrt(mean(x^2) + eps)."""
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


def normalised(x: Tensor, norm: nn.Module) -> Tensor:
    """Return norm(x) for one token a row (N, C), in the precision of x; an nn.Identity leaves it as it is."""
    return x if isinstance(norm, nn.Identity) else add_norm(x, None, norm, 0.0)[1]


def with_loss(result: Any, auxiliary: bool, sublayer: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return what a sublayer gave, and its auxiliary loss or None."""
    if isinstance(result, tuple) != auxiliary:
        given, said = ("(y, loss)", "no") if not auxiliary else ("y alone", "an")
        raise TypeError(f"{type(sublayer).__name__} returns {given}, but declares {said} auxiliary loss")
    return result if auxiliary else (result, None)


class Residual(nn.Module):
    """A sublayer with its norm and its residual connection."""

    def __init__(self, sublayer: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = make_norm(config)
        self.dropout = config.dropout
        self.auxiliary = bool(getattr(sublayer, "auxiliary", False))

    def run(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor | None]:
        """Return what the sublayer makes of x, and its loss if it has one."""
        return with_loss(ctx.apply(self.sublayer, x, ctx), self.auxiliary, self.sublayer)

    def fused(self, ctx: Context) -> Any:
        """Return the sublayer's fused step for one row, where the context allows it and the sublayer has one."""
        return ctx.state.fused.get(self.sublayer) if ctx.fuse and is_plain(self.norm) else None


class PreNorm(Residual):
    """x + f(norm(x)): the usual order today; the residual path stays untouched, so deep stacks train without warm-up."""

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        fused = self.fused(ctx)
        if fused is not None:
            x = x if y is None else x + y
            return fused(x, self.norm, x, ctx, ctx.state.parts.get(self.sublayer)), None, None
        x, normal = add_norm(x, y, self.norm, self.dropout if self.training else 0.0)
        return x, *self.run(normal, ctx)


class PostNorm(Residual):
    """norm(x + f(x)): the order of the 2017 paper. Nothing is left to be added: y is None."""

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        fused, loss = self.fused(ctx), None
        if fused is not None:
            out = fused(x, None, None, ctx, ctx.state.parts.get(self.sublayer))
        else:
            out, loss = self.run(x, ctx)
        return add_norm(x, out, self.norm, self.dropout if self.training else 0.0)[1], y, loss


class Branch(nn.Module):
    """One of the sublayers of a parallel block, which normalises once for all of them and adds."""

    def __init__(self, sublayer: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.auxiliary = bool(getattr(sublayer, "auxiliary", False))

    def forward(self, x: Tensor, ctx: Context) -> tuple[Tensor, Tensor | None]:
        return with_loss(ctx.apply(self.sublayer, x, ctx), self.auxiliary, self.sublayer)


PLACEMENTS = {"pre": PreNorm, "post": PostNorm}
