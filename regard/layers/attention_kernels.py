"""The kernels of attention: softmax(q k^T * scale + bias, over the keys a query may see) v, one signature for all.

`reference` spells the formula out and is the definition; `sdpa` is torch's fused kernel; `flex` is FlexAttention, which
skips the blocks of keys that a mask hides; `toeplitz` and `short` are Regard's own, for biases of distance and for rows that
are one tile (kernels/toeplitz_attention.py, kernels/short_attention.py). A `Plan` says which of them runs (layers/kernel_selection.py chooses), over which
mask and bias; it is made once per forward, outside the layers and outside whatever is compiled, so a layer has no branch on
features.

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
from regard.layers.positions.scheme import NoPositions, Positions

log = logging.getLogger("regard")
Kernel = Callable[[Tensor, Tensor, Tensor, "Plan", float], Tensor]


@dataclass(frozen=True)
class Plan:
    """How one kind of attention runs in this forward."""

    kernel: Kernel
    mask: Mask
    q: Tensor  # (B, T) positions of the queries
    k: Tensor  # (B, S) positions of the keys
    index: Tensor | None = None  # (T,) where each query stands among the keys, if they are the same tokens
    scheme: Positions = NoPositions()  # noqa: RUF009 (it holds nothing)
    past: Tensor | None = None  # (B, T, S) which keys are a query's own past, where queries are hypotheses
    prepared: Any = None  # what the kernel wants to have made once for all layers
    cudnn: bool = False  # cuDNN may take part in this one

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        return self.kernel(q, k, v, self, dropout)

    def seen(self) -> Tensor:
        """(B, 1, T or 1, S)"""
        if self.past is None:
            return dense_mask(self.mask, self.q, self.k, self.index)
        own = self.past[:, None]
        return own if self.mask.triangle else own & dense_mask(self.mask, self.q, self.k)

    def bias(self) -> Tensor:
        """(B or 1, H, T, S) fp32"""
        if self.index is not None and self.scheme.toeplitz:  # distances are those of the indices, also in packed rows
            n = self.k.shape[1]
            distance = torch.arange(n, device=self.k.device) - self.index[:, None]  # (T, S)
            return self.scheme.table(n, self.k.device)[:, distance + n - 1][None]
        if self.index is not None and not self.mask.packed:  # rows differ in their padding alone
            return self.scheme.bias(self.q.amax(0)[:, None], self.k.amax(0))[None]
        return self.scheme.bias(self.q[:, :, None], self.k[:, None, :]).movedim(0, 1)

    def for_queries(self, rows: Tensor) -> Plan:
        """The same for some of the queries."""
        index = None if self.index is None else self.index[rows]
        past = None if self.past is None else self.past[:, rows]
        return replace(self, kernel=reference, q=self.q[:, rows], index=index, past=past, prepared=None)


# ---- reference --------------------------------------------------------------------------------------------------------


def attention_weights(q: Tensor, k: Tensor, plan: Plan) -> Tensor:
    """The attention weights themselves, (B, H, T, S), in fp32. A query that may look nowhere gets zeros, not NaN."""
    return masked_softmax(raw_scores(q, k, plan), plan.seen())


def raw_scores(q: Tensor, k: Tensor, plan: Plan) -> Tensor:
    """q k^T * scale with whatever the positions add, also where a query may not look."""
    scheme = plan.scheme
    scale = scheme.scale or q.shape[-1] ** -0.5
    k = repeat_kv(k, q)
    scores = (q @ k.transpose(-2, -1)).float() * scale  # (B, H, T, S)
    if scheme.relative:
        scores = scores + plan.bias()
    if scheme.contextual:
        scores = scheme.scores(scores, q, plan.seen(), (plan.q, plan.k), k)  # type: ignore[operator]
    return scores


def reference(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """The formula as written."""
    a = F.dropout(attention_weights(q, k, plan), dropout).to(v.dtype)  # (B, H, T, S)
    result = a @ repeat_kv(v, q)  # (B, H, T, D)
    return result + plan.scheme.values(a, (plan.q, plan.k)) if plan.scheme.contextual else result  # type: ignore[operator]


# ---- sdpa -------------------------------------------------------------------------------------------------------------


def sdpa(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """torch's fused kernels (flash, memory-efficient, or its own CPU one)."""
    mask = plan.prepared
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(q.dtype)
    triangle = mask is None and plan.index is not None and plan.mask.triangle
    if q.is_cuda and (mask is not None or q.dtype == torch.float32):  # only flash shares heads, and takes neither
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
    return q.dtype == torch.bfloat16 and q.shape[-1] in (64, 128) and q.shape[1] == k.shape[1]


@functools.cache
def has_fast_cudnn() -> bool:
    """From Hopper on, for the triangle alone. (Under a mask it returned NaN gradients: device.py.)"""
    return torch.cuda.get_device_capability() >= (9, 0) and (torch.backends.cudnn.version() or 0) >= 90000


