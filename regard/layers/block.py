"""A block: sublayers, each wrapped in dropout, a residual connection and LayerNorm, one after the other or side by side.

A sublayer is any `f(x, ctx) -> x`. Encoder blocks are [self, ff], decoder blocks [self, cross, ff].
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.attention import CrossAttention, SelfAttention
from regard.layers.context import Context
from regard.layers.feedforward import make_feedforward
from regard.layers.norm import PLACEMENTS, Branch, make_norm


class Block(nn.Module):
    """Each sublayer reads what the one before it made."""

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__()
        place = Branch if config.parallel else PLACEMENTS[config.norm]
        self.sublayers = nn.ModuleDict({name: place(sublayer, config) for name, sublayer in sublayers.items()})

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        for sublayer in self.sublayers.values():
            x = sublayer(x, ctx)
        return x


class ParallelBlock(Block):
    """x + attn(norm(x)) + ff(norm(x)), PaLM's: one norm, and sublayers that need not wait for each other."""

    def __init__(self, config: ModelConfig, sublayers: dict[str, nn.Module]) -> None:
        super().__init__(config, sublayers)
        self.norm = make_norm(config)

    def forward(self, x: Tensor, ctx: Context) -> Tensor:
        normal = self.norm(x)
        for sublayer in self.sublayers.values():
            x = x + sublayer(normal, ctx)
        return x


def make_block(config: ModelConfig, sublayers: dict[str, nn.Module]) -> Block:
    return ParallelBlock(config, sublayers) if config.parallel else Block(config, sublayers)


def encoder_block(config: ModelConfig) -> Block:
    return make_block(config, {"self": SelfAttention(config), "ff": make_feedforward(config)})


def decoder_block(config: ModelConfig) -> Block:
    return make_block(
        config, {"self": SelfAttention(config), "cross": CrossAttention(config), "ff": make_feedforward(config)}
    )
