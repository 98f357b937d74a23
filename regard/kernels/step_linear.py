"""Fused kernels of a decoding step: matrix-vector products (`linear_one_row`) and residual norms (`add_norm`).

With a batch of one row, a linear layer is bound by reading its weights. A program of `one_row_kernel` reads a few rows
of the matrix at once, and fuses everything around the product: the norm before it; bias, activation, gate and residual
after it. With more rows, cuBLAS on tensor cores is faster.

Programmatic dependent launch (PDL): a kernel is launched while the previous one still runs, prefetches what does not
depend on it, its weights above all, and then waits for its end (`gdc_wait`). The previous kernel has waited for its own
predecessor, so after the wait all earlier kernels have ended. Before the wait a kernel must write nothing, and read
nothing that the same step writes: only weights and the results of earlier steps, which have ended since the first
kernel of a step is launched without PDL.

All arithmetic is in fp32, rounded once at the end.
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

NUM_SMS = 132  # streaming multiprocessors of an H100: grids are made large enough to fill these

# Tile of a program of `one_row_kernel`
LOADS_PER_THREAD = 8  # of 16 bytes each, in flight at once
TILE_BYTES = 16384  # of the matrix, unless one row is larger
MIN_PROGRAMS = 4 * NUM_SMS  # a program takes more than one row only if there are at least so many programs


@dataclass(frozen=True)
class Norm:
    """The parameters of an nn.LayerNorm (kind "layer") or an nn.RMSNorm (kind "rms")."""

    kind: str
    weight: Tensor  # (C,)
    bias: Tensor | None  # (C,)
    eps: float


def runs_kernels(x: Tensor) -> bool:
    """Return whether Triton kernels run on this tensor: on a GPU, or anywhere with Triton's interpreter."""
    return x.is_cuda or bool(triton.knobs.runtime.interpret)


