"""A stack of N blocks, and the context that they share."""

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
from regard.layers.attention_kernels import AttentionPlan, make_plan, with_additive_mask
from regard.layers.block import Block
from regard.layers.context import Context, PrepareRequest, apply_prefill, apply_step
from regard.layers.decoding_state import Columns, DecodingState, declared_storage
from regard.layers.mixers.attention import Attention, CrossAttention
from regard.layers.norm import make_norm
from regard.layers.positions.scheme import NoPositions, PositionScheme, make_positions


def to_working_precision(x: Tensor) -> Tensor:
    """Return x in the precision of matrix products: under autocast, that of autocast."""
    return x.to(working_dtype(x))


class ZerosWithGrad(torch.autograd.Function):
    """Zeros like x that require a gradient where x does; `Stack._initial_residual` says what for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.zeros_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        return None


class LastValue:
    """A tensor of the last forward pass, which is not copied with its module."""

    value: Tensor | None = None

    def __deepcopy__(self, memo: Any) -> LastValue:
        return LastValue()


class Stack(nn.Module):
    """N blocks on one side of a model. `side`, encoder or decoder, decides which position schemes are allowed."""

    def __init__(self, config: ModelConfig, blocks: Iterable[Block], mask: Mask, side: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        # Pre-norm leaves the residual sum unnormalised; post-norm blocks already end on a norm.
        self.norm = make_norm(config) if config.norm == "pre" else None
        self.side, self.mask, self.d_head = side, mask, config.d_head
        self.dropout, self.attention_dropout = config.dropout, config.attention_dropout
        # Activation (gradient) checkpointing: keep only the input of each block, and recompute the rest.
        self.activation_checkpointing = False
        self.compiled = False  # the blocks are compiled for training (training/training_step.py)
        self.intervened = (
            False  # look/intervention_hooks.py replaced methods of its parts, which compiled code would not call
        )
        chances = (config.dropout, config.attention_dropout, config.ff_dropout)
        parts = [*self.blocks.modules()]
        drops = any(isinstance(part, nn.Dropout) and part.p > 0 for part in parts)
        declared = any(getattr(part, "random", False) for part in parts)
        self.random = max(chances) > 0 or drops or declared  # recomputation must then restore the random state
        first = make_positions(config, side)
        own = (make_positions(config, side) for _ in self.blocks[1:]) if first.per_layer else ()
        self.schemes = nn.ModuleList([first, *own])  # one for all blocks, or one each
        for scheme, block in zip(self.schemes, self.blocks, strict=False):
            scheme.attach(block, first)  # type: ignore[operator]
        self.crosses = any("cross" in block.sublayers for block in self.blocks)  # type: ignore[operator]
        self.cross_scheme = make_positions(config, "cross") if self.crosses else NoPositions()
        self._auxiliary = LastValue()
        caches = any(isinstance(x, Columns) for _, _, named in declared_storage(self.blocks) for x in named.values())
        # A text has a longest length where a KV cache grows with it, or where positions are added to embeddings.
        self.grows = caches or type(first).embed is not PositionScheme.embed
        # A text whose state does not grow may be read in pieces, where no part needs all of it at once.
        self.reads_pieces = not self.grows and all(getattr(part, "reads_pieces", True) for part in parts)

    @property
    def auxiliary_loss(self) -> Tensor | None:
        """The sum of the blocks' auxiliary losses in the last forward pass, or None."""
        return self._auxiliary.value

    @property
    def mixers(self) -> list[Any]:
        """The token mixer of each block."""
        return [block.sublayers["self"] for block in self.blocks]  # type: ignore[index]

    @property
    def scales_queries(self) -> bool:
        """Whether `init_weights` changes the queries of any layer."""
        scale = self.d_head**-0.5
        return any((scheme.scale or scale) != scale for scheme in (self.schemes[0], self.cross_scheme))

    def init_weights(self) -> None:
        """Scale initial queries by 1/sqrt(D) where a scheme such as T5 does not divide scores by sqrt(D)."""
        for module in self.modules():
            if isinstance(module, Attention):
                crosses = isinstance(module, CrossAttention)
                scale: float = module.d_head**-0.5
                wanted = (self.cross_scheme if crosses else self.schemes[0]).scale or scale
                if wanted != scale:  # a model whose weights are about to be loaded is not even touched in memory
                    module.scale_queries(scale / wanted)  # type: ignore[operator]

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        """Return token embeddings (..., C) plus absolute positions, if the position scheme has any."""
        return self.schemes[0].embed(x, positions)  # type: ignore[operator]

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        positions: Tensor,  # (B, T)
        memory: Tensor | None = None,  # (B', S, C)
        memory_positions: Tensor | None = None,  # (B', S)
        state: DecodingState | None = None,  # a decoding state to fill: then x holds prompts
        mask: Mask | None = None,  # replaces the stack's own mask
    ) -> Tensor:
        """Run whole rows through all blocks and the final norm, (B, T, C) -> (B, T, C)."""
        keys = positions if state is None else state.key_positions(positions)
        memory_plan = None
        if memory_positions is not None:
            grouped = positions.reshape(memory_positions.shape[0], -1)  # hypotheses of a sentence share its memory
            memory_plan = self._memory_plan(grouped, memory_positions)
        ctx = Context(positions, None, memory, memory_plan, None if state is None else apply_prefill, state)
        scheme: Any = self.schemes[0]
        continues = state is not None and state.length > 0
        request = PrepareRequest(positions, keys, mask or self.mask, scheme, None, self.training, continues=continues)
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
            state.advance(positions, is_prompt=True)
        if self.norm is None:
            return x
        return add_norm(x, y, self.norm, self.dropout if self.training else 0.0)[1]

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Run one more token of each row through all blocks and the final norm, (N, C) -> (N, C)."""
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
            return ctx.positions, [ctx] * len(self.blocks)  # a static state holds its own tables
        positions = state.next[:, None].expand(-1, state.width)  # (B, K)
        memory_plan = None
        if state.memory_positions is not None:
            by_positions = self.cross_scheme.relative or self.cross_scheme.contextual
            make = functools.partial(self._memory_plan, positions, state.memory_positions)
            memory_plan = make() if by_positions else replace(state.get_memory_plan(make), query_positions=positions)
        ctx = Context(state.position(), None, None, memory_plan, apply_step, state)
        keys, past = state.key_positions(positions), state.own_past()
        sees_all = state.sees_all()
        request = PrepareRequest(positions, keys, self.mask, self.schemes[0], past, False, sees_all, True)  # type: ignore[arg-type]
        return positions, self._contexts(ctx, request)

    def store_memory(self, memory: Tensor, memory_positions: Tensor, state: DecodingState) -> None:
        """Store the cross-attention keys and values of the encoder's output (B, S, C) at positions (B, S)."""
        for block in self.blocks:
            block.get_submodule("sublayers.cross").store_memory(memory, state)  # type: ignore[operator]
        state.memory_positions = memory_positions

    def _initial_residual(self, x: Tensor) -> Tensor | None:
        """Return the pending residual y of the first block: None, or zeros where blocks are compiled.

        Later blocks receive a y that requires a gradient; without one, the first block would be compiled separately."""
        return ZerosWithGrad.apply(x) if self.compiled and self.norm is not None and torch.is_grad_enabled() else None

    def _checkpointed(self, block: nn.Module, x: Tensor, y: Tensor | None, ctx: Context) -> Any:
        """Run a block with activation (gradient) checkpointing: the backward pass runs it once more."""
        return checkpoint(block, x, y, ctx, use_reentrant=False, preserve_rng_state=self.random)

    def _contexts(self, ctx: Context, request: PrepareRequest) -> list[Context]:
        """Return the context of each block; blocks with equal mixers share the result of `prepare`."""
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

    def _memory_plan(self, q: Tensor, k: Tensor) -> AttentionPlan:
        """Return the plan of cross-attention for queries at q (B, T) and source tokens at k (B, S)."""
        dropout = self.attention_dropout if self.training else 0.0
        plan = make_plan(FULL, q, k, self.cross_scheme, d_head=self.d_head, dropout=dropout)
        return plan if self.training else with_additive_mask(plan)
