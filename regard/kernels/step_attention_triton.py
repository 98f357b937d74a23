"""Triton kernels of kernels/step_attention.py: attention of one new token per row, with an online softmax.

A single query (ONE) does not fill a tensor core: it is multiplied key by key, and every lane of a block keeps an online
softmax of its own until the end. Several queries (heads that share keys, hypotheses of one sentence) are one small
matrix. Scores are to base 2, since exp2 is the instruction that GPUs have.

Memory latency is hidden by prefetching: a block of keys and values is loaded while the previous one is computed, and
the first block, which earlier steps have written, before the queries are available.
"""

# mypy: ignore-errors
from __future__ import annotations

import math

import triton
import triton.language as tl

from regard.kernels.step_linear import launch_dependents, wait_for_previous

LOG2E: tl.constexpr = tl.constexpr(1 / math.log(2))
LOWEST: tl.constexpr = tl.constexpr(-1e30)  # below every score; with -inf, -inf - -inf would be NaN


@triton.jit
def load_head(at, d, inside, cos, sin, ROTARY: tl.constexpr):
    """Load a head; ROTARY rotates its pairs (2m, 2m+1): x_d cos -+ x_(its partner) sin."""
    x = tl.load(at + d, mask=inside, other=0.0)
    if ROTARY:
        partner = tl.load(at + (d ^ 1), mask=inside, other=0.0).to(tl.float32)
        x = (x.to(tl.float32) * cos + tl.where(d % 2 == 0, -partner, partner) * sin).to(at.dtype.element_ty)
    return x


@triton.jit
def scores_of(q, k, scale, ONE: tl.constexpr):
    """Return the scores: (BLOCK,) for one query, (Q, BLOCK) for several."""
    if ONE:
        scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1) * scale
    else:
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
    return scores


@triton.jit
def add_bias_and_mask(scores, bias, at, index, real, seen, BIAS: tl.constexpr, ONE: tl.constexpr):
    """Return scores + bias[at + index], -inf for keys that are not seen.

    `at` and `real` (Q,) belong to the queries, `index` and `seen` (BLOCK,) to the keys.
    """
    if BIAS:
        if ONE:
            scores += tl.load(bias + at + index, mask=real & seen, other=0.0) * LOG2E
        else:
            there = bias + at[:, None] + index[None, :]
            scores += tl.load(there, mask=real[:, None] & seen[None, :], other=0.0) * LOG2E
    return mask_scores(scores, seen, ONE)


@triton.jit
def mask_scores(scores, seen, ONE: tl.constexpr):
    """Return the scores, -inf for keys that are not seen (BLOCK,)."""
    return tl.where(seen if ONE else seen[None, :], scores, -float("inf"))


@triton.jit
def update_softmax(scores, v, m, total, acc, ONE: tl.constexpr):
    """Add a block of keys to an online softmax; return its new state.

    The state is the largest score so far, the sum of weights relative to it, and the sum of weighted values. With one
    query, every lane of the block has a state of its own.
    """
    if ONE:
        new = tl.maximum(m, scores)
        p, rescale = tl.exp2(scores - new), tl.exp2(m - new)
        total = total * rescale + p
        acc = acc * rescale[:, None] + p[:, None] * v.to(tl.float32)
    else:
        new = tl.maximum(m, tl.max(scores, 1))
        p, rescale = tl.exp2(scores - new[:, None]), tl.exp2(m - new)
        total = total * rescale + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new, total, acc


@triton.jit
def finish_softmax(m, total, acc, ONE: tl.constexpr):
    """Return the weighted mean (Q, D) of the values and the log-sum-exp (Q,); zeros and -inf where no key was seen."""
    if ONE:
        top = tl.max(m, 0, keep_dims=True)
        share = tl.exp2(m - top)
        total = tl.sum(total * share, 0, keep_dims=True)
        acc = tl.sum(acc * share[:, None], 0, keep_dims=True)
        m = top
    denominator = tl.where(total > 0, total, 1.0)
    return acc / denominator[:, None], tl.where(total > 0, m + tl.log2(denominator), -float("inf"))


