"""A block: sublayers, each wrapped in dropout, a residual connection and LayerNorm.

A sublayer is any `f(x, ctx) -> x`. Encoder blocks are [self, ff], decoder blocks [self, cross, ff].
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attention import CrossAttention, SelfAttention
from regard.layers.context import Context
from regard.layers.feedforward import make_feedforward
from regard.layers.norm import PLACEMENTS


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
    return Block(config, {"self": SelfAttention(config), "ff": make_feedforward(config)})


def decoder_block(config: ModelConfig) -> Block:
    return Block(
        config, {"self": SelfAttention(config), "cross": CrossAttention(config), "ff": make_feedforward(config)}
    )
