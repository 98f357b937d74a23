"""Triton kernels of kernels/expert_step.py: the gates of a row, an activation times gates, and a sum over experts."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.linear_activation_triton import value_and_slope
from regard.kernels.residual_norm_triton import load_fp32

DEPTH, WIDTH = 512, 256  # numbers of a row that are read at a time


@triton.jit
def top_k_gates(
    x, router, gates,
    E: tl.constexpr, EXPERTS: tl.constexpr, C: tl.constexpr, K: tl.constexpr, RENORMALIZE: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Write the gates of one row; EXPERTS is E rounded up to a power of two."""
    n = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, EXPERTS)
    logits = tl.zeros((EXPERTS,), tl.float32)
    for start in range(0, C, DEPTH):
        c = start + tl.arange(0, DEPTH)
        row = load_fp32(x + n * C + c, c < C)
        matrix = load_fp32(router + e[:, None] * C + c[None, :], (e[:, None] < E) & (c[None, :] < C))
        logits += tl.sum(matrix * row[None, :], 1)
    logits = tl.where(e < E, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, 0))
    left = logits
    chosen = tl.zeros((EXPERTS,), tl.int32)
    for _ in tl.static_range(K):
        hit = e == tl.argmax(left, 0)
        chosen = tl.where(hit, 1, chosen)
        left = tl.where(hit, float("-inf"), left)
    found = tl.where(chosen > 0, powers, 0.0)
    total = tl.sum(found, 0) if RENORMALIZE else tl.sum(powers, 0)
    tl.store(gates + n * E + e, found / total, mask=e < E)


@triton.jit
def weighted_activation(
    hidden, gates, result,
    E: tl.constexpr, F: tl.constexpr, NAME: tl.constexpr, GATES: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Write WIDTH of the E * F numbers of one row; gates and values alternate in blocks of GATES, if there are any."""
    n = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = c < E * F
    if GATES:
        at = hidden + n * 2 * E * F + c + c // GATES * GATES
        y, _ = value_and_slope(load_fp32(at, inside), NAME)
        y *= load_fp32(at + GATES, inside)
    else:
        y, _ = value_and_slope(load_fp32(hidden + n * E * F + c, inside), NAME)
    y *= load_fp32(gates + n * E + c // F, inside)
    tl.store(result + n * E * F + c, y.to(result.dtype.element_ty), mask=inside)


@triton.jit
def sum_experts(each, result, size, E: tl.constexpr, WIDTH: tl.constexpr):
    """Write WIDTH sums of `size`, over E numbers each."""
    c = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), tl.float32)
    for e in tl.static_range(E):
        total += load_fp32(each + e * size + c, c < size)
    tl.store(result + c, total.to(result.dtype.element_ty), mask=c < size)


def run_sum(each: Tensor) -> Tensor:
    """Return the sum of (E, N, C) over E."""
    experts, *shape = each.shape
    result = each.new_empty(shape)
    grid = (triton.cdiv(result.numel(), WIDTH),)
    sum_experts[grid](each, result, result.numel(), E=experts, WIDTH=WIDTH)
    return result


def run_gates(x: Tensor, router: Tensor, k: int, renormalize: bool) -> Tensor:
    """Return the gates (N, E) of x (N, C)."""
    experts, c = router.shape
    gates = torch.empty(len(x), experts, device=x.device, dtype=torch.float32)
    top_k_gates[(len(x),)](
        *(x, router, gates),
        E=experts, EXPERTS=triton.next_power_of_2(experts), C=c, K=k, RENORMALIZE=renormalize, DEPTH=DEPTH,
    )  # fmt: skip
    return gates


def run_activation(hidden: Tensor, gates: Tensor, f: int, activation: str, block: int) -> Tensor:
    """Return the weighted activation (N, E * F)."""
    rows, experts = gates.shape
    result = hidden.new_empty(rows, experts * f)
    grid = (rows, triton.cdiv(experts * f, WIDTH))
    weighted_activation[grid](hidden, gates, result, E=experts, F=f, NAME=activation, GATES=block, WIDTH=WIDTH)
    return result
