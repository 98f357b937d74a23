"""Multi-head attention against torch.nn.MultiheadAttention with the same weights."""

import pytest
import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attend import make_plan
from regard.layers.attention import CrossAttention, SelfAttention, merge_heads, split_heads
from regard.layers.cache import NO_CACHE
from regard.layers.context import Context
from regard.layers.masks import Causal, Full, Mask

C, H = 12, 3
CONFIG = ModelConfig(d_model=C, n_heads=H)


def ragged(*lengths: int) -> Tensor:
    return torch.tensor([[i if i < n else -1 for i in range(max(lengths))] for n in lengths])


def context(positions: Tensor, mask: Mask, memory: Tensor | None = None, places: Tensor | None = None) -> Context:
    memory_plan = None if places is None else make_plan(Full(), positions, places)
    return Context(positions, make_plan(mask, positions, positions), NO_CACHE, memory, memory_plan)


def peer(weight: Tensor, bias: Tensor, out: nn.Linear) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(C, H, batch_first=True)
    theirs.load_state_dict(
        {"in_proj_weight": weight, "in_proj_bias": bias, "out_proj.weight": out.weight, "out_proj.bias": out.bias}
    )
    return theirs


def test_heads_are_neighbouring_slices_of_the_width() -> None:
    x = torch.randn(2, 5, C)
    heads = split_heads(x, H)
    assert heads.shape == (2, H, 5, C // H)
    for h in range(H):
        assert torch.equal(heads[:, h], x[:, :, h * C // H : (h + 1) * C // H])
    assert torch.equal(merge_heads(heads), x)


@pytest.mark.parametrize("mask", [Full(), Causal()])
def test_self_attention_is_torchs(mask: Mask) -> None:
    ours = SelfAttention(CONFIG)
    theirs = peer(ours.qkv.weight, ours.qkv.bias, ours.out)
    positions = ragged(6, 4, 1)
    x = torch.randn(3, 6, C)
    triangle = torch.ones(6, 6).triu(1).bool() if mask.causal else None  # True = hidden, over there
    expected, _ = theirs(x, x, x, key_padding_mask=positions < 0, attn_mask=triangle, need_weights=False)
    real = positions >= 0
    torch.testing.assert_close(ours(x, context(positions, mask))[real], expected[real])


def test_cross_attention_is_torchs() -> None:
    ours = CrossAttention(CONFIG)
    theirs = peer(torch.cat([ours.q.weight, ours.kv.weight]), torch.cat([ours.q.bias, ours.kv.bias]), ours.out)
    places = ragged(5, 2, 1)
    x, memory = torch.randn(3, 4, C), torch.randn(3, 5, C)
    expected, _ = theirs(x, memory, memory, key_padding_mask=places < 0, need_weights=False)
    torch.testing.assert_close(ours(x, context(ragged(4, 4, 4), Causal(), memory, places)), expected)


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_hypotheses_share_their_sentences_memory(n_tokens: int) -> None:
    """Reading one memory row for K hypotheses equals giving each hypothesis its own copy, gradients included."""
    k = 3
    layer = CrossAttention(CONFIG)
    places = ragged(5, 2)
    x, memory = torch.randn(2 * k, n_tokens, C), torch.randn(2, 5, C, requires_grad=True)
    positions = torch.arange(n_tokens).expand(2 * k, -1)
    copied = context(positions, Causal(), memory.repeat_interleave(k, 0), places.repeat_interleave(k, 0))
    results, gradients = [], []
    for ctx in (context(positions, Causal(), memory, places), copied):
        result = layer(x, ctx)
        results.append(result)
        gradients.append(torch.autograd.grad(result.square().sum(), memory)[0])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_attention_dropout_acts_in_training_alone() -> None:
    config = ModelConfig(d_model=C, n_heads=H, attention_dropout=0.5)
    x, memory = torch.randn(2, 4, C), torch.randn(2, 5, C)
    ctx = context(ragged(4, 4), Causal(), memory, ragged(5, 5))
    for layer in (SelfAttention(config), CrossAttention(config)):
        assert not torch.equal(layer(x, ctx), layer(x, ctx))
        layer.eval()
        assert torch.equal(layer(x, ctx), layer(x, ctx))
