"""A matrix times one row, and the normalisation of many: what a decoding step does between its attentions.

With one row, a projection is nothing but reading its weights, so `one_row` is built to read: each program takes a few
rows of the matrix at once, and does all the small things around the product (the normalisation before it, bias,
activation, gate and residual after it) itself. With more rows, tensor cores do better.

Kernels start early: while the one before still works, the next is on the machine and reads what was there before the
step, its weights above all; then it waits until the one before has ended. That one has waited in its turn, so by then
all of the past is done. So before it has waited, a kernel writes nothing, and reads nothing of the step's own, only
weights and what earlier steps left behind: those are over when a step begins, since its first kernel is launched
plainly.

Everything is worked in fp32 and rounded once, at the end.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from regard.kernels.linear_activation import ACTIVATIONS
from regard.kernels.weight_layout import gate_block, split_gates

MACHINE = 132  # multiprocessors of the least GPU worth filling

# What a program of `one_row` reads at once
VECTORS = 8  # of 16 bytes, by one thread
BYTES = 16384  # of the matrix, unless a row has more
PROGRAMS = 4 * MACHINE  # at least, before a program takes a second row


@dataclass(frozen=True)
class Norm:
    """The numbers of an nn.LayerNorm ("layer") or an nn.RMSNorm ("rms")."""

    kind: str
    weight: Tensor  # (C,)
    bias: Tensor | None
    eps: float


def runs_kernels(x: Tensor) -> bool:
    """Whether Triton works on this tensor: on a GPU, or anywhere in its interpreter."""
    return x.is_cuda or bool(triton.knobs.runtime.interpret)


def launch(x: Tensor) -> dict[str, Any]:
    """How a kernel on this tensor is launched: early, where the GPU can do that."""
    early = x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}


@triton.jit
def launch_dependents(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_wait()


def norm_of(norm: nn.Module) -> Norm:
    """Return the numbers of a norm of torch."""
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    kind = "rms" if isinstance(norm, nn.RMSNorm) else "layer"
    return Norm(kind, norm.weight.detach(), getattr(norm, "bias", None), norm.eps)  # type: ignore[arg-type]


# ---- a matrix times one row --------------------------------------------------------------------------------------------


def project(
    x: Tensor,
    linear: nn.Linear,
    *,
    norm: nn.Module | None = None,
    activation: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return activation(linear(norm(x))) + residual for one row x (1, C), in one kernel."""
    bias = None if linear.bias is None else linear.bias.detach()
    inner = None if norm is None else norm_of(norm)
    return linear_one_row(
        x, linear.weight.detach(), bias, norm=inner, activation=activation, gated=gated, residual=residual
    )


def linear_one_row(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """activation(norm(x) W^T + bias) + residual for x (1, C) and W (N, C); (1, N).

    Gated: W is (2N, C), and the result activation(gates) * values, as in feedforward.Gated.
    """
    if not runs_kernels(x):
        return one_row_reference(x, weight, bias, norm=norm, activation=activation, gated=gated, residual=residual)
    (m, c), n = x.shape, weight.shape[0] // (1 + gated)
    assert m == 1, f"{m} rows are more than one"
    for row in (x, x if residual is None else residual):
        assert row.stride(1) == 1, "the numbers of a row must lie together"
    assert weight.is_contiguous()
    out, (rows, warps) = x.new_empty(1, n), tile(n, c, weight.itemsize, gated)
    shift = None if norm is None else norm.bias
    one_row_kernel[(triton.cdiv(n, rows),)](
        x, weight, bias, None if norm is None else norm.weight, shift, residual, out, n, 0.0 if norm is None else norm.eps,
        C=c, WIDTH=triton.next_power_of_2(c), ROWS=rows, NORM="" if norm is None else norm.kind, SHIFT=shift is not None,
        BIAS=bias is not None, ACTIVATION=activation, GATES=gate_block(n) if gated else 0, RESIDUAL=residual is not None,
        num_warps=warps, **launch(x),
    )  # fmt: skip
    return out


def tile(n: int, c: int, size: int, gated: bool) -> tuple[int, int]:
    """(rows of W, warps) of a program, W being (N, C) of numbers of `size` bytes: all of its part is read at once."""
    row = triton.next_power_of_2(c) * size * (1 + gated)  # bytes
    rows = max(r for r in (1, 2, 4, 8) if r == 1 or (n >= r * PROGRAMS and r * row <= BYTES))
    return rows, max(1, min(16, rows * row // (32 * 16 * VECTORS)))


def one_row_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    y = x.float() if norm is None else normalise(x.float(), norm)
    y = F.linear(y, weight.float(), None if bias is None else bias.float())
    gate, value = split_gates(y) if gated else (y, None)
    y = ACTIVATIONS[activation](gate) if activation else gate
    y = y if value is None else (y * value).flatten(-2)
    return (y if residual is None else y + residual.float()).to(x.dtype)


def normalise(x: Tensor, norm: Norm) -> Tensor:
    """gamma (x - mean) / sqrt(var + eps) + beta, or without the mean, of x in fp32."""
    weight, c = norm.weight.float(), x.shape[-1:]
    if norm.kind == "rms":
        return F.rms_norm(x, c, weight, norm.eps)
    return F.layer_norm(x, c, weight, None if norm.bias is None else norm.bias.float(), norm.eps)


@triton.jit
def normal(x, inside, gamma, beta, C: tl.constexpr, eps, KIND: tl.constexpr, SHIFT: tl.constexpr):
    """The norm of a row x (1, C and more) in fp32; 0 beyond C, where gamma and beta are."""
    if KIND == "layer":
        x = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / C, 0.0)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / C + eps)) * gamma
    if SHIFT:
        y += beta
    return y


