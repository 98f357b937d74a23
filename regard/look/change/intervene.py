"""What a model would do if a part of it did otherwise.

    with changed(model, [Zero("decoder.2.cross", (3,)), Forbid("decoder.*.cross", None, query=4, key=1)]):
        model(source, target)  # or beam search, sampling, recording: all that runs inside is changed

| change                            | the heads concerned, or all of them                                           |
|-----------------------------------|-------------------------------------------------------------------------------|
| Zero(layers, heads)               | say nothing: all that they could see is hidden from them                      |
| Mean(layers, heads)               | look alike at all that they may see                                           |
| Forbid(layers, heads, query, key) | do not look from there to there, but at the rest as if that key did not exist |
| Force(layers, heads, query, key)  | look from there at nothing else                                               |
| Pin(query, key)                   | the same in all attention over the source                                     |
| Positions(name)                   | the whole model has another position scheme, or with "none" none              |
| Replace(strip, place, text)       | nothing here: `other_source` and `forced_target` make such tokens             |

Each is a change of who sees whom, or of scores, and so of the plan that a layer attends by. It is made before the layer
attends, so whoever records it hears of the changed plan, whether `record` is outside of `changed` or inside. Queries and
keys are named by absolute positions, which caches and hypotheses have too. Rows that no change concerns keep their fused
kernel and their result to the bit. Where two changes contradict each other the later holds. Recurrent decoders
have no positions: there a query is a step since the source was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import find
from regard.errors import RegardError
from regard.kernels.attention_functions import masked_softmax
from regard.kernels.masks import FULL, PAD_POSITION
from regard.layers.attention_kernels import Plan, reference
from regard.layers.cells import CellState
from regard.layers.context import Context
from regard.layers.mixers.attention import Attention
from regard.layers.positions.scheme import Positions as Scheme
from regard.layers.positions.scheme import make_positions, schemes_for
from regard.layers.recurrent_attention import Alignment, SourceAnnotations
from regard.layers.stack import Stack
from regard.look.change.changes import (
    Change,
    Forbid,
    Force,
    Mean,
    Pin,
    Positions,
    Replace,
    Strips,
    Zero,
    forced_target,
    other_source,
    parse,
    resolved,
)
from regard.look.change.edits import ChangedPlan, Edit, changed_plan, edits_of
from regard.look.record import layers_of, swapped, uncompiled
from regard.models.seq2seq import RNNSearchDecoder

__all__ = [
    "Change",
    "Forbid",
    "Force",
    "Mean",
    "Pin",
    "Positions",
    "Replace",
    "Strips",
    "Zero",
    "changed",
    "forced_target",
    "other_source",
    "parse",
    "resolved",
]


@contextmanager
def changed(model: nn.Module, changes: Sequence[Change]) -> Iterator[None]:
    """The model does otherwise inside the `with`, and afterwards what it did before."""
    edits = edits_of(model, changes)
    with ExitStack() as stack:
        for change in changes:
            if isinstance(change, Positions):
                swap_positions(model, change.name, stack)
        for layer, own in edits.items():
            if isinstance(layer, Attention):
                stack.enter_context(swapped({layer: Attending(layer, own)}, "plan"))
        for decoder in model.modules():
            if isinstance(decoder, RNNSearchDecoder) and decoder.attentive.cross in edits:
                Aligning(decoder, edits[decoder.attentive.cross]).enter(stack)
        # what was compiled or recorded for decoding knows nothing of this
        stack.enter_context(uncompiled(model, set(layers_of(model).values())))
        stack.enter_context(swapped({m: True for m in model.modules() if isinstance(m, Stack)}, "intervened"))
        yield


# ---- attention --------------------------------------------------------------------------------------------------------


class Attending:
    """Stands before the `plan` of an attention layer, and changes the plan that it attends by."""

    def __init__(self, layer: Attention, edits: Sequence[Edit]) -> None:
        self.inner, self.edits = layer.plan, edits  # or that of a `changed` around this one

    def __call__(self, ctx: Context) -> Plan:
        return changed_plan(self.inner(ctx), self.edits)  # type: ignore[operator]


# ---- alignments -------------------------------------------------------------------------------------------------------


class Aligning:
    """Stands in the place of an alignment's `forward`. It counts the steps, since a recurrent decoder does not."""

    def __init__(self, decoder: RNNSearchDecoder, edits: Sequence[Edit]) -> None:
        self.decoder, self.layer, self.step = decoder, decoder.attentive.cross, 0
        earlier = vars(self.layer).get("forward")  # that of a `changed` around this one
        self.edits: list[Edit] = [*(earlier.edits if isinstance(earlier, Aligning) else ()), *edits]
        self.level = any(isinstance(edit.change, Mean) for edit in self.edits)

    def enter(self, stack: ExitStack) -> None:
        stack.enter_context(swapped({self.layer: self}, "forward"))
        stack.enter_context(swapped({self.decoder: self.begin}, "begin"))
        stack.enter_context(swapped({self.decoder: self.tell}, "expose_attention"))

    def begin(self, annotations: Tensor, end: CellState, padding: Tensor) -> Any:
        self.step = 0
        return RNNSearchDecoder.begin(self.decoder, annotations, end, padding)

    def __call__(self, states: Tensor, keys: Tensor, padding: Tensor) -> Tensor:
        """The weights (B, K, S) of states (B*K, H)."""
        at = torch.full((len(keys), len(states) // len(keys)), self.step, device=keys.device)
        plan, self.step = self.plan(padding, at), self.step + 1
        q = self.layer.score.queries(states).view(len(keys), -1, keys.shape[-1])  # (B, K, A)
        scores = self.layer.score(q, keys)[:, None]  # (B, 1, K, S)
        weights = masked_softmax(torch.zeros_like(scores) if self.level else scores, plan.seen())
        usual = Alignment.forward(self.layer, states, keys, padding)
        return torch.where(plan.touched()[:, 0], weights[:, 0].to(usual.dtype), usual)

    def plan(self, padding: Tensor, at: Tensor) -> ChangedPlan:
        """For queries at these steps (B, T)."""
        places = torch.arange(padding.shape[1], device=padding.device).where(~padding, PAD_POSITION)
        return ChangedPlan(reference, FULL, at, places, edits=tuple(self.edits))

    def tell(self, states: Tensor, source: SourceAnnotations, annotations: Tensor) -> None:
        """Whoever listens hears of the changed plan; where all scores are alike, of queries and keys that are."""
        heard, n = self.layer.attend, states.shape[1]
        steps = torch.arange(self.step - n, self.step, device=states.device)

        def attend(q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Any:
            at = steps.repeat(q.shape[2] // n).expand(len(q), -1)  # (B, K * T)
            q, k = (q * 0, k * 0) if self.level else (q, k)
            return heard(q, k, v, self.plan(source.padding, at))

        with swapped({self.layer: attend}, "attend"):
            RNNSearchDecoder.expose_attention(self.decoder, states, source, annotations)


# ---- positions --------------------------------------------------------------------------------------------------------


def swap_positions(model: nn.Module, name: str, stack: ExitStack) -> None:
    """Every stack of blocks has this scheme; with none, attention over a source has none either."""
    owners = [m for m in model.modules() if any(isinstance(child, Stack) for child in m.children())]
    if not owners:
        raise RegardError("this model has no position scheme that could be swapped: it is not built of attention")
    for owner in owners:
        for place, part in owner.named_children():
            if isinstance(part, Stack):
                scheme = other_scheme(owner.config, place, name).to(device_of(part))  # type: ignore[arg-type]
                stack.enter_context(swapped({part: nn.ModuleList([scheme])}, "schemes"))
                if name == "none":
                    stack.enter_context(swapped({part: find("positions", "none")()}, "cross_scheme"))


def other_scheme(config: ModelConfig, place: str, name: str) -> Scheme:
    scheme = find("positions", "none")() if name == "none" else make_positions(config, place, name)
    if is_learned(scheme):
        with torch.device("meta"):
            there_are = {other: make_positions(config, place, other) for other in schemes_for(config, place)}
        others = ["none", *(other for other, made in there_are.items() if other != "none" and not is_learned(made))]
        raise RegardError(
            f"positions '{name}' are learned, and this model has not learned them: choose one of {', '.join(others)}"
        )
    return scheme


def is_learned(scheme: Scheme) -> bool:
    return any(True for _ in scheme.parameters())


def device_of(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
