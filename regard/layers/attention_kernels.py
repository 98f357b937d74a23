"""The attention kernels: softmax(q k^T * scale + bias) v over the keys that the mask allows, with one signature.

`reference` computes the formula directly and defines the result. `sdpa` is torch's fused kernel. `flex` is FlexAttention,
which skips masked blocks of keys. `toeplitz` and `short` are Regard's own: `toeplitz` for biases that depend on distance
(kernels/toeplitz_attention.py), `short` for rows that fit into one tile (kernels/short_attention.py).

An `AttentionPlan` holds the kernel, which layers/kernel_selection.py chooses, with its mask and position scheme. It is made
once per forward pass, outside of the layers and of compiled code, so that a layer has no branches on features.

Shapes: q (B, H, T, D), k and v (B, G, S, D) with H a multiple of G, result (B, H, T, D).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.kernels.attention_functions import has_triton, masked_softmax, repeat_kv
from regard.kernels.masks import Mask, dense_mask, key_intervals
from regard.layers.kernel_selection import Situation, choose
from regard.layers.positions.scheme import NoPositions, PositionScheme

log = logging.getLogger("regard")
Kernel = Callable[[Tensor, Tensor, Tensor, "AttentionPlan", float], Tensor]


@dataclass(frozen=True)
class AttentionPlan:
    """The kernel, mask and position scheme of attention in one forward pass."""

    kernel: Kernel
    mask: Mask
    query_positions: Tensor  # (B, T)
    key_positions: Tensor  # (B, S)
    index: Tensor | None = None  # (T,), the column of each query among the keys; None: not self-attention of whole rows
    scheme: PositionScheme = NoPositions()  # noqa: RUF009 (it has no state)
    past: Tensor | None = None  # (B, T, S), the keys of each query's own hypothesis, in beam search
    kernel_input: Any = None  # the kernel's own form of mask and bias, made once for all layers
    cudnn: bool = False  # `sdpa` may call cuDNN

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Run the kernel, q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D)."""
        return self.kernel(q, k, v, self, dropout)

    def seen(self) -> Tensor:
        """Return the mask of the keys that each query may attend to, (B, 1, T or 1, S)."""
        if self.past is None:
            return dense_mask(self.mask, self.query_positions, self.key_positions, self.index)
        own = self.past[:, None]
        return own if self.mask.triangle else own & dense_mask(self.mask, self.query_positions, self.key_positions)

    def bias(self) -> Tensor:
        """Return the bias that the position scheme adds to the scores, (B or 1, H, T, S) fp32."""
        if self.index is not None and self.scheme.toeplitz:  # distances of columns, which also serve packed rows
            n = self.key_positions.shape[1]
            distance = torch.arange(n, device=self.key_positions.device) - self.index[:, None]  # (T, S)
            return self.scheme.table(n, self.key_positions.device)[:, distance + n - 1][None]
        if self.index is not None and not self.mask.packed:
            # Rows differ in padding alone, whose position is -1, so the largest of a column is that of a token.
            return self.scheme.bias(self.query_positions.amax(0)[:, None], self.key_positions.amax(0))[None]
        return self.scheme.bias(self.query_positions[:, :, None], self.key_positions[:, None, :]).movedim(0, 1)

    def for_queries(self, rows: Tensor) -> AttentionPlan:
        """Return the plan of some of the queries, with the reference kernel."""
        index = None if self.index is None else self.index[rows]
        past = None if self.past is None else self.past[:, rows]
        positions = self.query_positions[:, rows]
        return replace(self, kernel=reference, query_positions=positions, index=index, past=past, kernel_input=None)


# ---- reference --------------------------------------------------------------------------------------------------------


