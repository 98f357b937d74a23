"""Multi-head attention: projections to queries, keys and values, an attention kernel, and an output projection."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.kernels.attention_functions import Rotation, merge_heads, rotate, split_heads, split_qkv
from regard.kernels.masks import with_window
from regard.layers.attention_kernels import AttentionPlan, get_kernel, make_plan, sdpa, with_additive_mask
from regard.layers.context import Context, PrepareRequest
from regard.layers.decoding_state import LENGTH, Columns, PerSentence, Storage
from regard.layers.part import Mixer, Part, Place


@dataclass(frozen=True)
class Prepared:
    """What the self-attention layers of a forward pass share."""

    plan: AttentionPlan
    rotation: Rotation | None = None  # cosines and sines of rotary positions


class Attention(Part):
    """Base class of self-attention and cross-attention."""

    observed: ClassVar[dict[str, str]] = {"mix": "out"}
    batch_invariant = False  # `make_batch_invariant` sets it

    def __init__(self, config: ModelConfig) -> None:
        nn.Module.__init__(self)
        self.d_head, self.p_drop = config.d_head, config.attention_dropout
        self.n_heads, self.n_kv_heads = config.n_heads, config.n_kv_heads
        self.d_queries, self.d_keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        self.out = nn.Linear(self.d_queries, config.d_model, bias=config.bias)

    def cut_sizes(self) -> dict[str, int]:
        return {"heads of keys and values": self.n_kv_heads}

    def cut(self, size: int) -> None:
        self.n_heads, self.n_kv_heads = self.n_heads // size, self.n_kv_heads // size
        self.d_queries, self.d_keys = self.d_queries // size, self.d_keys // size

    def attend(self, q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan) -> Tensor:
        """Return attention (B, H, T, D), computed by the kernel of the plan; `look.record` observes this call."""
        if self.batch_invariant:
            is_step = plan.index is None and (
                q.shape[2] == 1 or plan.past is not None or isinstance(self, CrossAttention)
            )
            return batch_invariant_attention(q, k, v, plan, is_step and not plan.scheme.contextual)
        return plan(q, k, v, self.p_drop if self.training else 0.0)


def make_batch_invariant(model: nn.Module) -> None:
    """Make what an int8 model computes for a sentence on a CPU independent of the other sentences in its batch.

    Matrix products in int8 are exact sums, and layer norms are computed row by row. Attention is not: padding, and the
    columns of other hypotheses, change the order in which its sums are made, and so their last bit. Where that moves a
    number over the border between two int8 values, another token may win.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            module.batch_invariant = True


def batch_invariant_attention(q: Tensor, k: Tensor, v: Tensor, plan: AttentionPlan, is_step: bool) -> Tensor:
    """Return attention whose rows do not depend on each other, q (B, H, T, D), k and v (B, G, S, D) -> (B, H, T, D).

    The few queries of a decoding step are computed one by one, in an order of their own. Whole rows are computed in fp64:
    sums in any order agree to 16 digits there, so they are the same after they are rounded to fp32."""
    mask = plan.kernel_input
    if not is_step or plan.kernel is not sdpa or q.dtype != torch.float32:
        return plan(q.double(), k.double(), v.double(), 0.0).to(q.dtype)
    from regard.kernels.row_attention_numba import row_attention

    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, -torch.inf)
    return row_attention(q, k, v, mask, plan.scheme.scale or q.shape[-1] ** -0.5)


