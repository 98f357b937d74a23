"""Recorded weights of every kind of model against float64 NumPy: projections, position schemes by their published formulas,
softmax. Alignments of recurrent models from the parameters alone."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fused_rows import kv_rows, qkv_rows
from torch import Tensor, nn

from regard.look.record import Tape, attention_layers, record
from regard.models.classification_model import ClassificationModel
from regard.models.seq2seq import Seq2Seq
from regard.text.special_tokens import PAD

sys.path.append(str(Path(__file__).parent))
from small import D, H, bert, config, gpt, ids, seq2seq, stirred, transformer, vit

SOURCE, TARGET = ids(6, 3, 5), ids(4, 9, 5, seed=2)
PIXELS = torch.randn(2, 1, 12, 12, generator=torch.Generator().manual_seed(0))
SCHEMES = ["sinusoidal", "rope", "alibi", "t5"]
STYLES: dict[str, dict[str, Any]] = {
    "pre-norm": {},
    "post-norm": {"norm": "post"},
    "parallel": {"parallel": True},
    "grouped": {"n_kv_heads": 2},
    "one head of keys": {"n_kv_heads": 1, "bias": False, "norm_kind": "rms"},
}


def classifier(**changes: Any) -> nn.Module:
    body = bert(n_classes=3, prediction_head="sequence", **changes)
    return stirred(
        ClassificationModel(config(preset="bert-tiny", n_classes=3, prediction_head="sequence", **changes), body)
    )


def run(kind: str, **changes: Any) -> tuple[nn.Module, Tape, dict[str, Tensor]]:
    """A model, what was recorded of it, and who is there (B, S) on each of its sides."""
    makers: dict[str, Any] = {
        "transformer": transformer,
        "gpt": gpt,
        "bert": bert,
        "vit": vit,
        "classifier": classifier,
    }
    model = makers[kind](**changes)
    inputs: dict[str, tuple[Tensor, ...]] = {"transformer": (SOURCE, TARGET), "gpt": (TARGET,), "vit": (PIXELS,)}
    with record(model, stream=True) as tape:
        model(*inputs.get(kind, (SOURCE, torch.zeros_like(SOURCE)) if kind == "classifier" else (SOURCE,)))
    everybody = torch.ones(2, 10, dtype=torch.bool)
    return model, tape, {"encoder": everybody if kind == "vit" else SOURCE != PAD, "decoder": TARGET != PAD}


# ---- the formulas ----------------------------------------------------------------------------------------------------


def linear(layer: nn.Linear, x: np.ndarray) -> np.ndarray:
    bias = 0 if layer.bias is None else layer.bias.detach().double().numpy()
    return x @ layer.weight.detach().double().numpy().T + bias


def turned(x: np.ndarray) -> np.ndarray:
    """(T, D): pair m of the vector at place p, as a complex number, is turned by p 10000^(-2m/D)."""
    pairs = x[:, 0::2] + 1j * x[:, 1::2]
    pairs = pairs * np.exp(1j * np.arange(len(x))[:, None] * 10000.0 ** (-2 * np.arange(D // 2) / D))
    return np.stack([pairs.real, pairs.imag], -1).reshape(x.shape)


def bucket(distance: int, both_sides: bool) -> int:
    """T5's, for 32 buckets up to a distance of 128; `distance` is key minus query."""
    n = 16 if both_sides else 32
    side, back = (n if both_sides and distance > 0 else 0), abs(distance) if both_sides else max(0, -distance)
    if back < n // 2:
        return side + back
    far = n // 2 + int(math.log(back / (n // 2)) / math.log(128 / (n // 2)) * (n // 2))
    return side + min(far, n - 1)


