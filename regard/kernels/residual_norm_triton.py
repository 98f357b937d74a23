"""Triton kernels of kernels/residual_norm.py: a residual sum with dropout and its norm, forward and backward.

A program holds ROWS whole rows in registers: WIDTH numbers each (a power of two), of which the first C are real. All
arithmetic is in fp32. The backward kernel recomputes the dropout mask from the seed, the row and the column.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.short_attention_triton import dropout_scale


@triton.jit
def load_fp32(at, inside):
    """Load as fp32, zeros outside."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def forward(
    x, y, weight, bias, seed, total, normal, stats, rows, eps, threshold, factor,
    C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RMS: tl.constexpr, SHIFT: tl.constexpr, DROPOUT: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    inside = (row < rows) & (c < C)
    at = row * C + c
    z = load_fp32(x + at, inside)
    added = load_fp32(y + at, inside)
    w = load_fp32(weight + c, c < C)
    if DROPOUT:
        added *= dropout_scale(seed, row, c, threshold, factor)
    rounded = (z + added).to(total.dtype.element_ty)
    tl.store(total + at, rounded, mask=inside)
    z = rounded.to(tl.float32)  # the norm of the rounded sum, which is what the backward kernel reads
    if not RMS:
        mean = tl.sum(z, 1, keep_dims=True) / C
        tl.store(stats + rows + row, mean, mask=row < rows)
        z = tl.where(c < C, z - mean, 0.0)
    rate = 1.0 / tl.sqrt(tl.sum(z * z, 1, keep_dims=True) / C + eps)
    tl.store(stats + row, rate, mask=row < rows)
    z = z * rate * w
    if SHIFT:
        z += load_fp32(bias + c, c < C)
    tl.store(normal + at, z.to(normal.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward(
    grad_total, grad_normal, total, stats, weight, seed, dx, dy, partial_sums, rows, threshold, factor,
    C: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, RMS: tl.constexpr, SHIFT: tl.constexpr, TOTAL: tl.constexpr,
    APART: tl.constexpr, DROPOUT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of x and y, and the sums over rows that the gradients of weight and bias are made of.

    TOTAL: the sum itself has a gradient. APART: the gradient of y is not that of x. A few programs loop over all rows,
    so that the sums stay in registers, as (ROWS, WIDTH) until the end: the reduction over rows is the expensive part.
    """
    c = tl.arange(0, WIDTH)[None, :]
    w = load_fp32(weight + c, c < C)
    grad_weight = tl.zeros((ROWS, WIDTH), tl.float32)
    grad_bias = tl.zeros((ROWS, WIDTH), tl.float32)
    for start in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (c < C)
        at = row * C + c
        g = load_fp32(grad_normal + at, inside)
        z = load_fp32(total + at, inside)
        rate = load_fp32(stats + row, row < rows)
        if TOTAL:
            rest = load_fp32(grad_total + at, inside)
        if not RMS:
            z -= load_fp32(stats + rows + row, row < rows)
        z *= rate  # beyond C it has no effect: g is 0 there
        grad_weight += g * z
        if SHIFT:
            grad_bias += g
        g *= w
        d = g - z * (tl.sum(g * z, 1, keep_dims=True) / C)
        if not RMS:
            d -= tl.sum(g, 1, keep_dims=True) / C
        d *= rate
        if TOTAL:
            d += rest
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        if DROPOUT:
            d *= dropout_scale(seed, row, c, threshold, factor)
        if APART:
            tl.store(dy + at, d.to(dy.dtype.element_ty), mask=inside)
    at = partial_sums + tl.program_id(0) * C * (1 + SHIFT) + c
    tl.store(at, tl.sum(grad_weight, 0, keep_dims=True), mask=c < C)
    if SHIFT:
        tl.store(at + C, tl.sum(grad_bias, 0, keep_dims=True), mask=c < C)
