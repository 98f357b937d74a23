"""The state dict mapping: rules that rename and convert the tensors of a Hugging Face state_dict to ours, and back.

In this package `theirs` is a tensor or setting of transformers, and `ours` its counterpart in Regard. A `Step` is an
invertible change of a tensor. A `Rule` takes one or more of their tensors, each through its own steps, concatenates them
along the rows, and takes the result through further steps: our queries, keys and values, and our gates and values, are
interleaved (kernels/weight_layout.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.weight_layout import deinterleave_rows, gate_block, interleave_rows


@dataclass(frozen=True)
class Step:
    """An invertible change of a tensor, with the name that the report shows."""

    name: str
    to_ours: Callable[[Tensor], Tensor]
    to_theirs: Callable[[Tensor], Tensor]


Steps = tuple[Step, ...]


@dataclass(frozen=True)
class SourceTensor:
    """One of their tensors and the number of rows of ours that it makes (0 = all).

    A source tensor without a name stands for a parameter that theirs lack: zeros on import, and it must be zero on export.
    """

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
    """One tensor of ours and the tensors of theirs that it is made of."""

    ours: str
    sources: tuple[SourceTensor, ...]
    group: str = "body"  # the body or a head: a model class of theirs has all tensors of a group or none
    steps: Steps = ()  # applied to the concatenated sources

    def to_ours(self, theirs: Mapping[str, Tensor]) -> Tensor:
        tensors = [s.to_ours(theirs[s.name]) if s.name else torch.zeros(s.rows) for s in self.sources]
        return SourceTensor("", self.steps).to_ours(tensors[0] if len(tensors) == 1 else torch.cat(tensors))

    def to_theirs(self, ours: Tensor) -> dict[str, Tensor]:
        ours = SourceTensor("", self.steps).to_theirs(ours)
        tensors = (ours,) if len(self.sources) == 1 else ours.split([source.rows for source in self.sources])
        both = list(zip(self.sources, tensors, strict=True))
        if any(not source.name and not tensor.is_meta and tensor.any() for source, tensor in both):
            raise RegardError(
                f"{self.ours} cannot be exported: the non-zero parameter has no counterpart in these models, "
                f"so this model can be used in Regard alone"
            )
        return {source.name: source.to_theirs(tensor) for source, tensor in both if source.name}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(source.name for source in self.sources if source.name)

    @property
    def description(self) -> str:
        """The steps in words, for the report."""
        each = [step for source in self.sources for step in source.steps]
        steps = list(dict.fromkeys(step.name for step in (*each, *self.steps)))
        return ", ".join((["joined"] if len(self.sources) > 1 else []) + steps) or "as it is"


WEIGHT, BOTH = ("weight",), ("weight", "bias")


def copy_layer(
    ours: str, theirs: str, steps: Steps = (), names: Sequence[str] = BOTH, group: str = "body"
) -> Iterator[Rule]:
    """Yield the rules of a layer of theirs that is one layer of ours: its weight and its bias."""
    for name in names:
        yield Rule(f"{ours}.{name}", (SourceTensor(f"{theirs}.{name}", steps),), group)


def join_layers(
    ours: str, theirs: Mapping[str, int], together: Step, steps: Sequence[Steps] = (), names: Sequence[str] = BOTH
) -> Iterator[Rule]:
    """Yield the rules of several layers of theirs (name -> rows) that are one layer of ours.

    `together` says how their rows are interleaved in ours.
    """
    for name in names:
        each = steps or [()] * len(theirs)
        sources = (
            SourceTensor(f"{layer}.{name}", s, rows) for (layer, rows), s in zip(theirs.items(), each, strict=True)
        )
        yield Rule(f"{ours}.{name}", tuple(sources), steps=(together,))


def join_experts(ours: str, theirs: Sequence[str], rows: int, experts: int, each: Step | None = None) -> Rule:
    """Return the rule of a weight that stacks those of experts; `theirs` are the names by expert, `rows` of each."""
    sources = tuple(SourceTensor(f"{name}.weight", rows=rows) for name in theirs)
    return Rule(ours, sources, steps=(stack_experts(experts, each),))


def export_tensors(rules: Iterable[Rule], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors as theirs, by the name that theirs have."""
    return {name: x.contiguous() for rule in rules for name, x in rule.to_theirs(own[rule.ours]).items()}


