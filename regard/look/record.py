"""Attention weights of any layer, while the model runs as fast as ever.

    with record(model, "decoder.*.cross") as tape:
        model(source, target)
    tape["decoder.3.cross"][0].weights(rows=[5])  # (B, H, 1, S)

Recurrent decoders have one such layer with one head, "decoder.cross", whose weights are an alignment.

A fused kernel never has the weights, so a recorded layer keeps what they are made of: queries, keys and the plan, whose size
is linear in length, and the score of a layer that compares them by one of its own. The weights are worked out when asked
for, and of a long sequence only the rows asked for: a row meets all of its keys at once and so normalises itself, no
log-sum-exp is needed. The forward does not change by a bit.

Searches move their hypotheses about at every step, so decoding is not recorded while it runs: the engine reads the best
hypothesis of each sentence once more, and that forward is recorded, with its `sentences` and `tokens`.
A training step that is replayed as a CUDA graph runs no Python and leaves no records.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar, TypeGuard
from weakref import WeakSet

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.layers.alignment import Alignment
from regard.layers.attend import Plan, raw_scores, reference, softmax_over
from regard.layers.attention import Attention

Layer = Attention | Alignment
Formula = Callable[[Tensor, Tensor, Plan], Tensor]  # queries and keys -> scores (B, H, T, S), whatever may be seen
Which = Sequence[int] | Tensor | None  # None: all


@dataclass(frozen=True)
class Record:
    """One layer in one forward."""

    q: Tensor  # (B, H, T, D)
    k: Tensor  # (B, G, S, D)
    v: Tensor  # (B, G, S, D)
    plan: Plan
    formula: Formula = raw_scores
    sentences: list[int] | None = None  # after decoding: which source each of the B rows translates,
    tokens: list[list[int]] | None = None  # ... and what was written; row t of the weights wrote token t + 1

    def weights(self, rows: Which = None, heads: Which = None) -> Tensor:
        """(B, H, T, S) fp32, or only these queries and heads; a query that may look nowhere has zeros."""
        return self._worked_out(softmax_over, rows, heads)

    def scores(self, rows: Which = None, heads: Which = None) -> Tensor:
        """What the softmax is taken of; -inf where a query may not look."""
        return self._worked_out(lambda scores, seen: scores.masked_fill(~seen, -torch.inf), rows, heads)

    def _worked_out(self, finish: Callable[[Tensor, Tensor], Tensor], rows: Which, heads: Which) -> Tensor:
        q, plan = self.q, self.plan
        if rows is not None:
            places = indices(rows, q.shape[2], "queries").to(q.device)
            q, plan = q[:, :, places], plan.rows(places)
        # in fp32 also for a model in bf16: the fused kernels keep their scores in fp32 too
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, self.k))
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            result = finish(self.formula(q, k, plan), plan.seen())
        return result if heads is None else result[:, indices(heads, q.shape[1], "heads").to(q.device)]


def indices(which: Sequence[int] | Tensor, n: int, what: str) -> Tensor:
    """Looked up here, because a GPU does not survive an index that is out of range."""
    try:
        return torch.arange(n)[torch.as_tensor(which, dtype=torch.long, device="cpu")]
    except IndexError as error:
        raise RegardError(f"the record has {n} {what}, counted from 0: there is no such one ({error})") from None


class Tape:
    """The records of each layer, oldest first: `tape["decoder.0.cross"][-1]`. Iterates over names."""

    def __init__(self, names: Sequence[str]) -> None:
        self._records: dict[str, list[Record]] = {name: [] for name in names}

    @property
    def names(self) -> list[str]:
        return list(self._records)

    def __getitem__(self, name: str) -> list[Record]:
        if name not in self._records:
            raise RegardError(f"'{name}' was not recorded: choose one of {', '.join(self._records)}")
        return self._records[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._records)

    def __len__(self) -> int:
        return len(self._records)

    def weights(self, name: str, rows: Which = None, heads: Which = None) -> Tensor:
        """Those of the layer's last forward."""
        if not self[name]:
            raise RegardError(f"'{name}' has no records: run the model inside the `with`")
        return self[name][-1].weights(rows, heads)


