"""Gated linear attention: a recurrence whose state is a matrix, S_t = diag(alpha_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t.

Linear attention has no decay (alpha = 1), Mamba-2 one decay a head, GLA one a key channel. The state is updated before it is
read. In all forms here

    q, k: (B, T, G, K), where the H / G heads of v in a group share one head of q and k
    v: (B, T, H, V)
    log_decay: None, (B, T, H) or (B, T, H, K), log alpha, at most 0, in fp32 or float64
    starts: (B, T) int32, the column at which each token's document begins, below 0 where it began before the first column
            (`kernels.masks.document_starts`): token i sees token j if starts[i] <= j <= i
    initial: (B, H, K, V) or None, the state before the first column, which tokens with starts < 0 see

and the results are o (B, T, H, V) and the state after the last column (B, H, K, V).

`recurrent_form` is the definition, one token after the other. `parallel_form` is attention without softmax, in T x T scores.
`chunked_form` has scores inside of chunks and passes one state from chunk to chunk, so that nearly all work is in matrix
products and memory grows with T; it runs where there is no GPU. On a GPU, Triton kernels compute it (the operator
`regard::gated_linear_attention`).

With B the sum of log alpha from the beginning of a chunk, the scores of a chunk are sum_d q_id k_jd exp(B_id - B_jd). All
exponents are differences that are at most 0: exp(-B_j) alone would overflow. For results in fp32 the sums are in float64:
with a strong decay among weak ones, the difference of two large sums would lose the digits of a small exponent. No decay is
set to 0 where a document begins, since -inf - -inf is no number: scores of other documents are masked, and states reach only
tokens of their own document.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.device import without_autocast
from regard.kernels.operators import operator
from regard.kernels.residual_norm import TRITON

CHUNK, CHANNEL_CHUNK = 128, 64  # tokens of a chunk in the Triton kernels; the second with one decay a channel


def gated_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, starts: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o (B, T, H, V) in the dtype of v, and the last state (B, H, K, V) in fp32 or float64."""
    if not v.shape[1]:
        return v, to_full_precision(q, k, v, log_decay, initial)[-1]
    if not (q.is_meta or (q.is_cuda and TRITON and q.dtype != torch.float64)):
        with without_autocast(q.device):  # the products that make the state are in fp32
            return chunked_form(q, k, v, log_decay, starts, initial)
    # Rows of whole 16 bytes, and products in whole tiles; a compiled block makes the padded tensors in one pass.
    width, values = q.shape[3], v.shape[3]
    rows, columns = -width % 16, -values % 8
    if rows:
        q, k = F.pad(q, (0, rows)), F.pad(k, (0, rows))
        if log_decay is not None and log_decay.dim() == 4:
            log_decay = F.pad(log_decay, (0, rows))
    if columns:
        v = F.pad(v, (0, columns))
    if initial is not None and (rows or columns):
        initial = F.pad(initial, (0, columns, 0, rows))
    q, k = q.to(v.dtype), k.to(v.dtype)
    o, final = forward(q, k, v, None if log_decay is None else log_decay.float(), starts, initial)
    return (o[..., :values], final[:, :, :width, :values]) if rows or columns else (o, final)


# ---- definitions -------------------------------------------------------------------------------------------------------


