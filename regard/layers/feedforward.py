"""The feed-forward sublayer, at each position by itself: W2 f(W1 x + b1) + b2, or gated, W2 (f(W1 x) * W3 x)."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.activated import ACTIVATIONS as ACTIVATIONS
from regard.layers.activated import activated
from regard.layers.context import Context
from regard.layers.part import Part, Place
from regard.registry import register


class FeedForward(Part):
    """A sublayer `f(x, ctx) -> x` that reads each token by itself."""

    kind = "feedforward"


@register("dense")
class Dense(FeedForward):
    """Two matrices with an activation function between them."""

    gated = False

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.inner = nn.Linear(config.d_model, (1 + self.gated) * config.d_ff, bias=config.bias)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.activation = config.activation
        self.dropout = nn.Dropout(config.ff_dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.outer(self.dropout(activated(x, self.inner, self.activation, self.gated)))


@register("gated")
class Gated(Dense):
    """A second projection opens and closes the first: SwiGLU with silu, GEGLU with gelu. Both are one matrix."""

    gated = True
