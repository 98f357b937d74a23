"""Gated linear attention against the naive forms of flash-linear-attention; skipped where it is not installed."""

from __future__ import annotations

import pytest
import torch

from regard.kernels.gated_linear_attention import gated_linear_attention
from regard.layers.mixers.based import taylor_features
from regard.layers.mixers.linear_recurrence import normalize_weights, with_ones

naive_gla = pytest.importorskip("fla.ops.gla.naive", reason="fla-core is not installed")
naive_linear = pytest.importorskip("fla.ops.linear_attn.naive", reason="fla-core is not installed")
naive_based = pytest.importorskip("fla.ops.based.naive", reason="fla-core is not installed")

B, T, H, K, V = 2, 128, 3, 16, 24
STARTS = torch.zeros(B, T, dtype=torch.int32)


def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(B, T, H, K), torch.randn(B, T, H, K), torch.randn(B, T, H, V)


def test_gla_is_their_recurrence() -> None:
    q, k, v = inputs()
    decay = torch.nn.functional.logsigmoid(torch.randn(B, T, H, K)) / 16
    state = torch.randn(B, H, K, V)
    wanted, final = naive_gla.naive_recurrent_gla(q, k, v, decay, state, output_final_state=True)
    found, end = gated_linear_attention(q * K**-0.5, k, v, decay, STARTS - 1, state)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(end, final, atol=1e-4, rtol=1e-4)


def test_linear_attention_is_their_recurrence_with_a_normalizer() -> None:
    q, k, v = inputs()
    q, k = (torch.nn.functional.elu(x) + 1 for x in (q, k))
    wanted = naive_linear.naive_recurrent_linear_attn(q, k, v, scale=1.0, normalize=True)[0]
    o = gated_linear_attention(q, k, with_ones(v), None, STARTS)[0]
    torch.testing.assert_close(normalize_weights(o, 1e-10), wanted, atol=1e-4, rtol=1e-4)


def test_based_is_their_taylor_attention() -> None:
    q, k, v = inputs()
    theirs = (x.transpose(1, 2) for x in (q, k, v))  # (B, H, T, D)
    wanted = naive_based.naive_parallel_based(*theirs, use_norm=True).transpose(1, 2)
    o = gated_linear_attention(taylor_features(q), taylor_features(k), with_ones(v), None, STARTS)[0]
    torch.testing.assert_close(normalize_weights(o, 1e-6), wanted, atol=1e-4, rtol=1e-4)
