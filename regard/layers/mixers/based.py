"""Taylor linear attention, as in Based (Arora et al. 2024): weights 1 + s + s^2 / 2 with s = q . k / sqrt(d) for exp(s).

That is phi(q) . phi(k) for phi(x) = [1, x / d^(1/4), x x^T / (sqrt(2) d^(1/2))], so that the recurrence of linear attention
computes it. The matrix x x^T is symmetric: its d (d + 1) / 2 products of different factors are enough, those of two
channels times sqrt(2), which makes 1 + d + d (d + 1) / 2 = 153 features of d = 16 channels instead of 273. The weights are
at least 1/2, and are divided by their sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.layers.context import Context
from regard.layers.mixers.linear_recurrence import LinearRecurrence, Recurrence, normalize_weights, with_ones
from regard.layers.part import Place

EPS = 1e-12  # added to the sum of weights


def feature_width(d: int) -> int:
    """Return the number of Taylor features of d numbers."""
    return 1 + d + d * (d + 1) // 2


def taylor_features(x: Tensor) -> Tensor:
    """Return the features (..., 1 + d + d (d + 1) / 2) of x (..., d), whose products are 1 + s + s^2 / 2."""
    d, y = x.shape[-1], x.to(torch.promote_types(x.dtype, torch.float32))
    scaled = y * d**-0.25
    # Slices have cheaper gradients than look-ups of pairs: they are no scattered sums.
    pairs = [scaled[..., : d - apart] * scaled[..., apart:] for apart in range(1, d)]
    return torch.cat([torch.ones_like(y[..., :1]), scaled, scaled.square() * 0.5**0.5, *pairs], -1).to(x.dtype)


@register("based")
class Based(LinearRecurrence):
    """Taylor linear attention of Based (Arora et al. 2024): the softmax's exponential up to its second power."""

    @dataclass(frozen=True)
    class Settings:
        feature_dim: int = setting(16, "channels of queries and keys in each head", least=1, most=256)

    ordered = False
    reads: ClassVar[tuple[str, ...]] = ("n_heads", "d_head")

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.heads, d = config.n_heads, settings.feature_dim
        self.sizes = [self.heads * d, self.heads * d, self.heads * config.d_head]
        self.qkv = nn.Linear(config.d_model, sum(self.sizes), bias=config.bias)
        self.out = nn.Linear(self.sizes[2], config.d_model, bias=config.bias)
        self.set_state(self.heads, feature_width(d), config.d_head + 1)

    @classmethod
    def activation_bytes(cls, settings: Settings, config: ModelConfig) -> int:
        # input; in each head q and k, v and the input of `out`, features of q and k, v and o with the column of ones
        d, values = settings.feature_dim, config.d_head
        return 2 * config.d_model + config.n_heads * (4 * d + 4 * values + 4 * feature_width(d) + 4 * (values + 1))

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"qkv": (1, self.sizes)}

    def project(self, x: Tensor, ctx: Context, kept: object) -> Recurrence:
        q, k, v = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).split(self.sizes, -1))
        return Recurrence(taylor_features(q), taylor_features(k), with_ones(v), None)

    def finish(self, o: Tensor, given: Recurrence) -> Tensor:
        return self.out(normalize_weights(o, EPS).to(o.dtype).flatten(-2))
