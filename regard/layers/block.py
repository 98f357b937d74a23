"""A Transformer block: sublayers, each with its norm, dropout and residual connection.

Encoder blocks have the sublayers [self, ff], decoder blocks [self, cross, ff]; `self` is the block's token mixer, and the
feed-forward layer may be missing. The same code serves training, prefill and decoding steps: `ctx.apply` selects
`prefill` or `step` of a sublayer, and is None where its `forward` is called.

The residual stream inside a stack is a pair (x, y): y, if it is not None, has yet to be added to x. The norm that follows,
in this block or in the next one, computes the sum, so that addition and norm take a single pass through memory
(kernels/residual_norm.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.residual_norm import add_norm, is_plain
from regard.layers.context import Context
from regard.layers.mixers.attention import CrossAttention
from regard.layers.norm import make_norm
from regard.layers.part import Place, make_part

Stream = tuple[Tensor, Tensor | None, Tensor | None]  # x, the pending residual y, the sum of auxiliary losses


class Block(nn.Module):
    """The sublayers of one block and their norms, under the same names; subclasses define where the norms stand."""

    observe: Any = None  # set by a recorder: observe(name, x, y) receives the residual stream after each sublayer

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.sublayers = nn.ModuleDict(sublayers)
        self.norms = self.make_norms(config)
        self.dropout = config.dropout
        self.returns_loss = {name: bool(getattr(part, "auxiliary", False)) for name, part in sublayers.items()}

    def make_norms(self, config: ModelConfig) -> nn.ModuleDict:
        """Return a norm for each sublayer."""
        return nn.ModuleDict({name: make_norm(config) for name in self.sublayers})

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        """Return the residual stream (x, y) after the block, (B, T, C) each, and the sum of its auxiliary losses or None.

        In a decoding step x and y are (N, C)."""
        raise NotImplementedError


class PreNormBlock(Block):
    """Pre-norm block, x + f(norm(x)): the residual path has no norm in it, so deep stacks train without warm-up."""

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        """Add x + f(norm(x)) for each sublayer f; return the pending pair (x, y), (B, T, C) each, and the auxiliary loss."""
        dropout, total = self.dropout if self.training else 0.0, None
        for name, part in self.sublayers.items():
            norm = self.norms[name]
            # Decoding one row on a GPU: the part's fused kernel computes norm, part and residual sum at once.
            fused = ctx.state.fused.get(part) if ctx.fuse and is_plain(norm) else None
            if fused is not None:
                x = x if y is None else x + y
                x, y = fused(x, norm, x, ctx, ctx.state.parts.get(part)), None
                continue
            x, normal = add_norm(x, y, norm, dropout)
            result = part(normal, ctx) if ctx.apply is None else ctx.apply(part, normal, ctx)
            y, total = split_loss(result, total, self.returns_loss[name], part)
            if self.observe is not None:
                self.observe(name, x, y)
        return x, y, total


class PostNormBlock(Block):
    """Post-norm block, norm(x + f(x)), as in the 2017 paper; no residual is left pending, so y stays None."""

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        """Compute norm(x + f(x)) for each sublayer f; return (x, None), x (B, T, C), and the auxiliary loss."""
        dropout, total = self.dropout if self.training else 0.0, None
        for name, part in self.sublayers.items():
            norm = self.norms[name]
            # Decoding one row on a GPU: the part's fused kernel computes norm, part and residual sum at once.
            fused = ctx.state.fused.get(part) if ctx.fuse and is_plain(norm) else None
            if fused is not None:
                out = fused(x, None, None, ctx, ctx.state.parts.get(part))
            else:
                result = part(x, ctx) if ctx.apply is None else ctx.apply(part, x, ctx)
                out, total = split_loss(result, total, self.returns_loss[name], part)
            x = add_norm(x, out, norm, dropout)[1]
            if self.observe is not None:
                self.observe(name, x, None)
        return x, y, total


class ParallelBlock(Block):
    """Parallel block, x + self(norm(x)) + ff(norm(x)), as in PaLM: the sublayers share one norm and one input."""

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__(config, sublayers)
        self.norm = make_norm(config)

    def make_norms(self, config: ModelConfig) -> nn.ModuleDict:
        return nn.ModuleDict()

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> Stream:
        """Run all sublayers on norm(x); return the pending pair (x, their sum), (B, T, C) each, and the auxiliary loss."""
        parts = [*self.sublayers.values()]
        if ctx.fuse and is_plain(self.norm) and all(part in ctx.state.fused for part in parts):
            before = x = x if y is None else x + y
            for part in parts:
                x = ctx.state.fused[part](before, self.norm, x, ctx, ctx.state.parts.get(part))
            return x, None, None
        x, normal = add_norm(x, y, self.norm, self.dropout if self.training else 0.0)
        added, total = None, None
        for name, part in self.sublayers.items():
            result = part(normal, ctx) if ctx.apply is None else ctx.apply(part, normal, ctx)
            out, total = split_loss(result, total, self.returns_loss[name], part)
            added = out if added is None else added + out
        if self.observe is not None:
            self.observe(name, x, added)
        return x, added, total


def split_loss(result: Any, total: Tensor | None, returns_loss: bool, part: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Return the output of a part, and `total` plus the auxiliary loss of the part, if it returns one."""
    if isinstance(result, tuple) != returns_loss:
        given, declared = ("(y, loss)", "no") if not returns_loss else ("y alone", "an")
        raise TypeError(f"{type(part).__name__} returns {given}, but declares {declared} auxiliary loss")
    if not returns_loss:
        return result, total
    y, loss = result
    if loss.dim():
        raise TypeError(f"the auxiliary loss of {type(part).__name__} has shape {list(loss.shape)}: return one number")
    return y, loss if total is None else total + loss


PLACEMENTS = {"pre": PreNormBlock, "post": PostNormBlock}


def make_block(config: ModelConfig, sublayers: dict[str, nn.Module]) -> Block:
    """Return a parallel, pre-norm or post-norm block of these sublayers, as the configuration says."""
    return (ParallelBlock if config.parallel else PLACEMENTS[config.norm])(config, sublayers)


def make_blocks(config: ModelConfig, n: int, side: str, causal: bool, crosses: bool = False) -> Iterator[Block]:
    """Yield n blocks; their mixers and feed-forward layers follow the configured lists, repeated as often as needed."""
    for i in range(n):
        place = Place(side, i, causal)
        sublayers = {"self": make_part("mixer", *part_at("mixer", config, place))}
        if crosses:
            sublayers["cross"] = CrossAttention(config)
        if config.d_ff:
            sublayers["ff"] = make_part("feedforward", *part_at("feedforward", config, place))
        yield make_block(config, sublayers)


def part_at(kind: str, config: ModelConfig, place: Place) -> tuple[str, ModelConfig, Place]:
    """Return the name of the mixer or feed-forward layer of block `place.index`, the configuration, and the place with the
    number of the block as its depth, counted among parts of that name."""
    listed: tuple[str, ...] = getattr(config, kind)
    names = [listed[i % len(listed)] for i in range(place.index + 1)]
    return names[-1], config, replace(place, index=names.count(names[-1]) - 1, depth=place.index)