def recurrent_form(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, starts: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the results by the definition, one token after the other."""
    q, k, x, log_alpha, state = to_full_precision(q, k, v, log_decay, initial)
    q, k = (part.repeat_interleave(v.shape[2] // q.shape[2], 2) for part in (q, k))
    found = []
    for t in range(q.shape[1]):
        state = torch.where((starts[:, t] < t)[:, None, None, None], state, 0)
        if log_alpha is not None:
            state = state * log_alpha[:, t, :, :, None].exp()
        state = state + k[:, t, :, :, None] * x[:, t, :, None]
        found.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(found, 1).to(v.dtype), state


def parallel_form(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, starts: Tensor, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the results as attention without softmax, in scores of all pairs of tokens."""
    q, k, x, log_alpha, state = to_full_precision(q, k, v, log_decay, initial)
    o, state = mix_chunk(q, k, x, log_alpha, starts, state, 0)
    return o.to(v.dtype), state


def chunked_form(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    starts: Tensor,
    initial: Tensor | None = None,
    chunk: int = 0,
) -> tuple[Tensor, Tensor]:
    """Return the results chunk by chunk; `chunk` tokens each, by default 64, or 16 with one decay a channel.

    With one decay a channel the scores of a chunk need (C, C, K) exponents, which small chunks keep few."""
    q, k, x, log_alpha, state = to_full_precision(q, k, v, log_decay, initial)
    chunk = chunk or (16 if log_decay is not None and log_decay.dim() == 4 else 64)
    found = []
    for first in range(0, q.shape[1], chunk):
        here = slice(first, first + chunk)
        alpha = None if log_alpha is None else log_alpha[:, here]
        o, state = mix_chunk(q[:, here], k[:, here], x[:, here], alpha, starts[:, here], state, first)
        found.append(o)
    return torch.cat(found, 1).to(v.dtype), state


def to_full_precision(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, initial: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
    """Return q, k, v, log_decay (B, T, H, K or 1) and the first state (B, H, K, V), all in fp32 or float64."""
    dtype = torch.promote_types(v.dtype, torch.float32)
    if log_decay is not None:
        log_decay = (log_decay if log_decay.dim() == 4 else log_decay[..., None]).to(dtype)
    shape = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    state = v.new_zeros(shape, dtype=dtype) if initial is None else initial.to(dtype)
    return q.to(dtype), k.to(dtype), v.to(dtype), log_decay, state


def mix_chunk(
    q: Tensor, k: Tensor, v: Tensor, log_alpha: Tensor | None, starts: Tensor, state: Tensor, first: int
) -> tuple[Tensor, Tensor]:
    """Return o (B, C, H, V) and the state after a chunk, which begins at column `first` with a state (B, H, K, V).

    The R heads of a group share queries and keys. Unless there is a decay a channel, products with these are made once for
    a group, with the values of all its heads beside each other."""
    groups, index = q.shape[2], torch.arange(first, first + q.shape[1], device=q.device)
    q, k = q.transpose(1, 2), k.transpose(1, 2)  # (B, G, C, K)
    v = v.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4)  # (B, G, R, C, V)
    state = state.unflatten(1, (groups, -1))  # (B, G, R, K, V)
    seen = ((index <= index[:, None]) & (index >= starts[:, :, None]))[:, None]  # (B, 1, C, C), of query i and key j
    sees_state = (starts < first)[:, None, :, None]  # (B, 1, C, 1), the token's document began before this chunk
    last = starts[:, -1:, None, None]  # (B, 1, 1, 1), where the document begins that continues after the chunk
    q_late, k_left = (
        q.where(sees_state, 0),
        k.where(index[:, None] >= last, 0),
    )  # what meets the state before, and after
    if log_alpha is not None:
        total = log_alpha.transpose(1, 2).unflatten(1, (groups, -1)).double().cumsum(3)  # (B, G, R, C, K or 1)
        gaps = (total[:, :, :, :, None] - total[:, :, :, None]).to(q.dtype).where(seen[:, :, None, ..., None], 0)
        decay = gaps.exp()  # (B, G, R, C, C, K or 1)
        since_start = total.to(q.dtype).exp()
        until_end = (total[:, :, :, -1:] - total).to(q.dtype).exp()
    if log_alpha is not None and log_alpha.shape[3] > 1:
        scores = (q[:, :, None, :, None] * k[:, :, None, None] * decay).sum(-1).where(seen[:, :, None], 0)
        from_state = (q_late[:, :, None] * since_start) @ state
        added = (k_left[:, :, None] * until_end).mT @ v
    else:
        scores = (q @ k.mT).where(seen, 0)[:, :, None]
        from_state = split_columns(q_late @ join_columns(state), v)
        left = v
        if log_alpha is not None:
            scores = scores * decay[..., 0]
            from_state = from_state * since_start
            left = v * until_end
        added = split_columns(k_left.mT @ join_columns(left), v)
    end = state if log_alpha is None else state * since_start[:, :, :, -1, :, None]
    o = scores @ v + from_state
    end = end.where((last < first)[:, None], 0) + added
    return o.permute(0, 3, 1, 2, 4).flatten(2, 3), end.flatten(1, 2)


def join_columns(x: Tensor) -> Tensor:
    """Put the columns of the heads of a group beside each other, (B, G, R, n, V) -> (B, G, n, R * V)."""
    return x.transpose(2, 3).flatten(3)


def split_columns(x: Tensor, v: Tensor) -> Tensor:
    """Separate the heads of a group again, (B, G, n, R * V) -> (B, G, R, n, V)."""
    return x.unflatten(3, (v.shape[2], v.shape[4])).transpose(2, 3)


def step(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor) -> Tensor:
    """Return o (N, H, V) of one more token of each row, in the dtype of the state (N, H, K, V), which is updated in place.

    q, k: (N, G, K). v: (N, H, V). log_decay: None, (N, H) or (N, H, K)."""
    groups = v.shape[1] // q.shape[1]
    if state.is_cuda and TRITON and state.dtype == torch.float32:
        from regard.kernels import gated_linear_attention_triton as kernels

        return kernels.run_step(q, k, v, log_decay, state)
    q, k = (x.to(state.dtype).repeat_interleave(groups, 1) if groups > 1 else x.to(state.dtype) for x in (q, k))
    if log_decay is not None:
        state.mul_(log_decay.to(state.dtype).exp().view(*log_decay.shape[:2], -1, 1))
    state.addcmul_(k[..., None], v[:, :, None].to(state.dtype))
    return (q[..., None] * state).sum(2)


# ---- operators ---------------------------------------------------------------------------------------------------------


@operator("regard::gated_linear_attention")
def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, starts: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return o (B, T, H, V) and the last state (B, H, K, V) fp32; K is a multiple of 16, V of 8, the dtype not float64."""
    from regard.kernels import gated_linear_attention_triton as kernels

    return kernels.run_forward(q, k, v, log_decay, starts, initial, chunk_of(log_decay))


@forward.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, starts: Tensor, initial: Tensor | None
) -> tuple[Tensor, Tensor]:
    b, t, h, width = v.shape
    return v.new_empty(b, t, h, width), v.new_empty(b, h, q.shape[3], width, dtype=torch.float32)


@torch.library.custom_op("regard::gated_linear_attention_backward", mutates_args=())
def backward(
    grad: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    starts: Tensor,
    initial: Tensor | None,
) -> list[Tensor]:
    """Return the gradients of q, k and v, then those of log_decay and of `initial` where they are given."""
    from regard.kernels import gated_linear_attention_triton as kernels

    return kernels.run_backward(grad, grad_final, q, k, v, log_decay, starts, initial, chunk_of(log_decay))


@backward.register_fake
def _(
    grad: Tensor,
    grad_final: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None,
    starts: Tensor,
    initial: Tensor | None,
) -> list[Tensor]:
    like = [x for x in (q, k, v, log_decay, initial) if x is not None]
    return [x.new_empty(x.shape) for x in like]


def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Save the inputs alone: the states of the chunks are computed again, which costs less than reading them."""
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def run_backward(ctx: Any, grad: Tensor | None, grad_final: Tensor | None) -> tuple[Tensor | None, ...]:
    """Return the gradients of all inputs (torch.library's `backward`)."""
    q, k, v, log_decay, starts, initial = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    found = backward(grad, grad_final, q, k, v, log_decay, starts, initial)
    by_decay = found[3] if log_decay is not None else None
    return *found[:3], by_decay, None, found[-1] if initial is not None else None


forward.register_autograd(run_backward, setup_context=setup_context)


def chunk_of(log_decay: Tensor | None) -> int:
    """Return the tokens of a chunk in the Triton kernels."""
    return CHANNEL_CHUNK if log_decay is not None and log_decay.dim() == 4 else CHUNK


def forward_flops(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, *_: Any) -> int:
    """Return the FLOPs of scores in chunks, masked or not, of their sums of values, and of making and reading states."""
    width, values, chunk = q.shape[3], v.shape[3], min(chunk_of(log_decay), v.shape[1])
    return 2 * math.prod(v.shape[:3]) * (chunk * (width + values) + 2 * width * values)


def backward_flops(grad: Tensor, _: Any, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, *__: Any) -> int:
    """Return the FLOPs of the gradients of q, k and v, each like the forward pass, and of the states and their gradients."""
    width, values, chunk = q.shape[3], v.shape[3], min(chunk_of(log_decay), v.shape[1])
    return 2 * math.prod(v.shape[:3]) * (3 * chunk * (width + values) + 5 * width * values)
