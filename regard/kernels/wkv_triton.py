"""Triton kernels of kernels/wkv.py: the weighted mean of RWKV-4, one channel per lane, token after token.

Tokens are read in groups of STEPS and results are written after a group, so that the loads of a group are under way at once.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

EMPTY: tl.constexpr = tl.constexpr(-1e30)
LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def exp(x):
    return tl.exp2(x * LOG2E)


@triton.jit
def load_token(at, t, T, W, valid):
    """Load one number for each channel at token t in fp32, 0 beyond the end."""
    return tl.load(at + t * W, mask=tl.where(t < T, valid, False), other=0.0).to(tl.float32)


@triton.jit
def forward(
    k, v, w, u, starts, initial, count, y, final, logs, T, W,
    BLOCK: tl.constexpr, STEPS: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    d, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    valid = d < W
    decay = tl.load(w + d, mask=valid, other=1.0)
    bonus = tl.load(u + d, mask=valid, other=0.0)
    first = row * T * W + d
    k, v, y, logs, starts = k + first, v + first, y + first, logs + first, starts + row * T
    state = row * 3 * W + d
    a = tl.load(initial + state, mask=valid, other=0.0)
    b = tl.load(initial + state + W, mask=valid, other=0.0)
    p = tl.where(b == 0.0, EMPTY, tl.load(initial + state + 2 * W, mask=valid, other=0.0))
    limit = T
    if COUNT:
        limit = tl.load(count + row)
    for s in range(0, T, STEPS):
        outputs, sums = (), ()
        for i in tl.static_range(STEPS):
            t = s + i
            key, value = load_token(k, t, T, W, valid), load_token(v, t, T, W, valid)
            begins = tl.load(starts + t, mask=t < T, other=-1) == t
            a, b, p = tl.where(begins, 0.0, a), tl.where(begins, 0.0, b), tl.where(begins, EMPTY, p)
            q = tl.maximum(p, bonus + key)
            old, new = exp(p - q), exp(bonus + key - q)
            denominator = old * b + new
            outputs, sums = outputs + ((old * a + new * value) / denominator,), sums + (q + LN2 * tl.log2(denominator),)
            top = tl.maximum(p - decay, key)
            old, new = exp(p - decay - top), exp(key - top)
            real = t < limit
            a = tl.where(real, old * a + new * value, a)
            b = tl.where(real, old * b + new, b)
            p = tl.where(real, top, p)
        for i in tl.static_range(STEPS):
            t = s + i
            inside = tl.where(t < T, valid, False)
            tl.store(y + t * W, outputs[i].to(y.dtype.element_ty), mask=inside)
            tl.store(logs + t * W, sums[i], mask=inside)
    tl.store(final + state, a, mask=valid)
    tl.store(final + state + W, b, mask=valid)
    tl.store(final + state + 2 * W, tl.where(b == 0.0, 0.0, p), mask=valid)


@triton.jit
def backward(
    k, v, w, u, starts, initial, y, logs, grad, dk, dv, dw, du, T, W, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """Walk forwards for the gradient of w, then backwards for the others."""
    d, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(1).to(tl.int64)
    valid = d < W
    decay = tl.load(w + d, mask=valid, other=1.0)
    bonus = tl.load(u + d, mask=valid, other=0.0)
    first = row * T * W + d
    k, v, y, logs, starts = k + first, v + first, y + first, logs + first, starts + row * T
    grad, dk, dv = grad + first, dk + first, dv + first
    state = row * 3 * W + d
    a = tl.load(initial + state, mask=valid, other=0.0)
    b = tl.load(initial + state + W, mask=valid, other=0.0)
    p = tl.where(b == 0.0, EMPTY, tl.load(initial + state + 2 * W, mask=valid, other=0.0))
    slope_a, slope_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    sum_w, sum_u = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for s in range(0, T, STEPS):
        for i in tl.static_range(STEPS):
            t = s + i
            key, value = load_token(k, t, T, W, valid), load_token(v, t, T, W, valid)
            out, log, dy = (
                load_token(y, t, T, W, valid),
                load_token(logs, t, T, W, valid),
                load_token(grad, t, T, W, valid),
            )
            begins = tl.load(starts + t, mask=t < T, other=-1) == t
            keep = tl.where(begins, 0.0, 1.0)
            a, b, slope_a, slope_b = keep * a, keep * b, keep * slope_a, keep * slope_b
            p = tl.where(begins, EMPTY, p)
            sum_w += tl.where(t < T, dy * exp(tl.minimum(p - log, 80.0)) * (slope_a - out * slope_b), 0.0)
            top = tl.maximum(p - decay, key)
            old, new = exp(p - decay - top), exp(key - top)
            slope_a, slope_b = old * (slope_a - a), old * (slope_b - b)
            a, b, p = old * a + new * value, old * b + new, top
    tl.store(dw + row * W + d, sum_w, mask=valid)
    grad_a, grad_b = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    p = tl.full((BLOCK,), EMPTY, tl.float32)
    groups = tl.cdiv(T, STEPS)
    for back in range(0, groups):
        s = (groups - 1 - back) * STEPS
        keys, values = (), ()
        for j in tl.static_range(STEPS):
            t = s + STEPS - 1 - j
            key, value = load_token(k, t, T, W, valid), load_token(v, t, T, W, valid)
            out, log, dy = (
                load_token(y, t, T, W, valid),
                load_token(logs, t, T, W, valid),
                load_token(grad, t, T, W, valid),
            )
            direct = exp(bonus + key - log) * dy
            direct = tl.where(t < T, direct, 0.0)
            own = direct * (value - out)
            sum_u += own
            scale = exp(p + key)
            keys, values = keys + (own + scale * (grad_a * value + grad_b),), values + (direct + scale * grad_a,)
            top = tl.maximum(p - decay, -log)
            old, new = exp(p - decay - top), exp(-log - top)
            keep = tl.where(tl.load(starts + t, mask=t < T, other=-1) == t, 0.0, 1.0)
            inside = t < T
            grad_a = tl.where(inside, keep * (old * grad_a + new * dy), grad_a)
            grad_b = tl.where(inside, keep * (old * grad_b - new * dy * out), grad_b)
            p = tl.where(inside, tl.where(keep == 0.0, EMPTY, top), p)
        for j in tl.static_range(STEPS):
            t = s + STEPS - 1 - j
            inside = tl.where(t < T, valid, False)
            tl.store(dk + t * W, keys[j].to(dk.dtype.element_ty), mask=inside)
            tl.store(dv + t * W, values[j].to(dv.dtype.element_ty), mask=inside)
    tl.store(du + row * W + d, sum_u, mask=valid)
