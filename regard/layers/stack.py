"""N blocks one after the other, and the context they share."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.config import ModelConfig
from regard.device import working_dtype
from regard.layers.attend import Plan, make_plan, runnable, settled
from regard.layers.attention import Attention, CrossAttention
from regard.layers.block import Block
from regard.layers.cache import NO_CACHE, Cache
from regard.layers.context import Context
from regard.layers.contextual import Disentangled
from regard.layers.masks import FULL, Mask
from regard.layers.norm import make_norm
from regard.layers.positions import NoPositions, Positions
from regard.layers.reach import make_reach
from regard.layers.residual import add_norm
from regard.layers.schemes import make_positions


def in_working_precision(x: Tensor) -> Tensor:
    """The residual stream has the precision of the products that read it and add to it."""
    return x.to(working_dtype(x))


class Stack(nn.Module):
    """`place` is encoder or decoder; it says which position schemes make sense."""

    def __init__(self, config: ModelConfig, blocks: Iterable[Block], mask: Mask, place: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        # Pre-norm leaves the residual sum unnormalised; post-norm blocks already end on a norm.
        self.norm = make_norm(config) if config.norm == "pre" else None
        self.mask, self.d_head = mask, config.d_head
        self.kernel, self.dilations = config.kernel, config.dilations if config.mixer == "convolution" else ()
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        self.recompute = False  # training may keep only what enters a block, and compute the rest again
        chances = (config.dropout, config.attention_dropout, config.ff_dropout)
        self.random = max(chances) > 0  # then dropout must be the same again
        first = make_positions(config, place)
        own = (make_positions(config, place) for _ in self.blocks[1:]) if first.per_layer else ()
        self.schemes = nn.ModuleList([first, *own])  # one for all blocks, or one each
        self.unbiased = not (first.relative or first.contextual or first.per_layer)  # scores are q k^T alone
        for scheme, block in zip(self.schemes, self.blocks, strict=False):
            if isinstance(
                scheme, Disentangled
            ):  # all layers of DeBERTa read one table, with their own queries and keys
                scheme.join(first, block.get_submodule("sublayers.self.sublayer.qkv"))  # type: ignore[arg-type]
        crosses = any("cross" in block.sublayers for block in self.blocks)  # type: ignore[operator]
        self.cross_scheme = make_positions(config, "cross") if crosses else NoPositions()

    def init_weights(self) -> None:
        """Where a scheme wants scores that are not divided by sqrt(D), as T5's, queries start smaller by as much."""
        for module in self.modules():
            if isinstance(module, Attention):
                crosses = isinstance(module, CrossAttention)
                scale: float = module.d_head**-0.5
                wanted = (self.cross_scheme if crosses else self.schemes[0]).scale
                module.scale_queries(scale / (wanted or scale))  # type: ignore[operator]

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Token embeddings with what the scheme adds to them, (B, T, C)."""
        return self.schemes[0].embed(x, positions)  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        positions: Tensor,  # (B, T)
        memory: Tensor | None = None,  # (B', S, C)
        memory_positions: Tensor | None = None,  # (B', S)
        cache: Cache = NO_CACHE,
        mask: Mask | None = None,  # instead of the stack's own
    ) -> Tensor:
        keys = cache.key_positions(positions)
        past = cache.own_past()
        kernel = "reference" if self.dilations else None  # convolutions ask a plan only who stands where
        mask = mask or self.mask
        if positions.shape[1] == 1 and cache.sees_all() and mask.triangle and not kernel and self.unbiased:
            plans = [Plan(runnable("sdpa"), mask, positions, keys, scheme=self.schemes[0])]  # type: ignore[arg-type]
        else:
            plans = [self._plan(mask, positions, keys, scheme, past, kernel) for scheme in self.schemes]
        memory_plan = None
        if memory_positions is not None:
            grouped = positions.reshape(memory_positions.shape[0], -1)  # hypotheses of one sentence share its memory
            make = functools.partial(self._plan, FULL, grouped, memory_positions, self.cross_scheme)
            by_positions = self.cross_scheme.relative or self.cross_scheme.contextual
            memory_plan = make() if by_positions else cache.memory_plan(memory_positions, make)
            memory_plan = dataclasses.replace(memory_plan, q=grouped)
        ctx = Context(positions, plans[0], cache, self.schemes[0].rotation(positions), memory, memory_plan)  # type: ignore[operator]
        x = in_working_precision(x)
        y = self._nothing(x)
        for block, own in zip(self.blocks, self._contexts(ctx, plans), strict=True):
            x, y = self._run(block, x, y, own)
        cache.advance(positions)
        if self.norm is None:
            return x
        return add_norm(x, y, self.norm, self.dropout if self.training else 0.0)[1]

    def _nothing(self, x: Tensor) -> Tensor | None:
        """What is to be added to x before the first block. Where blocks may be compiled it is zeros and not None, or the
        first would be compiled apart from the others."""
        return torch.zeros_like(x) if self.norm is not None and x.is_cuda and torch.is_grad_enabled() else None

    def _run(self, block: nn.Module, x: Tensor, y: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor | None]:
        if self.recompute and self.training and torch.is_grad_enabled():
            return checkpoint(block, x, y, ctx, use_reentrant=False, preserve_rng_state=self.random)
        return block(x, y, ctx)

    def _contexts(self, ctx: Context, plans: list[Plan]) -> list[Context]:
        """Of each block: they differ where each has a scheme of its own, or convolutions of many dilations."""
        n = len(self.blocks)
        if self.dilations:
            made = {d: make_reach(plans[0], self.kernel, d) for d in set(self.dilations)}
            return [dataclasses.replace(ctx, reach=made[self.dilations[i % len(self.dilations)]]) for i in range(n)]
        return [ctx] * n if len(plans) == 1 else [dataclasses.replace(ctx, self_plan=plan) for plan in plans]

    def _plan(
        self,
        mask: Mask,
        q: Tensor,
        k: Tensor,
        scheme: nn.Module,
        past: Tensor | None = None,
        kernel: str | None = None,
    ) -> Plan:
        assert isinstance(scheme, Positions)
        dropout = self.attention_dropout if self.training else 0.0
        plan = make_plan(mask, q, k, scheme, d_head=self.d_head, dropout=dropout, past=past, kernel=kernel)
        return plan if self.training else settled(plan)