@contextmanager
def record(model: nn.Module, patterns: str | Sequence[str] = "*") -> Iterator[Tape]:
    """Keep what the named attention layers do in every forward inside the `with`; patterns as in file names."""
    layers = chosen(layers_of(model), [patterns] if isinstance(patterns, str) else patterns)
    tape = Tape(list(layers))
    ears: dict[nn.Module, Ear] = {layer: Ear(layer, tape[name]) for name, layer in layers.items()}
    with swapped(ears, "attend"), uncompiled(model, set(ears)):
        yield tape


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Every attention by its name: "decoder.blocks.3.sublayers.cross.sublayer" is "decoder.3.cross"."""
    paths = {path: layer for path, layer in model.named_modules() if isinstance(layer, (Attention, Alignment))}
    inside = ("blocks", "sublayers", "sublayer", "attentive")
    return {".".join(part for part in path.split(".") if part not in inside): layer for path, layer in paths.items()}


def chosen(layers: dict[str, Layer], patterns: Sequence[str]) -> dict[str, Layer]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            there_are = ", ".join(layers) or "none"
            raise RegardError(f"no attention layer is called '{pattern}': the layers of this model are {there_are}")
    return {name: layer for name, layer in layers.items() if any(fnmatchcase(name, p) for p in patterns)}


# ---- listening --------------------------------------------------------------------------------------------------------


class Ear:
    """Stands before a layer's `attend`, keeps a copy of what goes in, and lets it through.

    A copy, because a cache writes its keys and values in place. The scheme too, or the layer's own score, where there are
    parameters in it: they may have been trained further before anybody asks for the weights.
    """

    alive: ClassVar[WeakSet[Ear]] = WeakSet()  # while there are none, nobody need look for any

    def __init__(self, layer: Layer, records: list[Record]) -> None:
        self.alive.add(self)
        self.inner: Callable[..., Any] = layer.attend  # the layer's own, or the ear of a recording around this one
        self.score = layer.score if isinstance(layer, Alignment) else None
        self.records = records
        self.sentences: list[int] | None = None
        self.tokens: list[list[int]] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Any:
        scheme = plan.scheme
        if scheme.relative or scheme.contextual:
            scheme = copy.deepcopy(scheme).requires_grad_(False)
        light = replace(plan, kernel=reference, scheme=scheme, ready=None)  # `ready` may be a dense mask
        kept = [x.detach().clone() for x in (q, k, v)]
        self.records.append(Record(kept[0], kept[1], kept[2], light, self.formula(), self.sentences, self.tokens))
        return self.inner(q, k, v, plan)

    def formula(self) -> Formula:
        if self.score is None:
            return raw_scores
        score = copy.deepcopy(self.score).requires_grad_(False)
        return lambda q, k, plan: score(q, k)


@contextmanager
def swapped(values: Mapping[nn.Module, object], name: str) -> Iterator[None]:
    """Instance attributes for the time being; afterwards each module has what it had, or nothing."""
    before = {module: module.__dict__[name] for module in values if name in module.__dict__}
    for module, value in values.items():
        module.__dict__[name] = value
    try:
        yield
    finally:
        for module in values:
            del module.__dict__[name]
        for module, value in before.items():
            module.__dict__[name] = value


def uncompiled(model: nn.Module, layers: set[nn.Module]) -> AbstractContextManager[None]:
    """Whatever was compiled in place around these layers runs as written."""
    compiled = (m for m in model.modules() if m._compiled_call_impl is not None)
    return swapped({m: None for m in compiled if layers.intersection(m.modules())}, "_compiled_call_impl")


# ---- decoding ---------------------------------------------------------------------------------------------------------


def listeners(model: object) -> dict[nn.Module, Ear]:
    """The layers that are being recorded, each with the ear that hears first."""
    modules = model.modules() if isinstance(model, nn.Module) and Ear.alive else ()
    return {m: m.__dict__["attend"] for m in modules if isinstance(m.__dict__.get("attend"), Ear)}


def listening(model: object) -> TypeGuard[nn.Module]:
    return bool(listeners(model))


def paused(model: object) -> AbstractContextManager[None]:
    """Nothing is recorded inside."""
    own = {layer: [*chain_of(ear)][-1].inner for layer, ear in listeners(model).items()}
    return swapped(own, "attend")


@contextmanager
def labelled(model: nn.Module, sentences: list[int], tokens: list[list[int]]) -> Iterator[None]:
    """Records made inside are of these hypotheses."""
    ears = [ear for first in listeners(model).values() for ear in chain_of(first)]
    for ear in ears:
        ear.sentences, ear.tokens = sentences, tokens
    try:
        yield
    finally:
        for ear in ears:
            ear.sentences = ear.tokens = None


def chain_of(ear: object) -> Iterator[Ear]:
    """The ears of nested recordings, one behind the other."""
    while isinstance(ear, Ear):
        yield ear
        ear = ear.inner
