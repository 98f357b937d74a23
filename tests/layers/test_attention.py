"""Multi-head attention against torch.nn.MultiheadAttention with the same weights."""

import dataclasses

import formula
import numpy as np
import pytest
import torch
from formula import ragged
from fused_rows import kv_rows, qkv_rows
from kernel_cases import scheme_of
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.attention_functions import merge_heads, split_heads
from regard.kernels.masks import CAUSAL, FULL, Mask
from regard.layers.attention_kernels import make_plan
from regard.layers.context import Context
from regard.layers.mixers.attention import CrossAttention, Prepared, SelfAttention
from regard.layers.part import Place

C, H = 24, 4
D = C // H
CONFIG = ModelConfig(d_model=C, n_heads=H, n_kv_heads=H, d_head=D)


def context(positions: Tensor, mask: Mask, memory: Tensor | None = None, places: Tensor | None = None) -> Context:
    memory_plan = None if places is None else make_plan(FULL, positions, places)
    prepared = Prepared(make_plan(mask, positions, positions))
    return Context(positions, prepared, memory=memory, memory_plan=memory_plan)


def peer(weight: Tensor, bias: Tensor, out: nn.Linear) -> nn.MultiheadAttention:
    theirs = nn.MultiheadAttention(C, H, batch_first=True)
    theirs.load_state_dict(
        {"in_proj_weight": weight, "in_proj_bias": bias, "out_proj.weight": out.weight, "out_proj.bias": out.bias}
    )
    return theirs


def test_heads_are_neighbouring_slices_of_the_width() -> None:
    x = torch.randn(2, 5, C)
    heads = split_heads(x, D)
    assert heads.shape == (2, H, 5, D)
    for h in range(H):
        assert torch.equal(heads[:, h], x[:, :, h * D : (h + 1) * D])
    assert torch.equal(merge_heads(heads), x)


@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_self_attention_is_torchs(mask: Mask) -> None:
    ours = SelfAttention(SelfAttention.Settings(), CONFIG, Place("encoder"))
    rows = qkv_rows(H, H, D)
    theirs = peer(ours.qkv.weight[rows], ours.qkv.bias[rows], ours.out)
    positions = ragged(6, 4, 1)
    x = torch.randn(3, 6, C)
    triangle = torch.ones(6, 6).triu(1).bool() if mask.causal else None  # True = hidden, over there
    expected, _ = theirs(x, x, x, key_padding_mask=positions < 0, attn_mask=triangle, need_weights=False)
    real = positions >= 0
    torch.testing.assert_close(ours(x, context(positions, mask))[real], expected[real])


def test_cross_attention_is_torchs() -> None:
    ours = CrossAttention(CONFIG)
    rows = kv_rows(H, D)
    weight, bias = torch.cat([ours.q.weight, ours.kv.weight[rows]]), torch.cat([ours.q.bias, ours.kv.bias[rows]])
    theirs = peer(weight, bias, ours.out)
    places = ragged(5, 2, 1)
    x, memory = torch.randn(3, 4, C), torch.randn(3, 5, C)
    expected, _ = theirs(x, memory, memory, key_padding_mask=places < 0, need_weights=False)
    torch.testing.assert_close(ours(x, context(ragged(4, 4, 4), CAUSAL, memory, places)), expected)


