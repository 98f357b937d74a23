"""Where a token stands. Attention alone is permutation-equivariant: it does not know.

A scheme says where tokens stand by `embed`: once, at the bottom, it adds to their embeddings.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError


class NoPositions(nn.Module):
    """Nothing: the model sees a bag of tokens (in a causal decoder, the mask still tells it something)."""

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x


class Sinusoidal(nn.Module):
    """PE[p, 2i] = sin(p / base^(2i/C)), PE[p, 2i+1] = cos(the same): a clock with C/2 hands.

    Bounded, unique, and a step of c positions is one rotation whatever the position: P(t+c) = M_c P(t).
    """

    encoding: Tensor

    def __init__(self, d_model: int, max_len: int, base: float) -> None:
        super().__init__()
        self.register_buffer("encoding", sinusoids(max_len, d_model, base), persistent=False)  # (max_len, C)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.encoding[positions.clamp(min=0)].to(x.dtype)  # (B, T, C)


def sinusoids(n: int, d_model: int, base: float) -> Tensor:
    """The encoding of positions 0..n-1, (n, d_model) fp32, worked in fp64; odd widths end on a sine."""
    position = torch.arange(n, dtype=torch.float64)[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64)
    angle = position / base ** (even / d_model)  # (n, ceil(C/2))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model].float()


def make_positions(config: ModelConfig) -> NoPositions | Sinusoidal:
    if config.positions == "none":
        return NoPositions()
    if config.positions == "sinusoidal":
        return Sinusoidal(config.d_model, config.max_len, config.position_base)
    raise RegardError(f"unknown position scheme '{config.positions}'")
