"""Dropout for recurrent networks (Gal and Ghahramani 2016, Merity et al. 2018)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class VariationalDropout(nn.Module):
    """Dropout with one mask for all time steps of a row, or plain dropout if `variational` is False.

    With one mask, a recurrent state cannot recover at the next step what it lost at this one, nor average the noise."""

    def __init__(self, p: float, variational: bool = True) -> None:
        super().__init__()
        self.p, self.variational = p, variational

    def forward(self, x: Tensor) -> Tensor:  # (B, T, C)
        if not self.training or not self.p:
            return x
        if not self.variational:
            return F.dropout(x, self.p)
        return x * F.dropout(torch.ones_like(x[:, :1]), self.p)


def word_dropout(weight: Tensor, p: float, training: bool) -> Tensor:
    """Return an embedding matrix (V, C) in which whole rows are dropped: such a word is zero everywhere in the batch."""
    return weight * F.dropout(weight.new_ones(len(weight), 1), p) if training and p else weight