def spread(rows: Tensor, groups: int) -> Tensor:
    """The rows of G heads, each written down for every head of queries that reads it: (G*D, ...) -> (H*D, ...)."""
    heads = rows.detach().unflatten(0, (groups, D))
    return torch.cat([heads[h * groups // H] for h in range(H)])


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("mask", [FULL, CAUSAL])
def test_shared_keys_are_copies_for_each_head_that_reads_them(mask: Mask, groups: int) -> None:
    ours = SelfAttention(SelfAttention.Settings(), dataclasses.replace(CONFIG, n_kv_heads=groups), Place("encoder"))
    assert ours.qkv.out_features == C + 2 * groups * D
    rows = qkv_rows(H, groups, D)
    parts = [p[rows].split([C, groups * D, groups * D]) for p in (ours.qkv.weight, ours.qkv.bias)]
    weight, bias = (torch.cat([q, spread(k, groups), spread(v, groups)]) for q, k, v in parts)
    positions = ragged(6, 4, 1)
    x, real = torch.randn(3, 6, C), positions >= 0
    triangle = torch.ones(6, 6).triu(1).bool() if mask.causal else None
    theirs = peer(weight, bias, ours.out)
    expected, _ = theirs(x, x, x, key_padding_mask=~real, attn_mask=triangle, need_weights=False)
    torch.testing.assert_close(ours(x, context(positions, mask))[real], expected[real])


@pytest.mark.parametrize("groups", [1, 2])
def test_cross_attention_shares_keys_as_well(groups: int) -> None:
    ours = CrossAttention(dataclasses.replace(CONFIG, n_kv_heads=groups))
    (k, v), (k_bias, v_bias) = (p[kv_rows(groups, D)].chunk(2) for p in (ours.kv.weight, ours.kv.bias))
    weight = torch.cat([ours.q.weight, spread(k, groups), spread(v, groups)])
    bias = torch.cat([ours.q.bias, spread(k_bias, groups), spread(v_bias, groups)])
    places = ragged(5, 2, 1)
    x, memory = torch.randn(3, 4, C), torch.randn(3, 5, C)
    expected, _ = peer(weight, bias, ours.out)(x, memory, memory, key_padding_mask=places < 0, need_weights=False)
    torch.testing.assert_close(ours(x, context(ragged(4, 4, 4), CAUSAL, memory, places)), expected)


def test_heads_of_any_width() -> None:
    """Three heads of 5 in a model 24 wide, sharing one head of keys; by the formula, in NumPy."""
    layer = SelfAttention(
        SelfAttention.Settings(), dataclasses.replace(CONFIG, n_heads=3, n_kv_heads=1, d_head=5), Place("encoder")
    )
    x = torch.randn(4, C)
    w, b, w_out, b_out = (p.detach().double().numpy() for p in (*layer.qkv.parameters(), *layer.out.parameters()))
    qkv = x.double().numpy() @ w.T + b  # 15 of queries, 5 of keys, 5 of values
    keys, values, heads = qkv[:, 15:20], qkv[:, 20:], []
    for h in range(3):
        powers = np.exp(qkv[:, 5 * h : 5 * h + 5] @ keys.T / np.sqrt(5))
        heads.append(powers / powers.sum(1, keepdims=True) @ values)
    expected = np.concatenate(heads, 1) @ w_out.T + b_out
    found = layer(x[None], context(torch.arange(4)[None], FULL))[0].detach().numpy()
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("name", ["rope", "yarn"])
def test_a_rotation_turns_queries_and_keys_and_leaves_values(name: str) -> None:
    layer = SelfAttention(
        SelfAttention.Settings(), dataclasses.replace(formula.SETTINGS, n_kv_heads=2), Place("encoder")
    )
    nn.init.eye_(layer.out.weight)
    nn.init.zeros_(layer.out.bias)
    positions = ragged(6, 3)
    rotation = scheme_of(name, "encoder").rotation(positions)
    x, at = torch.randn(2, 6, formula.SETTINGS.d_model), positions.tolist()
    ctx = Context(positions, Prepared(make_plan(FULL, positions, positions), rotation))
    rows = qkv_rows(formula.SETTINGS.n_heads, 2, formula.D)
    q, k, v = (split_heads(part, formula.D).double() for part in layer.qkv(x)[..., rows].split([32, 16, 16], -1))
    expected = formula.attention(name, {}, q, k, v, formula.visible(at, at), at, at)
    real = positions >= 0
    torch.testing.assert_close(layer(x, ctx)[real], merge_heads(expected)[real].float())


@pytest.mark.parametrize("n_tokens", [1, 3])
def test_hypotheses_share_their_sentences_memory(n_tokens: int) -> None:
    """Reading one memory row for K hypotheses equals giving each hypothesis its own copy, gradients included."""
    k = 3
    layer = CrossAttention(CONFIG)
    places = ragged(5, 2)
    x, memory = torch.randn(2 * k, n_tokens, C), torch.randn(2, 5, C, requires_grad=True)
    positions = torch.arange(n_tokens).expand(2 * k, -1)
    copied = context(positions, CAUSAL, memory.repeat_interleave(k, 0), places.repeat_interleave(k, 0))
    results, gradients = [], []
    for ctx in (context(positions, CAUSAL, memory, places), copied):
        result = layer(x, ctx)
        results.append(result)
        gradients.append(torch.autograd.grad(result.square().sum(), memory)[0])
    torch.testing.assert_close(*results)
    torch.testing.assert_close(*gradients)


def test_attention_dropout_acts_in_training_alone() -> None:
    config = dataclasses.replace(CONFIG, attention_dropout=0.5)
    x, memory = torch.randn(2, 4, C), torch.randn(2, 5, C)
    ctx = context(ragged(4, 4), CAUSAL, memory, ragged(5, 5))
    for layer in (SelfAttention(SelfAttention.Settings(), config, Place("encoder")), CrossAttention(config)):
        assert not torch.equal(layer(x, ctx), layer(x, ctx))
        layer.eval()
        assert torch.equal(layer(x, ctx), layer(x, ctx))
