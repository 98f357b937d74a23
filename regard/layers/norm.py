"""Normalisation, and where it stands around a sublayer."""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.context import Context
from regard.layers.residual import add_norm


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm, gamma (x - mean) / sqrt(var + eps) + beta; or RMSNorm, gamma x / sqrt(mean(x^2) + eps)."""
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class PreNorm(nn.Module):
    """x + f(norm(x)): today's order; the residual path stays untouched, so deep stacks train without warm-up tricks.

    The stream is a pair: x, and y that is still to be added to it, or None. Every sum is made by the norm that follows
    it, in this block or the next: one pass through memory for both.
    """

    def __init__(self, sublayer: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = make_norm(config)
        self.dropout = config.dropout

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor | None]:
        x, normal = add_norm(x, y, self.norm, self.dropout if self.training else 0.0)
        return x, self.sublayer(normal, ctx)


class PostNorm(PreNorm):
    """norm(x + f(x)): the order of the 2017 paper. Nothing is left to be added: y is None."""

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor | None]:
        return add_norm(x, self.sublayer(x, ctx), self.norm, self.dropout if self.training else 0.0)[1], y


class Branch(nn.Module):
    """f(x): one of the sublayers of a parallel block, which normalises once for all of them and adds."""

    def __init__(self, sublayer: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = sublayer

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.sublayer(x, ctx)


PLACEMENTS = {"pre": PreNorm, "post": PostNorm}
