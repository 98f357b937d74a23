"""Contextual positions, which depend on queries and keys themselves.

They change scores and values in ways that no fused kernel supports, so they run on the reference kernel.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.errors import RegardError
from regard.kernels.attention_functions import repeat_kv
from regard.layers.part import Curves, Matrix, Place
from regard.layers.positions.scheme import DISTANCE, PositionScheme

if TYPE_CHECKING:
    from regard.layers.block import Block


class Contextual(PositionScheme):
    """Base class of schemes that use queries, keys and attention weights."""

    contextual: ClassVar[bool] = True
    per_layer: ClassVar[bool] = True

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
        """Return new scores (B, H, T, S) from scaled scores, queries q (B, H, T, D) and keys k (B, H, S, D).

        `seen` (B, 1, T, S) is the mask; `places` are the positions (B, T) of queries and (B, S) of keys."""
        raise NotImplementedError

    def values(self, weights: Tensor, places: tuple[Tensor, Tensor]) -> Tensor | float:
        """Return what is added to the weighted sum of the values, (B, H, T, D)."""
        return 0.0


@register("shaw")
class Shaw(Contextual):
    """Learned vectors for distances, added to keys and to values (Shaw et al. 2018).

    e_ij = q_i . (k_j + aK[j-i]) / sqrt(D),  z_i = sum_j a_ij (v_j + aV[j-i]), distances clipped to [-clip, clip].
    """

    @dataclass(frozen=True)
    class Settings:
        clip: int = setting(16, "distances beyond this share one vector", least=1, most=1 << 20)

    formula = r"$e_{ij} = q_i \cdot (k_j + a^K_{j-i})\,/\sqrt{D},\quad z_i = \sum_j \alpha_{ij}\,(v_j + a^V_{j-i})$"

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.clip = settings.clip
        self.keys = nn.Parameter(torch.empty(2 * self.clip + 1, config.d_head))  # aK, shared by the heads
        self.added = nn.Parameter(torch.empty(2 * self.clip + 1, config.d_head))  # aV
        self.init_weights()

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if place.side == "cross":
            why = "Shaw's vectors stand for distances within one sentence; source and target have none between them"
            cls.refuse(place, why)

    def init_weights(self) -> None:
        for vectors in (self.keys, self.added):
            nn.init.xavier_uniform_(vectors)

    def vector_index(self, places: tuple[Tensor, Tensor]) -> Tensor:
        """Return the index of the vector for each pair of query and key, (B, 1, T, S)."""
        q, k = places
        return (k[:, None, None, :] - q[:, None, :, None]).clamp(-self.clip, self.clip) + self.clip

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
        products = (q @ self.keys.T.to(q.dtype)).float() * q.shape[-1] ** -0.5  # (B, H, T, 2 clip + 1)
        return scores + products.gather(-1, self.vector_index(places).expand_as(scores))

    def values(self, weights: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        by_distance = weights.new_zeros(*weights.shape[:-1], 2 * self.clip + 1, dtype=torch.float32)
        by_distance = by_distance.scatter_add(-1, self.vector_index(places).expand_as(weights), weights.float())
        return by_distance.to(weights.dtype) @ self.added.to(weights.dtype)  # (B, H, T, D)

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return the absolute values of both tables, for distances from -clip to clip."""
        tables = {"|aK|": self.keys, "|aV|": self.added}
        return tuple(Matrix(name, x.abs().T, DISTANCE, "dimension", start=-self.clip) for name, x in tables.items())


