"""The selective scan of Mamba (Gu and Dao 2023).

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t,   y_t = (C_t . h_t + D x_t) silu(z_t)

Every channel has N states of its own. The decay exp(dt A) depends on channel, state and token, so no matrix product computes
the sum over earlier tokens: the scan is bound by the exponentials, one per state and token. dt = softplus(u + bias), where u
is the input here; that, the skip connection D x and the gate z are computed on the way, as they are passes over memory.

| device and dtype            | form                                                                              |
|-----------------------------|-----------------------------------------------------------------------------------|
| CUDA, other than float64    | Triton kernels (kernels/selective_scan_triton.py)                                 |
| CPU, fp32, much work        | compiled by numba (kernels/selective_scan_numba.py)                               |
| others                      | `scan_chunks`: the states of one chunk of tokens at a time, in torch              |
| the definition              | `recurrence`                                                                      |

The forward pass keeps the state before each chunk, from which the backward pass computes the states of the chunk again.
Documents of a packed row begin with zeros: `starts` (B, T) is the column at which each token's document begins
(kernels/masks.py), and h is set to zero where starts[t] = t.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.device import without_autocast
from regard.kernels.residual_norm import TRITON, multiprocessors

CHUNK = 64  # tokens between two stored states
LOG2E = 1.4426950408889634
LARGE = 1 << 22  # states (tokens * channels * N) from which a model of many layers is faster with numba


def selective_scan(
    x: Tensor,  # (B, T, D)
    u: Tensor,  # (B, T, D), dt before bias and softplus
    a: Tensor,  # (D, N), negative
    b: Tensor,  # (B, T, N)
    c: Tensor,  # (B, T, N)
    skip: Tensor,  # (D,)
    bias: Tensor,  # (D,), of u
    starts: Tensor,  # (B, T) int32
    gate: Tensor | None = None,  # (B, T, D)
    initial: Tensor | None = None,  # (B, D, N); None: zeros
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D) in the dtype of x, and the state (B, D, N) after the last token, at least in fp32."""
    exact = torch.promote_types(x.dtype, torch.float32)
    vectors = torch.cat([b, c], -1).to(exact)  # (B, T, 2N)
    a, skip, bias = a.to(exact), skip.to(exact), bias.to(exact)
    y, final, _ = forward(x, u, a, vectors, skip, bias, starts, gate, initial)
    return y, final


# ---- definition --------------------------------------------------------------------------------------------------------


