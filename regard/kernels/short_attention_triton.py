"""The Triton side of kernels/short_attention.py: attention of rows whose keys fit into one tile, forward and backward.

A program has all N keys of one row and head at once, so a query's softmax is complete after one product, and the gradients
of keys and values are complete when all queries, M at a time, have passed by. Rows of padding are neither read nor seen.
Scores are in units of ln 2 (scale and log-sum-exp come multiplied by log2 e), since exp2 is what the hardware has.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.toeplitz_attention_triton import LN2, rows_of


@triton.jit
def masked(scores, i, j, length, causal):
    """-inf where query i may not see key j."""
    return tl.where((j < length) & ((causal == 0) | (j <= i) & (i < length)), scores, -float("inf"))


@triton.jit
def kept(seed, bh, place, cut, boost):
    """What dropout multiplies weights by: 0 with probability cut / 2^31, else `boost`.

    Philox gives each row and head two words, and two rounds of multiplying mix a weight's place into them: ten rounds of
    Philox for every weight would take longer than all else.
    """
    first, second, _, _ = tl.randint4x(tl.load(seed), bh.to(tl.int32))
    x = place.to(tl.uint32) + first.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ second.to(tl.uint32)) * 0x846CA68B
    return tl.where(((x ^ (x >> 16)) >> 1).to(tl.int32) >= cut, boost, 0.0)


@triton.jit(do_not_specialize=["T", "causal"])
def forward(
    q, k, v, lengths, seed, out, lse, T, H, causal, scale, cut, boost,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    j, d = tl.arange(0, N), tl.arange(0, D)
    length = tl.load(lengths + b)
    keys = rows_of(k + b * k_b + h // GROUP * k_h, j, length, k_row, D)
    values = rows_of(v + b * v_b + h // GROUP * v_h, j, length, v_row, D)
    end = tl.where(causal != 0, length, T)  # of the queries that see something
    for turn in range(N // M):
        i = turn * M + tl.arange(0, M)
        queries = rows_of(q + b * q_b + h * q_h, i, end, q_row, D)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # (M, N)
        scores = masked(scores, i[:, None], j[None, :], length, causal)
        m = tl.max(scores, 1)
        m = tl.where(m > -float("inf"), m, 0.0)
        p = tl.exp2(scores - m[:, None])
        total = tl.sum(p, 1)
        some = tl.where(total > 0, total, 1.0)  # a query that sees nothing gets zeros
        if DROPOUT:
            p *= kept(seed, bh, i[:, None] * N + j[None, :], cut, boost)
        result = tl.dot(p.to(values.dtype), values, input_precision="ieee") / some[:, None]
        at = out + ((b * T + i[:, None]) * H + h) * D + d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(i < T)[:, None])
        z = tl.where(total > 0, m + tl.log2(some), float("inf"))  # inf: weights of zero
        tl.store(lse + bh * T + i, z, mask=i < T)


@triton.jit(do_not_specialize=["T", "S", "causal"])
def backward(
    q, k, v, grad, lengths, seed, lse, dq, dk, dv, T, S, H, causal, scale, cut, boost,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """The keys of one row and group, and the queries of all heads that share them. Scores stand on their side, (N, M), so
    that weights are where the products for keys and values want them."""
    bg, groups = tl.program_id(0).to(tl.int64), H // GROUP
    b, g = bg // groups, bg % groups
    j, d = tl.arange(0, N), tl.arange(0, D)
    length = tl.load(lengths + b)
    keys = rows_of(k + b * k_b + g * k_h, j, length, k_row, D)
    values = rows_of(v + b * v_b + g * v_h, j, length, v_row, D)
    by_key = tl.zeros((N, D), tl.float32)
    by_value = tl.zeros((N, D), tl.float32)
    end = tl.where(causal != 0, length, T)
    for turn in range(GROUP * (N // M)):
        h = g * GROUP + turn // (N // M)
        bh = b * H + h
        i = turn % (N // M) * M + tl.arange(0, M)
        queries = rows_of(q + b * q_b + h * q_h, i, end, q_row, D)
        grads = rows_of(grad + b * g_b + h * g_h, i, end, g_row, D)
        z = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale  # (N, M)
        p = tl.exp2(masked(scores, i[None, :], j[:, None], length, causal) - z[None, :])
        dp = tl.dot(values, tl.trans(grads), input_precision="ieee")
        a = p
        if DROPOUT:
            keep = kept(seed, bh, i[None, :] * N + j[:, None], cut, boost)
            a = p * keep
            dp *= keep
        by_value = tl.dot(a.to(grads.dtype), grads, by_value, input_precision="ieee")
        ds = (p * (dp - tl.sum(p * dp, 0)[None, :])).to(keys.dtype)
        by_key = tl.dot(ds, queries, by_key, input_precision="ieee")
        by_query = tl.dot(tl.trans(ds), keys, input_precision="ieee") * (scale * LN2)
        at = dq + ((b * T + i[:, None]) * H + h) * D + d[None, :]
        tl.store(at, by_query.to(dq.dtype.element_ty), mask=(i < T)[:, None])
    at = ((b * S + j[:, None]) * groups + g) * D + d[None, :]
    tl.store(dk + at, (by_key * (scale * LN2)).to(dk.dtype.element_ty), mask=(j < S)[:, None])
    tl.store(dv + at, by_value.to(dv.dtype.element_ty), mask=(j < S)[:, None])