@register("attention")
class SelfAttention(Attention, Mixer):
    """Multi-head self-attention, with fewer heads of keys and values where n_kv_heads says so."""

    @dataclass(frozen=True)
    class Settings:
        window: int = setting(
            0, "self-attention sees this many tokens back (in an encoder also ahead); 0 = all", most=1 << 24
        )

    attends: ClassVar[bool] = True
    ordered: ClassVar[bool] = False
    tensor_parallel: ClassVar[dict[str, str]] = {"qkv": "column", "out": "row"}

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        Attention.__init__(self, config)
        self.window = settings.window
        self.share_key = settings.window
        self.qkv = nn.Linear(config.d_model, self.d_queries + 2 * self.d_keys, bias=config.bias)

    @classmethod
    def activation_bytes(cls, settings: Settings, config: ModelConfig) -> int:
        # its input; q, k and v, of which rotations make copies; its output
        queries, keys = config.n_heads * config.d_head, config.n_kv_heads * config.d_head
        rotated = 4 * queries + 2 * keys if config.positions in ("rope", "yarn") else 0
        return 2 * config.d_model + 2 * (queries + 2 * keys) + rotated + 2 * queries

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries (B, H, T, D), keys and values (B, G, T, D) from fused projections (B, T, (H + 2G) * D)."""
        return split_qkv(qkv, self.n_heads, self.n_kv_heads, self.d_head)

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        queries = self.d_queries // self.n_kv_heads
        return {"qkv": (self.n_kv_heads, [queries, self.d_head, self.d_head])}

    def prepare(self, request: PrepareRequest) -> Prepared:
        scheme, mask = request.scheme, with_window(request.mask, self.window)
        rotation = scheme.rotation(request.positions)
        if request.sees_all and mask.triangle and not (scheme.relative or scheme.contextual):
            plan = AttentionPlan(get_kernel("sdpa"), mask, request.positions, request.keys, scheme=scheme)
            return Prepared(plan, rotation)
        dropout = self.p_drop if request.training else 0.0
        q, k, past = request.positions, request.keys, request.past
        plan = make_plan(mask, q, k, scheme, d_head=self.d_head, dropout=dropout, past=past)
        return Prepared(plan if request.training else with_additive_mask(plan), rotation)

    def plan(self, ctx: Context) -> AttentionPlan:
        """Return the plan that this layer attends by; `look/intervention_hooks.py` replaces this method."""
        return ctx.prepared.plan

    def scale_queries(self, factor: float) -> None:
        """Multiply the initial query weights by a factor; a stack whose scores are not divided by sqrt(D) uses it."""
        groups = self.qkv.weight.unflatten(0, (self.n_kv_heads, -1))  # queries, key, value (kernels/weight_layout.py)
        groups[:, : -2 * self.d_head] *= factor

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Attend among the tokens of whole rows, (B, T, C) -> (B, T, C)."""
        q, k, v = self.split(self.qkv(x))
        q, k = rotate(q, ctx.prepared.rotation), rotate(k, ctx.prepared.rotation)
        return self.out(merge_heads(self.attend(q, k, v, self.plan(ctx))))

    def state(self) -> dict[str, Storage]:
        """Declare the KV cache."""
        columns = Columns(self.n_kv_heads, self.d_head, self.window)
        return {"keys": columns, "values": columns}

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Append the keys and values of prompts to the KV cache and attend to all cached ones, (B, T, C) -> (B, T, C)."""
        return self.attend_with_cache(x, ctx)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Attend from one new token of each hypothesis to its own past, (N, C) -> (N, C)."""
        if ctx.state.static:
            return self.out(ctx.state.attend(self, self.qkv(x), kept))
        # The K hypotheses of a sentence are K queries of one row, so that its keys are read once and never copied.
        return self.attend_with_cache(x.view(len(ctx.state.next), -1, x.shape[-1]), ctx).view_as(x)

    def attend_with_cache(self, x: Tensor, ctx: Context) -> Tensor:
        """Append the keys and values of x to the KV cache and attend from x to all cached ones, (B, T, C) -> (B, T, C)."""
        q, k, v = self.split(self.qkv(x))
        q, k = rotate(q, ctx.prepared.rotation), rotate(k, ctx.prepared.rotation)
        k, v = ctx.state.extend(self, keys=k, values=v)  # (B, G, S, D)
        return self.out(merge_heads(self.attend(q, k, v, self.plan(ctx))))

    def fused_step(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None, ctx: Context, kept: Any) -> Tensor:
        """Compute residual + step(norm(x)) of one row by fused kernels, (1, C) -> (1, C)."""
        from regard.kernels.step_linear import project

        mixed = ctx.state.attend(self, project(x, self.qkv, norm=norm), kept)
        return project(mixed, self.out, residual=residual)


