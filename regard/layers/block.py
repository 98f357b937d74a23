"""A block: sublayers, each wrapped in dropout, a residual connection and LayerNorm.

A sublayer is any `f(x, ctx) -> x`. Encoder blocks are [self, ff], decoder blocks [self, cross, ff].
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attention import CrossAttention, SelfAttention
from regard.layers.context import Context
from regard.layers.feedforward import FeedForward


class PreNorm(nn.Module):
    """x + f(norm(x)): today's order; the residual path stays untouched, so deep stacks train without warm-up tricks."""

    def __init__(self, sublayer: nn.Module, config: ModelConfig) -> None:
        super().__init__()
        self.sublayer = sublayer
        self.norm = nn.LayerNorm(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return x + self.dropout(self.sublayer(self.norm(x), ctx))


class PostNorm(PreNorm):
    """norm(x + f(x)): the order of the 2017 paper."""

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        return self.norm(x + self.dropout(self.sublayer(x, ctx)))


PLACEMENTS = {"pre": PreNorm, "post": PostNorm}


class Block(nn.Module):
    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__()
        place = PLACEMENTS[config.norm]
        self.sublayers = nn.ModuleDict({name: place(sublayer, config) for name, sublayer in sublayers.items()})

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for sublayer in self.sublayers.values():
            x = sublayer(x, ctx)
        return x


def encoder_block(config: ModelConfig) -> Block:
    return Block(config, {"self": SelfAttention(config), "ff": FeedForward(config)})


def decoder_block(config: ModelConfig) -> Block:
    return Block(config, {"self": SelfAttention(config), "cross": CrossAttention(config), "ff": FeedForward(config)})
