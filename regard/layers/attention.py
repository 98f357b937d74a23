"""Multi-head attention: H heads of width D = C/H look at the same tokens, each in its own projection.

Self-attention and cross-attention differ only in where keys and values come from; everything else is shared.
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.cache import KeysValues
from regard.layers.context import Context


def split_heads(x: Tensor, n_heads: int) -> Tensor:
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.unflatten(-1, (n_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Queries, keys and values of the same tokens, in one projection."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.p_drop = config.n_heads, config.attention_dropout
        self.qkv = nn.Linear(config.d_model, 3 * config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = (split_heads(part, self.n_heads) for part in self.qkv(x).chunk(3, dim=-1))  # (B, H, T, D)
        k, v = ctx.cache.extend(self, k, v)  # (B, H, S, D)
        heads = ctx.self_plan(q, k, v, self.p_drop if self.training else 0.0)  # (B, H, T, D)
        return self.out(merge_heads(heads))


class CrossAttention(nn.Module):
    """Queries from the decoder; keys and values from the final encoder output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.n_heads, self.p_drop = config.n_heads, config.attention_dropout
        self.q = nn.Linear(config.d_model, config.d_model)
        self.kv = nn.Linear(config.d_model, 2 * config.d_model)
        self.out = nn.Linear(config.d_model, config.d_model)

    def keys_values(self, memory: Tensor) -> KeysValues:
        k, v = (split_heads(part, self.n_heads) for part in self.kv(memory).chunk(2, dim=-1))
        return k, v  # (B', H, S, D)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        memory, plan = ctx.memory, ctx.memory_plan
        assert memory is not None
        assert plan is not None
        k, v = ctx.cache.memory(self, lambda: self.keys_values(memory))
        # The hypotheses of one sentence are that many queries of one memory row: its keys are read once, not copied.
        grouped = x.reshape(k.shape[0], -1, x.shape[-1])  # (B', B/B' * T, C)
        q = split_heads(self.q(grouped), self.n_heads)
        heads = plan(q, k, v, self.p_drop if self.training else 0.0)
        return self.out(merge_heads(heads)).view_as(x)
