"""Attention weights of given translations: which source tokens each target token attends to.

The model reads a source and its given translation in one pass (teacher forcing), and the attention weights of each target
token are taken from the step that predicts it, as the mean over all heads of all decoder layers. On Tatoeba's validation
pairs (German, French; words of a small dictionary and names that both sides have once) the mean of all layers of the
bundled model is as good as its best layer, and better than any single head; the step that reads a token instead of
predicting it is far worse. The mean needs no choice of a layer for each model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.decode.constraints import pad_rows
from regard.kernels.attention_functions import masked_softmax
from regard.kernels.cpu_threads import one_thread
from regard.layers.attention_kernels import AttentionPlan, raw_scores
from regard.layers.hooks import AttentionHook, Recording, paused
from regard.layers.mixers.attention import CrossAttention
from regard.layers.recurrent_attention import Alignment
from regard.models.model import TranslationModel
from regard.text.special_tokens import SpecialTokenTemplate

TOKENS_AT_A_TIME = {
    "cpu": 512,
    "cuda": 32768,
}  # padded tokens of a batch; on a CPU a batch that fits its cache is faster


class WeightsHook(AttentionHook):
    """A hook that keeps the attention weights of a layer's last call, as the mean over its heads."""

    def __init__(self, layer: CrossAttention | Alignment) -> None:
        super().__init__(layer, Recording())
        self.score = layer.score if isinstance(layer, Alignment) else None
        self.weights: Tensor | None = None  # (B, T, S)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Any:
        out = self.inner(q, k, v, plan)
        scores = raw_scores(q.float(), k.float(), plan) if self.score is None else self.score(q, k).float()
        self.weights = masked_softmax(scores, plan.seen()).mean(1)
        return out


def has_cross_attention(model: TranslationModel) -> bool:
    """Return whether a model attends to its source; recurrent models without attention do not."""
    return any(isinstance(layer, (CrossAttention, Alignment)) for layer in model.modules())


@contextmanager
def hooked_layers(model: TranslationModel) -> Iterator[list[WeightsHook]]:
    """Put a `WeightsHook` on every layer that attends to the source; afterwards the layers are as before."""
    layers = [layer for layer in model.modules() if isinstance(layer, (CrossAttention, Alignment))]
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
    with paused(model), hooked_layers(model) as hooks, one_thread():
        while order:
            width = max(len(sources[order[0]]), len(targets[order[0]])) + n_start + 1
            size = max(1, TOKENS_AT_A_TIME[device.type] // width)
            rows, order = order[:size], order[size:]
            source = pad_rows([token_template.wrap(sources[i]) for i in rows], device)
            model.head_input(source, pad_rows([[*token_template.start, *targets[i]] for i in rows], device))
            mean = torch.stack([hook.weights for hook in hooks if hook.weights is not None]).mean(0).cpu().numpy()
            for row, i in enumerate(rows):
                around = len(token_template.wrap(sources[i]))
                found[i] = mean[row, n_start - 1 : n_start - 1 + len(targets[i]), :around]
    return [found[i] for i in range(len(sources))]
