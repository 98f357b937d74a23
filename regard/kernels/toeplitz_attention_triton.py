"""Triton kernels of kernels/toeplitz_attention.py: attention with a Toeplitz bias, forward and backward (FlashAttention-2).

A tile has the scores of N queries and N keys; query i sees the keys first[i]..last[i]. Scores, table and log-sum-exps
are to base 2 (multiplied by log2 e), since exp2 is the instruction that GPUs have. `table` points at distance 0 of a
head and is padded at both ends, so that tiles may read beyond the largest distance.

FIRE's bias is f(x), x = table[distance] * rate[query], with f piecewise linear. x hardly varies within a tile, so there
f is the line of piece `pieces[tile][0]`, plus a change of slope at each of the few knots up to `pieces[tile][1]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def lookup(table, d, DIRECT: tl.constexpr):
    """Return table[d] for a tile of distances.

    DIRECT loads by inline assembly, since Triton's pipeliner would copy every single number through shared memory,
    while the few that a tile needs are in the L1 cache. (Triton's interpreter has no inline assembly.)
    """
    at = table + d
    if DIRECT:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.load(at)


@triton.jit
def add_fire_bias(scores, x, piece, lines, knots, K: tl.constexpr):
    """Return scores + FIRE's f(x): the line of the tile's first piece, and a change of slope at each knot in the tile."""
    low, high = tl.load(piece), tl.load(piece + 1)
    scores += x * tl.load(lines + low) + tl.load(lines + K + low)
    for p in range(low, high):
        scores += tl.load(lines + 2 * K + p) * tl.maximum(x - tl.load(knots + p), 0.0)
    return scores


@triton.jit
def load_rows(base, n, T, row, D: tl.constexpr):
    """Load rows n of a (T, D) matrix, zeros beyond its end."""
    return tl.load(base + n[:, None] * row + tl.arange(0, D)[None, :], mask=(n < T)[:, None], other=0.0)


@triton.jit
def forward(
    q, k, v, table, first, last, rate, pieces, lines, knots, out, lse, T, H, GROUP, WIDTH, STRIDE, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row,
    D: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see the most keys: longest work first
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    i = block * N + tl.arange(0, N)
    low = tl.load(first + b * T + i, mask=i < T, other=T)
    high = tl.load(last + b * T + i, mask=i < T, other=-1)
    queries = load_rows(q + b * q_b + h * q_h, i, T, q_row, D)
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h // GROUP * v_h
    table += h * STRIDE + WIDTH // 2
    start, end = tl.min(tl.where(high >= low, low, T)) // N, tl.cdiv(tl.max(high) + 1, N)
    all_from, all_to = tl.max(low), tl.min(high)  # keys that every query of the tile sees
    if FIRE:
        rates = tl.load(rate + i, mask=i < T, other=0.0)
    acc = tl.zeros((N, D), tl.float32)
    m = tl.full((N,), -1e30, tl.float32)
    total = tl.zeros((N,), tl.float32)
    for t in range(start, end):
        j = t * N + tl.arange(0, N)
        keys = load_rows(k, j, T, k_row, D)
        scores = tl.dot(queries, tl.trans(keys)) * scale  # (N, N)
        bias = lookup(table, j[None, :] - i[:, None], DIRECT)
        if FIRE:
            piece = pieces + 2 * (block * tl.num_programs(0) + t)
            scores = add_fire_bias(scores, bias * rates[:, None], piece, lines + 3 * h * K, knots, K)
        else:
            scores += bias
        if (t * N < all_from) | (t * N + N - 1 > all_to):
            scores = tl.where((j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None]), scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        rescale = tl.exp2(m - m_new)  # online softmax
        values = load_rows(v, j, T, v_row, D)
        total = total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * rescale[:, None])
        m = m_new
    denominator = tl.where(total > 0, total, 1.0)  # a query that sees no key gets zeros
    at = out + bh * T * D + i[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, (acc / denominator[:, None]).to(out.dtype.element_ty), mask=(i < T)[:, None])
    z = tl.where(total > 0, m + tl.log2(denominator), float("inf"))  # inf makes the weights 0 in the backward pass
    tl.store(lse + bh * T + i, z, mask=i < T)


@triton.jit
def compute_delta(out, grad, delta, T, H, g_b, g_h, g_row, D: tl.constexpr, N: tl.constexpr):
    """Write delta_i = out_i . grad_i, which the derivative of the softmax subtracts."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * N + tl.arange(0, N)
    o = load_rows(out + bh * T * D, i, T, D, D).to(tl.float32)
    g = load_rows(grad + bh // H * g_b + bh % H * g_h, i, T, g_row, D).to(tl.float32)
    tl.store(delta + bh * T + i, tl.sum(o * g, 1), mask=i < T)


@triton.jit
def key_tiles(
    grad_k, grad_v, keys, values, q, grad, table, first, last, rate, pieces, lines, knots, lse, delta, j, block, t, end, T,
    scale, q_row, g_row,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add the contributions of tiles t..end, of M queries of one head each, to the gradients of N keys and values."""
    for tile in range(t, end):
        i = tile * M + tl.arange(0, M)
        queries = load_rows(q, i, T, q_row, D)
        grads = load_rows(grad, i, T, g_row, D)
        z = tl.load(lse + i, mask=i < T, other=float("inf"))
        d = tl.load(delta + i, mask=i < T, other=0.0)
        scores = tl.dot(keys, tl.trans(queries)) * scale  # (N, M)
        bias = lookup(table, j[:, None] - i[None, :], DIRECT)
        if FIRE:
            rates = tl.load(rate + i, mask=i < T, other=0.0)
            piece = pieces + 2 * (tile * M // N * tl.num_programs(0) + block)
            scores = add_fire_bias(scores, bias * rates[None, :], piece, lines, knots, K)
        else:
            scores += bias
        p = tl.exp2(scores - z[None, :])
        if MASKED:
            low = tl.load(first + i, mask=i < T, other=0)
            high = tl.load(last + i, mask=i < T, other=-1)
            p = tl.where((j[:, None] >= low[None, :]) & (j[:, None] <= high[None, :]), p, 0.0)
        grad_v = tl.dot(p.to(grads.dtype), grads, grad_v)
        ds = p * (tl.dot(values, tl.trans(grads)) - d[None, :])
        grad_k = tl.dot(ds.to(queries.dtype), queries, grad_k)
    return grad_k, grad_v


@triton.jit
def backward_keys(
    q, k, v, table, first, last, rate, pieces, lines, knots, grad, lse, delta, dk, dv,
    T, H, GROUP, WIDTH, STRIDE, BACK, AHEAD, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr,
    TRIANGLE: tl.constexpr,
):  # fmt: skip
    """Write the gradients of one tile of N keys and values: a loop over the queries that see it, of all heads that share it.

    The queries come M at a time. TRIANGLE: the mask is the plain causal one, so queries after the tile see all of it
    (or nothing, if they are padding), and need no masking.
    """
    block, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = H // GROUP
    b, g = bg // groups, bg % groups
    j = block * N + tl.arange(0, N)
    keys = load_rows(k + b * k_b + g * k_h, j, T, k_row, D)
    values = load_rows(v + b * v_b + g * v_h, j, T, v_row, D)
    first += b * T
    last += b * T
    grad_k = tl.zeros((N, D), tl.float32)
    grad_v = tl.zeros((N, D), tl.float32)
    start = tl.maximum(block * N - AHEAD, 0) // M
    end = tl.cdiv(tl.minimum(block * N + N + BACK, T), M)
    whole = tl.minimum((block + 1) * (N // M), end) if TRIANGLE else end
    for h in range(g * GROUP, g * GROUP + GROUP):
        bh = b * H + h
        q_head, grad_head = q + b * q_b + h * q_h, grad + b * g_b + h * g_h
        bias, line = table + h * STRIDE + WIDTH // 2, lines + 3 * h * K
        z, d = lse + bh * T, delta + bh * T
        grad_k, grad_v = key_tiles(
            grad_k, grad_v, keys, values, q_head, grad_head, bias, first, last, rate, pieces, line, knots, z, d,
            j, block, start, whole, T, scale, q_row, g_row, D, N, M, DIRECT, FIRE, K, True,
        )  # fmt: skip
        if TRIANGLE:
            grad_k, grad_v = key_tiles(
                grad_k, grad_v, keys, values, q_head, grad_head, bias, first, last, rate, pieces, line, knots, z, d,
                j, block, whole, end, T, scale, q_row, g_row, D, N, M, DIRECT, FIRE, K, False,
            )  # fmt: skip
    at = bg * T * D + j[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk + at, (grad_k * scale * LN2).to(dk.dtype.element_ty), mask=(j < T)[:, None])
    tl.store(dv + at, grad_v.to(dv.dtype.element_ty), mask=(j < T)[:, None])


@triton.jit
def fire_sums(
    sum_ds, sum_ds_x, sum_psi, sum_slope, current, ds, x, psi, slope, piece, lines, knots, piece_sums, knot_sums,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Add up what the gradients of FIRE's parameters need of one tile.

    These are sum(ds) and sum(ds x) of its first piece (kept in registers while the piece stays the same) and beyond
    each knot within the tile; and sum(ds f'(x) psi) and sum(ds f'(x) dpsi/dc), for the query's rate and for c.
    """
    begin = tl.load(piece)
    if begin != current:
        tl.atomic_add(piece_sums + current, tl.sum(sum_ds), sem="relaxed")
        tl.atomic_add(piece_sums + K + current, tl.sum(sum_ds_x), sem="relaxed")
        sum_ds = tl.zeros((N,), tl.float32)
        sum_ds_x = tl.zeros((N,), tl.float32)
        current = begin
    sum_ds += tl.sum(ds, 1)
    sum_ds_x += tl.sum(ds * x, 1)
    grad_x = ds * (tl.load(lines + begin) * LN2)  # f'(x) is the slope of the first piece,
    for n in range(begin, tl.load(piece + 1)):
        beyond = tl.where(x > tl.load(knots + n), ds, 0.0)
        tl.atomic_add(knot_sums + n, tl.sum(beyond), sem="relaxed")
        tl.atomic_add(knot_sums + K + n, tl.sum(beyond * x), sem="relaxed")
        grad_x += beyond * (tl.load(lines + 2 * K + n) * LN2)  # and changes at each knot
    sum_psi += tl.sum(grad_x * psi, 1)
    sum_slope += tl.sum(grad_x * slope, 1)
    return sum_ds, sum_ds_x, sum_psi, sum_slope, current


@triton.jit
def backward_queries(
    q, k, v, table, first, last, rate, pieces, lines, knots, grad, lse, delta, dq,
    curve, grad_theta, piece_sums, knot_sums, grad_rate,
    T, H, GROUP, WIDTH, STRIDE, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    D: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr, THETA: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one tile of N queries, and the sums over the gradient of the scores that a learned bias needs.

    THETA: its products with the bias and with `curve`. FIRE: see `fire_sums`.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    i = block * N + tl.arange(0, N)
    low = tl.load(first + b * T + i, mask=i < T, other=T)
    high = tl.load(last + b * T + i, mask=i < T, other=-1)
    queries = load_rows(q + b * q_b + h * q_h, i, T, q_row, D)
    grads = load_rows(grad + b * g_b + h * g_h, i, T, g_row, D)
    z = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
    d = tl.load(delta + bh * T + i, mask=i < T, other=0.0)
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h // GROUP * v_h
    table += h * STRIDE + WIDTH // 2
    curve += h * STRIDE + WIDTH // 2
    acc = tl.zeros((N, D), tl.float32)
    if THETA:
        sum_psi = tl.zeros((N, N), tl.float32)  # reduced at the end
        sum_slope = tl.zeros((N, N), tl.float32)
    if FIRE:
        rates = tl.load(rate + i, mask=i < T, other=0.0)
        lines += 3 * h * K
        piece_sums += 2 * h * K
        knot_sums += 2 * h * K
        sum_ds = tl.zeros((N,), tl.float32)
        sum_ds_x = tl.zeros((N,), tl.float32)
        sum_psi = tl.zeros((N,), tl.float32)
        sum_slope = tl.zeros((N,), tl.float32)
        current = 0
    all_from, all_to = tl.max(low), tl.min(high)
    for t in range(tl.min(tl.where(high >= low, low, T)) // N, tl.cdiv(tl.max(high) + 1, N)):
        j = t * N + tl.arange(0, N)
        keys = load_rows(k, j, T, k_row, D)
        values = load_rows(v, j, T, v_row, D)
        scores = tl.dot(queries, tl.trans(keys)) * scale  # (N, N)
        bias = lookup(table, j[None, :] - i[:, None], DIRECT)
        if FIRE:
            x = bias * rates[:, None]
            piece = pieces + 2 * (block * tl.num_programs(0) + t)
            scores = add_fire_bias(scores, x, piece, lines, knots, K)
        else:
            scores += bias
        p = tl.exp2(scores - z[:, None])
        if (t * N < all_from) | (t * N + N - 1 > all_to):
            p = tl.where((j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None]), p, 0.0)
        ds = p * (tl.dot(grads, tl.trans(values)) - d[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc)
        if THETA:
            sum_psi += ds * bias
            sum_slope += ds * lookup(curve, j[None, :] - i[:, None], DIRECT)
        if FIRE:
            slope = lookup(curve, j[None, :] - i[:, None], DIRECT)
            sum_ds, sum_ds_x, sum_psi, sum_slope, current = fire_sums(
                sum_ds, sum_ds_x, sum_psi, sum_slope, current, ds, x, bias, slope, piece, lines, knots,
                piece_sums, knot_sums, N, K,
            )  # fmt: skip
    if THETA:
        tl.atomic_add(grad_theta + 2 * h, tl.sum(sum_psi), sem="relaxed")
        tl.atomic_add(grad_theta + 2 * h + 1, tl.sum(sum_slope), sem="relaxed")
    if FIRE:
        tl.atomic_add(piece_sums + current, tl.sum(sum_ds), sem="relaxed")
        tl.atomic_add(piece_sums + K + current, tl.sum(sum_ds_x), sem="relaxed")
        tl.atomic_add(grad_rate + i, sum_psi, mask=i < T, sem="relaxed")
        tl.atomic_add(grad_theta, tl.sum(sum_slope * rates), sem="relaxed")
    at = dq + bh * T * D + i[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, (acc * scale * LN2).to(dq.dtype.element_ty), mask=(i < T)[:, None])


@triton.jit
def backward_table(
    q, k, v, table, first, last, grad, lse, delta, dtable, T, H, GROUP, WIDTH, STRIDE, LEAST, SHARE, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    D: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the table at the distances of one diagonal of tiles.

    All its tiles have the same distances, so their score gradients are added up tile-wise, and only the sum is reduced
    along its diagonals.
    """
    offset, bh = tl.program_id(0) + LEAST, tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    n = tl.arange(0, N)
    q += b * q_b + h * q_h
    grad += b * g_b + h * g_h
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h // GROUP * v_h
    distance = offset * N + n[None, :] - n[:, None]
    bias = lookup(table + h * STRIDE + WIDTH // 2, distance, DIRECT)
    acc = tl.zeros((N, N), tl.float32)
    start = tl.maximum(-offset, 0) + tl.program_id(2) * SHARE
    for t in range(start, tl.minimum(start + SHARE, tl.cdiv(T, N) - tl.maximum(offset, 0))):
        i, j = t * N + n, (t + offset) * N + n
        low = tl.load(first + b * T + i, mask=i < T, other=0)
        high = tl.load(last + b * T + i, mask=i < T, other=-1)
        z = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
        d = tl.load(delta + bh * T + i, mask=i < T, other=0.0)
        scores = tl.dot(load_rows(q, i, T, q_row, D), tl.trans(load_rows(k, j, T, k_row, D))) * scale + bias
        visible = (j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None])
        p = tl.where(visible, tl.exp2(scores - z[:, None]), 0.0)
        acc += p * (tl.dot(load_rows(grad, i, T, g_row, D), tl.trans(load_rows(v, j, T, v_row, D))) - d[:, None])
    # Row r is rotated left by r, so that a diagonal becomes a column; what wrapped around belongs N distances further left.
    r, c = n[:, None], n[None, :]
    rotated = tl.gather(acc, (r + c) % N, 1)
    wrapped = r + c >= N
    dtable += h * STRIDE + WIDTH // 2 + offset * N + n
    tl.atomic_add(dtable, tl.sum(tl.where(wrapped, 0.0, rotated), 0), sem="relaxed")
    tl.atomic_add(dtable - N, tl.sum(tl.where(wrapped, rotated, 0.0), 0), sem="relaxed")
