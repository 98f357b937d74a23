"""Attention in nine stages, each of which adds one idea to the one before, up to the layers of the Transformer.

All have the signature `stage(query, keys, values, mask) -> (context, weights)`. Weights are a softmax of scores, and the
context is the weighted sum of the values. Where a stage makes no difference between keys and values (or, in
self-attention, queries and keys), pass the same tensor again. `mask` is True where a query may attend, and None means
everywhere; any boolean tensor that broadcasts to the weights (in stages 8 and 9: to those of one head, (B, T, S)) will do.

Shapes: stages 1 to 3 take one query (B, D), and their weights are (B, S); stages 4 to 7 take T queries (B, T, D), with
weights (B, T, S); stages 8 and 9 have H heads, with weights (B, H, T, S). Keys and values are (B, S, D); a context is as
wide as the values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.attention_functions import masked_softmax, repeat_kv
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import AttentionPlan
from regard.layers.context import Context
from regard.layers.mixers.attention import CrossAttention, Prepared
from regard.layers.part import Place, make_part

AttentionOutput = tuple[Tensor, Tensor]  # context, weights


# ---- one query --------------------------------------------------------------------------------------------------------


def attend_one(scores: Tensor, values: Tensor, mask: Tensor | None) -> AttentionOutput:
    """Return the context c = sum_i a_i v_i of one query with scores (B, S), and its weights a."""
    weights = masked_softmax(scores, mask)  # (B, S)
    return (weights[..., None, :] @ values)[..., 0, :], weights  # (B, D)


class AdditiveAttention(nn.Module):
    """Stage 1 (Bahdanau): a small network scores each key, e_i = v . tanh(W q + U k_i).

    The query is the state of a decoder, keys and values are the states of its encoder. Their widths may differ.
    """

    def __init__(self, d_query: int, d_key: int, d_hidden: int) -> None:
        super().__init__()
        self.W = nn.Linear(d_query, d_hidden, bias=False)
        self.U = nn.Linear(d_key, d_hidden, bias=False)
        self.v = nn.Linear(d_hidden, 1, bias=False)

    def scores(self, query: Tensor, projected: Tensor) -> Tensor:
        """Return scores (B, S) for keys that `U` has projected, which a decoder does once for all of its steps."""
        return self.v((self.W(query)[..., None, :] + projected).tanh())[..., 0]

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
        return attend_one(self.scores(query, self.U(keys)), values, mask)


def dot_product(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
    """Compute stage 2, e_i = q . k_i: no parameters, and one matrix product in place of S small networks."""
    return attend_one((keys @ query[..., None])[..., 0], values, mask)


def scaled_dot_product(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
    """Compute stage 3, e_i = q . k_i / sqrt(D).

    A dot product of D pairs of numbers of unit variance has variance D. With wide vectors the softmax would saturate and its
    gradient vanish; the division gives scores unit variance again.
    """
    return dot_product(query / math.sqrt(query.shape[-1]), keys, values, mask)


# ---- many queries -----------------------------------------------------------------------------------------------------


def many_queries(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
    """Compute stage 4, softmax(Q K^T / sqrt(D)) V: queries are independent, so that all of them are one matrix product."""
    scores = query @ keys.transpose(-2, -1) / math.sqrt(query.shape[-1])  # (B, T, S)
    weights = masked_softmax(scores, mask)
    return weights @ values, weights  # (B, T, D)


class KeyValueHead(nn.Module):
    """Stage 5: keys K = X W_K are compared with queries, values V = X W_V are summed."""

    def __init__(self, d_model: int, d_head: int) -> None:
        super().__init__()
        self.w_k = nn.Linear(d_model, d_head, bias=False)
        self.w_v = nn.Linear(d_model, d_head, bias=False)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
        return many_queries(query, self.w_k(keys), self.w_v(values), mask)


class SelfHead(KeyValueHead):
    """Stage 6, self-attention: queries Q = X W_Q come from the same tokens; pass X three times."""

    def __init__(self, d_model: int, d_head: int) -> None:
        super().__init__(d_model, d_head)
        self.w_q = nn.Linear(d_model, d_head, bias=False)

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
        return super().forward(self.w_q(query), keys, values, mask)


def causal_mask(n: int, device: torch.device | None = None) -> Tensor:
    """Return the causal mask (n, n): token t attends to the tokens up to itself. Models use `CAUSAL` of kernels/masks.py."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril()


