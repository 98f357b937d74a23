"""The Triton side of kernels/linear_activation.py: an activation, maybe one half of its input gating the other, and its backward.

A program has tiles of ROWS rows and WIDTH of their F columns, in fp32. Gated, the input's rows are F gates and F
values in turns, GATES of each: column c of the result has its gate at c + c // GATES * GATES, and its value GATES further.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.residual_norm_triton import read


@triton.jit
def value_and_slope(z, NAME: tl.constexpr):
    """f(z) and f'(z). ReLU's slope at f(z) is the one at z."""
    if NAME == "relu":
        y = tl.maximum(z, 0.0)
        slope = tl.where(z <= 0.0, 0.0, 1.0)
    elif NAME == "gelu":
        share = 0.5 + 0.5 * tl.erf(z * 0.7071067811865476)
        y = z * share
        slope = share + z * (0.3989422804014327 * tl.exp(-0.5 * z * z))
    elif NAME == "gelu-tanh":  # (1 + tanh(u)) / 2 = sigmoid(2u)
        square = z * z
        share = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * z * (1.0 + 0.044715 * square)))
        y = z * share
        slope = share + y * (1.0 - share) * (1.5957691216057308 + 0.21406444881780076 * square)
    else:  # silu
        share = 1.0 / (1.0 + tl.exp(-z))
        y = z * share
        slope = share + y * (1.0 - share)
    return y, slope


@triton.jit(do_not_specialize=["rows"])
def forward(
    kept, result, rows,
    F: tl.constexpr, NAME: tl.constexpr, GATES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(F, WIDTH)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(0) % blocks * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = (row < rows) & (c < F)
    if GATES:
        at = kept + row * 2 * F + c + c // GATES * GATES
        y, _ = value_and_slope(read(at, inside), NAME)
        y *= read(at + GATES, inside)
    else:
        y, _ = value_and_slope(read(kept + row * F + c, inside), NAME)
    tl.store(result + row * F + c, y.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward(
    grad, kept, by_product, parts, rows,
    F: tl.constexpr, NAME: tl.constexpr, GATES: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Few programs walk over all rows, so that the sums for the bias stay in registers: (ROWS, WIDTH) until the end, since
    adding rows up is the dear part."""
    N: tl.constexpr = 2 * F if GATES else F
    c = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH))[None, :]
    n = c + c // GATES * GATES if GATES else c
    first = tl.zeros((ROWS, WIDTH), tl.float32)  # sums of the only gradient, or of the gate's
    second = tl.zeros((ROWS, WIDTH), tl.float32)  # of the value's
    for start in tl.range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (c < F)
        g = read(grad + row * F + c, inside)  # 0 beyond rows and F, and so is all that is added up
        y, slope = value_and_slope(read(kept + row * N + n, inside), NAME)
        at = by_product + row * N + n
        if GATES:
            value = read(kept + row * N + n + GATES, inside)
            y *= g
            tl.store(at + GATES, y.to(by_product.dtype.element_ty), mask=inside)
            if BIAS:
                second += y
            g *= value
        g *= slope
        tl.store(at, g.to(by_product.dtype.element_ty), mask=inside)
        if BIAS:
            first += g
    if BIAS:
        at = parts + tl.program_id(1) * N + n
        tl.store(at, tl.sum(first, 0, keep_dims=True), mask=c < F)
        if GATES:
            tl.store(at + GATES, tl.sum(second, 0, keep_dims=True), mask=c < F)