def attention_weights(q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
    """Return the attention weights (B, H, T, S) in fp32. A query without any allowed key gets zeros, not NaN."""
    return masked_softmax(raw_scores(q, k, plan), plan.seen())


def raw_scores(q: Tensor, k: Tensor, plan: AttentionPlan) -> Tensor:
    """Return unmasked scores (B, H, T, S) in fp32: q k^T * scale and what the position scheme adds."""
    scheme = plan.scheme
    scale = scheme.scale or q.shape[-1] ** -0.5
    k = repeat_kv(k, q)
    scores = (q @ k.transpose(-2, -1)).float() * scale  # (B, H, T, S)
    if scheme.relative:
        scores = scores + plan.bias()
    if scheme.contextual:
        scores = scheme.scores(scores, q, plan.seen(), (plan.query_positions, plan.key_positions), k)  # type: ignore[operator]
    return scores


def reference(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Compute attention by its formula, with the whole (T, S) matrix of weights in memory."""
    a = F.dropout(attention_weights(q, k, plan), dropout).to(v.dtype)  # (B, H, T, S)
    result = a @ repeat_kv(v, q)  # (B, H, T, D)
    if not plan.scheme.contextual:
        return result
    return result + plan.scheme.values(a, (plan.query_positions, plan.key_positions))  # type: ignore[operator]


# ---- sdpa -------------------------------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Compute attention by torch's fused kernels: cuDNN, flash, memory-efficient, or that of the CPU."""
    mask = plan.kernel_input
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    triangle = mask is None and plan.index is not None and plan.mask.triangle
    if q.is_cuda and (mask is not None or q.dtype == torch.float32):  # only flash takes grouped heads
        k, v = repeat_kv(k, q), repeat_kv(v, q)
    if triangle and plan.cudnn and fits_cudnn(q, k):
        scale = plan.scheme.scale
        return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, dropout, True, scale=scale)[0]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=triangle,
        scale=plan.scheme.scale,
        enable_gqa=k.shape[1] != q.shape[1],
    )


def fits_cudnn(q: Tensor, k: Tensor) -> bool:
    """Return whether dtype and shapes are those for which cuDNN is used."""
    return q.dtype == torch.bfloat16 and q.shape[-1] in (64, 128) and q.shape[1] == k.shape[1]


@functools.cache
def has_fast_cudnn() -> bool:
    """Return whether cuDNN is the fastest kernel for causal attention: from Hopper on, with cuDNN 9.

    It is not used with a mask, where its gradients were NaN (device.py)."""
    return torch.cuda.get_device_capability() >= (9, 0) and (torch.backends.cudnn.version() or 0) >= 90000


def prepare_dense_mask(plan: AttentionPlan) -> Tensor | None:
    """Return mask and bias as one tensor, or None for a plain causal mask, which the kernel has built in.

    Padding is at the end of a row, after every real query, so the causal mask already excludes it.
    """
    triangle = plan.index is not None and plan.mask.triangle
    if not plan.scheme.relative:
        return None if triangle else plan.seen()
    if triangle:  # a mask without a batch dimension, so that the sum with a shared bias has none either
        n = plan.query_positions.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool, device=plan.query_positions.device).tril()
    else:
        seen = plan.seen()
    bias = plan.bias().masked_fill(~seen, -torch.inf)
    # Subtract each row's maximum: softmax is invariant to it, and the largest scores stay exact in bf16.
    return bias - bias.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)


def with_additive_mask(plan: AttentionPlan) -> AttentionPlan:
    """Return the plan with its boolean mask as an additive one, on a CPU.

    With few queries it pays to convert the mask once; the kernel would do it again in every layer."""
    seen = plan.kernel_input
    if plan.kernel is not sdpa or seen is None or seen.dtype != torch.bool or seen.device.type != "cpu":
        return plan
    if plan.past is None and seen.all():
        return replace(plan, kernel_input=None)
    return replace(plan, kernel_input=torch.where(seen, 0.0, -torch.inf))


# ---- flex -------------------------------------------------------------------------------------------------------------


