"""The feed-forward sublayer: W2 f(W1 x + b1) + b2 at each position by itself."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.context import Context

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


class FeedForward(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.outer = nn.Linear(config.d_ff, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = nn.Dropout(config.ff_dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.outer(self.dropout(self.activation(self.inner(x))))
