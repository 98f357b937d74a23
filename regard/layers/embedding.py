"""Ids to vectors and back.

A one-hot vector times the embedding matrix is a look-up of one of its rows; the output layer is the same matrix used the
other way round when the two are tied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.cpu_threads import LARGE_MATRIX_BYTES, large_matmul


class Embedding(nn.Embedding):
    """Token embeddings, scaled by sqrt(C) so that they are as large as the positions added to them, or as they are."""

    def __init__(self, vocab_size: int, d_model: int, scaled: bool = True) -> None:
        super().__init__(vocab_size, d_model)
        self.scale = d_model**0.5 if scaled else 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """Padding, which is below 0, gets the vector of some token: nothing looks at it. A step (N,) has no padding."""
        return super().forward(ids if ids.dim() == 1 else ids.clamp(min=0)) * self.scale  # (B, T, C)


class Head(nn.Module):
    """Hidden vectors to logits, (..., C) -> (..., V). `weight` may be an embedding's own matrix, as large as its use below
    wants it; T5 then makes its logits smaller by sqrt(C)."""

    def __init__(self, weight: Tensor, scaled: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.weight = weight  # (V, C)
        self.bias = nn.Parameter(torch.zeros(len(weight))) if biased else None
        self.scale = weight.shape[1] ** -0.5 if scaled else 1.0

    def features(self, x: Tensor) -> Tensor:
        """What the matrix multiplies."""
        return x * self.scale if self.scale != 1.0 else x

    def forward(self, x: Tensor) -> Tensor:
        large = x.device.type == "cpu" and self.weight.nbytes >= LARGE_MATRIX_BYTES
        return large_matmul(self.multiply, x) if large else self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        return F.linear(self.features(x), self.weight, self.bias)  # (..., V)
