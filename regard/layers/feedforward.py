"""The feed-forward sublayer, at each position by itself: W2 f(W1 x + b1) + b2, or gated, W2 (f(W1 x) * W3 x)."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.activated import ACTIVATIONS as ACTIVATIONS
from regard.layers.activated import activated
from regard.layers.context import Context


class FeedForward(nn.Module):
    gated = False
    tensor_parallel: ClassVar[dict[str, str]] = {"inner": "column", "outer": "row"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, (1 + self.gated) * config.d_ff, bias=config.bias)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.activation = config.activation
        self.dropout = nn.Dropout(config.ff_dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.outer(self.dropout(activated(x, self.inner, self.activation, self.gated)))


class GatedFeedForward(FeedForward):
    """A second projection opens and closes the first: SwiGLU with silu, GEGLU with gelu. Both are one matrix, whose rows
    are gates and values in turns (layers/layout.py)."""

    gated = True


def make_feedforward(config: ModelConfig) -> FeedForward:
    return GatedFeedForward(config) if config.gated else FeedForward(config)
