"""N blocks one after the other, and the context they share."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attend import make_plan
from regard.layers.block import Block
from regard.layers.cache import NO_CACHE, Cache
from regard.layers.context import Context
from regard.layers.masks import Full, Mask


class Stack(nn.Module):
    def __init__(self, config: ModelConfig, blocks: Iterable[Block], mask: Mask) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        # Pre-norm leaves the residual sum unnormalised; post-norm blocks already end on a norm.
        self.norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else nn.Identity()
        self.mask = mask

    def forward(
        self,
        x: Tensor,  # (B, T, C)
        positions: Tensor,  # (B, T)
        memory: Tensor | None = None,  # (B', S, C)
        memory_positions: Tensor | None = None,  # (B', S)
        cache: Cache = NO_CACHE,
    ) -> Tensor:
        ctx = Context(
            positions=positions,
            self_plan=make_plan(self.mask, positions, cache.key_positions(positions)),
            cache=cache,
            memory=memory,
            memory_plan=None if memory_positions is None else make_plan(Full(), positions, memory_positions),
        )
        for block in self.blocks:
            x = block(x, ctx)
        cache.advance(positions)
        return self.norm(x)
