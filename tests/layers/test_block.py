"""Blocks and stacks against the formulas worked in float64 NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from configured import model_config, replaced
from torch import Tensor, nn

from regard.kernels.masks import CAUSAL, FULL, prefix
from regard.layers import attention_kernels
from regard.layers.attention_kernels import make_plan
from regard.layers.block import PostNormBlock, PreNormBlock, make_block, make_blocks
from regard.layers.context import Context
from regard.layers.decoding_state import DecodingState
from regard.layers.feedforward import Dense
from regard.layers.kernel_selection import Choice, Situation
from regard.layers.mixers.attention import Prepared, SelfAttention
from regard.layers.part import Mixer, Place
from regard.layers.positions.relative import ALiBi, T5Bias
from regard.layers.positions.rotary import Rotary
from regard.layers.stack import Stack

C = 8
CONFIG = model_config(d_model=C, n_heads=2, n_kv_heads=2, d_head=4, d_ff=20, dropout=0.0)
THREE = torch.arange(3)[None]
CTX = Context(THREE, Prepared(make_plan(FULL, THREE, THREE)))


class Affine(Mixer):
    """A sublayer a x + b, which stores its arguments."""

    def __init__(self, a: float, b: float) -> None:
        nn.Module.__init__(self)
        self.a, self.b = a, b
        self.seen: list[Context] = []

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        self.seen.append(ctx)
        return self.a * x + self.b

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        return self.forward(x, ctx)


def layer_norm(x: np.ndarray, gain: Tensor, bias: Tensor) -> np.ndarray:
    """gamma (x - mean) / sqrt(var + eps) + beta, position by position."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return gain.detach().numpy() * (x - mean) / np.sqrt(var + 1e-5) + bias.detach().numpy()


def stirred(module: nn.Module) -> nn.Module:
    """Randomize parameters, so that none has a special value such as 0 or 1."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


@pytest.mark.parametrize(
    ("name", "f"),
    [("relu", lambda x: np.maximum(x, 0)), ("gelu", np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2))],
)
def test_feed_forward_is_the_formula_at_each_position(name: str, f: np.ufunc) -> None:
    layer = Dense(None, model_config(d_model=C, d_ff=20, activation=name), Place("encoder"))
    x = torch.randn(2, 3, C)
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in (*layer.inner.parameters(), *layer.outer.parameters()))
    expected = f(x.double().numpy() @ w1.T + b1) @ w2.T + b2
    np.testing.assert_allclose(layer(x, CTX).detach().numpy(), expected, atol=1e-6)


def test_feed_forward_dropout_is_inside_and_in_training_alone() -> None:
    layer = Dense(None, model_config(d_model=C, d_ff=20, ff_dropout=0.5), Place("encoder"))
    nn.init.zeros_(layer.inner.weight)
    nn.init.ones_(layer.inner.bias)
    nn.init.eye_(layer.outer.weight)
    nn.init.zeros_(layer.outer.bias)
    x = torch.randn(4, 5, C)
    assert set(layer(x, CTX).unique().tolist()) == {0.0, 2.0}
    assert set(layer.eval()(x, CTX).unique().tolist()) == {1.0}


def through(module: nn.Module, x: Tensor) -> Tensor:
    """Run x through a block and add its pending residual (no dropout)."""
    x, y, _ = module(x, None if isinstance(module, PostNormBlock) else torch.zeros_like(x), CTX)
    return x if y is None else x + y


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_where_the_norm_stands(norm: str) -> None:
    layer = stirred(make_block(replaced(CONFIG, norm=norm), {"self": Affine(2.0, 0.5)}))
    assert isinstance(layer, PreNormBlock if norm == "pre" else PostNormBlock)
    x = torch.randn(2, 3, C)
    own = layer.norms["self"]
    numbers, gain, bias = x.double().numpy(), own.weight, own.bias
    if norm == "pre":
        expected = numbers + 2.0 * layer_norm(numbers, gain, bias) + 0.5
    else:
        expected = layer_norm(numbers + 2.0 * numbers + 0.5, gain, bias)
    np.testing.assert_allclose(through(layer, x).detach().numpy(), expected, atol=2e-6)


def test_dropout_falls_on_the_sublayer_and_never_on_the_residual() -> None:
    """With two sublayers, the norm of the second adds the output of the first to the residual stream."""
    config = model_config(d_model=C, dropout=0.25)
    x = torch.randn(50, 40, C)
    block = make_block(config, {"a": Affine(0.0, 3.0), "b": Affine(0.0, 5.0)})
    gained = block(x, torch.zeros_like(x), CTX)[0] - x
    dropped = gained.abs() < 1e-4
    torch.testing.assert_close(gained[~dropped], torch.full_like(gained[~dropped], 4.0))  # 3 / (1 - 0.25)
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(block.eval()(x, torch.zeros_like(x), CTX)[0] - x, torch.full_like(x, 3.0))


def test_the_last_sublayer_is_dropped_too() -> None:
    """The last residual is added by the stack's final norm, after which dropped elements differ from the others."""
    config = model_config(d_model=C, dropout=0.25)
    stack = Stack(config, [make_block(config, {"self": Affine(0.0, 3.0)})], FULL, "encoder")
    x, positions = torch.zeros(50, 40, C), torch.arange(40).expand(50, -1)
    assert stack.eval()(x, positions).abs().max() < 1e-3
    values = stack.train()(x, positions).detach()
    assert ((values < -0.1).float().mean().item()) == pytest.approx(0.25 - 0.25**C, abs=0.02)


