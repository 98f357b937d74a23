"""Activations along the path of a token: every equation is computed in float64 from the model's own parameters."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from fused_rows import gate_rows, kv_rows, qkv_rows
from torch import nn

from regard.look.model_trace import AttentionLayer, Trace
from regard.look.tracers import trace
from regard.model_folder import ModelPackage

Maker = Callable[..., ModelPackage]
Array = np.ndarray
TEXT = {"gpt": "the man has", "bert": "der Mann <mask> einen Apfel."}
close = {"rtol": 1e-9, "atol": 1e-9}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pre-norm": ("translation", {}),
    "post-norm": ("post-norm", {}),
    "rope": ("rope", {"norm_kind": "rms", "bias": False}),
    "gated": ("gpt", {}),
    "parallel": ("gpt", {"parallel": True}),
    "bert": ("bert", {}),
    "no bias": ("translation", {"bias": False, "activation": "gelu"}),
}


class Chain:
    """A view in float64, its stages by name."""

    def __init__(self, package: ModelPackage, text: str) -> None:
        self.model: Any = package.model.double()
        self.stacks = [name for name in ("encoder", "decoder") if hasattr(self.model, name)]
        self.config, self.seen = package.config, trace(package, text)
        assert isinstance(self.seen, Trace)
        self.strips = {"encoder": "source", "decoder": "target"} if len(self.stacks) == 2 else {}

    def reads(self, stack: str) -> str:
        return self.strips.get(stack, "tokens")

    def get(
        self, stack: str, stage: str, layer: int | None = None, sublayer: str | None = None, own: str = ""
    ) -> Array:
        where = (own or self.reads(stack), layer, sublayer, stage)
        (found,) = [s for s in self.seen.activations if (s.sequence, s.layer, s.sublayer, s.stage) == where]
        return found.values.numpy()

    def has(self, stack: str, stage: str, layer: int, sublayer: str) -> bool:
        where = (self.reads(stack), layer, sublayer, stage)
        return any((s.sequence, s.layer, s.sublayer, s.stage) == where for s in self.seen.activations)

    def attention(self, name: str) -> AttentionLayer:
        (found,) = [one for one in self.seen.attention if one.name == name]
        return found


def array(x: torch.Tensor) -> Array:
    return x.detach().numpy()


def linear(layer: nn.Linear, x: Array) -> Array:
    return x @ array(layer.weight).T + (0 if layer.bias is None else array(layer.bias))


def normed(norm: nn.Module, x: Array) -> Array:
    weight, eps = array(norm.weight), norm.eps  # type: ignore[arg-type]
    if isinstance(norm, nn.RMSNorm):
        return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)
    x = x - x.mean(-1, keepdims=True)
    bias = 0 if norm.bias is None else array(norm.bias)  # type: ignore[arg-type]
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) + bias


def activated(name: str, x: Array) -> Array:
    if name == "relu":
        return np.maximum(x, 0)
    if name == "silu":
        return x / (1 + np.exp(-x))
    erf = np.vectorize(math.erf)
    return x * (1 + erf(x / np.sqrt(2))) / 2


def heads(x: Array, n: int) -> Array:
    """(T, H*D) -> (H, T, D)"""
    return x.reshape(len(x), n, -1).transpose(1, 0, 2)


@pytest.fixture(params=CASES)
def chain(request: pytest.FixtureRequest, make: Maker) -> Chain:
    kind, changes = CASES[request.param]
    return Chain(make(kind, **changes), TEXT.get(kind, "the man has eaten."))


def blocks(chain: Chain) -> list[tuple[str, int, str, Any]]:
    """(stack, layer, sublayer, (the part, its norm)) of all that ran."""
    found = []
    for stack in chain.stacks:
        for layer, block in enumerate(getattr(chain.model, stack).blocks):
            norms = block.norms or dict.fromkeys(
                block.sublayers, getattr(block, "norm", None)
            )  # a parallel block has one
            found += [(stack, layer, name, (part, norms[name])) for name, part in block.sublayers.items()]
    return found


def test_the_input_is_a_row_of_the_matrix_and_a_position(chain: Chain) -> None:
    for stack in chain.stacks:
        ids = list(chain.seen.sequences[chain.reads(stack)].ids)
        name = {"encoder": "source_embedding", "decoder": "target_embedding"}[stack] if chain.strips else "embedding"
        table = getattr(chain.model, name)
        embedded = array(table.weight)[ids] * table.scale
        if getattr(chain.model, "types", None) is not None:
            embedded = embedded + array(chain.model.types.weight)[0]
        np.testing.assert_allclose(chain.get(stack, "embedding"), embedded, **close)
        total = embedded
        if chain.config.positions != "rope":
            position = chain.get(stack, "position")
            total = embedded + position
            if chain.config.positions == "sinusoidal":
                np.testing.assert_allclose(position[3, :2], [np.sin(3), np.cos(3)], rtol=1e-6)
        if chain.config.embedding_norm:
            total = normed(chain.model.embedding_norm, total)
        np.testing.assert_allclose(chain.get(stack, "input"), total, rtol=1e-6, atol=1e-6)  # tables of sines are fp32


def test_each_sublayer_adds_its_output_to_the_stream(chain: Chain) -> None:
    post = chain.config.norm == "post"
    stream = {stack: chain.get(stack, "input") for stack in chain.stacks}
    for stack, layer, sublayer, place in blocks(chain):
        total = stream[stack] + chain.get(stack, "output", layer, sublayer)
        np.testing.assert_allclose(chain.get(stack, "residual", layer, sublayer), total, **close)
        stream[stack] = total
        if post:
            stream[stack] = chain.get(stack, "norm", layer, sublayer)
            np.testing.assert_allclose(stream[stack], normed(place[1], total), **close)
    for stack in chain.stacks:
        if not post:
            final = normed(getattr(chain.model, stack).norm, stream[stack])
            np.testing.assert_allclose(chain.get(stack, "final"), final, **close)


def read_by(chain: Chain) -> dict[tuple[str, int, str], Array]:
    """What each sublayer was given: the norm of the stream, or the stream itself."""
    post, parallel = chain.config.norm == "post", chain.config.parallel
    given, stream = {}, {stack: chain.get(stack, "input") for stack in chain.stacks}
    for stack, layer, sublayer, place in blocks(chain):
        if not parallel:
            given[stack, layer, sublayer] = stream[stack] if post else normed(place[1], stream[stack])
            stream[stack] = chain.get(stack, "norm" if post else "residual", layer, sublayer)
        elif sublayer == "self":
            block = getattr(chain.model, stack).blocks[layer]
            both = normed(block.norm, stream[stack])
            given |= {(stack, layer, name): both for name in ("self", "ff")}
            stream[stack] = chain.get(stack, "residual", layer, "ff")
    return given


def test_norms_stand_before_the_sublayers_where_they_come_first(chain: Chain) -> None:
    if chain.config.norm == "post":
        return
    for where, expected in read_by(chain).items():
        stack, layer, sublayer = where
        np.testing.assert_allclose(chain.get(stack, "norm", layer, sublayer), expected, **close)


def test_queries_keys_and_values_are_products_and_scores_are_theirs(chain: Chain) -> None:
    given = read_by(chain)
    for stack, layer, sublayer, place in blocks(chain):
        if sublayer == "ff":
            continue
        x, inner = given[stack, layer, sublayer], place[0]
        seen = chain.attention(f"{stack}.{layer}.{sublayer}")
        d, groups = inner.d_head, inner.d_keys // inner.d_head
        if sublayer == "cross":
            memory = chain.get("encoder", "final" if chain.config.norm == "pre" else "norm", *last(chain, "encoder"))
            source = chain.reads("encoder")
            k, v = np.split(linear(inner.kv, memory)[:, kv_rows(groups, d)], 2, -1)
            q = linear(inner.q, x)
        else:
            source = chain.reads(stack)
            qkv = linear(inner.qkv, x)[:, qkv_rows(seen.heads, groups, d)]
            q, k, v = np.split(qkv, np.cumsum([inner.d_queries, inner.d_keys]), -1)
        here = (layer, sublayer)
        np.testing.assert_allclose(chain.get(stack, "value", *here, own=source), v, **close)
        turned = chain.config.positions == "rope" and sublayer == "self"
        if not turned:
            np.testing.assert_allclose(chain.get(stack, "query", *here), q, **close)
            np.testing.assert_allclose(chain.get(stack, "key", *here, own=source), k, **close)
        shown_q, shown_k = chain.get(stack, "query", *here), chain.get(stack, "key", *here, own=source)
        np.testing.assert_allclose(np.linalg.norm(shown_q, axis=1), np.linalg.norm(q, axis=1), rtol=1e-5)
        assert_mixed(chain, seen, inner, (stack, *here), shown_q, shown_k, v)


def last(chain: Chain, stack: str) -> tuple[Any, ...]:
    """Where the output of a stack stands."""
    return () if chain.config.norm == "pre" else (chain.config.n_encoder_layers - 1, "ff")


def assert_mixed(
    chain: Chain, seen: AttentionLayer, inner: Any, where: tuple[str, int, str], q: Array, k: Array, v: Array
) -> None:
    """scores = q . k / sqrt(D), weights their softmax, mix = weights v, output = mix W + b."""
    n, groups = seen.heads, k.shape[1] // inner.d_head
    qs, ks, vs = heads(q, n), heads(k, groups).repeat(n // groups, 0), heads(v, groups).repeat(n // groups, 0)
    scores = qs @ ks.transpose(0, 2, 1) / np.sqrt(inner.d_head)
    shown = seen.scores().double().numpy()
    visible = np.isfinite(shown)
    assert visible.all() != seen.causal
    np.testing.assert_allclose(shown[visible], scores[visible], rtol=1e-5, atol=1e-5)
    weights = np.where(visible, np.exp(scores), 0)
    weights /= weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(seen.weights().double(), weights, atol=1e-6)
    mix = (weights @ vs).transpose(1, 0, 2).reshape(len(q), -1)
    np.testing.assert_allclose(chain.get(where[0], "mix", *where[1:]), mix, rtol=1e-6, atol=1e-6)
    output = linear(inner.out, chain.get(where[0], "mix", *where[1:]))
    np.testing.assert_allclose(chain.get(where[0], "output", *where[1:]), output, **close)


def test_the_feed_forward_layers_are_two_products_around_an_activation(chain: Chain) -> None:
    given = read_by(chain)
    for stack, layer, sublayer, place in blocks(chain):
        if sublayer != "ff":
            continue
        inner = linear(place[0].inner, given[stack, layer, sublayer])
        if chain.config.feedforward == ("gated",):
            first, gate = np.split(inner[:, gate_rows(chain.config.d_ff)], 2, -1)
            inner = activated(chain.config.activation, first) * gate
        else:
            inner = activated(chain.config.activation, inner)
        np.testing.assert_allclose(chain.get(stack, "inner", layer, "ff"), inner, rtol=1e-7, atol=1e-9)
        output = linear(place[0].outer, chain.get(stack, "inner", layer, "ff"))
        np.testing.assert_allclose(chain.get(stack, "output", layer, "ff"), output, **close)


def test_candidates_are_the_softmax_of_the_last_vector_times_the_vocabulary(chain: Chain) -> None:
    stack = chain.stacks[-1]
    if chain.config.architecture == "bert":
        end = chain.get(stack, "norm", chain.config.n_encoder_layers - 1, "ff")
        head = chain.model.head
        end = normed(head.norm, activated(chain.config.activation, linear(head.inner, end)))
        logits = end @ array(head.weight).T + array(head.bias)
    else:
        layers = chain.config.n_decoder_layers
        post = chain.config.norm == "post"
        end = chain.get(stack, "norm", layers - 1, "ff") if post else chain.get(stack, "final")
        logits = end @ array(chain.model.head.weight).T
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert chain.seen.predictions
    for one in chain.seen.predictions:
        expected = np.sort(log_p[one.place])[::-1][:10]
        np.testing.assert_allclose([candidate.log_prob for candidate in one.top], expected, rtol=1e-9)
        assert log_p[one.place, one.chosen.id] == pytest.approx(one.chosen.log_prob, rel=1e-9)
        assert one.top[0].id == log_p[one.place].argmax()


def test_the_stages_come_in_the_order_in_which_they_happen(make: Maker) -> None:
    seen = trace(make("translation"), "the man.")
    names = [s.stage for s in seen.activations if s.sequence == "target" and s.layer in (None, 0)]
    inside = ["norm", "query", "key", "value", "mix", "output", "residual"]
    crossing = [name for name in inside if name not in ("key", "value")]  # those are the source's
    ff = ["norm", "inner", "output", "residual"]
    assert names == ["embedding", "position", "input", *inside, *crossing, *ff, "final"]
    assert {s.sublayer for s in seen.activations if s.sequence == "source" and s.stage == "key"} == {"self", "cross"}


def test_an_alignment_has_its_states_annotations_and_contexts(make: Maker) -> None:
    package = make("rnnsearch")
    model: Any = replace(package, model=package.model.double()).model
    seen = trace(package, "der Mann.")
    q, k, v, mix = (stage.values.numpy() for stage in seen.activations)
    assert [stage.stage for stage in seen.activations] == ["query", "key", "value", "mix"]
    scores = np.tanh(q[:, None] + k[None]) @ array(model.decoder.attentive.cross.score.v)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(seen.attention[0].weights()[0], weights, atol=1e-6)
    np.testing.assert_allclose(mix, weights @ v, rtol=1e-6, atol=1e-6)