@triton.jit
def load_kv(keys, values, offset, seen, d, inside):
    """Load keys and values (BLOCK, D) at `offset` (BLOCK,), zeros where they are not seen."""
    at, real = offset[:, None] + d, seen[:, None] & inside
    return tl.load(keys + at, mask=real, other=0.0), tl.load(values + at, mask=real, other=0.0)


@triton.jit
def owner_rows(owner, owner_row, n, j, L, OWNED: tl.constexpr):
    """Return the rows of the cache that hold columns j of row n (beam reordering)."""
    return tl.load(owner + n * owner_row + j, mask=j < L, other=0).to(tl.int64) if OWNED else n + j * 0


@triton.jit
def ring_place(j, RING: tl.constexpr):
    """Return the place of column j in a cache, which is a ring buffer of RING places unless that is 0."""
    return j % RING if RING else j


@triton.jit
def self_kernel(
    qkv, keys, values, position, owner, cos_table, sin_table, bias, out, lse,
    qkv_row, row, group, column, owner_row, bias_row, L, scale, back,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, OWNED: tl.constexpr, ROTARY: tl.constexpr, BIAS: tl.constexpr,
    RING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with the query heads of one row that share a key/value head, over one of SPLITS parts of its past.

    The first split also writes the new key and value into the cache.
    """
    launch_dependents(PDL)
    n, g, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    ONE: tl.constexpr = Q_BLOCK == 1
    Q: tl.constexpr = H // G
    at = tl.load(position + n)
    d, i = tl.arange(0, D_BLOCK)[None, :], tl.arange(0, Q_BLOCK)
    inside, lane, real = d < D, tl.arange(0, BLOCK), i < Q
    keys += g.to(tl.int64) * group
    values += g.to(tl.int64) * group

    low = tl.maximum(at - back, 0) if RING else 0
    share = tl.cdiv(tl.cdiv(at - low, BLOCK), SPLITS) * BLOCK if SPLITS > 1 else at - low
    begin = low + split * share if SPLITS > 1 else low
    end = tl.minimum(begin + share, at)
    j = begin + lane
    offset = owner_rows(owner, owner_row, n, j, L, OWNED) * row + ring_place(j, RING) * column
    k, v = load_kv(keys, values, offset, j < end, d, inside)
    which = owner_rows(owner, owner_row, n, j + BLOCK, L, OWNED)
    cos, sin = 1.0, 0.0
    if ROTARY:
        cos = tl.load(cos_table + at * (D // 2) + d // 2, mask=inside, other=0.0)
        sin = tl.load(sin_table + at * (D // 2) + d // 2, mask=inside, other=0.0)
    wait_for_previous(PDL)

    qkv += n * qkv_row
    first = g * (Q + 2)  # by key/value head: its query heads, its key, its value
    q = load_head(qkv + (first + i)[:, None] * D, d, inside & real[:, None], cos, sin, ROTARY)  # (Q, D)
    new_k = load_head(qkv + (first + Q) * D, d, inside, cos, sin, ROTARY).to(keys.dtype.element_ty)  # (1, D)
    new_v = tl.load(qkv + (first + Q + 1) * D + d, mask=inside, other=0.0).to(values.dtype.element_ty)
    q = q.to(keys.dtype.element_ty)
    if split == 0:
        to = n * row + ring_place(at, RING) * column + d
        tl.store(keys + to, new_k, mask=inside)
        tl.store(values + to, new_v, mask=inside)

    # The first split starts with the new token itself, which is not in the cache yet.
    own = tl.sum(q.to(tl.float32) * new_k.to(tl.float32), 1) * scale  # (Q,)
    bias_at = (g * Q + i) * bias_row
    if BIAS:
        own += tl.load(bias + bias_at, mask=real, other=0.0) * LOG2E
    mine = ((lane if ONE else i * 0) == 0) & (split == 0)
    m = tl.where(mine, own, LOWEST)
    total = tl.where(mine, 1.0, 0.0)
    acc = tl.where(mine[:, None], new_v.to(tl.float32), 0.0)

    for start in range(begin, end, BLOCK):
        j = start + lane
        now_k, now_v, following = k, v, j + BLOCK
        k, v = load_kv(keys, values, which * row + ring_place(following, RING) * column, following < end, d, inside)
        which = owner_rows(owner, owner_row, n, following + BLOCK, L, OWNED)
        scores = add_bias_and_mask(scores_of(q, now_k, scale, ONE), bias, bias_at, at - j, real, j < end, BIAS, ONE)
        m, total, acc = update_softmax(scores, now_v, m, total, acc, ONE)
    result, z = finish_softmax(m, total, acc, ONE)
    to = (n * H + g * Q + i) * SPLITS + split
    tl.store(out + to[:, None] * D + d, result.to(out.dtype.element_ty), mask=inside & real[:, None])
    if SPLITS > 1:
        tl.store(lse + to, z, mask=real)


@triton.jit
def combine_kernel(
    part, lse, out,
    D: tl.constexpr, D_BLOCK: tl.constexpr, SPLITS: tl.constexpr, S_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one head by their log-sum-exps."""
    launch_dependents(PDL)
    nh = tl.program_id(0).to(tl.int64)
    s, d = tl.arange(0, S_BLOCK), tl.arange(0, D_BLOCK)
    wait_for_previous(PDL)
    z = tl.load(lse + nh * SPLITS + s, mask=s < SPLITS, other=-float("inf"))
    at = part + (nh * SPLITS + s)[:, None] * D + d[None, :]
    x = tl.load(at, mask=(s < SPLITS)[:, None] & (d < D)[None, :], other=0.0)
    share = tl.exp2(z - tl.max(z, 0))
    result = tl.sum(x * share[:, None], 0) / tl.sum(share, 0)
    tl.store(out + nh * D + d, result.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def cross_kernel(
    q, keys, values, length, out, q_row, row, group, column, EACH, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, D_BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Attend with Q_BLOCK queries, of the EACH hypotheses of one source, that share a key/value head."""
    launch_dependents(PDL)
    b, g = tl.program_id(0).to(tl.int64), tl.program_id(1)
    ONE: tl.constexpr = Q_BLOCK == 1
    Q: tl.constexpr = H // G
    end = tl.load(length + b)
    d, i = tl.arange(0, D_BLOCK)[None, :], tl.program_id(2) * Q_BLOCK + tl.arange(0, Q_BLOCK)
    inside, lane, real = d < D, tl.arange(0, BLOCK), i < EACH * Q
    keys += b * row + g.to(tl.int64) * group
    values += b * row + g.to(tl.int64) * group
    k, v = load_kv(keys, values, lane * column, lane < end, d, inside)
    n, h = b * EACH + i // Q, g * Q + i % Q
    wait_for_previous(PDL)

    queries = tl.load(q + (n * q_row + h * D)[:, None] + d, mask=inside & real[:, None], other=0.0)
    queries = queries.to(keys.dtype.element_ty)
    zeros = (lane if ONE else i) * 0.0
    m, total = zeros + LOWEST, zeros
    acc = zeros[:, None] + tl.zeros((1, D_BLOCK), tl.float32)
    for start in range(0, end, BLOCK):
        j = start + lane
        now_k, now_v, following = k, v, j + BLOCK
        k, v = load_kv(keys, values, following * column, following < end, d, inside)
        scores = mask_scores(scores_of(queries, now_k, scale, ONE), j < end, ONE)
        m, total, acc = update_softmax(scores, now_v, m, total, acc, ONE)
    result, _ = finish_softmax(m, total, acc, ONE)
    tl.store(out + ((n * H + h) * D)[:, None] + d, result.to(out.dtype.element_ty), mask=inside & real[:, None])
