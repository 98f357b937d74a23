"""The weighted mean of RWKV-4 (Peng et al. 2023), channel by channel:

    y_t = (sum_{i<t} e^{k_i - (t-1-i) w} v_i + e^{u + k_t} v_t) / (the same without v)

Numerator and denominator over earlier tokens are the state, kept as (a, b, p) with a e^p and b e^p, where p is the largest
exponent so far: nothing overflows, whatever the keys are. A state without tokens has b = 0. There are no matrix products:
the kernels (kernels/wkv_triton.py, on CUDA devices) walk through time with one channel per lane, and torch does so
elsewhere.

The forward pass keeps the logarithm of each denominator. With it the gradients are two more walks: one forwards for w and u,
one backwards for k and v. States have no gradients: they are for decoding. Documents of a packed row begin without a state,
where starts[t] = t, and tokens from `count` on, which are padding, leave the state as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regard.kernels.operators import operator
from regard.kernels.residual_norm import TRITON

EMPTY = -1e30  # the exponent of a state without tokens


def wkv(
    k: Tensor,  # (B, T, D)
    v: Tensor,  # (B, T, D)
    w: Tensor,  # (D,), the decay, above 0
    u: Tensor,  # (D,), what the token itself has in addition
    starts: Tensor,  # (B, T) int32
    initial: Tensor | None = None,  # (B, 3, D): a, b and p; None: no tokens
    count: Tensor | None = None,  # (B,) tokens of each row, the rest is padding; None: all
) -> tuple[Tensor, Tensor]:
    """Return y (B, T, D) in the dtype of v, and the state (B, 3, D) after the last token, at least in fp32."""
    exact = torch.promote_types(v.dtype, torch.float32)
    if not v.shape[1]:
        return v, v.new_zeros(len(v), 3, v.shape[2], dtype=exact) if initial is None else initial.to(exact)
    y, final, _ = forward(k, v, w.to(exact), u.to(exact), starts, initial, count)
    return y, final


def step(state: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the next state (B, 3, D), the output (B, D) and the logarithm of its denominator, from k and v (B, D)."""
    a, b, p = state.unbind(1)
    p = torch.where(b == 0, EMPTY, p)
    q = torch.maximum(p, u + k)
    old, new = torch.exp(p - q), torch.exp(u + k - q)
    denominator = old * b + new
    y = (old * a + new * v) / denominator
    top = torch.maximum(p - w, k)
    old, new = torch.exp(p - w - top), torch.exp(k - top)
    return torch.stack([old * a + new * v, old * b + new, top], 1), y, q + denominator.log()


# ---- torch -------------------------------------------------------------------------------------------------------------


