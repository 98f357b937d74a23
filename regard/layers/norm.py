"""Normalisation, and where it stands around a sublayer."""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.context import Context


def make_norm(config: ModelConfig) -> nn.Module:
    """LayerNorm, gamma (x - mean) / sqrt(var + eps) + beta; or RMSNorm, gamma x / sqrt(mean(x^2) + eps)."""
    if config.norm_kind == "rms":
        return nn.RMSNorm(config.d_model, eps=config.norm_eps)
    return nn.LayerNorm(config.d_model, eps=config.norm_eps, bias=config.bias)


class PreNorm(nn.Module):
    """x + f(norm(x)): today's order; the residual path stays untouched, so deep stacks train without warm-up tricks."""

    def __init__(self, sublayer: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = make_norm(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x + self.dropout(self.sublayer(self.norm(x), ctx))


class PostNorm(PreNorm):
    """norm(x + f(x)): the order of the 2017 paper."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.norm(x + self.dropout(self.sublayer(x, ctx)))


class Branch(nn.Module):
    """f(x): one of the sublayers of a parallel block, which normalises once for all of them and adds."""

    def __init__(self, sublayer: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.dropout(self.sublayer(x, ctx))


PLACEMENTS = {"pre": PreNorm, "post": PostNorm}
