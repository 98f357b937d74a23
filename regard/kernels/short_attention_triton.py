"""Triton kernels of kernels/short_attention.py: attention over at most one tile of keys, forward and backward.

A program holds all N keys of one row and head, so the softmax of a query is complete after one matrix product, and the
gradients of keys and values are complete after a loop over the queries, M at a time. Padding is neither read nor
attended to. Scores and log-sum-exps are to base 2 (the scale is multiplied by log2 e), since exp2 is the instruction
that GPUs have.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.toeplitz_attention_triton import LN2, load_rows


@triton.jit
def mask_scores(scores, i, j, length, causal):
    """Return the scores, -inf where query i does not see key j."""
    return tl.where((j < length) & ((causal == 0) | (j <= i) & (i < length)), scores, -float("inf"))


@triton.jit
def dropout_scale(seed, bh, index, threshold, factor):
    """Return the dropout factors of elements `index` of row and head bh: 0 with probability threshold / 2^31, else `factor`.

    Philox gives every row and head two random words, and two multiply-xorshift rounds hash the index with them: the ten
    rounds of Philox for every element would take longer than the rest of the kernel.
    """
    first, second, _, _ = tl.randint4x(tl.load(seed), bh.to(tl.int32))
    x = index.to(tl.uint32) + first.to(tl.uint32)
    x = (x ^ (x >> 16)) * 0x7FEB352D
    x = (x ^ (x >> 15) ^ second.to(tl.uint32)) * 0x846CA68B
    return tl.where(((x ^ (x >> 16)) >> 1).to(tl.int32) >= threshold, factor, 0.0)


@triton.jit(do_not_specialize=["T", "causal"])
def forward(
    q, k, v, lengths, seed, out, lse, T, H, causal, scale, threshold, factor,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    bh = tl.program_id(0).to(tl.int64)
    b, h = bh // H, bh % H
    j, d = tl.arange(0, N), tl.arange(0, D)
    length = tl.load(lengths + b)
    keys = load_rows(k + b * k_b + h // GROUP * k_h, j, length, k_row, D)
    values = load_rows(v + b * v_b + h // GROUP * v_h, j, length, v_row, D)
    end = tl.where(causal != 0, length, T)  # of the queries that see a key
    for turn in range(N // M):
        i = turn * M + tl.arange(0, M)
        queries = load_rows(q + b * q_b + h * q_h, i, end, q_row, D)
        scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale  # (M, N)
        scores = mask_scores(scores, i[:, None], j[None, :], length, causal)
        m = tl.max(scores, 1)
        m = tl.where(m > -float("inf"), m, 0.0)
        p = tl.exp2(scores - m[:, None])
        total = tl.sum(p, 1)
        denominator = tl.where(total > 0, total, 1.0)  # a query that sees no key gets zeros
        if DROPOUT:
            p *= dropout_scale(seed, bh, i[:, None] * N + j[None, :], threshold, factor)
        result = tl.dot(p.to(values.dtype), values, input_precision="ieee") / denominator[:, None]
        at = out + ((b * T + i[:, None]) * H + h) * D + d[None, :]
        tl.store(at, result.to(out.dtype.element_ty), mask=(i < T)[:, None])
        z = tl.where(total > 0, m + tl.log2(denominator), float("inf"))  # inf makes the weights 0 in the backward pass
        tl.store(lse + bh * T + i, z, mask=i < T)


@triton.jit(do_not_specialize=["T", "S", "causal"])
def backward(
    q, k, v, grad, lengths, seed, lse, dq, dk, dv, T, S, H, causal, scale, threshold, factor,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    GROUP: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the keys and values of one row and key/value head, and of the query heads that share them.

    Scores are transposed, (N, M): that is the layout which the products for keys and values need.
    """
    bg, groups = tl.program_id(0).to(tl.int64), H // GROUP
    b, g = bg // groups, bg % groups
    j, d = tl.arange(0, N), tl.arange(0, D)
    length = tl.load(lengths + b)
    keys = load_rows(k + b * k_b + g * k_h, j, length, k_row, D)
    values = load_rows(v + b * v_b + g * v_h, j, length, v_row, D)
    grad_k = tl.zeros((N, D), tl.float32)
    grad_v = tl.zeros((N, D), tl.float32)
    end = tl.where(causal != 0, length, T)
    for turn in range(GROUP * (N // M)):
        h = g * GROUP + turn // (N // M)
        bh = b * H + h
        i = turn % (N // M) * M + tl.arange(0, M)
        queries = load_rows(q + b * q_b + h * q_h, i, end, q_row, D)
        grads = load_rows(grad + b * g_b + h * g_h, i, end, g_row, D)
        z = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
        scores = tl.dot(keys, tl.trans(queries), input_precision="ieee") * scale  # (N, M)
        p = tl.exp2(mask_scores(scores, i[None, :], j[:, None], length, causal) - z[None, :])
        dp = tl.dot(values, tl.trans(grads), input_precision="ieee")
        a = p
        if DROPOUT:
            keep = dropout_scale(seed, bh, i[None, :] * N + j[:, None], threshold, factor)
            a = p * keep
            dp *= keep
        grad_v = tl.dot(a.to(grads.dtype), grads, grad_v, input_precision="ieee")
        ds = (p * (dp - tl.sum(p * dp, 0)[None, :])).to(keys.dtype)
        grad_k = tl.dot(ds, queries, grad_k, input_precision="ieee")
        grad_q = tl.dot(tl.trans(ds), keys, input_precision="ieee") * (scale * LN2)
        at = dq + ((b * T + i[:, None]) * H + h) * D + d[None, :]
        tl.store(at, grad_q.to(dq.dtype.element_ty), mask=(i < T)[:, None])
    at = ((b * S + j[:, None]) * groups + g) * D + d[None, :]
    tl.store(dk + at, (grad_k * (scale * LN2)).to(dk.dtype.element_ty), mask=(j < S)[:, None])
    tl.store(dv + at, grad_v.to(dv.dtype.element_ty), mask=(j < S)[:, None])
