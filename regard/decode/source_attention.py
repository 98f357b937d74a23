"""The attention weights over the source while a model decodes, or reads a given translation.

They are the mean over all heads of all layers that attend to the source: cross-attention of a decoder stack, or the
alignment of a recurrent decoder. The weights of a target token are taken from the step that predicts it. On Tatoeba's
validation pairs (German, French; words of a small dictionary and names that both sides have once) the mean of all layers of
the bundled model is as good as its best layer, and better than any single head; the step that reads a token instead of
predicting it is far worse. The mean needs no choice of a layer for each model. In an ensemble the weights are those of all
members that read the same source tokens as the first.

Threads may do this at the same time with one model, as those of a server do: a hook stays on a layer while any thread needs
it, and keeps the weights of each of these threads by itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import pad_rows
from regard.errors import RegardError
from regard.kernels.attention_functions import masked_softmax
from regard.kernels.cpu_threads import one_thread
from regard.layers.attention_kernels import AttentionPlan, raw_scores
from regard.layers.hooks import AttentionHook, paused
from regard.layers.mixers.attention import CrossAttention
from regard.layers.recurrent_attention import Alignment
from regard.models.ensemble import Ensemble
from regard.models.model import TranslationModel
from regard.text.special_tokens import SpecialTokenTemplate

SourceLayer = CrossAttention | Alignment
TOKENS_AT_A_TIME = {
    "cpu": 512,
    "cuda": 32768,
}  # padded tokens of a batch; on a CPU a batch that fits its cache is faster


class WeightsHook(AttentionHook):
    """A hook that keeps the attention weights of a layer's last call, as the mean over its heads."""

    lock: ClassVar = Lock()  # held while a hook is put on a layer or taken from it

    def __init__(self, layer: SourceLayer) -> None:
        super().__init__(layer, None)
        self.score = layer.score if isinstance(layer, Alignment) else None
        self.before = layer.__dict__.get("attend")  # the hook of an outer recording, or None
        # (B, T, S), or (B, K, S) in a decoding step, for each thread that wants them; None before its first call
        self.weights: dict[int, Tensor | None] = {}

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Any:
        out, thread = self.inner(q, k, v, plan), get_ident()
        if thread in self.weights:
            scores = raw_scores(q.float(), k.float(), plan) if self.score is None else self.score(q, k).float()
            self.weights[thread] = masked_softmax(scores, plan.seen()).mean(1)
        return out

    @classmethod
    def join(cls, layer: SourceLayer) -> WeightsHook:
        """Return the hook on a layer, which keeps the weights of this thread from now on."""
        with cls.lock:
            hook = layer.__dict__.get("attend")
            if not isinstance(hook, WeightsHook):
                layer.__dict__["attend"] = hook = cls(layer)
            hook.weights[get_ident()] = None
        return hook

    def leave(self, layer: SourceLayer) -> None:
        """Forget the weights of this thread; the last one leaves the layer as it was before the first."""
        with self.lock:
            del self.weights[get_ident()]
            if self.weights or layer.__dict__.get("attend") is not self:
                return
            if self.before is None:
                del layer.__dict__["attend"]
            else:
                layer.__dict__["attend"] = self.before


def source_layers(model: Any) -> list[SourceLayer]:
    """Return the layers of a model that attend to its source; a recurrent model without attention has none."""
    models = model.same_source if isinstance(model, Ensemble) else [model]
    modules = dict.fromkeys(module for one in models for module in one.modules())  # a model may be a member twice
    return [layer for layer in modules if isinstance(layer, (CrossAttention, Alignment))]


def has_cross_attention(model: Any) -> bool:
    """Return whether a model attends to its source."""
    return bool(source_layers(model))


@contextmanager
def hooked_layers(layers: Sequence[SourceLayer]) -> Iterator[list[WeightsHook]]:
    """Keep the attention weights of each of these layers for this thread; afterwards the layers are as before."""
    hooks: list[WeightsHook] = []
    try:
        hooks.extend(map(WeightsHook.join, layers))
        yield hooks
    finally:
        for layer, hook in zip(layers, hooks, strict=False):
            hook.leave(layer)


def mean_weights(hooks: Sequence[WeightsHook]) -> Tensor:
    """Return the mean of the weights that hooks have kept for this thread, (B, T, S)."""
    kept = (hook.weights[get_ident()] for hook in hooks)
    return torch.stack([weights for weights in kept if weights is not None]).mean(0)


def check_coverage(options: DecodeConfig, model: Any) -> None:
    """Refuse a coverage penalty for a model that does not attend to its source."""
    if options.coverage_penalty:
        AttentiveStep(model)


# A fork waits for the lock and releases it on both sides: a child could not get it from a thread that it does not have.
if hasattr(os, "register_at_fork"):  # not on Windows
    lock = WeightsHook.lock
    os.register_at_fork(before=lock.acquire, after_in_parent=lock.release, after_in_child=lock.release)


class AttentiveStep:
    """The step of a model, with the attention weights of each hypothesis over its source."""

    def __init__(self, model: Any) -> None:
        self.model, self.layers = model, source_layers(model)
        if not self.layers:
            raise RegardError(
                "decode.coverage_penalty needs attention over the source, which this model has not: set it to 0"
            )

    def __call__(self, tokens: Tensor, state: Any) -> tuple[Tensor, Tensor]:
        """Return the logits (N, V) after one more token (N,) of each hypothesis, and attention weights (B, K, S)."""
        with hooked_layers(self.layers) as hooks:
            logits = self.model.step(tokens, state)
            return logits, mean_weights(hooks)


@torch.inference_mode()
def forced_attention(
    model: TranslationModel,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    token_template: SpecialTokenTemplate,
) -> list[np.ndarray]:
    """Return the attention weights (T, S) of each pair of token ids, whose special tokens the template adds.

    Row t belongs to target token t, column s to token s of the source with the special tokens around it."""
    device = next(model.parameters()).device
    n_start = len(token_template.start)
    order = sorted(range(len(sources)), key=lambda i: -max(len(sources[i]), len(targets[i])))
    found: dict[int, np.ndarray] = {}
    models = model.same_source if isinstance(model, Ensemble) else [model]
    with paused(model), hooked_layers(source_layers(model)) as hooks, one_thread():
        while order:
            width = max(len(sources[order[0]]), len(targets[order[0]])) + n_start + 1
            size = max(1, TOKENS_AT_A_TIME[device.type] // width)
            rows, order = order[:size], order[size:]
            source = pad_rows([token_template.wrap(sources[i]) for i in rows], device)
            # The last token is predicted, and not read: with it a target that was cut off would be too long for the model.
            target = pad_rows([[*token_template.start, *targets[i][:-1]] for i in rows], device)
            for one in models:
                one.head_input(source, target)
            mean = mean_weights(hooks).cpu().numpy()
            for row, i in enumerate(rows):
                around = len(token_template.wrap(sources[i]))
                found[i] = mean[row, n_start - 1 : n_start - 1 + len(targets[i]), :around]
    return [found[i] for i in range(len(sources))]