def flex(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Compute attention by FlexAttention, which skips masked blocks and looks up a bias for each score."""
    from regard.kernels.flex_attention import flex_attend

    return flex_attend(q, k, v, plan.kernel_input, plan.scheme.scale)


def prepare_block_mask(plan: AttentionPlan) -> Any:
    """Return the block mask of `flex`, and the bias by distance if there is one."""
    from regard.kernels.flex_attention import prepare

    table = (
        plan.scheme.table(plan.query_positions.shape[1], plan.query_positions.device) if plan.scheme.relative else None
    )
    return prepare(*key_intervals(plan.mask, plan.query_positions), table)


# ---- toeplitz ---------------------------------------------------------------------------------------------------------


def toeplitz(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Compute attention with a bias by distance, in memory linear in T, with gradients for learned biases."""
    return bias_kernels_for(plan.scheme).attend(q, k, v, plan.kernel_input, plan.scheme.scale)


def prepare_bias_table(plan: AttentionPlan) -> Any:
    """Return the bias by distance in the form of the `toeplitz` kernels."""
    return bias_kernels_for(plan.scheme).prepare(plan.scheme, plan.mask, plan.query_positions)


def bias_kernels_for(scheme: PositionScheme) -> Any:
    """Return the module of kernels for the scheme. It is imported here because Triton may not be installed."""
    from regard.kernels import fire_attention, toeplitz_attention

    return toeplitz_attention if scheme.toeplitz else fire_attention


# ---- short ------------------------------------------------------------------------------------------------------------


def short(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, dropout: float) -> Tensor:
    """Compute attention for rows of at most 128 tokens; a program handles one whole row and head."""
    from regard.kernels.short_attention import attend

    return attend(q, k, v, plan.kernel_input, plan.scheme.scale, dropout)


def prepare_lengths(plan: AttentionPlan) -> Any:
    """Return the number of keys of each row, for `short`."""
    from regard.kernels.short_attention import prepare

    return prepare(plan)


# ---- plans -----------------------------------------------------------------------------------------------------------

PREPARE: dict[Kernel, Callable[[AttentionPlan], Any]] = {
    sdpa: prepare_dense_mask,
    flex: prepare_block_mask,
    toeplitz: prepare_bias_table,
    short: prepare_lengths,
}
KERNELS: dict[str, Kernel] = {kernel.__name__: kernel for kernel in (reference, sdpa, flex, toeplitz, short)}


def make_plan(
    mask: Mask,
    query_positions: Tensor,
    key_positions: Tensor,
    scheme: PositionScheme | None = None,
    *,
    d_head: int = 64,
    dropout: float = 0.0,
    kernel: str | None = None,
    past: Tensor | None = None,
) -> AttentionPlan:
    """Return the plan for queries at positions (B, T) and keys at positions (B, S).

    Where both are one tensor, it is self-attention without a cache. Without `kernel`, kernel_selection.py chooses one."""
    q, k = query_positions, key_positions
    self_attention, scheme = k is q and past is None, scheme or NoPositions()
    if kernel is None:
        sizes = (d_head, dropout, has_triton(), k.shape[1], torch.is_grad_enabled())
        choice = choose(Situation(q.device.type, q.shape[1], self_attention, mask, scheme, *sizes))
        if not choice.fast:
            warn_once(choice.kernel, choice.why)
        kernel = choice.kernel
    cudnn = q.is_cuda and torch.is_grad_enabled() and has_fast_cudnn()
    index = torch.arange(q.shape[1], device=q.device) if self_attention else None
    plan = AttentionPlan(get_kernel(kernel), mask, q, k, index, scheme, past, cudnn=cudnn)
    prepare = PREPARE.get(KERNELS[kernel])
    return replace(plan, kernel_input=prepare(plan)) if prepare else plan


@functools.cache
def get_kernel(kernel: str) -> Kernel:
    """Return the kernel of this name, as compiled blocks can call it.

    `flex` and `toeplitz` are excluded from compilation. `torch.compiler.disable` is slow to import, so it is called only
    when such a kernel is first chosen."""
    call = KERNELS[kernel]
    return torch.compiler.disable(call) if call in (flex, toeplitz) else call


@functools.cache
def warn_once(kernel: str, why: str) -> None:
    """Log that a slower kernel runs; the cache makes it once per kernel and reason."""
    log.warning("attention runs on the slower kernel '%s': %s", kernel, why)