def bias(scheme: str, stack: Any, causal: bool, t: int) -> np.ndarray:
    """(H, T, T)"""
    distance = np.arange(t)[None, :] - np.arange(t)[:, None]
    if scheme == "alibi":
        return -np.array([1 / 4, 1 / 16, 1 / 64, 1 / 256])[:, None, None] * np.abs(distance)
    if scheme == "t5":
        table = stack.schemes[0].weight.detach().double().numpy()  # (H, buckets)
        return table[:, np.vectorize(lambda d: bucket(d, not causal))(distance)]
    return np.zeros((H, t, t))


def softmax(scores: np.ndarray) -> np.ndarray:
    e = np.exp(scores - scores.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def weights(layer: Any, x: np.ndarray, memory: np.ndarray | None, scheme: str, stack: Any, causal: bool) -> np.ndarray:
    """(H, T, S) of one row without padding, given x (T, C)."""
    groups = layer.d_keys // D
    if memory is None:
        q, k, _ = np.split(linear(layer.qkv, x)[:, qkv_rows(H, groups, D)], [H * D, (H + groups) * D], -1)
    else:
        q, k = linear(layer.q, x), linear(layer.kv, memory)[:, kv_rows(groups, D)[: groups * D]]
    found = []
    for h in range(H):
        g = h // (H // groups)
        a, b = q[:, h * D :][:, :D], k[:, g * D :][:, :D]
        if scheme == "rope" and memory is None:
            a, b = turned(a), turned(b)
        found.append(a @ b.T * (1 if scheme == "t5" and memory is None else D**-0.5))
    scores = np.stack(found)
    if memory is None:
        scores = scores + bias(scheme, stack, causal, len(x))
    return softmax(np.where(np.tri(*scores.shape[1:], dtype=bool) | (not causal), scores, -np.inf))


def check(model: nn.Module, tape: Tape, there: dict[str, Tensor], scheme: str) -> None:
    body: Any = getattr(model, "body", model)
    for name, layer in attention_layers(model).items():
        side, _, kind = name.split(".")
        given, found = tape.vectors[f"{name}.input"][0].double().numpy(), tape.weights(name)
        keys = there["encoder" if kind == "cross" else side]
        for b, real in enumerate(there[side]):
            x, memory, t, s = given[b][real], None, int(real.sum()), int(keys[b].sum())
            if kind == "cross":
                memory = tape.vectors["encoder.output"][0][b][keys[b]].double().numpy()
            causal = side == "decoder" and kind == "self"
            expected = weights(layer, x, memory, scheme, getattr(body, side), causal)
            np.testing.assert_allclose(found[b, :, :t, :s], expected, atol=1e-5)
            np.testing.assert_array_equal(found[b, :, :t, s:], 0)  # nobody looks at padding
        difference = tape[name][0].difference()
        assert difference is not None
        assert difference < 1e-4


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("style", STYLES)
def test_encoder_decoder_and_cross_attention(style: str, scheme: str) -> None:
    found = run("transformer", positions=scheme, **STYLES[style])
    assert found[1].names == [f"encoder.{i}.self" for i in (0, 1)] + [
        f"decoder.{i}.{kind}" for i in (0, 1) for kind in ("self", "cross")
    ]
    check(*found, scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("kind", ["gpt", "bert", "classifier", "vit"])
@pytest.mark.parametrize("style", STYLES)
def test_models_of_one_stack(kind: str, style: str, scheme: str) -> None:
    model, tape, there = run(kind, positions=scheme, **STYLES[style])
    side = "decoder" if kind == "gpt" else "encoder"
    assert tape.names == [f"{side}.0.self", f"{side}.1.self"]
    check(model, tape, there, scheme)


def test_distances_that_share_a_bucket() -> None:
    """Rows long enough that T5's buckets are no more one a distance."""
    model, rows = gpt(positions="t5"), ids(40, 60)
    with record(model, stream=True) as tape:
        model(rows)
    assert len({bucket(-d, both_sides=False) for d in range(60)}) < 30
    check(model, tape, {"decoder": rows != PAD}, "t5")


# ---- alignments ------------------------------------------------------------------------------------------------------


def sigma(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


class InNumPy:
    """A recurrent encoder-decoder of one layer each, one pair of sentences at a time."""

    def __init__(self, model: Seq2Seq) -> None:
        self.p = {name: p.detach().double().numpy() for name, p in model.named_parameters()}
        self.config, self.words = model.config, self.p["source_embedding.weight"] * math.sqrt(model.config.d_model)

    def cell(self, name: str, x: np.ndarray, state: list[np.ndarray]) -> list[np.ndarray]:
        w, u, b = (self.p[f"{name}.{leaf}"] for leaf in ("weight_ih", "weight_hh", "bias"))
        if self.config.cell == "lstm":
            i, f, g, o = np.split(w @ x + u @ state[0] + b, 4)
            c = sigma(f) * state[1] + sigma(i) * np.tanh(g)
            return [sigma(o) * np.tanh(c), c]
        (x_r, x_z, x_n), (h_r, h_z, h_n) = np.split(w @ x + b, 3), np.split(u @ state[0], 3)
        z = sigma(x_z + h_z)
        return [z * state[0] + (1 - z) * np.tanh(x_n + sigma(x_r + h_r) * h_n)]

    def read(self, way: str, words: np.ndarray) -> np.ndarray:
        state, states = [np.zeros(self.config.value("recurrent.d_hidden"))] * 2, []
        for x in words:
            state = self.cell(f"encoder.layers.0.{way}_", x, state)
            states.append(state[0])
        return np.stack(states)

    def energies(self, s: np.ndarray, annotations: np.ndarray) -> np.ndarray:
        name = "decoder.attentive.cross.score"
        if self.config.attention_score == "dot":
            return annotations @ s
        h = annotations @ self.p[f"{name}.U.weight"].T
        if self.config.attention_score == "general":
            return h @ s
        return np.tanh(h + self.p[f"{name}.W.weight"] @ s) @ self.p[f"{name}.v"]

    def __call__(self, source: list[int], target: list[int]) -> np.ndarray:
        """(T, S)"""
        words = self.words[source]
        annotations = last = self.read("forward", words)
        end = last[-1]
        if self.config.value("recurrent.bidirectional"):
            back = self.read("backward", words[::-1])[::-1]
            annotations, end = np.concatenate([annotations, back], 1), back[0]
        first = np.tanh(self.p["decoder.bridge.weight"] @ end + self.p["decoder.bridge.bias"])
        state, rows = np.split(first, 2 if self.config.cell == "lstm" else 1), []
        for token in target:
            rows.append(softmax(self.energies(state[0], annotations)))
            state = self.cell(
                "decoder.attentive.cell", np.concatenate([self.words[token], rows[-1] @ annotations]), state
            )
        return np.stack(rows)


@pytest.mark.parametrize("cell", ["gru", "lstm"])
@pytest.mark.parametrize(
    ("score", "bidirectional"), [("additive", True), ("additive", False), ("general", True), ("dot", False)]
)
def test_alignments_of_recurrent_models(score: str, bidirectional: bool, cell: str) -> None:
    model = seq2seq(attention_score=score, **{"recurrent.bidirectional": bidirectional}, cell=cell)
    with record(model, stream=True) as tape:
        logits = model(SOURCE, TARGET)
    assert tape.names == ["decoder.cross"]
    (kept,) = tape["decoder.cross"]
    assert kept.difference() is None  # the layer is told of it, and gives nothing back
    for b in range(3):
        source, target = (x[b][x[b] != PAD].tolist() for x in (SOURCE, TARGET))
        found, t, s = tape.weights("decoder.cross")[b, 0], len(target), len(source)
        np.testing.assert_allclose(found[:t, :s], InNumPy(model)(source, target), atol=1e-5)
        np.testing.assert_array_equal(found[:t, s:], 0)
    assert torch.equal(tape.vectors["logits"][0], logits)
