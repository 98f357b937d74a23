"""The Triton side of kernels/toeplitz_attention.py: attention with a bias made of a table of distances, forward and backward.

A tile has one score for each of N queries and N keys; query i sees the keys first[i]..last[i]. Scores are in units of ln 2
(scale, table and log-sum-exp come multiplied by log2 e), since exp2 is what the hardware has. `table` points at a head's
distance 0 and has room on both sides, so that tiles may reach over the edge.

FIRE's bias is f(x), x = table[distance] * rate[query], f piecewise linear. Over a tile x hardly varies, so f is one line
there, number `pieces[tile][0]`, plus a bend at each of the few knots up to `pieces[tile][1]`.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def lookup(table, d, DIRECT: tl.constexpr):
    """table[d] for a tile of distances.

    DIRECT reads past Triton's pipeliner, which would copy every single number through shared memory: the few that a tile
    needs lie in the first-level cache. (The interpreter knows no assembly.)
    """
    at = table + d
    if DIRECT:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [at.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.load(at)


@triton.jit
def bend(scores, x, piece, lines, knots, K: tl.constexpr):
    """scores + FIRE's f at x: the line of the tile's first piece, and a bend at each knot that lies within the tile."""
    low, high = tl.load(piece), tl.load(piece + 1)
    scores += x * tl.load(lines + low) + tl.load(lines + K + low)
    for p in range(low, high):
        scores += tl.load(lines + 2 * K + p) * tl.maximum(x - tl.load(knots + p), 0.0)
    return scores


@triton.jit
def rows_of(base, n, T, row, D: tl.constexpr):
    """Rows n of a (T, D) matrix, zeros beyond its end."""
    return tl.load(base + n[:, None] * row + tl.arange(0, D)[None, :], mask=(n < T)[:, None], other=0.0)


@triton.jit
def forward(
    q, k, v, table, first, last, rate, pieces, lines, knots, out, lse, T, H, GROUP, WIDTH, STRIDE, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row,
    D: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the last queries see the most: the longest work begins first
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    i = block * N + tl.arange(0, N)
    low = tl.load(first + b * T + i, mask=i < T, other=T)
    high = tl.load(last + b * T + i, mask=i < T, other=-1)
    queries = rows_of(q + b * q_b + h * q_h, i, T, q_row, D)
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
        keys = rows_of(k, j, T, k_row, D)
        scores = tl.dot(queries, tl.trans(keys)) * scale  # (N, N)
        bias = lookup(table, j[None, :] - i[:, None], DIRECT)
        if FIRE:
            piece = pieces + 2 * (block * tl.num_programs(0) + t)
            scores = bend(scores, bias * rates[:, None], piece, lines + 3 * h * K, knots, K)
        else:
            scores += bias
        if (t * N < all_from) | (t * N + N - 1 > all_to):
            scores = tl.where((j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None]), scores, -float("inf"))
        m_new = tl.maximum(m, tl.max(scores, 1))
        p = tl.exp2(scores - m_new[:, None])
        fade = tl.exp2(m - m_new)
        values = rows_of(v, j, T, v_row, D)
        total = total * fade + tl.sum(p, 1)
        acc = tl.dot(p.to(values.dtype), values, acc * fade[:, None])
        m = m_new
    some = tl.where(total > 0, total, 1.0)  # a query that sees nothing gets zeros
    at = out + bh * T * D + i[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, (acc / some[:, None]).to(out.dtype.element_ty), mask=(i < T)[:, None])
    tl.store(lse + bh * T + i, tl.where(total > 0, m + tl.log2(some), float("inf")), mask=i < T)  # inf: weights of zero


@triton.jit
def agreement(out, grad, delta, T, H, g_b, g_h, g_row, D: tl.constexpr, N: tl.constexpr):
    """delta_i = out_i . grad_i, which the softmax's derivative subtracts."""
    bh = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * N + tl.arange(0, N)
    o = rows_of(out + bh * T * D, i, T, D, D).to(tl.float32)
    g = rows_of(grad + bh // H * g_b + bh % H * g_h, i, T, g_row, D).to(tl.float32)
    tl.store(delta + bh * T + i, tl.sum(o * g, 1), mask=i < T)


@triton.jit
def key_tiles(
    by_key, by_value, keys, values, q, grad, table, first, last, rate, pieces, lines, knots, lse, delta, j, block, t, end, T,
    scale, q_row, g_row,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Add what tiles t..end of M queries of one head say to the gradients of N keys and values."""
    for tile in range(t, end):
        i = tile * M + tl.arange(0, M)
        queries = rows_of(q, i, T, q_row, D)
        grads = rows_of(grad, i, T, g_row, D)
        z = tl.load(lse + i, mask=i < T, other=float("inf"))
        d = tl.load(delta + i, mask=i < T, other=0.0)
        scores = tl.dot(keys, tl.trans(queries)) * scale  # (N, M)
        bias = lookup(table, j[:, None] - i[None, :], DIRECT)
        if FIRE:
            rates = tl.load(rate + i, mask=i < T, other=0.0)
            piece = pieces + 2 * (tile * M // N * tl.num_programs(0) + block)
            scores = bend(scores, bias * rates[None, :], piece, lines, knots, K)
        else:
            scores += bias
        p = tl.exp2(scores - z[None, :])
        if MASKED:
            low = tl.load(first + i, mask=i < T, other=0)
            high = tl.load(last + i, mask=i < T, other=-1)
            p = tl.where((j[:, None] >= low[None, :]) & (j[:, None] <= high[None, :]), p, 0.0)
        by_value = tl.dot(p.to(grads.dtype), grads, by_value)
        ds = p * (tl.dot(values, tl.trans(grads)) - d[None, :])
        by_key = tl.dot(ds.to(queries.dtype), queries, by_key)
    return by_key, by_value


@triton.jit
def backward_keys(
    q, k, v, table, first, last, rate, pieces, lines, knots, grad, lse, delta, dk, dv,
    T, H, GROUP, WIDTH, STRIDE, BACK, AHEAD, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr,
    TRIANGLE: tl.constexpr,
):  # fmt: skip
    """One tile of N keys, and M at a time the queries (of all heads that share the keys) that may see it.

    TRIANGLE: the mask is the plain causal one, so queries after the tile see all of it (or nothing, if they are padding).
    """
    block, bg = tl.program_id(0), tl.program_id(1).to(tl.int64)
    groups = H // GROUP
    b, g = bg // groups, bg % groups
    j = block * N + tl.arange(0, N)
    keys = rows_of(k + b * k_b + g * k_h, j, T, k_row, D)
    values = rows_of(v + b * v_b + g * v_h, j, T, v_row, D)
    first += b * T
    last += b * T
    by_key = tl.zeros((N, D), tl.float32)
    by_value = tl.zeros((N, D), tl.float32)
    start = tl.maximum(block * N - AHEAD, 0) // M
    end = tl.cdiv(tl.minimum(block * N + N + BACK, T), M)
    whole = tl.minimum((block + 1) * (N // M), end) if TRIANGLE else end
    for h in range(g * GROUP, g * GROUP + GROUP):
        bh = b * H + h
        at, by = q + b * q_b + h * q_h, grad + b * g_b + h * g_h
        bias, line = table + h * STRIDE + WIDTH // 2, lines + 3 * h * K
        z, d = lse + bh * T, delta + bh * T
        by_key, by_value = key_tiles(
            by_key, by_value, keys, values, at, by, bias, first, last, rate, pieces, line, knots, z, d,
            j, block, start, whole, T, scale, q_row, g_row, D, N, M, DIRECT, FIRE, K, True,
        )  # fmt: skip
        if TRIANGLE:
            by_key, by_value = key_tiles(
                by_key, by_value, keys, values, at, by, bias, first, last, rate, pieces, line, knots, z, d,
                j, block, whole, end, T, scale, q_row, g_row, D, N, M, DIRECT, FIRE, K, False,
            )  # fmt: skip
    at = bg * T * D + j[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(dk + at, (by_key * scale * LN2).to(dk.dtype.element_ty), mask=(j < T)[:, None])
    tl.store(dv + at, by_value.to(dv.dtype.element_ty), mask=(j < T)[:, None])


@triton.jit
def fire_sums(
    plain, times_x, one, two, current, ds, x, psi, slope, piece, lines, knots, by_piece, by_knot,
    N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """What FIRE needs of one tile: sum(ds) and sum(ds x) of its first piece (kept while the piece stays the same), the same
    beyond each knot within the tile; and sum(ds f') times psi and times its slope, for the query's rate and for c.
    """
    begin = tl.load(piece)
    if begin != current:
        tl.atomic_add(by_piece + current, tl.sum(plain), sem="relaxed")
        tl.atomic_add(by_piece + K + current, tl.sum(times_x), sem="relaxed")
        plain = tl.zeros((N,), tl.float32)
        times_x = tl.zeros((N,), tl.float32)
        current = begin
    plain += tl.sum(ds, 1)
    times_x += tl.sum(ds * x, 1)
    by_x = ds * (tl.load(lines + begin) * LN2)  # f' is the slope of the piece ...
    for n in range(begin, tl.load(piece + 1)):
        beyond = tl.where(x > tl.load(knots + n), ds, 0.0)
        tl.atomic_add(by_knot + n, tl.sum(beyond), sem="relaxed")
        tl.atomic_add(by_knot + K + n, tl.sum(beyond * x), sem="relaxed")
        by_x += beyond * (tl.load(lines + 2 * K + n) * LN2)  # ... and changes at each knot
    one += tl.sum(by_x * psi, 1)
    two += tl.sum(by_x * slope, 1)
    return plain, times_x, one, two, current


@triton.jit
def backward_queries(
    q, k, v, table, first, last, rate, pieces, lines, knots, grad, lse, delta, dq,
    curve, by_theta, by_piece, by_knot, by_rate,
    T, H, GROUP, WIDTH, STRIDE, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    D: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr, FIRE: tl.constexpr, K: tl.constexpr, THETA: tl.constexpr,
):  # fmt: skip
    """One tile of N queries and all keys they may see; and the sums that a learned bias needs of the scores' gradient:
    THETA: its product with the bias and with `curve`; FIRE: see kernels/fire_attention.py."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1).to(tl.int64)
    b, h = bh // H, bh % H
    i = block * N + tl.arange(0, N)
    low = tl.load(first + b * T + i, mask=i < T, other=T)
    high = tl.load(last + b * T + i, mask=i < T, other=-1)
    queries = rows_of(q + b * q_b + h * q_h, i, T, q_row, D)
    grads = rows_of(grad + b * g_b + h * g_h, i, T, g_row, D)
    z = tl.load(lse + bh * T + i, mask=i < T, other=float("inf"))
    d = tl.load(delta + bh * T + i, mask=i < T, other=0.0)
    k += b * k_b + h // GROUP * k_h
    v += b * v_b + h // GROUP * v_h
    table += h * STRIDE + WIDTH // 2
    curve += h * STRIDE + WIDTH // 2
    acc = tl.zeros((N, D), tl.float32)
    if THETA:
        one = tl.zeros((N, N), tl.float32)  # added up along rows in the end
        two = tl.zeros((N, N), tl.float32)
    if FIRE:
        rates = tl.load(rate + i, mask=i < T, other=0.0)
        lines += 3 * h * K
        by_piece += 2 * h * K
        by_knot += 2 * h * K
        plain = tl.zeros((N,), tl.float32)
        times_x = tl.zeros((N,), tl.float32)
        one = tl.zeros((N,), tl.float32)
        two = tl.zeros((N,), tl.float32)
        current = 0
    all_from, all_to = tl.max(low), tl.min(high)
    for t in range(tl.min(tl.where(high >= low, low, T)) // N, tl.cdiv(tl.max(high) + 1, N)):
        j = t * N + tl.arange(0, N)
        keys = rows_of(k, j, T, k_row, D)
        values = rows_of(v, j, T, v_row, D)
        scores = tl.dot(queries, tl.trans(keys)) * scale  # (N, N)
        bias = lookup(table, j[None, :] - i[:, None], DIRECT)
        if FIRE:
            x = bias * rates[:, None]
            piece = pieces + 2 * (block * tl.num_programs(0) + t)
            scores = bend(scores, x, piece, lines, knots, K)
        else:
            scores += bias
        p = tl.exp2(scores - z[:, None])
        if (t * N < all_from) | (t * N + N - 1 > all_to):
            p = tl.where((j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None]), p, 0.0)
        ds = p * (tl.dot(grads, tl.trans(values)) - d[:, None])
        acc = tl.dot(ds.to(keys.dtype), keys, acc)
        if THETA:
            one += ds * bias
            two += ds * lookup(curve, j[None, :] - i[:, None], DIRECT)
        if FIRE:
            slope = lookup(curve, j[None, :] - i[:, None], DIRECT)
            plain, times_x, one, two, current = fire_sums(
                plain, times_x, one, two, current, ds, x, bias, slope, piece, lines, knots, by_piece, by_knot, N, K
            )
    if THETA:
        tl.atomic_add(by_theta + 2 * h, tl.sum(one), sem="relaxed")
        tl.atomic_add(by_theta + 2 * h + 1, tl.sum(two), sem="relaxed")
    if FIRE:
        tl.atomic_add(by_piece + current, tl.sum(plain), sem="relaxed")
        tl.atomic_add(by_piece + K + current, tl.sum(times_x), sem="relaxed")
        tl.atomic_add(by_rate + i, one, mask=i < T, sem="relaxed")
        tl.atomic_add(by_theta, tl.sum(two * rates), sem="relaxed")
    at = dq + bh * T * D + i[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(at, (acc * scale * LN2).to(dq.dtype.element_ty), mask=(i < T)[:, None])


@triton.jit
def backward_table(
    q, k, v, table, first, last, grad, lse, delta, dtable, T, H, GROUP, WIDTH, STRIDE, LEAST, SHARE, scale,
    q_b, q_h, q_row, k_b, k_h, k_row, v_b, v_h, v_row, g_b, g_h, g_row,
    D: tl.constexpr, N: tl.constexpr, DIRECT: tl.constexpr,
):  # fmt: skip
    """The gradient of the table at the distances of one diagonal of tiles: all its tiles have the same distances, so they
    are added up as they are, and only their sum is added up along its own diagonals.
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
        scores = tl.dot(rows_of(q, i, T, q_row, D), tl.trans(rows_of(k, j, T, k_row, D))) * scale + bias
        seen = (j[None, :] >= low[:, None]) & (j[None, :] <= high[:, None])
        p = tl.where(seen, tl.exp2(scores - z[:, None]), 0.0)
        acc += p * (tl.dot(rows_of(grad, i, T, g_row, D), tl.trans(rows_of(v, j, T, v_row, D))) - d[:, None])
    # Row r is turned left by r: a diagonal becomes a column; what was turned around the edge belongs N further left.
    r, c = n[:, None], n[None, :]
    turned = tl.gather(acc, (r + c) % N, 1)
    around = r + c >= N
    dtable += h * STRIDE + WIDTH // 2 + offset * N + n
    tl.atomic_add(dtable, tl.sum(tl.where(around, 0.0, turned), 0), sem="relaxed")
    tl.atomic_add(dtable - N, tl.sum(tl.where(around, turned, 0.0), 0), sem="relaxed")