def check_absorbed(result: Tensor, wanted: Tensor, moved: Tensor, name: str) -> None:
    """Refuse to export a bias that theirs lack unless another bias absorbed it: the system must have a solution, with values
    that fp32 adds without losing digits.
    """
    if not moved.isfinite().all() or moved.abs().max() > 100 or (result - wanted).abs().max() > 1e-5:
        raise RegardError(
            f"{name} cannot be exported: the non-zero parameter has no counterpart in these models and no other bias "
            f"can absorb it, so this model can be used in Regard alone"
        )


# ---- steps ------------------------------------------------------------------------------------------------------------

TRANSPOSE = Step("transposed", lambda x: x.t(), lambda x: x.t())  # a bias (one dimension) stays as it is


def interleave_rotary(heads: int) -> Step:
    """Return the step from rotary pairs (m, m + D/2) of each head to pairs (2m, 2m + 1)."""
    return Step(
        "rotary pairs",
        lambda x: x.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2),
        lambda x: x.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2),
    )


def interleave(name: str, blocks: int, *shares: int) -> Step:
    """Return the step from stacked matrices to one of interleaved blocks (kernels/weight_layout.py).

    The heights of the matrices are in the ratio `shares`.
    """

    def to_ours(x: Tensor) -> Tensor:
        unit = len(x) // sum(shares)
        return interleave_rows(x.split([unit * share for share in shares]), blocks)

    return Step(name, to_ours, lambda x: torch.cat(deinterleave_rows(x, blocks, shares)))


def interleave_qkv(config: ModelConfig) -> Step:
    """Return the step from all queries, all keys, all values to those of each key/value head together."""
    return interleave("by head of keys", config.n_kv_heads, config.n_heads // config.n_kv_heads, 1, 1)


def interleave_kv(config: ModelConfig) -> Step:
    """Return the step from all keys, all values to those of each head together."""
    return interleave("by head of keys", config.n_kv_heads, 1, 1)


def interleave_gates(config: ModelConfig) -> Step:
    """Return the step from all gates, all values to alternating blocks of them."""
    return interleave("gates and values in turns", config.d_ff // gate_block(config.d_ff), 1, 1)


def stack_experts(experts: int, each: Step | None = None) -> Step:
    """Return the step from the matrices of all experts one below the other to a stack of them, each taken through `each`."""

    def to_ours(x: Tensor) -> Tensor:
        matrices = x.unflatten(0, (experts, -1))
        return matrices if each is None else torch.stack([each.to_ours(matrix) for matrix in matrices])

    def to_theirs(x: Tensor) -> Tensor:
        return (x if each is None else torch.stack([each.to_theirs(matrix) for matrix in x])).flatten(0, 1)

    return Step("stacked" if each is None else f"{each.name}, stacked", to_ours, to_theirs)


def drop_first_rows(n: int) -> Step:
    """Return the step that drops the first `n` rows of a position table, which nothing reads; export writes zeros there."""
    return Step(f"without its first {n} rows", lambda x: x[n:], lambda x: torch.cat([x.new_zeros(n, *x.shape[1:]), x]))


def scale(factor: float) -> Step:
    return Step(f"times {factor:g}", lambda x: x * factor, lambda x: x / factor)


def drop_leading_dims(n: int) -> Step:
    """Return the step that drops the first `n` dimensions, all of size 1."""
    index = (0,) * n
    return Step("without sizes of 1", lambda x: x[index], lambda x: x[(None,) * n])


def interleave_sinusoids(width: int, dim: int) -> Step:
    """Return the step from channels with all sines before all cosines to alternating ones, along dimension `dim`."""
    half = torch.arange(width // 2)
    to_ours = torch.stack([half, half + width // 2], 1).flatten()
    to_theirs = torch.cat([torch.arange(0, width, 2), torch.arange(1, width, 2)])
    return Step(
        "channels by turns",
        lambda x: x.index_select(dim, to_ours.to(x.device)),
        lambda x: x.index_select(dim, to_theirs.to(x.device)),
    )