@triton.jit
def read(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def stream(at, inside):
    """What is read once should not drive out of the cache what all programs read."""
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def activate(z, NAME: tl.constexpr):
    if NAME == "relu":
        z = tl.maximum(z, 0.0)
    elif NAME == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif NAME == "gelu-tanh":  # (1 + tanh(u)) / 2 = sigmoid(2u)
        z = z / (1.0 + tl.exp(-1.5957691216057308 * (z + 0.044715 * z * z * z)))
    elif NAME == "silu":
        z = z / (1.0 + tl.exp(-z))
    return z


@triton.jit
def one_row_kernel(
    x, weight, bias, gamma, beta, residual, out, N, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr,
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr, RESIDUAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """ROWS rows of W, whole and in registers. Tensors are (N, C), with 1 where an axis is missing."""
    launch_dependents(EARLY)
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    here, inside = n < N, c < C
    row = n + n // GATES * GATES if GATES else n  # gates and values are in turns, GATES of each
    w = stream(weight + row * C + c, here & inside)
    if GATES:
        w2 = stream(weight + (row + GATES) * C + c, here & inside)
    if BIAS:
        b = read(bias + row, here)
        if GATES:
            b2 = read(bias + row + GATES, here)
    g, shift = 1.0, 0.0
    if NORM != "":
        g = read(gamma + c, inside)
        if SHIFT:
            shift = read(beta + c, inside)
    wait_for_previous(EARLY)
    y = read(x + c, inside)
    if RESIDUAL:
        past = read(residual + n, here)
    if NORM != "":
        y = normal(y, inside, g, shift, C, eps, NORM, SHIFT)
    z = tl.sum(w.to(tl.float32) * y, 1, keep_dims=True)  # (N, 1)
    if BIAS:
        z += b
    z = activate(z, ACTIVATION)
    if GATES:
        value = tl.sum(w2.to(tl.float32) * y, 1, keep_dims=True)
        if BIAS:
            value += b2
        z *= value
    if RESIDUAL:
        z += past
    tl.store(out + n, z.to(out.dtype.element_ty), mask=here)


# ---- normalisation -----------------------------------------------------------------------------------------------------


def add_norm(x: Tensor, y: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """x + y and norm(x + y) for rows (M, C), any number of them; without y, x itself and norm(x)."""
    if not runs_kernels(x):
        return add_norm_reference(x, y, norm)
    x = x.contiguous()
    (m, c), total, out = x.shape, x if y is None else torch.empty_like(x), torch.empty_like(x)
    width = triton.next_power_of_2(c)
    add_norm_kernel[(m,)](
        x, None if y is None else y.contiguous(), norm.weight, norm.bias, total, out, norm.eps,
        C=c, WIDTH=width, ADD=y is not None, NORM=norm.kind, SHIFT=norm.bias is not None,
        num_warps=max(1, min(16, width // 256)), **launch(x),
    )  # fmt: skip
    return total, out


def add_norm_reference(x: Tensor, y: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    total = x if y is None else x + y
    return total, normalise(total.float(), norm).to(x.dtype)


@triton.jit
def add_norm_kernel(
    x, y, gamma, beta, total, out, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch_dependents(EARLY)
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, WIDTH)[None, :]
    inside = c < C
    g, shift = read(gamma + c, inside), 0.0
    if SHIFT:
        shift = read(beta + c, inside)
    wait_for_previous(EARLY)
    z = read(x + row + c, inside)
    if ADD:
        rounded = (z + read(y + row + c, inside)).to(total.dtype.element_ty)
        tl.store(total + row + c, rounded, mask=inside)
        z = rounded.to(tl.float32)
    z = normal(z, inside, g, shift, C, eps, NORM, SHIFT)
    tl.store(out + row + c, z.to(out.dtype.element_ty), mask=inside)