class CausalHead(SelfHead):
    """Stage 7, causal: scores of later tokens are -inf, so that each token can be trained to predict the next."""

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
        triangle = causal_mask(query.shape[-2], query.device)
        return super().forward(query, keys, values, triangle if mask is None else mask & triangle)


# ---- many heads: the layers of the Transformer itself -----------------------------------------------------------------


class RecordingKernel:
    """Stage 4 as the kernel of an attention layer (layers/attention_kernels.py) that records its weights."""

    weights: Tensor  # (B, H, T, S)

    def __init__(self, mask: Tensor | None) -> None:
        # (B, 1, T, S), the same for all heads
        self.mask = None if mask is None else torch.atleast_2d(mask).unsqueeze(-3)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
        context, self.weights = many_queries(q, repeat_kv(k, q), repeat_kv(v, q), self.mask)
        return context  # (B, H, T, D)


class MultiHead(nn.Module):
    """Stage 8, multi-head: H heads of stage 6 or 7, each of width C/H, concatenated and multiplied by W_O.

    Pass X three times. With fewer heads of keys and values than of queries (`n_kv_heads`), it is grouped-query attention.
    """

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int = 0) -> None:
        super().__init__()
        self.layer = make_part("mixer", "attention", make_config(d_model, n_heads, n_kv_heads), Place("encoder"))

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
        check_same(query, keys, values)
        kernel, places = RecordingKernel(mask), token_positions(query)
        ctx = Context(places, Prepared(AttentionPlan(kernel, FULL, places, places)))
        return self.layer(query, ctx), kernel.weights


class MultiHeadCross(nn.Module):
    """Stage 9, cross-attention: queries from the decoder, keys and values from the encoder's output; pass it twice."""

    def __init__(self, d_model: int, n_heads: int, n_kv_heads: int = 0) -> None:
        super().__init__()
        self.layer = CrossAttention(make_config(d_model, n_heads, n_kv_heads))

    def forward(self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> AttentionOutput:
        check_same(keys, values)
        kernel, places = RecordingKernel(mask), token_positions(query)
        plan = AttentionPlan(kernel, FULL, places, token_positions(keys))
        ctx = Context(places, memory=keys, memory_plan=plan)
        return self.layer(query, ctx), kernel.weights


def make_config(d_model: int, n_heads: int, n_kv_heads: int) -> ModelConfig:
    """Return the configuration of an attention layer of these sizes."""
    n_kv_heads = n_kv_heads or n_heads
    if min(d_model, n_heads, n_kv_heads) < 1 or d_model % n_heads or n_heads % n_kv_heads:
        raise RegardError(
            f"a width of {d_model} for {n_heads} heads, {n_kv_heads} of keys and values: "
            f"choose a width that is a multiple of the heads, and heads that are a multiple of those of keys and values"
        )
    return ModelConfig(d_model=d_model, n_heads=n_heads, n_kv_heads=n_kv_heads, d_head=d_model // n_heads)


def check_same(*given: Tensor) -> None:
    """Raise a RegardError unless all tensors are one: the layers project only the first and would ignore others."""
    if any(x is not given[0] for x in given):
        raise RegardError(
            "the Transformer's layers make keys and values of one tensor, and in self-attention queries too: "
            "give them the same tensor each time (stages 1 to 7 take different ones)"
        )


def token_positions(x: Tensor) -> Tensor:
    """Return the positions 0 .. T-1 of tokens x (B, T, C), without padding, (B, T)."""
    return torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