def test_a_block_runs_its_sublayers_in_order() -> None:
    config, parts = model_config(d_model=C, norm="post", dropout=0.0), {"a": Affine(1.0, 1.0), "b": Affine(-3.0, 0.2)}
    block = make_block(config, parts)
    x = torch.randn(1, 3, C)
    a, b = (make_block(config, {name: part}) for name, part in parts.items())
    a.norms["a"], b.norms["b"] = block.norms["a"], block.norms["b"]
    torch.testing.assert_close(through(block, x), through(b, through(a, x)))


def test_encoder_and_decoder_blocks() -> None:
    for side, crosses, names in [("encoder", False, ["self", "ff"]), ("decoder", True, ["self", "cross", "ff"])]:
        blocks = list(make_blocks(CONFIG, 2, side, side == "decoder", crosses))
        assert [list(block.sublayers) for block in blocks] == [names, names]
    without = replaced(CONFIG, d_ff=0)
    assert [list(block.sublayers) for block in make_blocks(without, 1, "encoder", causal=False)] == [["self"]]


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_stack_is_its_blocks_one_after_the_other_and_pre_norm_ends_on_a_norm(norm: str) -> None:
    config = model_config(d_model=C, norm=norm, dropout=0.0)
    sublayers = [Affine(0.5, 1.0), Affine(-2.0, 0.0), Affine(1.5, 0.3)]
    stack = stirred(Stack(config, (make_block(config, {"self": f}) for f in sublayers), FULL, "encoder"))
    assert isinstance(stack, Stack)
    x, positions = torch.randn(1, 3, C), torch.arange(3)[None]
    state = DecodingState(stack, 1, x.device, x.dtype)

    expected = x
    for block in stack.blocks:
        expected = through(block, expected)
    if norm == "pre":
        last = stack.norm
        assert isinstance(last, nn.LayerNorm)
        expected = torch.tensor(layer_norm(expected.detach().numpy(), last.weight, last.bias))
    for f in sublayers:
        f.seen.clear()

    torch.testing.assert_close(stack(x, positions, state=state), expected, atol=1e-5, rtol=1e-5)
    contexts = [f.seen for f in sublayers]
    assert [len(seen) for seen in contexts] == [1, 1, 1]
    assert contexts[0][0] is contexts[1][0] is contexts[2][0]  # made once, shared by all
    assert state.length == 3  # advanced once, after the last block
    assert state.next.tolist() == [3]


