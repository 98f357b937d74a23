"""Attention weights of any layer, while the model runs as fast as ever.

    with record(model, "decoder.*.cross") as tape:
        model(source, target)
    tape["decoder.3.cross"][0].weights(rows=[5])  # (B, H, 1, S)

Recurrent decoders have one such layer with one head, "decoder.cross", whose weights are an alignment.

A fused kernel never has the weights, so a recorded layer keeps what they are made of: queries, keys and the plan, whose size
is linear in length, and the score of a layer that compares them by one of its own. The weights are worked out when asked
for, and of a long sequence only the rows asked for: a row meets all of its keys at once and so normalises itself, no
log-sum-exp is needed. The forward does not change by a bit, and
`difference()` says how far its result is from that of these weights.

`record(model, stream=True)` keeps the vectors between the layers too (look/stream.py), as `tape.vectors`.

Searches move their hypotheses about at every step, so decoding is not recorded while it runs: the engine reads the best
hypothesis of each sentence once more, and that forward is recorded, with its `sentences` and `tokens`. (`look.live` records
the steps themselves.) A training step that somebody listens to runs as written, not compiled and not replayed.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.kernels.attention_functions import masked_softmax, repeat_kv
from regard.kernels.masks import PAD_POSITION
from regard.layers.attention_kernels import Plan, raw_scores, reference
from regard.layers.hooks import AttentionHook, Recording
from regard.layers.mixers.attention import Attention
from regard.layers.recurrent_attention import Alignment
from regard.look.stream import hearing, short_name
from regard.look.stream import swapped as swapped

Layer = Attention | Alignment
Formula = Callable[[Tensor, Tensor, Plan], Tensor]  # queries and keys -> scores (B, H, T, S), whatever may be seen
Which = Sequence[int] | Tensor | None  # None: all
ROWS = 256  # queries whose weights are there at a time


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
    out: Tensor | None = None  # (B, H, T, D) what the layer's kernel made of them; a recurrent decoder has none

    def weights(self, rows: Which = None, heads: Which = None) -> Tensor:
        """(B, H, T, S) fp32, or only these queries and heads; a query that may look nowhere has zeros."""
        q, plan = self._queries(rows)
        return self._heads(masked_softmax(self._raw(q, plan), plan.seen()), heads)

    def scores(self, rows: Which = None, heads: Which = None) -> Tensor:
        """What the softmax is taken of; -inf where a query may not look."""
        q, plan = self._queries(rows)
        return self._heads(self._raw(q, plan).masked_fill(~plan.seen(), -torch.inf), heads)

    def difference(self) -> float | None:
        """The largest |weights @ v - out| of a query that is no padding; None where the kernel's result was not heard.

        Rounding alone, unless attention dropout was on."""
        if self.out is None:
            return None
        worst = 0.0
        for rows in torch.arange(self.q.shape[2], device=self.q.device).split(ROWS):
            gap = (self._mixed(rows) - self.out[:, :, rows]).abs().amax((1, 3))  # (B, rows)
            worst = max(worst, float(gap.where(self.plan.q[:, rows] != PAD_POSITION, 0.0).max()))
        return worst

    def _mixed(self, rows: Tensor) -> Tensor:
        """What these queries read, by the formula, (B, H, rows, D)."""
        w = self.weights(rows)
        found = w @ repeat_kv(self.v.to(w.dtype), w)
        if self.plan.scheme.contextual:
            found = found + self.plan.scheme.values(w, (self.plan.q[:, rows], self.plan.k))  # type: ignore[operator]
        return found

    def _queries(self, rows: Which) -> tuple[Tensor, Plan]:
        if rows is None:
            return self.q, self.plan
        places = indices(rows, self.q.shape[2], "queries").to(self.q.device)
        return self.q[:, :, places], self.plan.for_queries(places)

    def _raw(self, q: Tensor, plan: Plan) -> Tensor:
        # in fp32 also for a model in bf16: the fused kernels keep their scores in fp32 too
        q, k = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (q, self.k))
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            return self.formula(q, k, plan)

    def _heads(self, found: Tensor, heads: Which) -> Tensor:
        return found if heads is None else found[:, indices(heads, found.shape[1], "heads").to(found.device)]


def indices(which: Sequence[int] | Tensor, n: int, what: str) -> Tensor:
    """Looked up here, because a GPU does not survive an index that is out of range."""
    try:
        return torch.arange(n)[torch.as_tensor(which, dtype=torch.long, device="cpu")]
    except IndexError as error:
        raise RegardError(f"the record has {n} {what}, counted from 0: there is no such one ({error})") from None


class Tape(Recording):
    """The records of each layer, oldest first: `tape["decoder.0.cross"][-1]`. Iterates over names.

    `vectors` are those between the layers, by name (look/stream.py), one tensor a forward, if they were asked for.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__()
        self._records: dict[str, list[Record]] = {name: [] for name in names}
        self.vectors: dict[str, list[Tensor]] = {}

    @property
    def names(self) -> list[str]:
        return list(self._records)

    @property
    def is_recording(self) -> bool:
        """Whether it is not paused; blocks that are recomputed in the backward pass have been recorded before."""
        return not self.pauses and torch._C._current_graph_task_id() == -1

    def keep(self, name: str, vectors: Tensor) -> None:
        if self.is_recording:
            self.vectors.setdefault(name, []).append(vectors.detach())

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
def record(model: nn.Module, patterns: str | Sequence[str] = "*", stream: bool = False) -> Iterator[Tape]:
    """Keep what the named attention layers do in every forward inside the `with`; patterns as in file names.

    With `stream`, also the vectors that go from layer to layer, of the whole model."""
    layers = chosen(layers_of(model), [patterns] if isinstance(patterns, str) else patterns)
    tape = Tape(list(layers))
    recorders = {layer: AttentionRecorder(layer, tape, name) for name, layer in layers.items()}
    concerned = None if stream else set[nn.Module](recorders)
    vectors = hearing(model, tape.keep) if stream else nullcontext()
    with swapped(recorders, "attend"), uncompiled(model, concerned), vectors:
        yield tape