def scan(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor, state: Tensor, count: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs (B, T, D), the last state, and the logarithms of the denominators (B, T, D)."""
    found, logs = [], []
    for t in range(k.shape[1]):
        state = torch.where((starts[:, t] == t)[:, None, None], 0, state)
        after, y, log = step(state, k[:, t], v[:, t], w, u)
        state = after if count is None else torch.where((t < count)[:, None, None], after, state)
        found.append(y)
        logs.append(log)
    return torch.stack(found, 1), state, torch.stack(logs, 1)


def scan_backward(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor, state: Tensor, y: Tensor, logs: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of k, v, w and u."""
    dw, (a, b, p) = torch.zeros_like(w), state.unbind(1)
    slope_a, slope_b = torch.zeros_like(a), torch.zeros_like(a)  # derivatives of a and b by w, times e^-p like those
    p = torch.where(b == 0, EMPTY, p)
    for t in range(k.shape[1]):
        begins = (starts[:, t] == t)[:, None]
        a, b, slope_a, slope_b = (torch.where(begins, 0, x) for x in (a, b, slope_a, slope_b))
        p = torch.where(begins, EMPTY, p)
        dw += (dy[:, t] * torch.exp(p - logs[:, t]) * (slope_a - y[:, t] * slope_b)).sum(0)
        top = torch.maximum(p - w, k[:, t])
        old, new = torch.exp(p - w - top), torch.exp(k[:, t] - top)
        slope_a, slope_b = old * (slope_a - a), old * (slope_b - b)
        a, b, p = old * a + new * v[:, t], old * b + new, top
    direct = torch.exp(u + k - logs) * dy  # the part of the token itself
    dv, dk = direct.clone(), direct * (v - y)
    du = dk.sum((0, 1))
    grad_a, grad_b = torch.zeros_like(a), torch.zeros_like(a)  # gradients of numerator and denominator, times e^-p
    p = torch.full_like(a, EMPTY)
    for t in reversed(range(k.shape[1])):
        scale = torch.exp(p + k[:, t])
        dv[:, t] += scale * grad_a
        dk[:, t] += scale * (grad_a * v[:, t] + grad_b)
        top = torch.maximum(p - w, -logs[:, t])
        old, new = torch.exp(p - w - top), torch.exp(-logs[:, t] - top)
        grad_a, grad_b = old * grad_a + new * dy[:, t], old * grad_b - new * dy[:, t] * y[:, t]
        begins = (starts[:, t] == t)[:, None]
        grad_a, grad_b = torch.where(begins, 0, grad_a), torch.where(begins, 0, grad_b)
        p = torch.where(begins, EMPTY, top)
    return dk, dv, dw, du


# ---- operators ---------------------------------------------------------------------------------------------------------


def uses_kernels(x: Tensor) -> bool:
    """Return whether the Triton kernels compute the mean of this x."""
    return x.is_cuda and TRITON and x.dtype != torch.float64


@operator("regard::wkv")
def forward(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor, initial: Tensor | None, count: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y (B, T, D), the last state (B, 3, D), and the logarithms of the denominators (B, T, D)."""
    state = w.new_zeros(len(k), 3, k.shape[2]) if initial is None else initial.to(w.dtype).contiguous()
    if uses_kernels(v):
        from regard.kernels import wkv_triton as kernels

        k, v, starts = k.contiguous(), v.contiguous(), starts.contiguous()
        y, final, logs = v.new_empty(v.shape), torch.empty_like(state), w.new_empty(v.shape)
        limit = starts if count is None else count.to(torch.int32)
        kernels.forward[launch_grid(v)](
            *(k, v, w, u, starts, state, limit, y, final, logs, *v.shape[1:]), **SIZES, COUNT=count is not None
        )
        return y, final, logs
    y, final, logs = scan(k.to(w.dtype), v.to(w.dtype), w, u, starts, state, count)
    return y.to(v.dtype), final.clone(), logs


@forward.register_fake
def _(
    k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor, initial: Any, count: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), w.new_empty(len(k), 3, k.shape[2]), w.new_empty(k.shape)


@torch.library.custom_op("regard::wkv_backward", mutates_args=())
def backward(
    grad: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor, initial: Tensor | None, y: Tensor,
    logs: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of k, v, w and u."""
    state = w.new_zeros(len(k), 3, k.shape[2]) if initial is None else initial.to(w.dtype).contiguous()
    if uses_kernels(v):
        from regard.kernels import wkv_triton as kernels

        k, v, starts, grad, y = (x.contiguous() for x in (k, v, starts, grad, y))
        dk, dv, sums = k.new_empty(k.shape), v.new_empty(v.shape), w.new_empty(2, *k.shape[::2])
        kernels.backward[launch_grid(v)](
            *(k, v, w, u, starts, state, y, logs, grad, dk, dv, sums[0], sums[1], *v.shape[1:]), **SIZES
        )
        return dk, dv, sums[0].sum(0), sums[1].sum(0)
    exact = (x.to(w.dtype) for x in (y, logs, grad))
    dk, dv, dw, du = scan_backward(k.to(w.dtype), v.to(w.dtype), w, u, starts, state, *exact)
    return dk.to(k.dtype), dv.to(v.dtype), dw, du


@backward.register_fake
def _(
    grad: Tensor, k: Tensor, v: Tensor, w: Tensor, u: Tensor, starts: Tensor, initial: Any, y: Tensor, logs: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return k.new_empty(k.shape), v.new_empty(v.shape), w.new_empty(w.shape), u.new_empty(u.shape)


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    """Save what the backward pass needs (torch.library's `setup_context`)."""
    k, v, w, u, starts, initial, _ = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(k, v, w, u, starts, initial, output[0], output[2])


def run_backward(ctx: Any, grad: Tensor | None, *_: None) -> Any:
    """Return the gradients of the inputs of `forward`, None for those that have none."""
    if grad is None:
        return (None,) * 7
    return *backward(grad, *ctx.saved_tensors), None, None, None


forward.register_autograd(run_backward, setup_context=setup_context)

BLOCK = 32  # channels of a program: one for each lane of its warp
SIZES = {"BLOCK": BLOCK, "STEPS": 8, "num_warps": 1, "num_stages": 1}


def launch_grid(x: Tensor) -> tuple[int, int]:
    """Return the programs: blocks of channels, and rows."""
    return -(-x.shape[2] // BLOCK), len(x)