def launch_options(x: Tensor) -> dict[str, Any]:
    """Return the options that launch a kernel with programmatic dependent launch, if the GPU has it (Hopper and later)."""
    pdl = x.is_cuda and torch.version.hip is None and torch.cuda.get_device_capability(x.device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if pdl else {"PDL": False}


@triton.jit
def launch_dependents(PDL: tl.constexpr):
    """Let the next kernel start now: it waits by itself for the end of this one."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until the previous kernel has ended and its results are visible."""
    if PDL:
        tl.extra.cuda.gdc_wait()


def norm_of(norm: nn.Module) -> Norm:
    """Return the parameters of an nn.LayerNorm or nn.RMSNorm."""
    assert isinstance(norm, (nn.LayerNorm, nn.RMSNorm))
    kind = "rms" if isinstance(norm, nn.RMSNorm) else "layer"
    return Norm(kind, norm.weight.detach(), getattr(norm, "bias", None), norm.eps)  # type: ignore[arg-type]


# ---- linear layer of one row --------------------------------------------------------------------------------------------


def project(
    x: Tensor,
    linear: nn.Linear,
    *,
    norm: nn.Module | None = None,
    activation: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return activation(linear(norm(x))) + residual for one row x (1, C), in one kernel: (1, N)."""
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
    """Return activation(norm(x) W^T + bias) + residual for x (1, C) and weight W (N, C): (1, N).

    Gated, W is (2N, C) with gates and values interleaved (kernels/weight_layout.py), and the result is
    activation(gates) * values + residual.
    """
    if not runs_kernels(x):
        return linear_one_row_reference(
            x, weight, bias, norm=norm, activation=activation, gated=gated, residual=residual
        )
    (m, c), n = x.shape, weight.shape[0] // (1 + gated)
    assert m == 1, f"{m} rows are more than one"
    for row in (x, x if residual is None else residual):
        assert row.stride(1) == 1, "the numbers of a row must lie together"
    assert weight.is_contiguous()
    out, (rows, warps) = x.new_empty(1, n), tile_size(n, c, weight.itemsize, gated)
    shift = None if norm is None else norm.bias
    one_row_kernel[(triton.cdiv(n, rows),)](
        x, weight, bias, None if norm is None else norm.weight, shift, residual, out, n, 0.0 if norm is None else norm.eps,
        C=c, WIDTH=triton.next_power_of_2(c), ROWS=rows, NORM="" if norm is None else norm.kind, SHIFT=shift is not None,
        BIAS=bias is not None, ACTIVATION=activation, GATES=gate_block(n) if gated else 0, RESIDUAL=residual is not None,
        num_warps=warps, **launch_options(x),
    )  # fmt: skip
    return out


def tile_size(n: int, c: int, size: int, gated: bool) -> tuple[int, int]:
    """Return the rows of W (N, C) that a program reads, all at once, and its warps; numbers have `size` bytes."""
    row_bytes = triton.next_power_of_2(c) * size * (1 + gated)
    rows = max(r for r in (1, 2, 4, 8) if r == 1 or (n >= r * MIN_PROGRAMS and r * row_bytes <= TILE_BYTES))
    return rows, max(1, min(16, rows * row_bytes // (32 * 16 * LOADS_PER_THREAD)))


def linear_one_row_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    activation: str = "",
    gated: bool = False,
    residual: Tensor | None = None,
) -> Tensor:
    """Return what `linear_one_row` defines, in plain torch."""
    y = x.float() if norm is None else normalize(x.float(), norm)
    y = F.linear(y, weight.float(), None if bias is None else bias.float())
    gate, value = split_gates(y) if gated else (y, None)
    y = ACTIVATIONS[activation](gate) if activation else gate
    y = y if value is None else (y * value).flatten(-2)
    return (y if residual is None else y + residual.float()).to(x.dtype)


def normalize(x: Tensor, norm: Norm) -> Tensor:
    """Return the LayerNorm or RMSNorm of x (..., C), in fp32."""
    weight, c = norm.weight.float(), x.shape[-1:]
    if norm.kind == "rms":
        return F.rms_norm(x, c, weight, norm.eps)
    return F.layer_norm(x, c, weight, None if norm.bias is None else norm.bias.float(), norm.eps)


@triton.jit
def normalize_row(x, inside, gamma, beta, C: tl.constexpr, eps, KIND: tl.constexpr, SHIFT: tl.constexpr):
    """Return the norm of a row x (1, WIDTH) in fp32; it is 0 beyond C, since gamma and beta are 0 there."""
    if KIND == "layer":
        x = tl.where(inside, x - tl.sum(x, 1, keep_dims=True) / C, 0.0)
    y = x * (1.0 / tl.sqrt(tl.sum(x * x, 1, keep_dims=True) / C + eps)) * gamma
    if SHIFT:
        y += beta
    return y


@triton.jit
def load_fp32(at, inside):
    """Load as fp32, zeros outside."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_streaming(at, inside):
    """Load weights, which are read once: they should not evict from the cache what all programs read."""
    return tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")


@triton.jit
def apply_activation(z, NAME: tl.constexpr):
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
    BIAS: tl.constexpr, ACTIVATION: tl.constexpr, GATES: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write ROWS numbers of the result; a program holds these rows of W whole, in registers.

    Tensors are (N, C), with a size of 1 for a dimension that they do not have.
    """
    launch_dependents(PDL)
    n = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    c = tl.arange(0, WIDTH)[None, :]
    here, inside = n < N, c < C
    row = n + n // GATES * GATES if GATES else n  # gates and values are interleaved in blocks of GATES
    w = load_streaming(weight + row * C + c, here & inside)
    if GATES:
        w2 = load_streaming(weight + (row + GATES) * C + c, here & inside)
    if BIAS:
        b = load_fp32(bias + row, here)
        if GATES:
            b2 = load_fp32(bias + row + GATES, here)
    g, shift = 1.0, 0.0
    if NORM != "":
        g = load_fp32(gamma + c, inside)
        if SHIFT:
            shift = load_fp32(beta + c, inside)
    wait_for_previous(PDL)
    y = load_fp32(x + c, inside)
    if RESIDUAL:
        r = load_fp32(residual + n, here)
    if NORM != "":
        y = normalize_row(y, inside, g, shift, C, eps, NORM, SHIFT)
    z = tl.sum(w.to(tl.float32) * y, 1, keep_dims=True)  # (N, 1)
    if BIAS:
        z += b
    z = apply_activation(z, ACTIVATION)
    if GATES:
        value = tl.sum(w2.to(tl.float32) * y, 1, keep_dims=True)
        if BIAS:
            value += b2
        z *= value
    if RESIDUAL:
        z += r
    tl.store(out + n, z.to(out.dtype.element_ty), mask=here)


# ---- residual norm -----------------------------------------------------------------------------------------------------


def add_norm(x: Tensor, y: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return x + y and norm(x + y) for x and y (M, C), with any number of rows; without y, x itself and norm(x)."""
    if not runs_kernels(x):
        return add_norm_reference(x, y, norm)
    x = x.contiguous()
    (m, c), total, out = x.shape, x if y is None else torch.empty_like(x), torch.empty_like(x)
    width = triton.next_power_of_2(c)
    add_norm_kernel[(m,)](
        x, None if y is None else y.contiguous(), norm.weight, norm.bias, total, out, norm.eps,
        C=c, WIDTH=width, ADD=y is not None, NORM=norm.kind, SHIFT=norm.bias is not None,
        num_warps=max(1, min(16, width // 256)), **launch_options(x),
    )  # fmt: skip
    return total, out


def add_norm_reference(x: Tensor, y: Tensor | None, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return what `add_norm` defines, in plain torch."""
    total = x if y is None else x + y
    return total, normalize(total.float(), norm).to(x.dtype)


@triton.jit
def add_norm_kernel(
    x, y, gamma, beta, total, out, eps,
    C: tl.constexpr, WIDTH: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr, SHIFT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Write the sum and the norm of one row."""
    launch_dependents(PDL)
    row = tl.program_id(0).to(tl.int64) * C
    c = tl.arange(0, WIDTH)[None, :]
    inside = c < C
    g, shift = load_fp32(gamma + c, inside), 0.0
    if SHIFT:
        shift = load_fp32(beta + c, inside)
    wait_for_previous(PDL)
    z = load_fp32(x + row + c, inside)
    if ADD:
        rounded = (z + load_fp32(y + row + c, inside)).to(total.dtype.element_ty)
        tl.store(total + row + c, rounded, mask=inside)
        z = rounded.to(tl.float32)
    z = normalize_row(z, inside, g, shift, C, eps, NORM, SHIFT)
    tl.store(out + row + c, z.to(out.dtype.element_ty), mask=inside)