def layers_of(model: nn.Module) -> dict[str, Layer]:
    """Every attention by its name: "decoder.blocks.3.sublayers.cross" is "decoder.3.cross"."""
    paths = {path: layer for path, layer in model.named_modules() if isinstance(layer, (Attention, Alignment))}
    return {short_name(path): layer for path, layer in paths.items()}


def chosen(layers: dict[str, Layer], patterns: Sequence[str]) -> dict[str, Layer]:
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in layers):
            there_are = ", ".join(layers) or "none"
            raise RegardError(f"no attention layer is called '{pattern}': the layers of this model are {there_are}")
    return {name: layer for name, layer in layers.items() if any(fnmatchcase(name, p) for p in patterns)}


# ---- recording --------------------------------------------------------------------------------------------------------


class AttentionRecorder(AttentionHook):
    """Stands before a layer's `attend`, keeps a copy of what goes in and what comes out, and lets it through.

    A copy, because a cache writes its keys and values in place. The scheme too, or the layer's own score, where there are
    parameters in it: they may have been trained further before anybody asks for the weights.
    """

    def __init__(self, layer: Layer, tape: Tape, name: str) -> None:
        super().__init__(layer, tape)
        self.score = layer.score if isinstance(layer, Alignment) else None
        self.tape, self.name = tape, name

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Any:
        out = self.inner(q, k, v, plan)
        if self.tape.is_recording:
            self.tape[self.name].append(self.recorded(q, k, v, plan, out))
        return out

    def recorded(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan, out: Tensor | None) -> Record:
        scheme = plan.scheme
        if scheme.relative or scheme.contextual:
            scheme = copy.deepcopy(scheme).requires_grad_(False)
        light = replace(plan, kernel=reference, scheme=scheme, prepared=None)  # `prepared` may be a dense mask
        q, k, v = (x.detach().clone() for x in (q, k, v))
        out = None if out is None else out.detach()
        return Record(q, k, v, light, self.formula(), self.tape.sentences, self.tape.tokens, out)

    def formula(self) -> Formula:
        if self.score is None:
            return raw_scores
        score = copy.deepcopy(self.score).requires_grad_(False)
        return lambda q, k, plan: score(q, k)


def uncompiled(model: nn.Module, layers: set[nn.Module] | None) -> AbstractContextManager[None]:
    """Whatever was compiled in place around these layers, or all of it, runs as written."""
    compiled = (m for m in model.modules() if m._compiled_call_impl is not None)
    around = (m for m in compiled if layers is None or layers.intersection(m.modules()))
    return swapped(dict.fromkeys(around), "_compiled_call_impl")
