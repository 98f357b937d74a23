"""A block: sublayers, each with dropout, a residual connection and a norm, one after the other or side by side.

Encoder blocks are [self, ff], decoder blocks [self, cross, ff]; `self` is the block's token mixer, after which there need
not be a feed-forward layer. One code serves training, reading prompts and decoding steps: the context says how parts are
applied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.residual_norm import add_norm, is_plain
from regard.layers.context import Context
from regard.layers.mixers.attention import CrossAttention
from regard.layers.norm import PLACEMENTS, Branch, Stream, make_norm
from regard.layers.part import Place, make_part


class Block(nn.Module):
    """A block whose sublayers each read what the one before it made."""

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__()
        place = Branch if config.parallel else PLACEMENTS[config.norm]
        self.sublayers = nn.ModuleDict({name: place(sublayer, config) for name, sublayer in sublayers.items()})

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        """Return the stream after the block (layers/norm.py), and the sum of its auxiliary losses, or None."""
        total = None
        for sublayer in self.sublayers.values():
            x, y, loss = sublayer(x, y, ctx)
            if loss is not None:
                total = loss if total is None else total + loss
        return x, y, total


class ParallelBlock(Block):
    """x + attn(norm(x)) + ff(norm(x)), as in PaLM: one norm, and sublayers that need not wait for each other."""

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__(config, sublayers)
        self.norm, self.dropout = make_norm(config), config.dropout

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        parts = [branch.sublayer for branch in self.sublayers.values()] if ctx.fuse and is_plain(self.norm) else []
        if parts and all(part in ctx.state.fused for part in parts):
            before = x = x if y is None else x + y
            for part in parts:
                x = ctx.state.fused[part](before, self.norm, x, ctx, ctx.state.parts.get(part))
            return x, None, None
        x, normal = add_norm(x, y, self.norm, self.dropout if self.training else 0.0)
        (y, total), *others = (branch(normal, ctx) for branch in self.sublayers.values())
        for out, loss in others:
            y = y + out
            if loss is not None:
                total = loss if total is None else total + loss
        return x, y, total


def make_block(config: ModelConfig, sublayers: dict[str, nn.Module]) -> Block:
    return ParallelBlock(config, sublayers) if config.parallel else Block(config, sublayers)


def make_blocks(config: ModelConfig, n: int, side: str, causal: bool, crosses: bool = False) -> Iterator[Block]:
    """Yield n blocks, whose mixers are those that the configuration lists, over and over."""
    for i in range(n):
        place = Place(side, i, causal)
        sublayers = {"self": make_part("mixer", *mixer_at(config, place))}
        if crosses:
            sublayers["cross"] = CrossAttention(config)
        if config.d_ff:
            sublayers["ff"] = make_part("feedforward", config.feedforward, config, place)
        yield make_block(config, sublayers)


def mixer_at(config: ModelConfig, place: Place) -> tuple[str, ModelConfig, Place]:
    """Return the name of the mixer of block `place.index`, and its place among those of its name."""
    names = [config.mixer[i % len(config.mixer)] for i in range(place.index + 1)]
    return names[-1], config, replace(place, index=names.count(names[-1]) - 1)