@register("cope")
class CoPE(Contextual):
    """CoPE: positions that count only the tokens which the query finds worth counting (Golovneva et al. 2024).

    p_ij = sum of the gates sigmoid(q_i . k_t / sqrt(D)) over t = j..i; the score gains q_i . e[p_ij], interpolated between
    whole positions.
    """

    @dataclass(frozen=True)
    class Settings:
        positions: int = setting(0, "learned positions; 0 = max_len", most=1 << 24)

    formula = r"$p_{ij} = \sum_{t=j}^{i} \sigma(q_i \cdot k_t / \sqrt{D}),\quad q_i \cdot (k_j + e[p_{ij}])\,/\sqrt{D}$"

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        n = settings.positions or config.max_len
        self.vectors = nn.Parameter(torch.empty(n, config.d_head))  # e, shared by the heads; zero: no positions
        self.init_weights()

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if not place.causal:
            cls.refuse(
                place,
                "CoPE counts from a key up to a later query, so it needs a causal decoder's self-attention "
                "(give the encoder another scheme: --model.encoder_positions rope)",
            )

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

    def describe(self, n: int = 64) -> tuple[Curves | Matrix, ...]:
        """Return the learned vectors or, while they are zero, an example with two queries at the last word of a text.

        One query counts only ends of sentences, the other counts every word."""
        if self.vectors.any():
            return (Matrix("the vectors e", self.vectors, "dimension", "position"),)
        wanted = torch.tensor([[6.0 if counts(word) else -6.0 for word in STORY] for counts in COUNTED.values()])
        gates = wanted.sigmoid()  # (queries, keys)
        counted = gates.flip(-1).cumsum(-1).flip(-1).clamp(max=len(self.vectors) - 1)
        at, key = torch.arange(len(STORY)), "key j; the query is the last word"
        shown = (dict(zip(COUNTED, x, strict=True)) for x in (gates, counted))
        return (
            Curves("gates: what two queries find worth counting", at, next(shown), key, "gate", ticks=STORY),
            Curves(
                "positions: the gates, summed back from the query", at, next(shown), key, "position p_ij", ticks=STORY
            ),
        )


STORY = ("The", "cat", "sat", "<eos>", "It", "slept", "<eos>", "Then", "it", "woke", "<eos>", "Who")
COUNTED = {"counts sentences": lambda word: word == "<eos>", "counts every word": lambda word: True}


class Distances(nn.Module):
    """DeBERTa's table P: a vector (C,) for every distance i - j.

    Version 1 has one vector for each distance from -reach to reach - 1. Version 3 has `buckets` on either side, exact for
    near distances and logarithmic for far ones, and a LayerNorm on its vectors.
    """

    row: Tensor

    def __init__(self, d_model: int, reach: int, buckets: int, eps: float) -> None:
        super().__init__()
        self.reach, self.buckets = reach, buckets
        self.table = nn.Parameter(torch.empty(2 * (buckets or reach), d_model))
        self.norm = nn.LayerNorm(d_model, eps=eps) if buckets else nn.Identity()
        row = torch.empty(2 * reach + 1, dtype=torch.long)
        self.register_buffer("row", row, persistent=False)  # the row of the table for each distance

    def init_weights(self) -> None:
        nn.init.normal_(self.table, std=0.02)
        if isinstance(self.norm, nn.LayerNorm):
            self.norm.reset_parameters()
        distance, side = torch.arange(-self.reach, self.reach + 1), self.buckets or self.reach
        rows = log_buckets(distance, self.buckets, self.reach) if self.buckets else distance
        self.row.copy_((rows + side).clamp(0, 2 * side - 1))

    def forward(self) -> Tensor:
        return self.norm(self.table)

    def row_index(self, places: tuple[Tensor, Tensor]) -> Tensor:
        """Return the row of the table for each pair of query and key, (B, 1, T, S)."""
        q, k = places
        distance = q[:, None, :, None] - k[:, None, None, :]
        return self.row[distance.clamp(-self.reach, self.reach) + self.reach]


def log_buckets(distance: Tensor, buckets: int, reach: int) -> Tensor:
    """Return the bucket of each distance.

    Up to half of the buckets distances are exact; the borders of further buckets grow geometrically, so that distance
    reach - 1 is in the last one."""
    near = buckets // 2
    size = distance.abs().clamp(min=near).double() / near
    far = near + (size.log() / math.log((reach - 1) / near) * (near - 1)).ceil()
    return distance.where(distance.abs() <= near, distance.sign() * far.long())


