"""Positions that look at the queries themselves. They change scores and values inside the softmax, which no fused kernel
allows, so they run on the reference kernel (layers/attend.py says so).
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.layers.positions import Positions


class Contextual(Positions):
    contextual: ClassVar[bool] = True
    per_layer: ClassVar[bool] = True

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        """Scaled scores (B, H, T, S), queries q (B, H, T, D), who sees whom (B, 1, T, S), positions (B, T) and (B, S)."""
        raise NotImplementedError

    def values(self, weights: Tensor, places: tuple[Tensor, Tensor]) -> Tensor | float:
        """What is added to the weighted sum of the values, (B, H, T, D)."""
        return 0.0


class Shaw(Contextual):
    """e_ij = q_i . (k_j + aK[j-i]) / sqrt(D),  z_i = sum_j a_ij (v_j + aV[j-i]), distances clipped to [-clip, clip]."""

    refuses: ClassVar = {
        "cross": "Shaw's vectors stand for distances within one sentence; source and target have none between them"
    }

    def __init__(self, d_head: int, clip: int) -> None:
        super().__init__()
        self.clip = clip
        self.keys = nn.Parameter(torch.empty(2 * clip + 1, d_head))  # aK, shared by the heads
        self.added = nn.Parameter(torch.empty(2 * clip + 1, d_head))  # aV
        for vectors in (self.keys, self.added):
            nn.init.xavier_uniform_(vectors)

    def which(self, places: tuple[Tensor, Tensor]) -> Tensor:
        """Which vector stands for each pair, (B, 1, T, S)."""
        q, k = places
        return (k[:, None, None, :] - q[:, None, :, None]).clamp(-self.clip, self.clip) + self.clip

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        products = (q @ self.keys.T.to(q.dtype)).float() * q.shape[-1] ** -0.5  # (B, H, T, 2 clip + 1)
        return scores + products.gather(-1, self.which(places).expand_as(scores))

    def values(self, weights: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        by_distance = weights.new_zeros(*weights.shape[:-1], 2 * self.clip + 1, dtype=torch.float32)
        by_distance = by_distance.scatter_add(-1, self.which(places).expand_as(weights), weights.float())
        return by_distance.to(weights.dtype) @ self.added.to(weights.dtype)  # (B, H, T, D)


class CoPE(Contextual):
    """Contextual positions: p_ij = sum of the gates sigmoid(q_i . k_t / sqrt(D)) over t = j..i counts what the query finds
    worth counting; the score gains q_i . e[p_ij], interpolated between whole positions.
    """

    refuses: ClassVar = dict.fromkeys(
        ("encoder", "cross"),
        "CoPE counts from a key up to a later query, so it needs a causal decoder's self-attention "
        "(give the encoder another scheme: --model.encoder_positions rope)",
    )

    def __init__(self, d_head: int, n_positions: int) -> None:
        super().__init__()
        self.vectors = nn.Parameter(torch.zeros(n_positions, d_head))  # e, shared by the heads; zero: no positions

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        gates = scores.sigmoid() * seen
        counted = gates.flip(-1).cumsum(-1).flip(-1)  # (B, H, T, S), p_ij
        counted = counted.clamp(max=len(self.vectors) - 1)
        below, above = counted.floor().long(), counted.ceil().long()
        products = (q @ self.vectors.T.to(q.dtype)).float() * q.shape[-1] ** -0.5  # (B, H, T, n_positions)
        part = counted - below
        return scores + products.gather(-1, above) * part + products.gather(-1, below) * (1 - part)
