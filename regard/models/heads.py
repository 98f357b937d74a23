"""What stands on top of a stack: hidden vectors (B, T, C) to answers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.feedforward import ACTIVATIONS
from regard.layers.norm import make_norm


class MaskedHead(nn.Module):
    """BERT's: one more layer and a norm before the embedding matrix, used the other way round, and a bias a token."""

    def __init__(self, config: ModelConfig, weight: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = make_norm(config)
        self.weight = weight  # (V, C)
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def features(self, x: Tensor) -> Tensor:
        """What the matrix multiplies."""
        return self.norm(self.activation(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.features(x), self.weight, self.bias)


class Pooler(nn.Module):
    """tanh(W x_0 + b): the first token speaks for its row."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, 0]).tanh()  # (B, C)
