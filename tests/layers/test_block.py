"""Blocks and stacks against the formulas worked in float64 NumPy."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attend import Plan, reference
from regard.layers.block import PLACEMENTS, Block, PostNorm, PreNorm, decoder_block, encoder_block
from regard.layers.cache import NO_CACHE, Cache
from regard.layers.context import Context
from regard.layers.feedforward import FeedForward
from regard.layers.masks import Causal, Full
from regard.layers.stack import Stack

C = 8
CONFIG = ModelConfig(d_model=C, n_heads=2, d_ff=20, dropout=0.0)
CTX = Context(torch.arange(3)[None], Plan(reference), NO_CACHE)


class Affine(nn.Module):
    """A sublayer one can work out by hand: a x + b. Writes down what it was given."""

    def __init__(self, a: float, b: float) -> None:
        super().__init__()
        self.a, self.b = a, b
        self.seen: list[Context] = []

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        self.seen.append(ctx)
        return self.a * x + self.b


def layer_norm(x: np.ndarray, gain: Tensor, bias: Tensor) -> np.ndarray:
    """gamma (x - mean) / sqrt(var + eps) + beta, position by position."""
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return gain.detach().numpy() * (x - mean) / np.sqrt(var + 1e-5) + bias.detach().numpy()


def stirred(module: nn.Module) -> nn.Module:
    """With no parameter at a special value such as 0 or 1."""
    with torch.no_grad():
        for p in module.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return module


@pytest.mark.parametrize(
    ("name", "f"),
    [("relu", lambda x: np.maximum(x, 0)), ("gelu", np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2))],
)
def test_feed_forward_is_the_formula_at_each_position(name: str, f: np.ufunc) -> None:
    layer = FeedForward(ModelConfig(d_model=C, d_ff=20, activation=name))
    x = torch.randn(2, 3, C)
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in (*layer.inner.parameters(), *layer.outer.parameters()))
    expected = f(x.double().numpy() @ w1.T + b1) @ w2.T + b2
    np.testing.assert_allclose(layer(x, CTX).detach().numpy(), expected, atol=1e-6)


def test_feed_forward_dropout_is_inside_and_in_training_alone() -> None:
    layer = FeedForward(ModelConfig(d_model=C, d_ff=20, ff_dropout=0.5))
    nn.init.zeros_(layer.inner.weight)
    nn.init.ones_(layer.inner.bias)
    nn.init.eye_(layer.outer.weight)
    nn.init.zeros_(layer.outer.bias)
    x = torch.randn(4, 5, C)
    assert set(layer(x, CTX).unique().tolist()) == {0.0, 2.0}
    assert set(layer.eval()(x, CTX).unique().tolist()) == {1.0}


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_where_the_norm_stands(norm: str) -> None:
    layer = stirred(PLACEMENTS[norm](Affine(2.0, 0.5), CONFIG))
    assert isinstance(layer, PreNorm)
    x = torch.randn(2, 3, C)
    numbers, gain, bias = x.double().numpy(), layer.norm.weight, layer.norm.bias
    if norm == "pre":
        expected = numbers + 2.0 * layer_norm(numbers, gain, bias) + 0.5
    else:
        expected = layer_norm(numbers + 2.0 * numbers + 0.5, gain, bias)
    np.testing.assert_allclose(layer(x, CTX).detach().numpy(), expected, atol=2e-6)


def test_dropout_falls_on_the_sublayer_and_never_on_the_residual() -> None:
    config = ModelConfig(d_model=C, dropout=0.25)
    x = torch.randn(50, 40, C)
    layer = PreNorm(Affine(0.0, 3.0), config)
    gained = layer(x, CTX) - x
    dropped = gained.abs() < 1e-4
    torch.testing.assert_close(gained[~dropped], torch.full_like(gained[~dropped], 4.0))  # 3 / (1 - 0.25)
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(layer.eval()(x, CTX) - x, torch.full_like(x, 3.0))


def test_a_block_runs_its_sublayers_in_order() -> None:
    block = Block(ModelConfig(d_model=C, norm="post", dropout=0.0), {"a": Affine(1.0, 1.0), "b": Affine(-3.0, 0.2)})
    x = torch.randn(1, 3, C)
    a, b = (block.sublayers[name] for name in "ab")
    assert isinstance(a, PostNorm)
    torch.testing.assert_close(block(x, CTX), b(a(x, CTX), CTX))


def test_encoder_and_decoder_blocks() -> None:
    assert list(encoder_block(CONFIG).sublayers) == ["self", "ff"]
    assert list(decoder_block(CONFIG).sublayers) == ["self", "cross", "ff"]


class Counting(Cache):
    def __init__(self) -> None:
        self.advanced: list[Tensor] = []

    def advance(self, positions: Tensor) -> None:
        self.advanced.append(positions)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_a_stack_is_its_blocks_one_after_the_other_and_pre_norm_ends_on_a_norm(norm: str) -> None:
    config = ModelConfig(d_model=C, norm=norm, dropout=0.0)
    sublayers = [Affine(0.5, 1.0), Affine(-2.0, 0.0), Affine(1.5, 0.3)]
    stack = stirred(Stack(config, (Block(config, {"only": f}) for f in sublayers), Full()))
    assert isinstance(stack, Stack)
    x, positions, cache = torch.randn(1, 3, C), torch.arange(3)[None], Counting()

    expected = x
    for block in stack.blocks:
        expected = block(expected, CTX)
    if norm == "pre":
        last = stack.norm
        assert isinstance(last, nn.LayerNorm)
        expected = torch.tensor(layer_norm(expected.detach().numpy(), last.weight, last.bias))
    for f in sublayers:
        f.seen.clear()

    torch.testing.assert_close(stack(x, positions, cache=cache), expected, atol=1e-5, rtol=1e-5)
    contexts = [f.seen for f in sublayers]
    assert [len(seen) for seen in contexts] == [1, 1, 1]
    assert contexts[0][0] is contexts[1][0] is contexts[2][0]  # made once, shared by all
    assert len(cache.advanced) == 1
    assert cache.advanced[0] is positions


def test_a_stack_hands_on_its_mask_and_the_memory() -> None:
    probe = Affine(1.0, 0.0)
    stack = Stack(CONFIG, [Block(CONFIG, {"only": probe})], Causal())
    positions, places, memory = torch.arange(3)[None], torch.tensor([[0, 1, -1, -1]]), torch.randn(1, 4, C)
    stack(torch.randn(1, 3, C), positions)
    stack(torch.randn(1, 3, C), positions, memory, places)
    alone, with_memory = probe.seen
    assert alone.self_plan.causal
    assert alone.memory is None
    assert alone.memory_plan is None
    assert with_memory.memory is memory
    assert with_memory.memory_plan is not None
    assert with_memory.memory_plan.mask is not None
    assert with_memory.memory_plan.mask.flatten().tolist() == [True, True, False, False]
