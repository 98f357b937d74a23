"""A block: sublayers, each wrapped in dropout, a residual connection and a norm, one after the other or side by side.

A sublayer is any `f(x, ctx) -> x`. Encoder blocks are [self, ff], decoder blocks [self, cross, ff]; `self` mixes the tokens,
by attention or by a convolution, after which there need not be an ff.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attention import CrossAttention
from regard.layers.context import Context
from regard.layers.norm import PLACEMENTS, Branch, make_norm
from regard.layers.part import Place, make_part
from regard.layers.residual import add_norm


class Block(nn.Module):
    """Each sublayer reads what the one before it made."""

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__()
        place = Branch if config.parallel else PLACEMENTS[config.norm]
        self.sublayers = nn.ModuleDict({name: place(sublayer, config) for name, sublayer in sublayers.items()})

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor | None]:
        """The stream, and what is still to be added to it, before and after (layers/norm.py)."""
        for sublayer in self.sublayers.values():
            x, y = sublayer(x, y, ctx)
        return x, y


class ParallelBlock(Block):
    """x + attn(norm(x)) + ff(norm(x)), PaLM's: one norm, and sublayers that need not wait for each other."""

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__(config, sublayers)
        self.norm, self.dropout = make_norm(config), config.dropout

    def forward(self, x: Tensor, y: Tensor | None, ctx: Context) -> tuple[Tensor, Tensor | None]:
        x, normal = add_norm(x, y, self.norm, self.dropout if self.training else 0.0)
        first, *others = (sublayer(normal, ctx) for sublayer in self.sublayers.values())
        return x, sum(others, first)


def make_block(config: ModelConfig, sublayers: dict[str, nn.Module]) -> Block:
    return ParallelBlock(config, sublayers) if config.parallel else Block(config, sublayers)


def encoder_block(config: ModelConfig, index: int = 0, causal: bool = False) -> Block:
    """Block `index` of an encoder, or of a decoder that has no source to look at."""
    place = Place("decoder" if causal else "encoder", index, causal)
    return make_block(config, {"self": make_mixer(config, place), **last_sublayer(config, place)})


def decoder_block(config: ModelConfig, index: int = 0) -> Block:
    place = Place("decoder", index, causal=True)
    sublayers = {"self": make_mixer(config, place), "cross": CrossAttention(config), **last_sublayer(config, place)}
    return make_block(config, sublayers)


def make_mixer(config: ModelConfig, place: Place) -> nn.Module:
    """The mixer of block `place.index`: those that model.mixer names are repeated over the blocks."""
    mixer: nn.Module = make_part("mixer", *mixer_at(config, place))
    return mixer


def mixer_at(config: ModelConfig, place: Place) -> tuple[str, ModelConfig, Place]:
    """The name of the mixer of block `place.index`, and its place among those of its name."""
    names = [config.mixer[i % len(config.mixer)] for i in range(place.index + 1)]
    return names[-1], config, dataclasses.replace(place, index=names.count(names[-1]) - 1)


def last_sublayer(config: ModelConfig, place: Place) -> dict[str, nn.Module]:
    """Nothing where its width is 0: a gated convolution is not linear itself."""
    return {"ff": make_part("feedforward", config.feedforward, config, place)} if config.d_ff else {}