class CrossAttention(Attention):
    """Attention with queries from the decoder, and keys and values from the encoder's final output."""

    tensor_parallel: ClassVar[dict[str, str]] = {"q": "column", "kv": "column", "out": "row"}

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.q = nn.Linear(config.d_model, self.d_queries, bias=config.bias)
        self.kv = nn.Linear(config.d_model, 2 * self.d_keys, bias=config.bias)

    def scale_queries(self, factor: float) -> None:
        self.q.weight *= factor

    def fused_matrices(self) -> dict[str, tuple[int, list[int]]]:
        return {"kv": (self.n_kv_heads, [self.d_head, self.d_head])}

    def keys_values(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values (B', G, S, D) of the encoder's output (B', S, C)."""
        k, v = self.kv(memory).view(*memory.shape[:2], -1, 2, self.d_head).unbind(3)  # each head's key, then its value
        return k.transpose(1, 2), v.transpose(1, 2)

    def plan(self, ctx: Context) -> AttentionPlan:
        """Return the plan that this layer attends by; `look/intervention_hooks.py` replaces this method."""
        assert ctx.memory_plan is not None
        return ctx.memory_plan

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        """Attend from target tokens to the encoder's output, (B, T, C) -> (B, T, C)."""
        assert ctx.memory is not None
        return self.attend_memory(x, *self.keys_values(ctx.memory), ctx)

    def attend_memory(self, x: Tensor, k: Tensor, v: Tensor, ctx: Context) -> Tensor:
        """Attend from x (B, T, C) or (N, C) to keys and values (B', G, S, D) of the memory."""
        # The hypotheses of a sentence are queries of one row of the memory, so that its keys are read once and never copied.
        grouped = x.reshape(k.shape[0], -1, x.shape[-1])  # (B', B/B' * T, C)
        q = split_heads(self.q(grouped), self.d_head)
        return self.out(merge_heads(self.attend(q, k, v, self.plan(ctx)))).view_as(x)

    def state(self) -> dict[str, Storage]:
        """Declare the keys and values of the source, which are the same in every step."""
        shape = (self.n_kv_heads, LENGTH, self.d_head)
        return {"keys": PerSentence(shape), "values": PerSentence(shape)}

    def store_memory(self, memory: Tensor, state: Any) -> None:
        """Store the keys and values of the encoder's output (B, S, C), which are the same in every step."""
        k, v = self.keys_values(memory)
        # Contiguous by head, since every step reads them.
        state.store_memory(self, keys=k.contiguous(), values=v.contiguous())

    def prefill(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Attend from several target tokens to the stored keys and values of the source, (B, T, C) -> (B, T, C)."""
        return self.attend_memory(x, kept.keys, kept.values, ctx)

    def step(self, x: Tensor, ctx: Context, kept: Any) -> Tensor:
        """Attend from one new token of each hypothesis to the stored keys and values of its source, (N, C) -> (N, C)."""
        if ctx.state.static:
            return self.out(ctx.state.attend_to_memory(self, self.q(x), kept))
        return self.attend_memory(x, kept.keys, kept.values, ctx)

    def fused_step(self, x: Tensor, norm: nn.Module | None, residual: Tensor | None, ctx: Context, kept: Any) -> Tensor:
        """Compute residual + step(norm(x)) of one row by fused kernels, (1, C) -> (1, C)."""
        from regard.kernels.step_linear import project

        mixed = ctx.state.attend_to_memory(self, project(x, self.q, norm=norm), kept)
        return project(mixed, self.out, residual=residual)
