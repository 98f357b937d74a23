"""Token embeddings and the output head.

An embedding looks up a row of its matrix, which is the product of a one-hot vector with it. With weight tying the head
multiplies by the transpose of the same matrix.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.kernels.cpu_threads import LARGE_MATRIX_BYTES, large_matmul


class Embedding(nn.Embedding):
    """Token embeddings, optionally scaled by sqrt(C) so that they are as large as the positions added to them."""

    def __init__(self, vocab_size: int, d_model: int, scaled: bool = True) -> None:
        super().__init__(vocab_size, d_model)
        self.scale = d_model**0.5 if scaled else 1.0

    def forward(self, ids: Tensor) -> Tensor:
        """Look up ids, (B, T) -> (B, T, C) or, in a step, (N,) -> (N, C).

        Padding ids are below 0 and get an arbitrary vector; a step has none."""
        return super().forward(ids if ids.dim() == 1 else ids.clamp(min=0)) * self.scale  # (B, T, C)


class Head(nn.Module):
    """The output layer, hidden vectors (..., C) -> logits (..., V).

    `weight` may be the matrix of an embedding (weight tying). `scaled` divides logits by sqrt(C), as T5 does."""

    def __init__(self, weight: Tensor, scaled: bool = False, biased: bool = False) -> None:
        super().__init__()
        self.weight = weight  # (V, C)
        self.bias = nn.Parameter(torch.zeros(len(weight))) if biased else None
        self.scale = weight.shape[1] ** -0.5 if scaled else 1.0

    def features(self, x: Tensor) -> Tensor:
        """Return the input of the matrix product: x, scaled if the head is."""
        return x * self.scale if self.scale != 1.0 else x

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (..., V) of hidden vectors (..., C)."""
        large = x.device.type == "cpu" and self.weight.nbytes >= LARGE_MATRIX_BYTES
        return large_matmul(self.multiply, x) if large else self.multiply(x)

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply by the output matrix, (..., C) -> (..., V)."""
        return F.linear(self.features(x), self.weight, self.bias)  # (..., V)
