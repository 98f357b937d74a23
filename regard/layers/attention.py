"""Multi-head attention: H heads of width D look at the same tokens, each in its own projection.

Keys and values may have fewer heads, G: grouped-query attention, or multi-query with G = 1; H/G heads of queries then share
one head of keys, and the cache is that much smaller. Self-attention and cross-attention differ only in where keys and values
come from.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attend import Plan
from regard.layers.cache import KeysValues
from regard.layers.context import Context
from regard.layers.part import Mixer, Place
from regard.layers.rotary import rotate
from regard.registry import register, setting


def split_heads(x: Tensor, d_head: int) -> Tensor:
    """(B, T, H*D) -> (B, H, T, D)"""
    return x.view(*x.shape[:2], -1, d_head).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, T, D) -> (B, T, H*D)"""
    return x.transpose(1, 2).flatten(2)


class Attention(nn.Module):
    """What self- and cross-attention share."""

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.d_head, self.p_drop = config.d_head, config.attention_dropout
        self.d_queries, self.d_keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.out = nn.Linear(self.d_queries, config.d_model, bias=config.bias)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: Plan) -> Tensor:
        """(B, H, T, D) by whichever kernel the plan names; `look.record` listens here."""
        return plan(q, k, v, self.p_drop if self.training else 0.0)


@register("attention")
class SelfAttention(Attention, Mixer):
    """Multi-head self-attention, queries, keys and values of the same tokens in one projection."""

    @dataclass(frozen=True)
    class Settings:
        window: int = setting(
            0, "self-attention sees this many tokens back (in an encoder also ahead); 0 = all", most=1 << 24
        )

    has_scores: ClassVar[bool] = True
    ordered: ClassVar[bool] = False

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(config)
        self.qkv = nn.Linear(config.d_model, self.d_queries + 2 * self.d_keys, bias=config.bias)
        self.heads = [config.n_heads, config.n_kv_heads, config.n_kv_heads]

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        q, k, v = split_heads(self.qkv(x), self.d_head).split(self.heads, dim=1)  # (B, H, T, D), (B, G, T, D) twice
        q, k = rotate(q, ctx.rotation), rotate(k, ctx.rotation)
        k, v = ctx.cache.extend(self, k, v)  # (B, G, S, D)
        return self.out(merge_heads(self.attend(q, k, v, ctx.self_plan)))


class CrossAttention(Attention):
    """Queries from the decoder; keys and values from the final encoder output."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q = nn.Linear(config.d_model, self.d_queries, bias=config.bias)
        self.kv = nn.Linear(config.d_model, 2 * self.d_keys, bias=config.bias)

    def keys_values(self, memory: Tensor) -> KeysValues:
        k, v = split_heads(self.kv(memory), self.d_head).chunk(2, dim=1)
        return k, v  # (B', G, S, D)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        memory, plan = ctx.memory, ctx.memory_plan
        assert memory is not None
        assert plan is not None
        k, v = ctx.cache.memory(self, lambda: self.keys_values(memory))
        # The hypotheses of one sentence are that many queries of one memory row: its keys are read once, not copied.
        grouped = x.reshape(k.shape[0], -1, x.shape[-1])  # (B', B/B' * T, C)
        q = split_heads(self.q(grouped), self.d_head)
        return self.out(merge_heads(self.attend(q, k, v, plan))).view_as(x)
