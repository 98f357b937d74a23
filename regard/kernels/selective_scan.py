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

The forward pass keeps the state before each chunk, from which the backward pass computes the states of the chunk again. In
bf16 these are kept in bf16, and gradients are as exact as that; the scan itself continues from a state in fp32.
Documents of a packed row begin with zeros: `starts` (B, T) is the column at which each token's document begins
(kernels/masks.py), and h is set to zero where starts[t] = t.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.device import without_autocast
from regard.kernels.operators import MOST_ROWS, dense_rows, operator
from regard.kernels.residual_norm import TRITON, multiprocessors

CHUNK = 64  # tokens between two stored states
TOKENS = 8  # the same in the Triton kernels
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
    if not x.shape[1]:
        return x, x.new_zeros(len(x), *a.shape, dtype=exact) if initial is None else initial.to(exact)
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


def decoding_step(
    state: Tensor,  # (N, D, S), at least in fp32
    x: Tensor,  # (N, D)
    u: Tensor,  # (N, D)
    a_log: Tensor,  # (D, S), log(-A)
    b: Tensor,  # (N, S)
    c: Tensor,  # (N, S)
    skip: Tensor,  # (D,)
    bias: Tensor,  # (D,)
    gate: Tensor,  # (N, D)
) -> Tensor:
    """Return y (N, D) of one more token of each row, and update the state in place: on a GPU one kernel."""
    if uses_kernels(x) and state.dtype == torch.float32 and state.is_contiguous():
        return run_step(state, x, u, a_log, b, c, skip, bias, gate)
    exact = state.dtype
    value, dt = x.to(exact), F.softplus(u.to(exact) + bias)
    h, y = step(state, value, dt, -a_log.to(exact).exp(), b.to(exact), c.to(exact))
    state.copy_(h)
    return ((y + skip * value) * F.silu(gate.to(exact))).to(x.dtype)


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
    return x.is_cuda and TRITON and x.dtype != torch.float64 and len(x) <= MOST_ROWS


