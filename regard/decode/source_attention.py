"""The attention weights over the source while a model decodes, or reads a given translation.

They are the mean over all heads of all layers that attend to the source: cross-attention of a decoder stack, or the
alignment of a recurrent decoder. inference/attention_alignment.py says why the mean of all layers is taken. In an ensemble
they are those of all members that read the same source tokens as the first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.kernels.attention_functions import masked_softmax
from regard.layers.attention_kernels import AttentionPlan, raw_scores
from regard.layers.hooks import AttentionHook, Recording
from regard.layers.mixers.attention import CrossAttention
from regard.layers.recurrent_attention import Alignment
from regard.models.ensemble import Ensemble

SourceLayer = CrossAttention | Alignment


class WeightsHook(AttentionHook):
    """A hook that keeps the attention weights of a layer's last call, as the mean over its heads."""

    def __init__(self, layer: SourceLayer) -> None:
        super().__init__(layer, Recording())
        self.score = layer.score if isinstance(layer, Alignment) else None
        self.weights: Tensor | None = None  # (B, T, S), or (B, K, S) in a decoding step

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Any:
        out = self.inner(q, k, v, plan)
        scores = raw_scores(q.float(), k.float(), plan) if self.score is None else self.score(q, k).float()
        self.weights = masked_softmax(scores, plan.seen()).mean(1)
        return out


def source_layers(model: Any) -> list[SourceLayer]:
    """Return the layers of a model that attend to its source; a recurrent model without attention has none."""
    models = model.same_source if isinstance(model, Ensemble) else [model]
    modules = dict.fromkeys(module for one in models for module in one.modules())  # a model may be a member twice
    return [layer for layer in modules if isinstance(layer, (CrossAttention, Alignment))]


@contextmanager
def hooked_layers(layers: Sequence[SourceLayer]) -> Iterator[list[WeightsHook]]:
    """Put a `WeightsHook` on each of these layers; afterwards the layers are as before."""
    before = [layer.__dict__.get("attend") for layer in layers]
    hooks = [WeightsHook(layer) for layer in layers]
    for layer, hook in zip(layers, hooks, strict=True):
        layer.__dict__["attend"] = hook
    try:
        yield hooks
    finally:
        for layer, old in zip(layers, before, strict=True):
            if old is None:
                del layer.__dict__["attend"]
            else:
                layer.__dict__["attend"] = old


def mean_weights(hooks: Sequence[WeightsHook]) -> Tensor:
    """Return the mean of the weights that hooks have kept, (B, T, S)."""
    return torch.stack([hook.weights for hook in hooks if hook.weights is not None]).mean(0)


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