def prepare_dense_mask(plan: Plan) -> Tensor | None:
    """Mask and bias as one tensor; None for the triangle, which the kernel knows by itself.

    Padding stands at the end of a row, after every real query, so the triangle hides it already.
    """
    triangle = plan.index is not None and plan.mask.triangle
    if not plan.scheme.relative:
        return None if triangle else plan.seen()
    if triangle:  # the same for every row of the batch where the bias is
        n = plan.q.shape[1]
        seen = torch.ones(n, n, dtype=torch.bool, device=plan.q.device).tril()
    else:
        seen = plan.seen()
    bias = plan.bias().masked_fill(~seen, -torch.inf)
    # Each row from its largest down: the softmax does not mind, and what matters stays exact in bf16.
    return bias - bias.detach().amax(-1, keepdim=True).clamp(min=torch.finfo(bias.dtype).min)


def with_additive_mask(plan: Plan) -> Plan:
    """For few queries on a CPU: the kernel would turn a mask into what is added to the scores in every layer anew."""
    seen = plan.prepared
    if plan.kernel is not sdpa or seen is None or seen.dtype != torch.bool or seen.device.type != "cpu":
        return plan
    if plan.past is None and seen.all():
        return replace(plan, prepared=None)
    return replace(plan, prepared=torch.where(seen, 0.0, -torch.inf))


# ---- flex -------------------------------------------------------------------------------------------------------------


def flex(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """FlexAttention over the blocks that a mask leaves; for a bias, with a look-up for every score."""
    from regard.kernels.flex_attention import flex_attend

    return flex_attend(q, k, v, plan.prepared, plan.scheme.scale)


def prepare_block_mask(plan: Plan) -> Any:
    from regard.kernels.flex_attention import prepare

    table = plan.scheme.table(plan.q.shape[1], plan.q.device) if plan.scheme.relative else None
    return prepare(*key_intervals(plan.mask, plan.q), table)


# ---- toeplitz ---------------------------------------------------------------------------------------------------------


def toeplitz(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """Regard's kernels for biases: linear memory, and gradients for all that is learned."""
    return bias_kernels_for(plan.scheme).attend(q, k, v, plan.prepared, plan.scheme.scale)


def prepare_bias_table(plan: Plan) -> Any:
    return bias_kernels_for(plan.scheme).prepare(plan.scheme, plan.mask, plan.q)


def bias_kernels_for(scheme: Positions) -> Any:
    """Imported when first needed: Triton is not everywhere."""
    from regard.kernels import fire_attention, toeplitz_attention

    return toeplitz_attention if scheme.toeplitz else fire_attention


# ---- short ------------------------------------------------------------------------------------------------------------


def short(q: Tensor, k: Tensor, v: Tensor, plan: Plan, dropout: float) -> Tensor:
    """Regard's kernels for rows of at most 128 tokens: all of a row and head at once."""
    from regard.kernels.short_attention import attend

    return attend(q, k, v, plan.prepared, plan.scheme.scale, dropout)


def prepare_lengths(plan: Plan) -> Any:
    from regard.kernels.short_attention import prepare

    return prepare(plan)


# ---- plans -----------------------------------------------------------------------------------------------------------

PREPARE: dict[Kernel, Callable[[Plan], Any]] = {
    sdpa: prepare_dense_mask,
    flex: prepare_block_mask,
    toeplitz: prepare_bias_table,
    short: prepare_lengths,
}
KERNELS: dict[str, Kernel] = {kernel.__name__: kernel for kernel in (reference, sdpa, flex, toeplitz, short)}


def make_plan(
    mask: Mask,
    q: Tensor,
    k: Tensor,
    scheme: Positions | None = None,
    *,
    d_head: int = 64,
    dropout: float = 0.0,
    kernel: str | None = None,
    past: Tensor | None = None,
) -> Plan:
    """The plan for queries at positions q (B, T) and keys at positions k (B, S); `k is q` where they are the same tokens."""
    own, scheme = k is q and past is None, scheme or NoPositions()
    if kernel is None:
        needs_grad = torch.is_grad_enabled()
        sizes = (d_head, dropout, has_triton(), k.shape[1], needs_grad)
        choice = choose(Situation(q.device.type, q.shape[1], own, mask, scheme, *sizes))
        if not choice.fast:
            warn_once(choice.kernel, choice.why)
        kernel = choice.kernel
    cudnn = q.is_cuda and torch.is_grad_enabled() and has_fast_cudnn()
    index = torch.arange(q.shape[1], device=q.device) if own else None
    plan = Plan(get_kernel(kernel), mask, q, k, index, scheme, past, cudnn=cudnn)
    prepare = PREPARE.get(KERNELS[kernel])
    return replace(plan, prepared=prepare(plan)) if prepare else plan


@functools.cache
def get_kernel(kernel: str) -> Kernel:
    """A kernel as compiled blocks may call it: two are not for compiling. What keeps them out is slow to import, so it is
    asked for when such a kernel is first chosen."""
    call = KERNELS[kernel]
    return torch.compiler.disable(call) if call in (flex, toeplitz) else call


@functools.cache
def warn_once(kernel: str, why: str) -> None:
    log.warning("attention runs on the slower kernel '%s': %s", kernel, why)
