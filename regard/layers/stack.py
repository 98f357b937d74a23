"""N blocks one after the other, and the context they share."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from regard.config import ModelConfig
from regard.device import working_dtype
from regard.kernels.masks import FULL, Mask
from regard.kernels.residual_norm import add_norm
from regard.layers.attention_kernels import Plan, make_plan, with_additive_mask
from regard.layers.block import Block
from regard.layers.context import Context, Request, apply_read, apply_step
from regard.layers.decoding_state import State
from regard.layers.mixers.attention import Attention, CrossAttention
from regard.layers.norm import make_norm
from regard.layers.positions.scheme import NoPositions, make_positions


def to_working_precision(x: Tensor) -> Tensor:
    """Return the residual stream in the precision of the products that read it and add to it."""
    return x.to(working_dtype(x))


class ZerosWithGrad(torch.autograd.Function):
    """ZerosWithGrad like x, which need a gradient where x does and pass none on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class LastValue:
    """A tensor of the last forward, which copies of its module do not have."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> LastValue:
        return LastValue()


class Stack(nn.Module):
    """N blocks on one side of a model. `side` is encoder or decoder; it says which position schemes make sense."""

    def __init__(self, config: ModelConfig, blocks: Iterable[Block], mask: Mask, side: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        # Pre-norm leaves the residual sum unnormalised; post-norm blocks already end on a norm.
        self.norm = make_norm(config) if config.norm == "pre" else None
        self.side, self.mask, self.d_head = side, mask, config.d_head
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        self.activation_checkpointing = False  # activation checkpointing: training keeps only what enters a block
        self.compiled = False  # its blocks are compiled for training (training/training_step.py)
        self.intervened = False  # look/change replaces parts of it: compiled and captured forms do not know of that
        chances = (config.dropout, config.attention_dropout, config.ff_dropout)
        parts = [*self.blocks.modules()]
        drops = any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts)
        declared = any(getattr(part, "random", False) for part in parts)
        self.random = max(chances) > 0 or drops or declared  # then recomputing must draw the same numbers again
        first = make_positions(config, side)
        own = (make_positions(config, side) for _ in self.blocks[1:]) if first.per_layer else ()
        self.schemes = nn.ModuleList([first, *own])  # one for all blocks, or one each
        for scheme, block in zip(self.schemes, self.blocks, strict=False):
            scheme.attach(block, first)  # type: ignore[operator]
        self.crosses = any("cross" in block.sublayers for block in self.blocks)  # type: ignore[operator]
        self.cross_scheme = make_positions(config, "cross") if self.crosses else NoPositions()
        self._auxiliary = LastValue()

    @property
    def auxiliary_loss(self) -> Tensor | None:
        """Return the sum of the blocks' auxiliary losses in the last forward, or None where they have none."""
        return self._auxiliary.value

    @property
    def mixers(self) -> list[Any]:
        """Return the token mixer of each block."""
        return [block.sublayers["self"] for block in self.blocks]  # type: ignore[index]

    def init_weights(self) -> None:
        """Where a scheme wants scores that are not divided by sqrt(D), as T5's, queries start smaller by as much."""
        for module in self.modules():
            if isinstance(module, Attention):
                crosses = isinstance(module, CrossAttention)
                scale: float = module.d_head**-0.5
                wanted = (self.cross_scheme if crosses else self.schemes[0]).scale
                module.scale_queries(scale / (wanted or scale))  # type: ignore[operator]

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return token embeddings (..., C) with what the position scheme adds to them."""
        return self.schemes[0].embed(x, positions)  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        positions: Tensor,  # (B, T)
        memory: Tensor | None = None,  # (B', S, C)
        memory_positions: Tensor | None = None,  # (B', S)
        state: State | None = None,  # what decoding keeps: then these are prompts, and it is filled
        mask: Mask | None = None,  # instead of the stack's own
    ) -> Tensor:
        """Run whole rows through all blocks."""
        keys = positions if state is None else state.key_positions(positions)
        memory_plan = None
        if memory_positions is not None:
            grouped = positions.reshape(memory_positions.shape[0], -1)  # hypotheses of one sentence share its memory
            memory_plan = self._memory_plan(grouped, memory_positions)
        ctx = Context(positions, None, memory, memory_plan, None if state is None else apply_read, state)
        request = Request(positions, keys, mask or self.mask, self.schemes[0], None, self.training)  # type: ignore[arg-type]
        x = to_working_precision(x)
        y = self._initial_residual(x)
        losses: list[Tensor] = []
        run = (
            self._checkpointed if self.activation_checkpointing and self.training and torch.is_grad_enabled() else None
        )
        for block, own in zip(self.blocks, self._contexts(ctx, request), strict=True):
            x, y, loss = block(x, y, own) if run is None else run(block, x, y, own)
            if loss is not None:
                losses.append(loss)
        self._auxiliary.value = sum(losses[1:], losses[0]) if losses else None
        if state is not None:
            state.advance(positions)
        if self.norm is None:
            return x
        return add_norm(x, y, self.norm, self.dropout if self.training else 0.0)[1]

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Run one more token of each row, (N, C) -> (N, C), the stack's last norm included."""
        positions, contexts = self._step_contexts(state)
        x, y = to_working_precision(x), None
        for block, own in zip(self.blocks, contexts, strict=True):
            x, y, _ = block(x, y, own)
        if not state.static:
            state.advance(positions)
        if self.norm is None:
            return x
        return add_norm(x, y, self.norm, self.dropout if self.training else 0.0)[1]

    def _step_contexts(self, state: Any) -> tuple[Tensor, list[Context]]:
        """Return the positions (B, K) of the tokens of a step, and the context of each block."""
        if state.static:
            ctx = Context(state.position(), apply=apply_step, state=state, fuse=state.fuse)
            return ctx.positions, [ctx] * len(self.blocks)  # a static state has prepared everything
        positions = state.next[:, None].expand(-1, state.width)  # (B, K)
        memory_plan = None
        if state.memory_positions is not None:
            by_positions = self.cross_scheme.relative or self.cross_scheme.contextual
            make = functools.partial(self._memory_plan, positions, state.memory_positions)
            memory_plan = make() if by_positions else replace(state.get_memory_plan(make), q=positions)
        ctx = Context(state.position(), None, None, memory_plan, apply_step, state)
        keys, past = state.key_positions(positions), state.own_past()
        sees_all = state.sees_all()
        request = Request(positions, keys, self.mask, self.schemes[0], past, False, sees_all)  # type: ignore[arg-type]
        return positions, self._contexts(ctx, request)

    def store_memory(self, memory: Tensor, memory_positions: Tensor, state: State) -> None:
        """Keep what cross-attention makes of the encoder's output (B, S, C), with tokens at these positions (B, S)."""
        for block in self.blocks:
            block.get_submodule("sublayers.cross").store_memory(memory, state)  # type: ignore[operator]
        state.memory_positions = memory_positions

    def _initial_residual(self, x: Tensor) -> Tensor | None:
        """Return what is to be added to x before the first block. Where blocks are compiled it is zeros that seem to have a
        gradient, as what later blocks are given has, or the first would be compiled apart from the others."""
        return ZerosWithGrad.apply(x) if self.compiled and self.norm is not None and torch.is_grad_enabled() else None

    def _checkpointed(self, block: nn.Module, x: Tensor, y: Tensor | None, ctx: Context) -> Any:
        return checkpoint(block, x, y, ctx, use_reentrant=False, preserve_rng_state=self.random)

    def _contexts(self, ctx: Context, request: Request) -> list[Context]:
        """Return the context of each block: what its mixer prepares is made once for all blocks that share it."""
        made: dict[Hashable, Context] = {}
        found, several = [], len(self.schemes) > 1
        for i, mixer in enumerate(self.mixers):
            number = i if several else 0
            key = (type(mixer), mixer.share_key, number)
            if key not in made:
                own = replace(request, scheme=self.schemes[i]) if number else request  # type: ignore[arg-type]
                made[key] = ctx.with_prepared(mixer.prepare(own))
            found.append(made[key])
        return found

    def _memory_plan(self, q: Tensor, k: Tensor) -> Plan:
        """Return the plan of cross-attention for queries at q (B, T) and source tokens at k (B, S)."""
        dropout = self.attention_dropout if self.training else 0.0
        plan = make_plan(FULL, q, k, self.cross_scheme, d_head=self.d_head, dropout=dropout)
        return plan if self.training else with_additive_mask(plan)
