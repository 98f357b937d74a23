"""A layer's share of the changes, as what they do to its plan: who sees whom, and scores that are all alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import ClassVar

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.attention_kernels import Plan, reference
from regard.layers.mixers.attention import Attention
from regard.layers.positions.scheme import Positions as Scheme
from regard.look.change.changes import CROSS, Change, Forbid, Force, Mean, Pin, Places, Zero, positions
from regard.look.record import Layer, chosen, layers_of


@dataclass(frozen=True)
class Edit:
    """One change in one layer."""

    change: Zero | Mean | Forbid
    heads: tuple[bool, ...]  # for each of the layer's heads, whether it is concerned

    def rows(self, plan: Plan) -> Tensor:
        """(B or 1, H, T or 1, 1), what it concerns."""
        heads = torch.tensor(self.heads, device=plan.q.device)[:, None, None]
        if isinstance(self.change, Forbid):
            return heads & among(plan.q, self.change.query)[:, None, :, None]
        return heads[None]

    def seen(self, seen: Tensor, may: Tensor, plan: Plan) -> Tensor:
        """Of what is seen (B, H or 1, T or 1, S), what is left; `may` is what can be seen in an unchanged model."""
        rows = self.rows(plan)
        if isinstance(self.change, Zero):
            return seen & ~rows
        if isinstance(self.change, Mean):
            return torch.where(rows, may, seen)  # whatever an earlier change hid
        keys = among(plan.k, self.change.key)[:, None, None]
        if isinstance(self.change, Force):
            return torch.where(rows & (may & keys).any(-1, keepdim=True), may & keys, seen)
        return seen & ~(rows & keys)


def among(at: Tensor, places: Places) -> Tensor:
    """Which of the positions (B, T) are these."""
    result = torch.zeros_like(at, dtype=torch.bool)
    for place in positions(places):
        result |= at == place
    return result


def edits_of(model: nn.Module, changes: Sequence[Change]) -> dict[Layer, list[Edit]]:
    """The changes of each layer, in their order."""
    edits: dict[Layer, list[Edit]] = {}
    for change in changes:
        if isinstance(change, Pin):
            change = Force(CROSS, None, change.query, change.key)
        if isinstance(change, Forbid):
            change = replace(change, query=positions(change.query), key=positions(change.key))
        if isinstance(change, (Zero, Mean, Forbid)):
            for name, layer in chosen(layers_of(model), [change.layers]).items():
                edits.setdefault(layer, []).append(Edit(change, heads_of(layer, name, change.heads)))
    return edits


def heads_of(layer: Layer, name: str, heads: tuple[int, ...] | None) -> tuple[bool, ...]:
    n = n_heads(layer)
    if wrong := [head for head in heads or () if not 0 <= head < n]:
        raise RegardError(f"{name} has no head {wrong[0]}: its {n} heads are counted from 0")
    return tuple(heads is None or head in heads for head in range(n))


def n_heads(layer: Layer) -> int:
    return layer.d_queries // layer.d_head if isinstance(layer, Attention) else 1


# ---- plans ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangedPlan(Plan):
    edits: tuple[Edit, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        usual = self.kernel(q, k, v, self, dropout)
        return torch.where(self.touched(), reference(q, k, v, self, dropout), usual)

    def touched(self) -> Tensor:
        """(B or 1, H, T or 1, 1), what any change concerns."""
        return reduce(or_, (edit.rows(self) for edit in self.edits))

    def seen(self) -> Tensor:
        may = seen = super().seen()
        for edit in self.edits:
            seen = edit.seen(seen, may, self)
        return seen  # (B, H, T or 1, S)


def changed_plan(plan: Plan, edits: Sequence[Edit]) -> ChangedPlan:
    level = [edit.heads for edit in edits if isinstance(edit.change, Mean)]
    if level:
        plan = replace(plan, scheme=Level(plan.scheme, [any(heads) for heads in zip(*level, strict=True)]))
    if isinstance(plan, ChangedPlan):  # by a `changed` around this one, so by earlier changes
        return replace(plan, edits=(*plan.edits, *edits))
    return ChangedPlan(**vars(plan), edits=tuple(edits))


class Level(Scheme):
    """A scheme under which all scores of some heads are alike."""

    contextual: ClassVar[bool] = True

    def __init__(self, inner: Scheme, heads: Sequence[bool]) -> None:
        nn.Module.__init__(self)  # it is made of another scheme, not of settings
        self.inner, self.heads, self.scale = inner, tuple(heads), inner.scale
        vars(self).update(relative=inner.relative, toeplitz=inner.toeplitz)

    def bias(self, q: Tensor, k: Tensor) -> Tensor:
        return self.inner.bias(q, k)

    def scores(self, scores: Tensor, q: Tensor, seen: Tensor, places: tuple[Tensor, Tensor], k: Tensor) -> Tensor:
        if self.inner.contextual:
            scores = self.inner.scores(scores, q, seen, places, k)  # type: ignore[operator]
        return scores.masked_fill(torch.tensor(self.heads, device=q.device)[:, None, None], 0.0)

    def values(self, weights: Tensor, places: tuple[Tensor, Tensor]) -> Tensor | float:
        return self.inner.values(weights, places) if self.inner.contextual else 0.0  # type: ignore[operator]
