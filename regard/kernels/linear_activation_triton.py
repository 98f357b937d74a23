"""Triton kernels of kernels/linear_activation.py: an activation, plain or gated, forward and backward.

A program handles tiles of ROWS rows and WIDTH of the F columns, in fp32. Gated, a row of the input has F gates and F
values, interleaved in blocks of GATES: column c of the result has its gate at c + c // GATES * GATES, and its value
GATES further.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

from regard.kernels.residual_norm_triton import load_fp32


@triton.jit
def value_and_slope(z, NAME: tl.constexpr):
    """Return f(z) and f'(z). For ReLU, f'(f(z)) = f'(z), so z may be the result itself."""
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
    saved, result, rows,
    F: tl.constexpr, NAME: tl.constexpr, GATES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    blocks = tl.cdiv(F, WIDTH)
    row = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = (tl.program_id(0) % blocks * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = (row < rows) & (c < F)
    if GATES:
        at = saved + row * 2 * F + c + c // GATES * GATES
        y, _ = value_and_slope(load_fp32(at, inside), NAME)
        y *= load_fp32(at + GATES, inside)
    else:
        y, _ = value_and_slope(load_fp32(saved + row * F + c, inside), NAME)
    tl.store(result + row * F + c, y.to(result.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows"])
def backward(
    grad, saved, grad_linear, partial_sums, rows,
    F: tl.constexpr, NAME: tl.constexpr, GATES: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Write the gradient of x W^T + b, and the sums over rows that the gradient of the bias is made of.

    A few programs loop over all rows, so that these sums stay in registers, as (ROWS, WIDTH) until the end: the
    reduction over rows is the expensive part.
    """
    N: tl.constexpr = 2 * F if GATES else F
    c = (tl.program_id(0) * WIDTH + tl.arange(0, WIDTH))[None, :]
    n = c + c // GATES * GATES if GATES else c
    gate_sums = tl.zeros((ROWS, WIDTH), tl.float32)  # sums of the gradient; gated, of the gate's gradient
    value_sums = tl.zeros((ROWS, WIDTH), tl.float32)  # sums of the value's gradient
    for start in tl.range(tl.program_id(1) * ROWS, rows, tl.num_programs(1) * ROWS, num_stages=STAGES):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (row < rows) & (c < F)
        g = load_fp32(grad + row * F + c, inside)  # 0 beyond rows and F, so the sums are not changed there
        y, slope = value_and_slope(load_fp32(saved + row * N + n, inside), NAME)
        at = grad_linear + row * N + n
        if GATES:
            value = load_fp32(saved + row * N + n + GATES, inside)
            y *= g
            tl.store(at + GATES, y.to(grad_linear.dtype.element_ty), mask=inside)
            if BIAS:
                value_sums += y
            g *= value
        g *= slope
        tl.store(at, g.to(grad_linear.dtype.element_ty), mask=inside)
        if BIAS:
            gate_sums += g
    if BIAS:
        at = partial_sums + tl.program_id(1) * N + n
        tl.store(at, tl.sum(gate_sums, 0, keep_dims=True), mask=c < F)
        if GATES:
            tl.store(at + GATES, tl.sum(value_sums, 0, keep_dims=True), mask=c < F)
