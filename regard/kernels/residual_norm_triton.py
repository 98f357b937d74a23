"""The Triton side of kernels/residual_norm.py: a residual sum with dropout and the norm of it, forward and backward.

A program has whole rows, ROWS of them, in registers: WIDTH numbers each, the first C of which are real. Everything is worked
in fp32. What dropout keeps is worked out again in the backward, from the seed, the row and the column.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.short_attention_triton import kept


@triton.jit
def read(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def forward(
    x, y, weight, bias, seed, total, normal, stats, rows, eps, cut, boost,
    C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RMS: tl.constexpr, SHIFT: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (c < C)
    at = row * C + c
    z = read(x + at, inside)
    added = read(y + at, inside)
    w = read(weight + c, c < C)
    if DROPOUT:
        added *= kept(seed, row, c, cut, boost)
    rounded = (z + added).to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    z = rounded.to(tl.float32)  # the norm is that of what is kept, as the backward reads it
    if not RMS:
        mean = tl.sum(z, 1, keep_dims=True) / C
        tl.store(stats + rows + row, mean, mask=row < rows)
        z = tl.where(c < C, z - mean, 0.0)
    rate = 1.0 / tl.sqrt(tl.sum(z * z, 1, keep_dims=True) / C + eps)
    tl.store(stats + row, rate, mask=row < rows)
    z = z * rate * w
    if SHIFT:
        z += read(bias + c, c < C)
    tl.store(normal + at, z.to(normal.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward(
    by_total, by_normal, total, stats, weight, seed, dx, dy, parts, rows, cut, boost,
    C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RMS: tl.constexpr, SHIFT: tl.constexpr, TOTAL: tl.constexpr,
    APART: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TOTAL: the sum itself has a gradient. APART: y's gradient is not x's.

    Few programs walk over all rows, so that the sums for weight and bias stay in registers: (ROWS, WIDTH) until the end,
    since adding rows up is the dear part.
    """
    c = tl.arange(0, WIDTH)[None, :]
    w = read(weight + c, c < C)
    by_weight = tl.zeros((ROWS, WIDTH), tl.float32)
    by_bias = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (c < C)
        at = row * C + c
        g = read(by_normal + at, inside)
        z = read(total + at, inside)
        rate = read(stats + row, row < rows)
        if TOTAL:
            rest = read(by_total + at, inside)
        if not RMS:
            z -= read(stats + rows + row, row < rows)
        z *= rate  # beyond C it is no matter: g is 0 there
        by_weight += g * z
        if SHIFT:
            by_bias += g
        g *= w
        d = g - z * (tl.sum(g * z, 1, keep_dims=True) / C)
        if not RMS:
            d -= tl.sum(g, 1, keep_dims=True) / C
        d *= rate
        if TOTAL:
            d += rest
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        if DROPOUT:
            d *= kept(seed, row, c, cut, boost)
        if APART:
            tl.store(dy + at, d.to(dy.dtype.element_ty), mask=inside)
    at = parts + tl.program_id(0) * C * (1 + SHIFT) + c
    tl.store(at, tl.sum(by_weight, 0, keep_dims=True), mask=c < C)
    if SHIFT:
        tl.store(at + C, tl.sum(by_bias, 0, keep_dims=True), mask=c < C)
