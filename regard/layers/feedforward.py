"""The feed-forward sublayer, at each position by itself: W2 f(W1 x + b1) + b2, or gated, W2 (f(W1 x) * W3 x)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.context import Context

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu-tanh": functools.partial(F.gelu, approximate="tanh"),  # GPT-2's: cheaper once, kept since
    "silu": F.silu,
}


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig, inner: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, inner * config.d_ff, bias=config.bias)
        self.outer = nn.Linear(config.d_ff, config.d_model, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.ff_dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.outer(self.dropout(self.activation(self.inner(x))))


class GatedFeedForward(FeedForward):
    """A second projection opens and closes the first: SwiGLU with silu, GEGLU with gelu. Both are one matrix."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config, inner=2)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        gate, value = self.inner(x).chunk(2, dim=-1)  # (B, T, d_ff) each
        return self.outer(self.dropout(self.activation(gate) * value))


def make_feedforward(config: ModelConfig) -> FeedForward:
    return GatedFeedForward(config) if config.gated else FeedForward(config)
