"""Triton kernels of kernels/gated_linear_attention.py: chunks of C tokens, forward and backward.

| kernel              | computes                                                                                        |
|---------------------|-------------------------------------------------------------------------------------------------|
| `accumulate`        | B, the sums of log alpha from the beginning of each chunk                                       |
| `sum_chunks`        | what the tokens of each chunk add to the state; reversed: what they add to its gradient         |
| `pass_states`       | the state before each chunk, chunk after chunk; reversed: the gradient of the state after it    |
| `mix`               | a sum over the tokens of a chunk, and what the state adds to it: o, gradients of q, k and v     |
| `score_channels`    | the scores of a chunk with one decay a channel, for `mix`                                       |
| `multiply_values`   | the gradient of the scores, with one decay a channel                                            |
| `channel_gradients` | the gradients of q and k with one decay a channel                                               |
| `decay_gradient`    | the gradient of log alpha                                                                       |
| `update_states`     | one decoding step                                                                               |

All four results of `mix` have one form, with D_ij = exp(B_i - B_j), E_i = exp(B_i), F_j = exp(B_last - B_j), S the state
before the chunk and R the gradient of the state after it:

    o_i  = sum over j <= i of (q_i . k_j) D_ij v_j  + E_i q_i S      dq_i = sum of (do_i . v_j) D_ij k_j + E_i do_i S^T
    dv_j = sum over i >= j of (k_j . q_i) D_ij do_i + F_j k_j R      dk_j = sum of (v_j . do_i) D_ij q_i + F_j v_j R^T

Only `pass_states` goes from chunk to chunk, and it multiplies no matrices; all other kernels run on all chunks at once.
MODE is 0 without decay, 1 with one decay a head, 2 with one a channel, where B is a vector and D_ij no number. Exponents are
then taken relative to the border of SUB = 16 tokens between i and j; inside of 16 tokens, they are taken pair by pair.

The gradient of log alpha_t is the sum of (gradient of a score) * score over all pairs i >= t > j. It is computed as sums
over rows minus sums over columns, both without the pairs i = j: these cancel, but are the largest where decays are strong.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.errors import RegardError

SUB: tl.constexpr = tl.constexpr(16)


@triton.jit
def load_tile(base, rows, limit, stride, columns, WIDTH: tl.constexpr):
    """Load rows and columns of a (limit, WIDTH) matrix, zeros outside."""
    inside = (rows < limit)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(base + rows[:, None] * stride + columns[None, :], mask=inside, other=0.0)


@triton.jit
def power(x):
    """Return exp(x) in fp32; x may be a difference of sums in float64."""
    return tl.exp(x.to(tl.float32))


@triton.jit(do_not_specialize=["T"])
def accumulate(x, out, T, H, x_b, x_t, x_h, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr):
    """Write the sums (B, H, T, K) of x (B, T, H, K) from the beginning of each chunk."""
    bh = tl.program_id(1).to(tl.int64)
    t, d = tl.program_id(0) * C + tl.arange(0, C), tl.program_id(2) * BK + tl.arange(0, BK)
    part = load_tile(x + bh // H * x_b + bh % H * x_h, t, T, x_t, d, K).to(out.dtype.element_ty)
    found = tl.cumsum(part, 0)
    inside = (t < T)[:, None] & (d < K)[None, :]
    tl.store(out + bh * T * K + t[:, None] * K + d[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def sum_chunks(
    x, y, sums, starts, out, T, N, H, GROUP, x_b, x_t, x_h, y_b, y_t, y_h,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, MODE: tl.constexpr, C: tl.constexpr, M: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the sum of F_j k_j v_j^T over tokens whose document continues after the chunk, (B, H, N, K, V).

    REVERSE: the sum of E_i q_i do_i^T over tokens whose document began before it."""
    n, bh = tl.program_id(1), tl.program_id(2).to(tl.int64)
    b, h = bh // H, bh % H
    blocks: tl.constexpr = tl.cdiv(V, BV)
    d = tl.program_id(0) // blocks * BK + tl.arange(0, BK)
    e = tl.program_id(0) % blocks * BV + tl.arange(0, BV)
    first, last = n * C, tl.minimum(n * C + C, T) - 1
    x += b * x_b + h // GROUP * x_h
    y += b * y_b + h * y_h
    starts += b * T
    start = tl.load(starts + last)
    if MODE == 1:
        sums += bh * T
        end = tl.load(sums + last)
    if MODE == 2:
        sums += bh * T * K
        end = tl.load(sums + last * K + d, mask=d < K, other=0.0)[None, :]
    found = tl.zeros((BK, BV), tl.float32)
    for m in range(0, C, M):
        t = first + m + tl.arange(0, M)
        rows = load_tile(x, t, T, x_t, d, K)
        sees = tl.load(starts + t, mask=t < T, other=first) < first if REVERSE else t >= start
        if MODE == 1:
            part = tl.load(sums + t, mask=t < T, other=0.0)
            part = power(part if REVERSE else tl.where(t < T, end - part, 0.0))
            rows = rows * part[:, None]
        if MODE == 2:
            part = load_tile(sums, t, T, K, d, K)
            rows = rows * power(part if REVERSE else tl.where((t < T)[:, None], end - part, 0.0))
        rows = tl.where(sees[:, None], rows, 0.0).to(x.dtype.element_ty)
        columns = load_tile(y, t, T, y_t, e, V)
        found = tl.dot(tl.trans(rows), columns, found, input_precision=PRECISION)
    inside = (d < K)[:, None] & (e < V)[None, :]
    at = out + (bh * N + n) * K * V + d[:, None] * V + e[None, :]
    tl.store(at, found.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def pass_states(
    states, sums, starts, initial, final, before, products, T, N, H,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, MODE: tl.constexpr, INITIAL: tl.constexpr, C: tl.constexpr,
    R: tl.constexpr, BV: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Replace what each chunk adds, (B, H, N, K, V), by the state before it, and write the last state (B, H, K, V) fp32.

    REVERSE: by the gradient of the state after the chunk, from the last chunk to the first. With decays, `products`
    (B, H, N, K) then gets the gradient of the chunk's whole log decay by way of the state `before` it."""
    bh = tl.program_id(1).to(tl.int64)
    d, e = tl.program_id(0) * R + tl.arange(0, R), tl.arange(0, BV)
    inside = (d < K)[:, None] & (e < V)[None, :]
    place = d[:, None] * V + e[None, :]
    starts += bh // H * T
    state = tl.zeros((R, BV), tl.float32)
    if INITIAL:
        state += tl.load(initial + bh * K * V + place, mask=inside, other=0.0)
    for i in tl.range(0, N, num_stages=STAGES):
        n = N - 1 - i if REVERSE else i
        last = tl.minimum(n * C + C, T) - 1
        at = (bh * N + n) * K * V + place
        added = tl.load(states + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(states + at, state.to(states.dtype.element_ty), mask=inside)
        keep = tl.load(starts + last) < n * C
        if MODE == 1:
            state *= power(tl.load(sums + bh * T + last))
        if MODE == 2:
            state *= power(tl.load(sums + (bh * T + last) * K + d, mask=d < K, other=0.0))[:, None]
        state = tl.where(keep, state, 0.0)
        if REVERSE and MODE > 0:
            earlier = tl.load(before + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(products + (bh * N + n) * K + d, tl.sum(state * earlier, 1), mask=d < K)
        state += added
    tl.store(final + bh * K * V + place, state, mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def mix(
    a, b, c, own, sums, scores, starts, states, out, parts, T, N, H,
    a_b, a_t, a_h, b_b, b_t, b_h, c_b, c_t, c_h, own_b, own_t, own_h, state_row, state_column,
    K: tl.constexpr, V: tl.constexpr, REVERSE: tl.constexpr, MODE: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr,
    SUMS: tl.constexpr, C: tl.constexpr, M: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write out_i = sum over j <= i of (a_i . b_j) D_ij c_j + E_i a_i S for M tokens i; a, b: (K,), c: (V,), S: (K, V).

    REVERSE: the sum over j >= i, with D_ji, F_i and R for S. GROUPED: a and b have H heads, c and the result H / GROUP, and
    the result is the sum over the heads of a group; otherwise c and the result have H heads, a and b H / GROUP.
    SUMS: `parts` (2, BLOCKS, B, H, T) get own_i . E_i a_i S, and own_i . the sum without j = i."""
    rows, f = tl.program_id(0) * M, tl.program_id(1) * BV + tl.arange(0, BV)
    heads = H // GROUP if GROUPED else H  # of the result
    batch, head = tl.program_id(2).to(tl.int64) // heads, tl.program_id(2).to(tl.int64) % heads
    n = rows // C
    first, beyond = n * C, tl.minimum(n * C + C, T)
    i = rows + tl.arange(0, M)
    starts += batch * T
    begin = tl.load(starts + i, mask=i < T, other=T)
    sees = i >= tl.load(starts + beyond - 1) if REVERSE else begin < first
    c += batch * c_b
    total = tl.zeros((M, BV), tl.float32)
    for r in tl.range(0, GROUP if GROUPED else 1, disable_licm=True):  # hoisted addresses would fill the registers
        h = head * GROUP + r if GROUPED else head
        bh = batch * H + h
        ab = h if GROUPED else h // GROUP
        left, right = a + batch * a_b + ab * a_h, b + batch * b_b + ab * b_h
        values = c + (head if GROUPED else h) * c_h
        found = tl.zeros((M, BV), tl.float32)
        if MODE == 1:
            sum_i = tl.load(sums + bh * T + i, mask=i < T, other=0.0)
            end = tl.load(sums + bh * T + beyond - 1)
            factor = power(tl.where(i < T, end - sum_i, 0.0) if REVERSE else sum_i)
        for k in range(0, K, BK):
            d = k + tl.arange(0, BK)
            x = load_tile(left, i, T, a_t, d, K)
            if MODE == 1:
                x = x * factor[:, None]
            if MODE == 2:
                part = load_tile(sums + bh * T * K, i, T, K, d, K)
                if REVERSE:
                    end = tl.load(sums + (bh * T + beyond - 1) * K + d, mask=d < K, other=0.0)
                    part = tl.where((i < T)[:, None], end[None, :] - part, 0.0)
                x = x * power(part)
            x = tl.where(sees[:, None], x, 0.0).to(a.dtype.element_ty)
            inside = (d < K)[:, None] & (f < V)[None, :]
            at = states + (bh * N + n) * K * V + d[:, None] * state_row + f[None, :] * state_column
            state = tl.load(at, mask=inside, other=0.0).to(a.dtype.element_ty)
            found = tl.dot(x, state, found, input_precision=PRECISION)
        if SUMS:
            mine = load_tile(own + batch * own_b + head * own_h, i, T, own_t, f, V).to(tl.float32)
            part_at = parts + (tl.program_id(1) * (tl.num_programs(2) // heads) + batch) * H * T + h * T + i
            of_state = tl.sum(mine * found, 1)
            tl.store(part_at, of_state, mask=i < T)
        for j_0 in range(rows if REVERSE else first, beyond if REVERSE else tl.minimum(rows + M, beyond), M):
            j = j_0 + tl.arange(0, M)
            if REVERSE:
                begin_j = tl.load(starts + j, mask=j < T, other=T)
                seen = (j[None, :] >= i[:, None]) & (begin_j[None, :] <= i[:, None])
            else:
                seen = (j[None, :] <= i[:, None]) & (j[None, :] >= begin[:, None])
            if SUMS:
                seen = seen & (j[None, :] != i[:, None])
            if MODE == 2:
                query, key = (j[None, :], i[:, None]) if REVERSE else (i[:, None], j[None, :])
                score = tl.load(scores + bh * T * C + query * C + (key - first), mask=seen & (query < T), other=0.0)
            else:
                score = tl.zeros((M, M), tl.float32)
                for k in range(0, K, BK):
                    d = k + tl.arange(0, BK)
                    x, y = load_tile(left, i, T, a_t, d, K), load_tile(right, j, T, b_t, d, K)
                    score = tl.dot(x, tl.trans(y), score, input_precision=PRECISION)
                if MODE == 1:
                    sum_j = tl.load(sums + bh * T + j, mask=j < T, other=0.0)
                    gap = sum_j[None, :] - sum_i[:, None] if REVERSE else sum_i[:, None] - sum_j[None, :]
                    score = score * power(tl.where(seen, gap, 0.0))
                score = tl.where(seen, score, 0.0)
            y = load_tile(values, j, T, c_t, f, V)
            found = tl.dot(score.to(c.dtype.element_ty), y, found, input_precision=PRECISION)
        if SUMS:
            mine = load_tile(own + batch * own_b + head * own_h, i, T, own_t, f, V).to(tl.float32)
            of_both = tl.sum(mine * found, 1)
            apart = tl.num_programs(1) * (tl.num_programs(2) // heads) * H * T
            tl.store(part_at + apart, of_both - of_state, mask=i < T)
            itself = tl.zeros((M,), tl.float32)  # j = i
            for k in range(0, K, BK):
                d = k + tl.arange(0, BK)
                x, y = load_tile(left, i, T, a_t, d, K), load_tile(right, i, T, b_t, d, K)
                itself += tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
            found += itself[:, None] * load_tile(values, i, T, c_t, f, V).to(tl.float32)
        total += found
    inside = (i < T)[:, None] & (f < V)[None, :]
    at = out + ((batch * T + i[:, None]) * heads + head) * V + f[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T"])
def score_channels(
    q, k, sums, starts, scores, T, H, GROUP, q_b, q_t, q_h, k_b, k_t, k_h,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, SMALL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the scores of SUB queries and the keys of their chunk up to them, (B, H, T, C)."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    rows = tl.program_id(0) * SUB
    first = rows // C * C
    q += b * q_b + h // GROUP * q_h
    k += b * k_b + h // GROUP * k_h
    sums += bh * T * K
    i, j = rows + tl.arange(0, SUB), first + tl.arange(0, C)
    found = tl.zeros((SUB, C), tl.float32)
    if rows > first:
        for x in range(0, K, BK):
            d = x + tl.arange(0, BK)
            border = tl.load(sums + (rows - 1) * K + d, mask=d < K, other=0.0)[None, :]
            late = load_tile(sums, i, T, K, d, K) - border
            early = border - load_tile(sums, j, T, K, d, K)
            queries = load_tile(q, i, T, q_t, d, K) * power(tl.where((i < T)[:, None], late, 0.0))
            keys = load_tile(k, j, T, k_t, d, K) * power(tl.where((j < rows)[:, None], early, 0.0))
            queries, keys = queries.to(q.dtype.element_ty), keys.to(q.dtype.element_ty)
            found = tl.dot(queries, tl.trans(keys), found, input_precision=PRECISION)
    at = scores + bh * T * C + i[:, None] * C + (j - first)[None, :]
    tl.store(at, found.to(scores.dtype.element_ty), mask=(i < T)[:, None] & (j < rows)[None, :])
    near = tl.zeros((SUB, SUB), tl.float32)
    before = (i[:, None] >= i[None, :]) & (i < T)[:, None]
    for x in range(0, K, SMALL):
        d = x + tl.arange(0, SMALL)
        part = load_tile(sums, i, T, K, d, K)
        gap = tl.where(before[:, :, None], part[:, None, :] - part[None, :, :], 0.0)
        queries, keys = load_tile(q, i, T, q_t, d, K).to(tl.float32), load_tile(k, i, T, k_t, d, K).to(tl.float32)
        near += tl.sum(queries[:, None, :] * keys[None, :, :] * power(gap), 2)
    at = scores + bh * T * C + i[:, None] * C + (i - first)[None, :]
    tl.store(at, near.to(scores.dtype.element_ty), mask=before)


@triton.jit(do_not_specialize=["T"])
def multiply_values(
    grad, v, starts, out, T, H, grad_b, grad_t, grad_h, v_b, v_t, v_h,
    V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write do_i . v_j for all pairs of tokens of a chunk that see each other, (B, H, T, C), and zeros for others."""
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    i = tl.program_id(0) * C + tl.arange(0, C)
    grad += b * grad_b + h * grad_h
    v += b * v_b + h * v_h
    found = tl.zeros((C, C), tl.float32)
    for x in range(0, V, BV):
        e = x + tl.arange(0, BV)
        left, right = load_tile(grad, i, T, grad_t, e, V), load_tile(v, i, T, v_t, e, V)
        found = tl.dot(left, tl.trans(right), found, input_precision=PRECISION)
    begin = tl.load(starts + b * T + i, mask=i < T, other=T)
    seen = (i[None, :] <= i[:, None]) & (i[None, :] >= begin[:, None])
    at = out + bh * T * C + i[:, None] * C + tl.arange(0, C)[None, :]
    tl.store(at, tl.where(seen, found, 0.0).to(out.dtype.element_ty), mask=(i < T)[:, None])


@triton.jit(do_not_specialize=["T", "N"])
def channel_gradients(
    q, k, v, grad, sums, dscores, starts, states, later, dq, dk, apart, inter, T, N, H, GROUP,
    q_b, q_t, q_h, k_b, k_t, k_h, v_b, v_t, v_h, grad_b, grad_t, grad_h,
    K: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SMALL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of SUB rows of q and k, (B, T, H, K), from those of the scores, of the states and of o.

    `apart` (B, H, T, K) gets q dq - k dk without pairs i = j and without the part of dk that comes by the state after the
    chunk; `inter` gets k times that part."""
    bh = tl.program_id(2).to(tl.int64)
    b, h = bh // H, bh % H
    rows, d = tl.program_id(0) * SUB, tl.program_id(1) * BK + tl.arange(0, BK)
    n = rows // C
    first, last = n * C, tl.minimum(n * C + C, T) - 1
    i, j = rows + tl.arange(0, SUB), first + tl.arange(0, C)
    q += b * q_b + h // GROUP * q_h
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h * v_h
    grad += b * grad_b + h * grad_h
    starts += b * T
    sums += bh * T * K
    dscores += bh * T * C
    dtype = q.dtype.element_ty
    part = load_tile(sums, i, T, K, d, K)  # (SUB, BK)
    real = (i < T)[:, None]
    by_state, by_later = tl.zeros((SUB, BK), tl.float32), tl.zeros((SUB, BK), tl.float32)
    for x in range(0, V, BV):
        e = x + tl.arange(0, BV)
        inside = (e < V)[:, None] & (d < K)[None, :]
        at = (bh * N + n) * K * V + d[None, :] * V + e[:, None]  # transposed, (BV, BK)
        state = tl.load(states + at, mask=inside, other=0.0).to(dtype)
        by_state = tl.dot(load_tile(grad, i, T, grad_t, e, V), state, by_state, input_precision=PRECISION)
        state = tl.load(later + at, mask=inside, other=0.0).to(dtype)
        by_later = tl.dot(load_tile(v, i, T, v_t, e, V), state, by_later, input_precision=PRECISION)
    sees = tl.load(starts + i, mask=i < T, other=first) < first
    continues = (i >= tl.load(starts + last)) & (i < T)
    end = tl.load(sums + last * K + d, mask=d < K, other=0.0)[None, :]
    by_state = tl.where(sees[:, None], by_state * power(part), 0.0)
    by_later = tl.where(continues[:, None], by_later * power(tl.where(continues[:, None], end - part, 0.0)), 0.0)
    all_sums = load_tile(sums, j, T, K, d, K)  # (C, BK)
    left, right = tl.zeros((SUB, BK), tl.float32), tl.zeros((SUB, BK), tl.float32)
    if rows > first:  # queries of these rows and earlier keys
        border = tl.load(sums + (rows - 1) * K + d, mask=d < K, other=0.0)[None, :]
        early = (j < rows)[:, None]
        keys = load_tile(k, j, T, k_t, d, K) * power(tl.where(early, border - all_sums, 0.0))
        keys = tl.where(early, keys, 0.0).to(dtype)
        weights = tl.load(dscores + i[:, None] * C + (j - first)[None, :], mask=real & (j < rows)[None, :], other=0.0)
        left = tl.dot(weights.to(dtype), keys, left, input_precision=PRECISION)
        left *= power(tl.where(real, part - border, 0.0))
    if rows + SUB <= last:  # keys of these rows and later queries
        border = tl.load(sums + (rows + SUB - 1) * K + d, mask=d < K, other=0.0)[None, :]
        late = ((j >= rows + SUB) & (j < T))[:, None]
        queries = load_tile(q, j, T, q_t, d, K) * power(tl.where(late, all_sums - border, 0.0))
        queries = tl.where(late, queries, 0.0).to(dtype)
        at = dscores + j[None, :] * C + (i - first)[:, None]
        weights = tl.load(at, mask=((j >= rows + SUB) & (j < T))[None, :], other=0.0)
        right = tl.dot(weights.to(dtype), queries, right, input_precision=PRECISION)
        right *= power(border - part)
    # Pairs inside of these rows, one partner after the other.
    mine_q, mine_k = load_tile(q, i, T, q_t, d, K).to(tl.float32), load_tile(k, i, T, k_t, d, K).to(tl.float32)
    for s in range(0, SUB):
        t = rows + s
        if t < T:
            other = tl.load(sums + t * K + d, mask=d < K, other=0.0)[None, :]
            key = tl.load(k + t * k_t + d, mask=d < K, other=0.0).to(tl.float32)[None, :]
            weight = tl.load(dscores + i * C + (t - first), mask=(i > t) & (i < T), other=0.0).to(tl.float32)
            left += weight[:, None] * key * power(tl.where((i > t)[:, None] & real, part - other, 0.0))
            query = tl.load(q + t * q_t + d, mask=d < K, other=0.0).to(tl.float32)[None, :]
            weight = tl.load(dscores + t * C + (i - first), mask=i < t, other=0.0).to(tl.float32)
            right += weight[:, None] * query * power(tl.where((i < t)[:, None], other - part, 0.0))
    itself = tl.load(dscores + i * C + (i - first), mask=i < T, other=0.0).to(tl.float32)[:, None]
    inside = real & (d < K)[None, :]
    at = bh * T * K + i[:, None] * K + d[None, :]
    tl.store(apart + at, mine_q * (left + by_state) - mine_k * right, mask=inside)
    tl.store(inter + at, mine_k * by_later, mask=inside)
    at = ((b * T + i[:, None]) * H + h) * K + d[None, :]
    tl.store(dq + at, (left + by_state + itself * mine_k).to(dq.dtype.element_ty), mask=inside)
    tl.store(dk + at, (right + by_later + itself * mine_q).to(dk.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["T", "N"])
def decay_gradient(
    apart, inter, products, starts, out, T, N, H,
    K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of log alpha_t (B, T, H, K): everything of its chunk from t on that reaches back before t.

    That is the sum of `apart` over tokens s >= t whose document began before t; where the state after the chunk has anything
    from before t, also the sum of `inter` before t, and `products`."""
    n, bh = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    t, s = n * C + tl.arange(0, C), n * C + tl.arange(0, C)
    begin = tl.load(starts + b * T + s, mask=s < T, other=T)
    continues = t > tl.load(starts + b * T + tl.minimum(n * C + C, T) - 1)
    after = (s[None, :] >= t[:, None]) & (begin[None, :] < t[:, None])
    before = (s[None, :] < t[:, None]) & continues[:, None]
    if K == 1:
        x = tl.load(apart + bh * T + s, mask=s < T, other=0.0)[None, :]
        y = tl.load(inter + bh * T + s, mask=s < T, other=0.0)[None, :]
        found = tl.sum(tl.where(after, x, 0.0) + tl.where(before, y, 0.0), 1)
        found += tl.where(continues, tl.load(products + bh * N + n), 0.0)
        tl.store(out + (b * T + t) * H + h, found, mask=t < T)
    else:
        d = tl.program_id(2) * BK + tl.arange(0, BK)
        x, y = load_tile(apart + bh * T * K, s, T, K, d, K), load_tile(inter + bh * T * K, s, T, K, d, K)
        found = tl.dot(after.to(tl.float32), x, input_precision=PRECISION)
        found = tl.dot(before.to(tl.float32), y, found, input_precision=PRECISION)
        product = tl.load(products + (bh * N + n) * K + d, mask=d < K, other=0.0)
        found += tl.where(continues[:, None], product[None, :], 0.0)
        inside = (t < T)[:, None] & (d < K)[None, :]
        tl.store(out + ((b * T + t[:, None]) * H + h) * K + d[None, :], found, mask=inside)


@triton.jit
def update_states(
    q, k, v, log_decay, state, out, H, GROUP, q_n, q_h, k_n, k_h, v_n, v_h, d_n, d_h,
    K: tl.constexpr, V: tl.constexpr, MODE: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """Update the state (N, H, K, V) of each row in place by one token, and write o (N, H, V)."""
    nh = tl.program_id(0).to(tl.int64)
    n, h = nh // H, nh % H
    e = tl.program_id(1) * BV + tl.arange(0, BV)
    value = tl.load(v + n * v_n + h * v_h + e, mask=e < V, other=0.0).to(tl.float32)
    found = tl.zeros((BV,), tl.float32)
    for x in range(0, K, BK):
        d = x + tl.arange(0, BK)
        key = tl.load(k + n * k_n + h // GROUP * k_h + d, mask=d < K, other=0.0).to(tl.float32)
        query = tl.load(q + n * q_n + h // GROUP * q_h + d, mask=d < K, other=0.0).to(tl.float32)
        inside = (d < K)[:, None] & (e < V)[None, :]
        at = state + nh * K * V + d[:, None] * V + e[None, :]
        new = tl.load(at, mask=inside, other=0.0)
        if MODE == 1:
            new *= tl.exp(tl.load(log_decay + n * d_n + h * d_h).to(tl.float32))
        if MODE == 2:
            new *= tl.exp(tl.load(log_decay + n * d_n + h * d_h + d, mask=d < K, other=0.0).to(tl.float32))[:, None]
        new += key[:, None] * value[None, :]
        tl.store(at, new, mask=inside)
        found += tl.sum(query[:, None] * new, 0)
    tl.store(out + nh * V + e, found, mask=e < V)


# ---- launches ----------------------------------------------------------------------------------------------------------


def block_of(width: int, most: int = 128) -> int:
    """Return how many columns a tile has of a matrix of this width: a power of two from 16 to `most`."""
    whole = max(16, triton.next_power_of_2(width))
    return whole if whole <= most else most if width % most == 0 else max(16, most // 2)


def strides(x: Tensor) -> tuple[int, int, int]:
    """Return the strides of batch, token and head."""
    return x.stride(0), x.stride(1), x.stride(2)


def dense(x: Tensor) -> Tensor:
    """Return x, copied if its last dimension is not contiguous; views of a projection are not copied."""
    return x if x.stride(-1) == 1 else x.contiguous()


class RecurrenceLaunch:
    """One call of the kernels: its tensors and sizes."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        starts: Tensor,
        initial: Tensor | None,
        chunk: int,
    ) -> None:
        self.q, self.k, self.v, self.starts, self.chunk = dense(q), dense(k), dense(v), starts.contiguous(), chunk
        self.initial = None if initial is None else initial.float().contiguous()
        self.b, self.t, self.h, self.width = v.shape
        row = max(x.stride(1) for x in (self.q, self.k, self.v))
        if self.t * row >= 1 << 31:  # the kernels count the numbers of a text in 32 bits
            raise RegardError(
                f"a text of {self.t:,} tokens is too long for this model: give it fewer than {2**31 // row:,}"
            )
        self.keys, self.group = q.shape[3], self.h // q.shape[2]
        self.n = -(-self.t // chunk)
        self.mode = 0 if log_decay is None else log_decay.dim() - 2
        fp32 = v.dtype == torch.float32
        self.most = 64 if fp32 else 128  # columns of a tile: fp32 takes twice the shared memory
        self.rows = min(32 if fp32 else 64, chunk)
        # A product of fp32 numbers is exact; tf32x3 is as exact for a product with zeros and ones.
        self.precision, self.exact = ("ieee" if fp32 else "tf32"), ("tf32x3" if v.is_cuda else "ieee")
        self.sums = starts  # not read without decays
        if log_decay is not None:
            x = dense(log_decay if self.mode == 2 else log_decay[..., None])
            width = x.shape[3]
            dtype = torch.float64 if fp32 else torch.float32
            self.sums = x.new_empty(self.b, self.h, self.t, width, dtype=dtype)
            block = 32 if self.mode == 2 else 1
            accumulate[(self.n, self.b * self.h, -(-width // block))](
                x, self.sums, self.t, self.h, *strides(x), K=width, C=chunk, BK=block
            )

    def states(
        self, x: Tensor, y: Tensor, initial: Tensor | None, reverse: bool, before: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the state before each chunk (B, H, N, K, V), and after the last one (B, H, K, V).

        Reversed: the gradient of the state after each chunk, that of the first state, and the gradients of the log decays of
        whole chunks by way of the states `before` them, (B, H, N, K)."""
        width, keys = self.width, self.keys
        states = self.v.new_empty(self.b, self.h, self.n, keys, width)
        bk, bv = block_of(keys, 64), block_of(width, 64 if self.most == 64 else 128)
        sum_chunks[(-(-keys // bk) * -(-width // bv), self.n, self.b * self.h)](
            *(x, y, self.sums, self.starts, states, self.t, self.n, self.h, self.group, *strides(x), *strides(y)),
            **{"K": keys, "V": width, "REVERSE": reverse, "MODE": self.mode, "C": self.chunk, "M": self.rows},
            **{"BK": bk, "BV": bv, "PRECISION": self.precision, "num_warps": 4, "num_stages": 2},
        )
        final = states.new_empty(self.b, self.h, keys, width, dtype=torch.float32)
        with_products = reverse and self.mode > 0
        products = final.new_empty(self.b, self.h, self.n, keys) if with_products else final
        bv = triton.next_power_of_2(width)
        rows = max(1, 1024 // bv)
        pass_states[(-(-keys // rows), self.b * self.h)](
            *(states, self.sums, self.starts, final if initial is None else initial, final),
            *(states if before is None else before, products, self.t, self.n, self.h),
            **{"K": keys, "V": width, "REVERSE": reverse, "MODE": self.mode, "INITIAL": initial is not None},
            **{"C": self.chunk, "R": rows, "BV": bv, "STAGES": 4, "num_warps": 4},
        )
        return states, final, products

    def mix(
        self,
        a: Tensor,
        b: Tensor,
        c: Tensor,
        states: Tensor,
        scores: Tensor | None,
        reverse: bool,
        own: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the sums (B, T, heads of c, width of c), and the parts of `own` in them, (2, blocks, B, H, T).

        c has the heads of v and a, b those of q, or the other way round; then the states are read transposed."""
        grouped, (keys, width) = c is self.k or c is self.q, (a.shape[3], c.shape[3])
        looped = grouped and self.group > 1  # two sums at once, one of a head and one of the group: narrow tiles
        bk, bv = block_of(keys, self.most), block_of(width, 64 if looped or own is not None else self.most)
        blocks = -(-width // bv)
        out = c.new_empty(self.b, self.t, c.shape[2], width)
        parts = out if own is None else states.new_empty(2, blocks, self.b, self.h, self.t, dtype=torch.float32)
        mine = c if own is None else own
        mix[(-(-self.t // self.rows), blocks, self.b * c.shape[2])](
            *(a, b, c, mine, self.sums, out if scores is None else scores, self.starts, states, out, parts),
            *(self.t, self.n, self.h, *strides(a), *strides(b), *strides(c), *strides(mine)),
            *((1, self.width) if grouped else (self.width, 1)),
            **{"K": keys, "V": width, "REVERSE": reverse, "MODE": self.mode, "GROUP": self.group, "GROUPED": grouped},
            **{
                "SUMS": own is not None,
                "C": self.chunk,
                "M": self.rows,
                "BK": bk,
                "BV": bv,
                "PRECISION": self.precision,
            },
            **{"num_warps": 4, "num_stages": 2},
        )
        return out, parts

    def channel_scores(self) -> Tensor | None:
        """Return the scores of each query in its chunk with one decay a channel, (B, H, T, C); None with other decays."""
        if self.mode != 2:
            return None
        scores = self.v.new_empty(self.b, self.h, self.t, self.chunk)
        score_channels[(-(-self.t // SUB.value), self.b * self.h)](
            *(
                self.q,
                self.k,
                self.sums,
                self.starts,
                scores,
                self.t,
                self.h,
                self.group,
                *strides(self.q),
                *strides(self.k),
            ),
            **{
                "K": self.keys,
                "C": self.chunk,
                "BK": block_of(self.keys, 64),
                "SMALL": 16,
                "PRECISION": self.precision,
            },
            **{"num_warps": 4, "num_stages": 1},
        )
        return scores


def run_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, starts: Tensor, initial: Tensor | None, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return o (B, T, H, V) and the last state (B, H, K, V) fp32."""
    call = RecurrenceLaunch(q, k, v, log_decay, starts, initial, chunk)
    states, final, _ = call.states(call.k, call.v, call.initial, False)
    return call.mix(call.q, call.k, call.v, states, call.channel_scores(), False)[0], final


def run_backward(
    grad: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    starts: Tensor,
    initial: Tensor | None,
    chunk: int,
) -> list[Tensor]:
    """Return the gradients of q, k and v, then those of log_decay and of `initial` where they are given."""
    call, grad = RecurrenceLaunch(q, k, v, log_decay, starts, initial, chunk), dense(grad)
    q, k, v = call.q, call.k, call.v
    states = call.states(k, v, call.initial, False)[0]
    ending = None if grad_final is None else grad_final.float().contiguous()
    later, by_initial, products = call.states(q, grad, ending, True, states)
    dv = call.mix(k, q, grad, later, call.channel_scores(), True)[0]
    if call.mode == 2:
        dq, dk, apart, inter = run_channel_gradients(call, grad, states, later)
    else:
        own = call.mode == 1
        dq, of_q = call.mix(grad, v, k, states, None, False, q if own else None)
        dk, of_k = call.mix(v, grad, q, later, None, True, k if own else None)
    found = [dq, dk, dv]
    if call.mode:
        if call.mode == 1:  # sums over the blocks of K, which are few
            of_q, of_k = of_q.sum((0, 1)), of_k.sum(1)
            apart, inter, products = of_q - of_k[1], of_k[0], products.sum(-1)
        width = call.keys if call.mode == 2 else 1
        by_decay = torch.empty(log_decay.shape, dtype=torch.float32, device=v.device)
        block = 64 if call.mode == 2 else 1
        decay_gradient[(call.n, call.b * call.h, -(-width // block))](
            *(apart, inter, products, call.starts, by_decay, call.t, call.n, call.h),
            **{"K": width, "C": chunk, "BK": block, "PRECISION": call.exact, "num_warps": 4, "num_stages": 1},
        )
        found.append(by_decay)
    return [*found, *([] if initial is None else [by_initial.to(initial.dtype)])]


def run_channel_gradients(call: RecurrenceLaunch, grad: Tensor, states: Tensor, later: Tensor) -> tuple[Tensor, ...]:
    """Return dq and dk, (B, T, G, K), and the two parts of the gradient of log alpha, (B, H, T, K) fp32."""
    q, k, v, (b, t, h, keys, chunk) = call.q, call.k, call.v, (call.b, call.t, call.h, call.keys, call.chunk)
    dscores = v.new_empty(b, h, t, chunk)
    multiply_values[(call.n, b * h)](
        *(grad, v, call.starts, dscores, t, h, *strides(grad), *strides(v)),
        **{"V": call.width, "C": chunk, "BV": block_of(call.width, 64), "PRECISION": call.precision, "num_warps": 4},
    )
    dq, dk = q.new_empty(b, t, h, keys), k.new_empty(b, t, h, keys)
    apart, inter = (v.new_empty(b, h, t, keys, dtype=torch.float32) for _ in range(2))
    block = block_of(keys, 64)
    channel_gradients[(-(-t // SUB.value), -(-keys // block), b * h)](
        *(
            q,
            k,
            v,
            grad,
            call.sums,
            dscores,
            call.starts,
            states,
            later,
            dq,
            dk,
            apart,
            inter,
            t,
            call.n,
            h,
            call.group,
        ),
        *(*strides(q), *strides(k), *strides(v), *strides(grad)),
        **{"K": keys, "V": call.width, "C": chunk, "BK": block, "BV": block_of(call.width, 64), "SMALL": 16},
        **{"PRECISION": call.precision, "num_warps": 4, "num_stages": 1},
    )
    if call.group > 1:
        dq, dk = (x.view(b, t, -1, call.group, keys).sum(3) for x in (dq, dk))
    return dq, dk, apart, inter


def run_step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor) -> Tensor:
    """Return o (N, H, V) fp32 of one more token of each row, and update the state (N, H, K, V) in place."""
    n, h, keys, width = state.shape
    q, k, v = dense(q), dense(k), dense(v)
    mode = 0 if log_decay is None else log_decay.dim() - 1
    decay = v if log_decay is None else dense(log_decay) if mode == 2 else log_decay
    out = state.new_empty(n, h, width)
    block = 16
    update_states[(n * h, -(-width // block))](
        *(q, k, v, decay, state, out, h, h // q.shape[1]),
        *(s for x in (q, k, v, decay) for s in x.stride()[:2]),
        **{
            "K": keys,
            "V": width,
            "MODE": mode,
            "BK": min(128, triton.next_power_of_2(keys)),
            "BV": block,
            "num_warps": 4,
        },
    )
    return out
