"""Which of their tensors make which of ours, declared once and used both ways.

A `Step` changes a tensor on its way to us and can be undone. A `Rule` takes one or more of their tensors, each through its
own steps, lays them one under the other, and takes the whole through further steps: queries, keys and values, or gates and
values, come in turns (kernels/weight_layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.weight_layout import deinterleave_rows, gate_block, interleave_rows


@dataclass(frozen=True)
class Step:
    name: str
    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]


Steps = tuple[Step, ...]


@dataclass(frozen=True)
class Part:
    """One of their tensors, and the rows of ours that it makes (0 = all); one without a name is zeros, which they lack."""

    name: str
    steps: Steps = ()
    rows: int = 0

    def to_ours(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step.to_ours(x)
        return x

    def to_theirs(self, x: Tensor) -> Tensor:
        for step in reversed(self.steps):
            x = step.to_theirs(x)
        return x


@dataclass(frozen=True)
class Rule:
    ours: str
    parts: tuple[Part, ...]
    group: str = "body"  # a head or a body: what a class of theirs has or lacks as a whole
    steps: Steps = ()  # of the parts together

    def to_ours(self, theirs: Mapping[str, Tensor]) -> Tensor:
        parts = [p.to_ours(theirs[p.name]) if p.name else torch.zeros(p.rows) for p in self.parts]
        return Part("", self.steps).to_ours(parts[0] if len(parts) == 1 else torch.cat(parts))

    def to_theirs(self, ours: Tensor) -> dict[str, Tensor]:
        ours = Part("", self.steps).to_theirs(ours)
        pieces = (ours,) if len(self.parts) == 1 else ours.split([part.rows for part in self.parts])
        both = list(zip(self.parts, pieces, strict=True))
        if any(not part.name and not piece.is_meta and piece.any() for part, piece in both):
            raise RegardError(
                f"{self.ours} has learned numbers where these models have none: this model can be used in Regard alone"
            )
        return {part.name: part.to_theirs(piece) for part, piece in both if part.name}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts if part.name)

    @property
    def how(self) -> str:
        """In words, for the report."""
        each = [step for part in self.parts for step in part.steps]
        steps = list(dict.fromkeys(step.name for step in (*each, *self.steps)))
        return ", ".join((["joined"] if len(self.parts) > 1 else []) + steps) or "as it is"


WEIGHT, BOTH = ("weight",), ("weight", "bias")


def same(ours: str, theirs: str, steps: Steps = (), kinds: Sequence[str] = BOTH, group: str = "body") -> Iterator[Rule]:
    """A layer of theirs that is one of ours: its weight and its bias."""
    for kind in kinds:
        yield Rule(f"{ours}.{kind}", (Part(f"{theirs}.{kind}", steps),), group)


def joined(
    ours: str, theirs: Mapping[str, int], together: Step, steps: Sequence[Steps] = (), kinds: Sequence[str] = BOTH
) -> Iterator[Rule]:
    """Layers of theirs (with their rows) that are one of ours, in which their rows come in turns as `together` says."""
    for kind in kinds:
        each = steps or [()] * len(theirs)
        parts = (Part(f"{name}.{kind}", s, rows) for (name, rows), s in zip(theirs.items(), each, strict=True))
        yield Rule(f"{ours}.{kind}", tuple(parts), steps=(together,))


def check_moved(made: Tensor, wanted: Tensor, moved: Tensor, name: str) -> None:
    """A bias that theirs lack can move into another one if that can be solved for, by numbers that fp32 adds safely."""
    if not moved.isfinite().all() or moved.abs().max() > 100 or (made - wanted).abs().max() > 1e-5:
        raise RegardError(
            f"{name} has learned what these models have no place for, and no other bias can say the same: "
            f"this model can be used in Regard alone"
        )


# ---- steps ------------------------------------------------------------------------------------------------------------

TRANSPOSED = Step("transposed", lambda x: x.t(), lambda x: x.t())  # of a bias: as it is


def pairs(heads: int) -> Step:
    """Rotary pairs (m, m + D/2) of each head as (2m, 2m + 1)."""
    return Step(
        "rotary pairs",
        lambda x: x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2),
        lambda x: x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2),
    )


def turns(name: str, blocks: int, *shares: int) -> Step:
    """Matrices one under the other, whose heights are in the ratio `shares`, as one of so many blocks (kernels/weight_layout.py)."""

    def to_ours(x: Tensor) -> Tensor:
        unit = len(x) // sum(shares)
        return interleave_rows(x.split([unit * share for share in shares]), blocks)

    return Step(name, to_ours, lambda x: torch.cat(deinterleave_rows(x, blocks, shares)))


def by_group(config: ModelConfig) -> Step:
    """All queries, all keys, all values, as those of each head of keys together."""
    return turns("by head of keys", config.n_kv_heads, config.n_heads // config.n_kv_heads, 1, 1)


def keys_by_group(config: ModelConfig) -> Step:
    """All keys and all values, as those of each head together."""
    return turns("by head of keys", config.n_kv_heads, 1, 1)


def gates(config: ModelConfig) -> Step:
    """All gates and all values, as a few of each in turns."""
    return turns("gates and values in turns", config.d_ff // gate_block(config.d_ff), 1, 1)


def without_first(n: int) -> Step:
    """Positions counted from n on: rows that nothing reads go, and come back as zeros."""
    return Step(f"without its first {n} rows", lambda x: x[n:], lambda x: torch.cat([x.new_zeros(n, *x.shape[1:]), x]))


def scaled(factor: float) -> Step:
    return Step(f"times {factor:g}", lambda x: x * factor, lambda x: x / factor)


def bare(sizes: int) -> Step:
    """Without its first sizes, which are all 1."""
    index = (0,) * sizes
    return Step("without sizes of 1", lambda x: x[index], lambda x: x[(None,) * sizes])


def waves(width: int, dim: int) -> Step:
    """Channels in the order of sine and cosine by turns, where theirs has all sines before all cosines."""
    half = torch.arange(width // 2)
    there = torch.stack([half, half + width // 2], 1).flatten()
    back = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return Step(
        "channels by turns",
        lambda x: x.index_select(dim, there.to(x.device)),
        lambda x: x.index_select(dim, back.to(x.device)),
    )