def recurrence(
    x: Tensor, u: Tensor, a: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor, starts: Tensor,
    gate: Tensor | None = None, initial: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return what `selective_scan` defines, token by token."""
    dt = F.softplus(u + bias)
    h = torch.zeros_like(a).expand(len(x), -1, -1) if initial is None else initial  # (B, D, N)
    found = []
    for t in range(x.shape[1]):
        h = torch.where((starts[:, t] == t)[:, None, None], 0, h)
        h, y = step(h, x[:, t], dt[:, t], a, b[:, t], c[:, t])
        found.append(y + skip * x[:, t])
    y = torch.stack(found, 1)
    return (y if gate is None else y * F.silu(gate)), h


def step(h: Tensor, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Return the next state (B, D, N) and C . h (B, D), from x and dt (B, D), b and c (B, N)."""
    h = torch.exp(dt[..., None] * a) * h + (dt * x)[..., None] * b[:, None]
    return h, (h * c[:, None]).sum(-1)  # a matrix product might be in TF32, or in bf16 under autocast


# ---- torch -------------------------------------------------------------------------------------------------------------


def decays(dt: Tensor, a: Tensor, begins: Tensor) -> Tensor:
    """Return exp(dt A) of the tokens of a chunk, (B, t, D, N), and 0 where a document begins."""
    return torch.exp(dt[..., None] * a).masked_fill_(begins[..., None, None], 0)


def states_of(h: Tensor, decay: Tensor, new: Tensor) -> Tensor:
    """Return the states of a chunk from the one before it (B, D, N); `new` (B, t, D, N) is overwritten by them."""
    for t in range(new.shape[1]):
        h = new[:, t].addcmul_(decay[:, t], h)
    return new


def uses_numba(x: Tensor, a: Tensor) -> bool:
    """Return whether numba computes the scan: fp32 on a CPU, and so many states that its compilation is worth it."""
    return x.device.type == "cpu" and a.dtype == torch.float32 and x.numel() * a.shape[1] >= LARGE


def scan_chunks(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, begins: Tensor, h: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return C . h (B, T, D), the last state, and the state before each chunk (B, chunks, N, D)."""
    if uses_numba(x, a):
        from regard.kernels.selective_scan_numba import scan

        return scan(x, dt, a, b, c, begins, h, CHUNK)
    y, kept = torch.empty_like(dt), []
    for s in range(0, x.shape[1], CHUNK):
        own = slice(s, s + CHUNK)
        kept.append(h.transpose(1, 2))
        new = (dt[:, own] * x[:, own])[..., None] * b[:, own, None]
        hs = states_of(h, decays(dt[:, own], a, begins[:, own]), new)
        y[:, own] = (hs @ c[:, own, :, None])[..., 0]
        h = hs[:, -1].clone()
    return y, h, torch.stack(kept, 1)


def scan_chunks_backward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, begins: Tensor, kept: Tensor, dy: Tensor, carry: Tensor
) -> tuple[Tensor, ...]:
    """Return C . h again, and the gradients of x, dt, A, B, C and the initial state; `carry` (B, D, N) is that of the
    last state."""
    if uses_numba(x, a):
        from regard.kernels.selective_scan_numba import scan_backward

        return scan_backward(x, dt, a, b, c, begins, kept, dy, carry, CHUNK)
    y, dx, ddt, da = torch.empty_like(dt), torch.empty_like(dt), torch.empty_like(dt), torch.zeros_like(a)
    db, dc = torch.empty_like(b), torch.empty_like(c)
    for i in reversed(range(kept.shape[1])):
        own = slice(i * CHUNK, (i + 1) * CHUNK)
        h, decay = kept[:, i].transpose(1, 2), decays(dt[:, own], a, begins[:, own])
        hs = states_of(h, decay, (dt[:, own] * x[:, own])[..., None] * b[:, own, None])
        y[:, own] = (hs @ c[:, own, :, None])[..., 0]
        dc[:, own] = (dy[:, own, None] @ hs)[..., 0, :]
        g = dy[:, own, :, None] * c[:, own, None]  # (B, t, D, N), becomes the gradient of the states
        for t in reversed(range(g.shape[1])):
            g[:, t] += carry
            carry = decay[:, t] * g[:, t]
        weighted = (dt[:, own] * x[:, own])[:, :, None]  # (B, t, 1, D)
        db[:, own] = (weighted @ g)[..., 0, :]
        each = (g @ b[:, own, :, None])[..., 0]
        before = torch.cat([h[:, None], hs[:, :-1]], 1)
        g.mul_(decay).mul_(before)  # the gradient of dt A
        ddt[:, own] = x[:, own] * each + (g * a).sum(-1)
        dx[:, own] = dt[:, own] * each
        da += (g * dt[:, own, :, None]).sum((0, 1))
    return y, dx, ddt, da, db, dc, carry


# ---- operators ---------------------------------------------------------------------------------------------------------


def uses_kernels(x: Tensor) -> bool:
    """Return whether the Triton kernels compute the scan of this x."""
    return x.is_cuda and TRITON and x.dtype != torch.float64


@torch.library.custom_op("regard::selective_scan", mutates_args=())
def forward(
    x: Tensor,
    u: Tensor,
    a: Tensor,
    vectors: Tensor,
    skip: Tensor,
    bias: Tensor,
    starts: Tensor,
    gate: Tensor | None,
    initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (B, T, D), the last state (B, D, N), and the state before each chunk (B, chunks, N, D)."""
    if uses_kernels(x):
        return run_forward(x, u, a, vectors, skip, bias, starts, gate, initial)
    begins = starts == torch.arange(x.shape[1], device=x.device)
    values, dt, (b, c) = x.to(a.dtype), F.softplus(u.to(a.dtype) + bias), vectors.chunk(2, -1)
    h = torch.zeros_like(a).expand(len(x), -1, -1) if initial is None else initial.to(a.dtype)
    with without_autocast(x.device):
        y, final, states = scan_chunks(values, dt, a, b, c, begins, h)
    y += skip * values
    return (y if gate is None else y * F.silu(gate.to(a.dtype))).to(x.dtype), final, states


@forward.register_fake
def _(
    x: Tensor,
    u: Tensor,
    a: Tensor,
    vectors: Tensor,
    skip: Tensor,
    bias: Tensor,
    starts: Tensor,
    gate: Any,
    initial: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape)
    chunks = (x.shape[1] + CHUNK - 1) // CHUNK
    return y, a.new_empty(len(x), *a.shape), a.new_empty(len(x), chunks, a.shape[1], a.shape[0])


@torch.library.custom_op("regard::selective_scan_backward", mutates_args=())
def backward(
    grad: Tensor,
    grad_final: Tensor | None,
    x: Tensor,
    u: Tensor,
    a: Tensor,
    vectors: Tensor,
    skip: Tensor,
    bias: Tensor,
    starts: Tensor,
    gate: Tensor | None,
    states: Tensor,
) -> list[Tensor]:
    """Return the gradients of x, u, A, B and C together, D, the bias, the initial state, and of the gate if there is one."""
    if uses_kernels(x):
        return run_backward_kernels(grad, grad_final, x, u, a, vectors, skip, bias, starts, gate, states)
    begins = starts == torch.arange(x.shape[1], device=x.device)
    values, raw, (b, c), dy = x.to(a.dtype), u.to(a.dtype) + bias, vectors.chunk(2, -1), grad.to(a.dtype)
    dt, gates, by_output = F.softplus(raw), [], dy
    carry = states.new_zeros(len(x), *a.shape) if grad_final is None else grad_final
    if gate is not None:
        z = gate.to(a.dtype)
        opened = z.sigmoid()
        dy = dy * z * opened
    with without_autocast(x.device):
        y, dx, ddt, da, db, dc, first = scan_chunks_backward(values, dt, a, b, c, begins, states, dy, carry)
    if gate is not None:
        gates = [(by_output * (y + skip * values) * opened * (1 + z * (1 - opened))).to(gate.dtype)]
    du, dskip = ddt * raw.sigmoid(), (dy * values).sum((0, 1))
    dx = (dx + dy * skip).to(x.dtype)
    return [dx, du.to(u.dtype), da, torch.cat([db, dc], -1), dskip, du.sum((0, 1)), first.contiguous(), *gates]


@backward.register_fake
def _(
    grad: Tensor,
    grad_final: Any,
    x: Tensor,
    u: Tensor,
    a: Tensor,
    vectors: Tensor,
    skip: Tensor,
    bias: Tensor,
    starts: Tensor,
    gate: Any,
    states: Tensor,
) -> list[Tensor]:
    like = [x, u, a, vectors, skip, bias, *([] if gate is None else [gate])]
    found = [tensor.new_empty(tensor.shape) for tensor in like]
    return [*found[:6], a.new_empty(len(x), *a.shape), *found[6:]]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what the backward pass needs (torch.library's `setup_context`)."""
    x, u, a, vectors, skip, bias, starts, gate, initial = inputs
    ctx.mark_non_differentiable(output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, u, a, vectors, skip, bias, starts, gate, output[2])
    ctx.begins = None if initial is None else initial.dtype


def run_backward(ctx: Any, grad: Tensor | None, grad_final: Tensor | None, _: None) -> Any:
    """Return the gradients of the inputs of `forward`, None for those that have none."""
    x, *rest = ctx.saved_tensors
    if grad is None:
        grad = torch.zeros_like(x)
    dx, du, da, dvectors, dskip, dbias, first, *gates = backward(grad, grad_final, x, *rest)
    dinitial = None if ctx.begins is None else first.to(ctx.begins)
    return dx, du, da, dvectors, dskip, dbias, None, gates[0] if gates else None, dinitial


forward.register_autograd(run_backward, setup_context=setup_context)


# ---- launches ----------------------------------------------------------------------------------------------------------

BLOCK = 32  # channels of a program: one for each lane of its warp
STEPS = 8  # tokens of a group in the forward kernel
BACKWARD_STEPS = 4  # in the backward kernel, which keeps the states of a group in registers
WARPS = 4  # programs per multiprocessor that keep it busy


def split_size(x: Tensor) -> int:
    """Return how many tokens one program walks through: all of them if batch and channels fill the GPU by themselves.

    A split costs every exponential twice, so there are only as many as the multiprocessors need."""
    programs = x.shape[0] * -(-x.shape[2] // BLOCK)
    wanted = WARPS * multiprocessors(x)
    splits = 1 if programs >= wanted else -(-2 * wanted // programs)
    chunks = -(-x.shape[1] // CHUNK)
    return max(1, -(-chunks // splits)) * CHUNK


def rows_of(x: Tensor) -> Tensor:
    """Return x (B, T, C), copied unless its rows are dense and follow each other at equal distances."""
    dense = x.stride(2) == 1 and (x.shape[0] == 1 or x.stride(0) == x.shape[1] * x.stride(1))
    return x if dense else x.contiguous()


def tile(x: Tensor, a: Tensor, steps: int) -> dict[str, Any]:
    """Return the constants that all kernels share."""
    states, full = a.shape[1], x.shape[1] % steps == 0 and x.shape[2] % BLOCK == 0
    sizes = {"W": x.shape[2], "N": max(1, 1 << (states - 1).bit_length()), "STATES": states, "BLOCK": BLOCK}
    return sizes | {"STEPS": steps, "FULL": full, "num_warps": 1, "num_stages": 1}


def run_forward(
    x: Tensor, u: Tensor, a: Tensor, vectors: Tensor, skip: Tensor, bias: Tensor, starts: Tensor,
    gate: Tensor | None, initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `forward` does, by the Triton kernels."""
    from regard.kernels import selective_scan_triton as kernels

    (batch, length, width), states, span = x.shape, a.shape[1], split_size(x)
    blocks, splits = -(-width // BLOCK), -(-length // span)
    x, u, vectors, starts = rows_of(x), rows_of(u), vectors.contiguous(), starts.contiguous()
    b, c, z = vectors, vectors[..., states:], x if gate is None else rows_of(gate)
    a2 = (a * LOG2E).t().contiguous()
    first = a2 if initial is None else initial.to(a.dtype).transpose(1, 2).contiguous()
    y, final = x.new_empty(x.shape), a.new_empty(batch, states, width)
    kept = a.new_empty(batch, -(-length // CHUNK), states, width)
    sizes = tile(x, a, STEPS)
    strides = {"X": x.stride(1), "DT": u.stride(1), "BC": 2 * states}
    begins = first
    if splits > 1:
        begins, sums = a.new_empty(batch, splits, states, width), a.new_empty(batch, splits, 2, width)
        kernels.local_states[(blocks, batch, splits)](
            *(x, u, b, a2, bias, starts, begins, sums, length, span, 1), **sizes, **strides
        )
        combine(kernels, first, begins, sums, a2, sizes, False, initial is not None)
    kernels.forward[(blocks, batch, splits)](
        *(x, u, z, b, c, a2, skip, bias, starts, begins, y, kept, final, length, span, 1),
        **(sizes | strides | {"Z": z.stride(1), "CHUNK": CHUNK, "GATE": gate is not None, "KEEP": True}),
        BEGIN=splits > 1 or initial is not None,
    )
    return y, final.transpose(1, 2).contiguous(), kept


def combine(
    kernels: Any, first: Tensor, parts: Tensor, sums: Tensor, a2: Tensor, sizes: dict[str, Any], back: bool, given: bool
) -> None:
    """Turn the states of splits by themselves, `parts` (B, splits, N, D), into those that the splits begin with."""
    batch, splits, _, width = parts.shape
    own = {name: sizes[name] for name in ("W", "N", "STATES", "BLOCK", "num_warps", "num_stages")}
    kernels.combine[(-(-width // BLOCK), batch)](first, parts, sums, a2, splits, 1, **own, REVERSE=back, FIRST=given)


def run_backward_kernels(
    grad: Tensor, grad_final: Tensor | None, x: Tensor, u: Tensor, a: Tensor, vectors: Tensor, skip: Tensor,
    bias: Tensor, starts: Tensor, gate: Tensor | None, states: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return what `backward` does, by the Triton kernels."""
    from regard.kernels import selective_scan_triton as kernels

    (batch, length, width), n, span = x.shape, a.shape[1], split_size(x)
    blocks, splits = -(-width // BLOCK), -(-length // span)
    grad, x, u, vectors = rows_of(grad), rows_of(x), rows_of(u), vectors.contiguous()
    starts = starts.contiguous()
    b, c, z = vectors, vectors[..., n:], x if gate is None else rows_of(gate)
    a2 = (a * LOG2E).t().contiguous()
    sizes = tile(x, a, BACKWARD_STEPS)
    strides = {"DT": u.stride(1), "Z": z.stride(1), "BC": 2 * n, "G": grad.stride(1), "GATE": gate is not None}
    carries = a2 if grad_final is None else grad_final.transpose(1, 2).contiguous()
    if splits > 1:
        last, sums = carries, a.new_empty(batch, splits, 2, width)
        carries = a.new_empty(batch, splits, n, width)
        kernels.local_adjoint[(blocks, batch, splits)](
            *(u, z, c, grad, a2, bias, starts, carries, sums, length, span, 1), **sizes, **strides
        )
        combine(kernels, last, carries, sums, a2, sizes, True, grad_final is not None)
    dx, du, dz = x.new_empty(x.shape), u.new_empty(u.shape), z.new_empty(z.shape if gate is not None else (1,))
    dvectors = a.new_empty(2, blocks, batch, length, n)
    da, rows = a.new_empty(batch * splits, n, width), a.new_empty(2, batch * splits, width)
    first = a.new_empty(batch, n, width)
    scratch = a.new_empty(batch, splits, CHUNK // BACKWARD_STEPS, n, width)
    kernels.backward[(blocks, batch, splits)](
        *(x, u, z, b, c, grad, a2, skip, bias, starts, states, carries, scratch),
        *(dx, du, dz, dvectors[0], dvectors[1], da, rows[0], rows[1], first, length, span, 1),
        **(sizes | strides | {"X": x.stride(1), "CHUNK": CHUNK, "CARRY": splits > 1 or grad_final is not None}),
        EXACT=not x.is_cuda or x.dtype == torch.float32,
    )
    db, dc = dvectors.sum(1)
    found = [dx, du, da.sum(0).t().contiguous(), torch.cat([db, dc], -1), rows[0].sum(0), rows[1].sum(0)]
    return [*found, first.transpose(1, 2).contiguous(), *([] if gate is None else [dz])]
