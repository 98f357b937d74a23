"""Positions that look at queries and keys themselves. They change scores and values inside the softmax, which no fused
kernel allows, so they run on the reference kernel (layers/attend.py says so).
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.layers.attend import repeated
from regard.layers.attention import split_heads
from regard.layers.positions import Positions


class Contextual(Positions):
    contextual: ClassVar[bool] = True
    per_layer: ClassVar[bool] = True

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
        """Scaled scores (B, H, T, S), queries q (B, H, T, D), who sees whom (B, 1, T, S), positions (B, T) and (B, S), and
        keys k (B, H, S, D)."""
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
        self.init_weights()

    def init_weights(self) -> None:
        for vectors in (self.keys, self.added):
            nn.init.xavier_uniform_(vectors)

    def which(self, places: tuple[Tensor, Tensor]) -> Tensor:
        """Which vector stands for each pair, (B, 1, T, S)."""
        q, k = places
        return (k[:, None, None, :] - q[:, None, :, None]).clamp(-self.clip, self.clip) + self.clip

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
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

    def init_weights(self) -> None:
        nn.init.zeros_(self.vectors)

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
        gates = scores.sigmoid() * seen
        counted = gates.flip(-1).cumsum(-1).flip(-1)  # (B, H, T, S), p_ij
        counted = counted.clamp(max=len(self.vectors) - 1)
        below, above = counted.floor().long(), counted.ceil().long()
        products = (q @ self.vectors.T.to(q.dtype)).float() * q.shape[-1] ** -0.5  # (B, H, T, n_positions)
        part = counted - below
        return scores + products.gather(-1, above) * part + products.gather(-1, below) * (1 - part)


class Distances(nn.Module):
    """A vector for every distance i - j, DeBERTa's table P, as wide as the model.

    Version 1 has one for each distance from -reach to reach - 1. Version 3 has `buckets` on either side: near distances have
    one each, far ones share them, ever more to a bucket; and its vectors are normalised.
    """

    row: Tensor

    def __init__(self, d_model: int, reach: int, buckets: int, eps: float) -> None:
        super().__init__()
        self.reach, self.buckets = reach, buckets
        self.table = nn.Parameter(torch.empty(2 * (buckets or reach), d_model))
        self.norm = nn.LayerNorm(d_model, eps=eps) if buckets else nn.Identity()
        self.register_buffer("row", torch.empty(2 * reach + 1, dtype=torch.long), persistent=False)  # of each distance
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.table, std=0.02)
        distance, side = torch.arange(-self.reach, self.reach + 1), self.buckets or self.reach
        rows = log_buckets(distance, self.buckets, self.reach) if self.buckets else distance
        self.row.copy_((rows + side).clamp(0, 2 * side - 1))

    def forward(self) -> Tensor:
        return self.norm(self.table)

    def rows(self, places: tuple[Tensor, Tensor]) -> Tensor:
        """Which row of the table stands for each pair, (B, 1, T, S)."""
        q, k = places
        distance = q[:, None, :, None] - k[:, None, None, :]
        return self.row[distance.clamp(-self.reach, self.reach) + self.reach]


def log_buckets(distance: Tensor, buckets: int, reach: int) -> Tensor:
    """Distances up to half the buckets are their own, further ones share buckets whose borders grow geometrically, so that
    reach - 1 falls into the last."""
    near = buckets // 2
    size = distance.abs().clamp(min=near).double() / near
    far = near + (size.log() / math.log((reach - 1) / near) * (near - 1)).ceil()
    return distance.where(distance.abs() <= near, distance.sign() * far.long())


class Disentangled(Contextual):
    """DeBERTa: a token is what it says and where it stands, two vectors, and three of their four products are scores:

    e_ij = (q_i . k_j + q_i . K[i-j] + Q[i-j] . k_j) / sqrt(3 D), where K and Q are projections of the table P of distances.

    All layers share one table; the projections are the layer's, in version 3 those of its queries and keys themselves. So a
    scheme is made for every layer, and `join` gives it the first one's table. Products P W of its own for every layer would
    be the same function with no need to join, but 24 tables in place of one, and a model that learns otherwise than
    the published ones do.
    """

    refuses: ClassVar = {
        "cross": "its table is of distances within one sentence; source and target have none between them",
        "decoder": "disentangled attention reads a whole text at once, in an encoder (choose another for the decoder: "
        "--model.positions rope --model.encoder_positions disentangled)",
    }

    def __init__(self, distances: Distances, d_model: int, d_head: int, heads: tuple[int, int], own: bool) -> None:
        """`heads` are those of queries and of keys; `own` projections of positions are version 1's."""
        super().__init__()
        self.distances, self.d_head = distances, d_head
        self.widths = heads[0] * d_head, heads[1] * d_head
        self.projection = nn.Linear(d_model, sum(self.widths)) if own else None  # to Q and K
        self.lent: tuple[nn.Linear, ...] = ()  # a tuple, because a module in it stays the layer's and is not ours
        self.init_weights()

    def init_weights(self) -> None:
        if self.projection is not None:
            nn.init.xavier_uniform_(self.projection.weight)
            nn.init.zeros_(self.projection.bias)

    def join(self, first: Disentangled, qkv: nn.Linear) -> None:
        """Read the table of the first layer, and, where positions have no projections, with those of this layer."""
        self.distances = first.distances
        self.lent = () if self.projection is not None else (qkv,)

    def projected(self) -> list[Tensor]:
        """Q (1, H, rows, D) and K (1, G, rows, D)."""
        layer = self.projection or self.lent[0]
        width, table = sum(self.widths), self.distances()
        both = F.linear(table, layer.weight[:width], None if layer.bias is None else layer.bias[:width])
        return [split_heads(part[None], self.d_head) for part in both.split(self.widths, dim=-1)]

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
        row = self.distances.rows(places).expand_as(scores)  # (B, H, T, S)
        queries, keys = (x.to(q.dtype) for x in self.projected())
        to_position = (q @ repeated(keys, q).transpose(-2, -1)).float()  # (B, H, T, rows)
        from_position = (k @ queries.transpose(-2, -1)).float()  # (B, H, S, rows)
        both = to_position.gather(-1, row) + from_position.gather(-1, row.transpose(-2, -1)).transpose(-2, -1)
        return (scores + both * self.d_head**-0.5) * 3**-0.5