@register("disentangled")
class Disentangled(Contextual):
    """DeBERTa's attention, in which what a token says and where it stands are compared apart (He et al. 2021).

    A token has a content vector and a position vector; three of the four products between those of two tokens are summed:

    e_ij = (q_i . k_j + q_i . K[i-j] + Q[i-j] . k_j) / sqrt(3 D), where K and Q are projections of the table P of distances.

    All layers share one table. Each layer has its own projections, which in version 3 are those of its queries and keys. So
    every layer has a scheme, to which `attach` gives the table of the first one. Separate tables P W per layer would give
    the same function, but they have more parameters and would be trained differently from the published models.
    """

    @dataclass(frozen=True)
    class Settings:
        buckets: int = setting(
            256,
            "buckets of distances on either side (DeBERTa 3); 0 = every distance its own (DeBERTa 1)",
            most=1 << 20,
        )
        reach: int = setting(512, "distances from this on share a vector", least=1, most=1 << 24)

    terms = 3

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.distances = Distances(config.d_model, settings.reach, settings.buckets, config.norm_eps)
        self.d_head = config.d_head
        self.widths = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        own = not settings.buckets  # version 1 has separate projections of positions
        self.projection = nn.Linear(config.d_model, sum(self.widths)) if own else None
        self.shared_qkv: tuple[nn.Linear, ...] = ()  # in a tuple, so that it is not registered as a submodule
        self.init_weights()

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if place.side == "cross":
            cls.refuse(place, "its table is of distances within one sentence; source and target have none between them")
        if place.side == "decoder":
            cls.refuse(
                place,
                "disentangled attention reads a whole text at once, in an encoder (choose another for the decoder: "
                "--model.positions rope --model.encoder_positions disentangled)",
            )
        near = settings.buckets // 2
        if near and not 1 < near < settings.reach - 1:
            raise RegardError(
                f"model.disentangled.buckets {settings.buckets} must be 0, or at least 4 and half of it below "
                f"model.disentangled.reach {settings.reach} - 1"
            )

    def init_weights(self) -> None:
        self.distances.init_weights()
        if self.projection is not None:
            nn.init.xavier_uniform_(self.projection.weight)
            nn.init.zeros_(self.projection.bias)

    def attach(self, block: Block, first: PositionScheme) -> None:
        """Share the table of the first layer and, in version 3, the query and key projections of this layer."""
        assert isinstance(first, Disentangled)
        self.distances = first.distances
        qkv = block.get_submodule("sublayers.self.qkv")
        assert isinstance(qkv, nn.Linear)
        self.shared_qkv = () if self.projection is not None else (qkv,)

    def project_distances(self) -> list[Tensor]:
        """Return the projected table, Q (1, H, rows, D) and K (1, G, rows, D)."""
        heads, groups = (width // self.d_head for width in self.widths)
        weight, bias = self._query_key_weights(groups)
        both = F.linear(self.distances(), weight, bias).unflatten(-1, (groups, -1, self.d_head))
        return [part.flatten(1, 2).transpose(0, 1)[None] for part in both.split([heads // groups, 1], 2)]

    def _query_key_weights(self, groups: int) -> tuple[Tensor, Tensor | None]:
        """Return weight and bias of the projection to queries and keys: the scheme's own, or the layer's without values."""
        if self.projection is not None:
            return self.projection.weight, self.projection.bias
        qkv = self.shared_qkv[0]

        def drop_values(rows: Tensor) -> Tensor:  # the last D rows of each group are values (kernels/weight_layout.py)
            return rows.unflatten(0, (groups, -1))[:, : -self.d_head].flatten(0, 1)

        return drop_values(qkv.weight), None if qkv.bias is None else drop_values(qkv.bias)

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
        row = self.distances.row_index(places).expand_as(scores)  # (B, H, T, S)
        queries, keys = (x.to(q.dtype) for x in self.project_distances())
        to_position = (q @ repeat_kv(keys, q).transpose(-2, -1)).float()  # (B, H, T, rows)
        from_position = (k @ queries.transpose(-2, -1)).float()  # (B, H, S, rows)
        both = to_position.gather(-1, row) + from_position.gather(-1, row.transpose(-2, -1)).transpose(-2, -1)
        return (scores + both * self.d_head**-0.5) * 3**-0.5
