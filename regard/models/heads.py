"""The heads of BERT on top of the encoder's hidden vectors (B, T, C)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.feedforward import ACTIVATIONS
from regard.layers.norm import make_norm


class MaskedLMHead(nn.Module):
    """The masked language modelling head: a dense layer and a norm, then the tied embedding matrix and a bias per token."""

    def __init__(self, config: ModelConfig, weight: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = make_norm(config)
        self.weight = weight  # (V, C)
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the embedding matrix (B, T, C)."""
        return self.norm(self.activation(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits (B, T, V) of hidden vectors (B, T, C)."""
        return F.linear(self.features(x), self.weight, self.bias)


class Pooler(nn.Module):
    """One vector for each row, tanh(W x_0 + b), from the first token."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        """Return one vector (B, C) for each row of hidden vectors (B, T, C)."""
        return self.inner(x[:, 0]).tanh()  # (B, C)