def make_states(x: Tensor, a: Tensor) -> Tensor:
    """Return the memory for the state before each chunk, (B, chunks, N, D)."""
    chunk, dtype = (TOKENS, torch.promote_types(x.dtype, torch.bfloat16)) if uses_kernels(x) else (CHUNK, a.dtype)
    return a.new_empty(len(x), -(-x.shape[1] // chunk), *a.shape[::-1], dtype=dtype)


@operator("regard::selective_scan")
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
    """Return y (B, T, D), the last state (B, D, N), and the state before each chunk (B, chunks, N, D).

    `vectors` (B, T, 2N) are B and C."""
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
    return x.new_empty(x.shape), a.new_empty(len(x), *a.shape), make_states(x, a)


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
    values, raw, dy = x.to(a.dtype), u.to(a.dtype) + bias, grad.to(a.dtype)
    b, c = vectors.chunk(2, -1)
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
IN_REGISTERS = 16  # states of a channel that it holds in registers
PROGRAMS = 8  # for each multiprocessor, where time is divided into splits: as many as its registers have room for
ENOUGH = 6  # programs for each multiprocessor from which on it is not
REGISTERS = 255  # that a thread may have; by itself the compiler takes few, and loads one number after the other


def split_size(x: Tensor) -> int:
    """Return how many tokens one program walks through: all of them if batch and channels fill the GPU by themselves.

    A split costs most exponentials twice."""
    programs, processors = max(1, x.shape[0] * -(-x.shape[2] // BLOCK)), multiprocessors(x)
    splits = 1 if programs >= ENOUGH * processors else max(1, PROGRAMS * processors // programs)
    chunks = -(-x.shape[1] // TOKENS)
    return max(1, -(-chunks // splits)) * TOKENS


def sums_by_tensor_cores(x: Tensor, states: int) -> bool:
    """Return whether the tensor cores make the sums over channels, which rounds their terms to bf16."""
    if not x.is_cuda or torch.version.hip or x.dtype != torch.bfloat16 or states % 2:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 0)  # the first with products in bf16


class ScanLaunch:
    """What the forward and the backward launches share: sizes, the division into splits, and dense tensors."""

    def __init__(
        self, x: Tensor, u: Tensor, a: Tensor, vectors: Tensor, bias: Tensor, starts: Tensor, gate: Tensor | None
    ) -> None:
        from regard.kernels import selective_scan_triton

        self.kernels = selective_scan_triton
        (self.batch, self.length, self.width), self.states, self.span = x.shape, a.shape[1], split_size(x)
        self.splits = -(-self.length // self.span)
        self.grid = (-(-self.width // BLOCK), self.batch, self.splits)
        self.local_grid = (*self.grid[:2], self.splits - 1)  # what one split adds is of no use to any other
        self.x, self.u, self.z = dense_rows(x), dense_rows(u), dense_rows(x if gate is None else gate)
        self.vectors, self.bias, self.starts = vectors.contiguous(), bias, starts.contiguous()
        self.a2 = (a * LOG2E).t().contiguous()  # (N, D)
        full = self.length % TOKENS == 0 and self.width % BLOCK == 0
        self.warp = {"num_warps": 1, "num_stages": 1, **({} if torch.version.hip else {"maxnreg": REGISTERS})}
        self.sizes = {
            "W": self.width,
            "STATES": self.states,
            "BLOCK": BLOCK,
            "TOKENS": TOKENS,
            "FULL": full,
            **self.warp,
        }
        self.gate = {"Z": self.z.stride(1), "GATE": gate is not None}
        self.sink = torch.empty(32 * self.grid[0], dtype=torch.int32, device=x.device)  # what nobody reads
        self.by_token = {"N": min(IN_REGISTERS, max(2, 1 << (self.states - 1).bit_length()))}

    def first_carry(self, given: Tensor | None, local: Any, reverse: bool) -> Tensor:
        """Return the state that each split begins with, (B, splits, N, D); `given` (B, D, N) is that of the first.

        `local` launches the kernel that computes what each split adds to a state of zeros."""
        shape = (self.batch, self.splits, self.states, self.width)
        carry = self.a2.new_zeros(shape)
        if given is not None:
            given = given.to(carry.dtype).transpose(1, 2).clone(memory_format=torch.contiguous_format)
        if self.splits == 1:
            return carry if given is None else given[:, None]
        totals = self.a2.new_zeros(self.batch, self.splits, self.width)
        local(carry, totals)
        sizes = {"W": self.width, "STATES": self.states, "BLOCK": BLOCK, **self.warp}
        self.kernels.combine[(self.grid[0], self.batch, self.states)](
            *(carry if given is None else given, carry, totals, self.a2, self.splits),
            **sizes, REVERSE=reverse, FIRST=given is not None,
        )  # fmt: skip
        return carry


def run_forward(
    x: Tensor, u: Tensor, a: Tensor, vectors: Tensor, skip: Tensor, bias: Tensor, starts: Tensor,
    gate: Tensor | None, initial: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return what `forward` does, by the Triton kernels."""
    call, y, kept = ScanLaunch(x, u, a, vectors, bias, starts, gate), x.new_empty(x.shape), make_states(x, a)

    def launch(grid: tuple[int, ...], carry: Tensor, totals: Tensor, local: bool) -> None:
        call.kernels.forward[grid](
            *(call.x, call.u, call.z, call.vectors, call.a2, skip, bias, call.starts, carry, totals, y, kept, call.sink),
            *(call.length, call.span), **call.sizes, **call.gate, **call.by_token,
            X=call.x.stride(1), DT=call.u.stride(1), LOCAL=local,
        )  # fmt: skip

    carry = call.first_carry(initial, lambda ends, totals: launch(call.local_grid, ends, totals, True), False)
    launch(call.grid, carry, carry, False)
    return y, carry[:, -1].transpose(1, 2).contiguous(), kept


def run_backward_kernels(
    grad: Tensor, grad_final: Tensor | None, x: Tensor, u: Tensor, a: Tensor, vectors: Tensor, skip: Tensor,
    bias: Tensor, starts: Tensor, gate: Tensor | None, states: Tensor,
) -> list[Tensor]:  # fmt: skip
    """Return what `backward` does, by the Triton kernels."""
    from regard.kernels.lane_sums_triton import matrices

    call, grad = ScanLaunch(x, u, a, vectors, bias, starts, gate), dense_rows(grad)

    def local(ends: Tensor, totals: Tensor) -> None:
        call.kernels.local_adjoint[call.local_grid](
            *(call.u, call.z, call.vectors, grad, call.a2, bias, call.starts, ends, totals, call.sink),
            *(call.length, call.span, call.splits), **call.sizes, **call.gate, **call.by_token,
            DT=call.u.stride(1), G=grad.stride(1),
        )  # fmt: skip

    carry = call.first_carry(grad_final, local, True)
    dx, du = x.new_empty(x.shape), u.new_empty(u.shape)
    dz = call.z.new_empty(call.z.shape if gate is not None else (1,))
    blocks, parts, exact = call.grid[0], call.batch * call.splits, not sums_by_tensor_cores(x, call.states)
    by_state = call.vectors.transpose(1, 2).contiguous()  # (B, 2N, T)
    shape = blocks, call.batch, call.length, 2 * call.states
    dvectors = vectors.new_empty(shape, dtype=torch.float32 if exact else torch.bfloat16)
    words = dvectors if exact else dvectors.view(torch.int32)
    da, rows = a.new_zeros(parts, call.states, call.width), a.new_empty(2, parts, call.width)
    call.kernels.backward[call.grid](
        *(call.x, call.u, call.z, by_state, grad, call.a2, skip, bias, call.starts, states, carry),
        *(dx, du, dz, words, da, rows[0], rows[1], call.sink, matrices(x.device), call.length, call.span),
        **call.sizes, **call.gate, X=call.x.stride(1), DT=call.u.stride(1), G=grad.stride(1), EXACT=exact,
    )  # fmt: skip
    found = [dx, du, da.sum(0).t().contiguous(), dvectors.sum(0, dtype=torch.float32), rows[0].sum(0), rows[1].sum(0)]
    return [*found, carry[:, 0].transpose(1, 2).contiguous(), *([] if gate is None else [dz])]


STEP_BLOCK = 32  # channels of a program of the decoding step


def run_step(
    state: Tensor, x: Tensor, u: Tensor, a_log: Tensor, b: Tensor, c: Tensor, skip: Tensor, bias: Tensor, gate: Tensor
) -> Tensor:
    """Return what `decoding_step` does, by the Triton kernel; b and c are parts of one tensor."""
    from regard.kernels import selective_scan_triton as kernels

    (rows, width, states), y = state.shape, x.new_empty(x.shape)
    x, u, gate, b, c = (each if each.stride(-1) == 1 else each.contiguous() for each in (x, u, gate, b, c))
    c = c if c.stride(0) == b.stride(0) else c.contiguous()
    b = b if b.stride(0) == c.stride(0) else b.contiguous()
    kernels.step[(-(-width // STEP_BLOCK), rows)](
        *(state, x, u, a_log.contiguous(), b, c, skip, bias, gate, y, x.stride(0), u.stride(0), b.stride(0), gate.stride(0)),
        W=width, STATES=states, N=max(2, 1 << (states - 1).bit_length()), BLOCK=STEP_BLOCK, num_warps=1,
    )  # fmt: skip
    return y
