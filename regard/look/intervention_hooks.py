"""Interventions on a running model: ablated heads, masked or forced attention, another position scheme.

    with intervene(model, [Zero("decoder.2.cross", (3,)), Forbid("decoder.*.cross", None, query=4, key=1)]):
        model(source, target)  # or beam search, sampling, recording: all that runs inside

| intervention                      | effect on the heads concerned, or on all of them                              |
|-----------------------------------|-------------------------------------------------------------------------------|
| Zero(layers, heads)               | all keys are masked, so the output is zero                                    |
| Uniform(layers, heads)            | all visible keys have the same weight                                         |
| Forbid(layers, heads, query, key) | the key is masked for the query; the other weights are the softmax without it |
| Force(layers, heads, query, key)  | all other keys are masked for the query                                       |
| Pin(query, key)                   | Force in all cross-attention                                                  |
| ReplacePositions(name)            | the whole model has another position scheme, or with "none" none              |
| Replace(side, place, text)        | nothing here: `replace_in_source` and `forced_prefix` make the tokens         |

Each is a change of the mask or of the scores, and so of the plan of a layer. It is applied before the layer attends, so
a recording has the changed plan, whether `record` is outside of `intervene` or inside. Queries and keys are named by
absolute positions, which caches and hypotheses have too. Rows that no intervention concerns keep their fused kernel and
their result to the bit. Where two interventions contradict each other, the later one holds. Recurrent decoders have no
positions: there a query is a step since the source was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import find
from regard.errors import RegardError
from regard.kernels.attention_functions import masked_softmax
from regard.kernels.masks import FULL, PAD_POSITION
from regard.layers.attention_kernels import AttentionPlan, reference
from regard.layers.cells import CellState
from regard.layers.context import Context
from regard.layers.mixers.attention import Attention
from regard.layers.positions.scheme import PositionScheme, make_positions, schemes_for
from regard.layers.recurrent_attention import Alignment, SourceAnnotations
from regard.layers.stack import Stack
from regard.look.interventions import (
    CROSS,
    Forbid,
    Force,
    Intervention,
    Pin,
    Places,
    ReplacePositions,
    Uniform,
    Zero,
    positions,
)
from regard.look.record import Layer, attention_layers, patch_attribute, select_layers, uncompiled
from regard.models.seq2seq import RNNSearchDecoder


@contextmanager
def intervene(model: nn.Module, changes: Sequence[Intervention]) -> Iterator[None]:
    """Apply interventions to a model inside the `with`; afterwards it is what it was."""
    edits = edits_by_layer(model, changes)
    with ExitStack() as stack:
        for change in changes:
            if isinstance(change, ReplacePositions):
                replace_positions(model, change.name, stack)
        for layer, own in edits.items():
            if isinstance(layer, Attention):
                stack.enter_context(patch_attribute({layer: PlanHook(layer, own)}, "plan"))
        for decoder in model.modules():
            if isinstance(decoder, RNNSearchDecoder) and decoder.attentive.cross in edits:
                AlignmentHook(decoder, edits[decoder.attentive.cross]).enter(stack)
        # Compiled code and captured CUDA graphs would run without the hooks.
        stack.enter_context(uncompiled(model, set(attention_layers(model).values())))
        stack.enter_context(patch_attribute({m: True for m in model.modules() if isinstance(m, Stack)}, "intervened"))
        yield


# ---- plans of attention -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Edit:
    """One intervention in one layer."""

    change: Zero | Uniform | Forbid
    heads: tuple[bool, ...]  # for each of the layer's heads, whether it is concerned

    def rows(self, plan: AttentionPlan) -> Tensor:
        """Return which heads and queries are concerned, (B or 1, H, T or 1, 1)."""
        heads = torch.tensor(self.heads, device=plan.query_positions.device)[:, None, None]
        if isinstance(self.change, Forbid):
            return heads & is_at(plan.query_positions, self.change.query)[:, None, :, None]
        return heads[None]

    def seen(self, seen: Tensor, usual: Tensor, plan: AttentionPlan) -> Tensor:
        """Return the changed mask for the mask `seen` (B, H or 1, T or 1, S); `usual` is that of the unchanged model."""
        rows = self.rows(plan)
        if isinstance(self.change, Zero):
            return seen & ~rows
        if isinstance(self.change, Uniform):
            return torch.where(rows, usual, seen)  # it also overrides what an earlier intervention masked
        keys = is_at(plan.key_positions, self.change.key)[:, None, None]
        if isinstance(self.change, Force):
            return torch.where(rows & (usual & keys).any(-1, keepdim=True), usual & keys, seen)
        return seen & ~(rows & keys)


def is_at(at: Tensor, places: Places) -> Tensor:
    """Return which of the positions (B, T) are among `places`."""
    result = torch.zeros_like(at, dtype=torch.bool)
    for place in positions(places):
        result |= at == place
    return result


def edits_by_layer(model: nn.Module, changes: Sequence[Intervention]) -> dict[Layer, list[Edit]]:
    """Return the interventions in each attention layer, in their order."""
    edits: dict[Layer, list[Edit]] = {}
    for change in changes:
        if isinstance(change, Pin):
            change = Force(CROSS, None, change.query, change.key)
        if isinstance(change, Forbid):
            change = replace(change, query=positions(change.query), key=positions(change.key))
        if isinstance(change, (Zero, Uniform, Forbid)):
            for name, layer in select_layers(attention_layers(model), [change.layers]).items():
                edits.setdefault(layer, []).append(Edit(change, head_mask(layer, name, change.heads)))
    return edits


def head_mask(layer: Layer, name: str, heads: tuple[int, ...] | None) -> tuple[bool, ...]:
    """Return for each head of a layer whether it is among `heads`; None: all are."""
    n = n_heads(layer)
    if wrong := [head for head in heads or () if not 0 <= head < n]:
        raise RegardError(f"{name} has no head {wrong[0]}: its {n} heads are counted from 0")
    return tuple(heads is None or head in heads for head in range(n))


def n_heads(layer: Layer) -> int:
    return layer.d_queries // layer.d_head if isinstance(layer, Attention) else 1


class PlanHook:
    """Stands in place of the `plan` of an attention layer, and returns it with edits."""

    def __init__(self, layer: Attention, edits: Sequence[Edit]) -> None:
        self.inner, self.edits = layer.plan, edits  # the layer's own method, or the hook of an outer `intervene`

    def __call__(self, ctx: Context) -> AttentionPlan:
        return edit_plan(self.inner(ctx), self.edits)  # type: ignore[operator]


@dataclass(frozen=True)
class EditedPlan(AttentionPlan):
    """A plan with another mask for some heads and queries; these are computed by the reference kernel."""

    edits: tuple[Edit, ...] = ()

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        usual = self.kernel(q, k, v, self, dropout)
        return torch.where(self.touched(), reference(q, k, v, self, dropout), usual)

    def touched(self) -> Tensor:
        """Return which heads and queries any edit concerns, (B or 1, H, T or 1, 1)."""
        return reduce(or_, (edit.rows(self) for edit in self.edits))

    def seen(self) -> Tensor:
        usual = seen = super().seen()
        for edit in self.edits:
            seen = edit.seen(seen, usual, self)
        return seen  # (B, H, T or 1, S)


def edit_plan(plan: AttentionPlan, edits: Sequence[Edit]) -> EditedPlan:
    """Return a plan with these edits after those that it has."""
    uniform = [edit.heads for edit in edits if isinstance(edit.change, Uniform)]
    if uniform:
        plan = replace(plan, scheme=UniformScores(plan.scheme, [any(heads) for heads in zip(*uniform, strict=True)]))
    if isinstance(plan, EditedPlan):  # of an outer `intervene`, whose edits come first
        return replace(plan, edits=(*plan.edits, *edits))
    return EditedPlan(**vars(plan), edits=tuple(edits))


class UniformScores(PositionScheme):
    """A position scheme under which all scores of some heads are equal."""

    contextual: ClassVar[bool] = True

    def __init__(self, inner: PositionScheme, heads: Sequence[bool]) -> None:
        nn.Module.__init__(self)  # it is built from another scheme, not from settings
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


# ---- alignments of recurrent decoders ---------------------------------------------------------------------------------


class AlignmentHook:
    """Stands in place of an alignment's `forward`. It counts the steps, since a recurrent decoder does not."""

    def __init__(self, decoder: RNNSearchDecoder, edits: Sequence[Edit]) -> None:
        self.decoder, self.layer, self.step = decoder, decoder.attentive.cross, 0
        outer = vars(self.layer).get("forward")  # the hook of an outer `intervene`
        self.edits: list[Edit] = [*(outer.edits if isinstance(outer, AlignmentHook) else ()), *edits]
        self.is_uniform = any(isinstance(edit.change, Uniform) for edit in self.edits)

    def enter(self, stack: ExitStack) -> None:
        stack.enter_context(patch_attribute({self.layer: self}, "forward"))
        stack.enter_context(patch_attribute({self.decoder: self.begin}, "begin"))
        stack.enter_context(patch_attribute({self.decoder: self.tell}, "expose_attention"))

    def begin(self, annotations: Tensor, end: CellState, padding: Tensor) -> Any:
        self.step = 0
        return RNNSearchDecoder.begin(self.decoder, annotations, end, padding)

    def __call__(self, states: Tensor, keys: Tensor, padding: Tensor) -> Tensor:
        """Return the weights (B, K, S) of states (B*K, H)."""
        at = torch.full((len(keys), len(states) // len(keys)), self.step, device=keys.device)
        plan, self.step = self.plan(padding, at), self.step + 1
        q = self.layer.score.queries(states).view(len(keys), -1, keys.shape[-1])  # (B, K, A)
        scores = self.layer.score(q, keys)[:, None]  # (B, 1, K, S)
        weights = masked_softmax(torch.zeros_like(scores) if self.is_uniform else scores, plan.seen())
        usual = Alignment.forward(self.layer, states, keys, padding)
        return torch.where(plan.touched()[:, 0], weights[:, 0].to(usual.dtype), usual)

    def plan(self, padding: Tensor, at: Tensor) -> EditedPlan:
        """Return the plan of queries at these steps, (B, T)."""
        places = torch.arange(padding.shape[1], device=padding.device).where(~padding, PAD_POSITION)
        return EditedPlan(reference, FULL, at, places, edits=tuple(self.edits))

    def tell(self, states: Tensor, source: SourceAnnotations, annotations: Tensor) -> None:
        """Pass the edited plan to recorders; where weights are uniform, with zero queries and keys."""
        recorder, n = self.layer.attend, states.shape[1]
        steps = torch.arange(self.step - n, self.step, device=states.device)

        def attend(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Any:
            at = steps.repeat(q.shape[2] // n).expand(len(q), -1)  # (B, K * T)
            q, k = (q * 0, k * 0) if self.is_uniform else (q, k)
            return recorder(q, k, v, self.plan(source.padding, at))

        with patch_attribute({self.layer: attend}, "attend"):
            RNNSearchDecoder.expose_attention(self.decoder, states, source, annotations)


# ---- positions --------------------------------------------------------------------------------------------------------


def replace_positions(model: nn.Module, name: str, stack: ExitStack) -> None:
    """Give every stack of blocks another position scheme; with "none", cross-attention has none either."""
    owners = [m for m in model.modules() if any(isinstance(child, Stack) for child in m.children())]
    if not owners:
        raise RegardError("this model has no position scheme that could be swapped: it is not built of attention")
    for owner in owners:
        for place, part in owner.named_children():
            if isinstance(part, Stack):
                device = next(part.parameters()).device
                scheme = make_fixed_scheme(owner.config, place, name).to(device)  # type: ignore[arg-type]
                stack.enter_context(patch_attribute({part: nn.ModuleList([scheme])}, "schemes"))
                if name == "none":
                    stack.enter_context(patch_attribute({part: find("positions", "none")()}, "cross_scheme"))


def make_fixed_scheme(config: ModelConfig, place: str, name: str) -> PositionScheme:
    """Return a position scheme without parameters; one that would have to be learned is an error."""
    scheme = find("positions", "none")() if name == "none" else make_positions(config, place, name)
    if has_parameters(scheme):
        with torch.device("meta"):
            there_are = {other: make_positions(config, place, other) for other in schemes_for(config, place)}
        others = ["none", *(other for other, made in there_are.items() if other != "none" and not has_parameters(made))]
        raise RegardError(
            f"positions '{name}' are learned, and this model has not learned them: choose one of {', '.join(others)}"
        )
    return scheme


def has_parameters(scheme: PositionScheme) -> bool:
    return any(True for _ in scheme.parameters())