class Probe(SelfAttention):
    """A mixer with the `prepare` of self-attention, whose forward only stores its context."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        self.seen = ctx
        return x


def probed(side: str, n: int = 1, **changes: object) -> tuple[Stack, list[Probe]]:
    """Return a stack of n blocks that only store their contexts."""
    config, place = replaced(CONFIG, **changes), Place(side, causal=side == "decoder")
    probes = [Probe(SelfAttention.Settings(), config, place) for _ in range(n)]
    mask = CAUSAL if place.causal else FULL
    return Stack(
        config, [make_block(config, {"self": f, "cross": Affine(1.0, 0.0)}) for f in probes], mask, side
    ), probes


def test_a_stack_hands_on_its_mask_and_the_memory() -> None:
    stack, (probe,) = probed("decoder")
    positions, places, memory = torch.arange(3)[None], torch.tensor([[0, 1, -1, -1]]), torch.randn(1, 4, C)
    stack(torch.randn(1, 3, C), positions)
    alone = probe.seen
    stack(torch.randn(1, 3, C), positions, memory, places)
    with_memory = probe.seen
    stack(torch.randn(1, 3, C), positions, mask=prefix(2))
    with_prefix = probe.seen
    assert alone.prepared.plan.mask is CAUSAL
    assert alone.prepared.plan.query_positions is alone.prepared.plan.key_positions is positions
    assert alone.memory is None
    assert alone.memory_plan is None
    assert with_memory.memory is memory
    assert with_memory.memory_plan is not None
    assert with_memory.memory_plan.kernel_input.flatten().tolist() == [True, True, False, False]
    assert with_prefix.prepared.plan.kernel_input[0, 0].tolist() == [[1, 1, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("name", ["alibi", "t5", "kerple-log", "rope"])
def test_one_scheme_for_all_blocks(name: str) -> None:
    stack, probes = probed("decoder", 3, positions=name)
    assert len(stack.schemes) == 1
    stack(torch.randn(1, 3, C), THREE)
    contexts = [probe.seen for probe in probes]
    assert contexts[0] is contexts[1] is contexts[2]
    assert contexts[0].prepared.plan.scheme is stack.schemes[0]
    assert (contexts[0].prepared.rotation is not None) == (name == "rope")


@pytest.mark.parametrize("name", ["fire", "shaw", "cope"])
def test_a_scheme_for_each_block(name: str) -> None:
    stack, probes = probed("decoder", 3, positions=name, **{"cope.positions": 4})
    assert len(set(stack.schemes)) == 3
    stack(torch.randn(1, 3, C), THREE)
    for probe, scheme in zip(probes, stack.schemes, strict=True):
        assert probe.seen.prepared.plan.scheme is scheme
        assert probe.seen.positions is THREE


def test_encoder_decoder_and_cross_attention_may_have_schemes_of_their_own() -> None:
    chosen: dict[str, Any] = {"positions": "rope", "encoder_positions": "alibi", "cross_positions": "t5"}
    (encoder, _), (decoder, (probe,)) = probed("encoder", **chosen), probed("decoder", **chosen)
    assert isinstance(encoder.schemes[0], ALiBi)
    assert isinstance(decoder.schemes[0], Rotary)
    decoder(torch.randn(1, 3, C), THREE, torch.randn(1, 3, C), THREE)
    plan = probe.seen.memory_plan
    assert plan is not None
    assert isinstance(plan.scheme, T5Bias)
    assert plan.scheme.bidirectional
    assert plan.scheme is decoder.cross_scheme


@pytest.mark.parametrize("training", [True, False])
def test_plans_know_the_width_of_heads_and_dropout_in_training(training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice of a kernel depends on both."""
    asked: list[Situation] = []

    def observe(situation: Situation) -> Choice:
        asked.append(situation)
        return Choice("reference", "for the test")

    monkeypatch.setattr(attention_kernels, "choose", observe)
    stack, _ = probed("decoder", attention_dropout=0.25)
    stack.train(training)(torch.randn(1, 3, C), THREE, torch.randn(1, 4, C), torch.arange(4)[None])
    dropout = 0.25 if training else 0.0
    assert sorted((s.d_head, s.dropout, s.self_attention) for s in asked) == [(4, dropout, False), (4, dropout, True)]
