"""Absolute positions: vectors that are added to the embeddings, once, before the first block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import register, setting
from regard.config.schema import LARGEST_TABLE
from regard.errors import RegardError
from regard.layers.part import Place
from regard.layers.positions.scheme import PositionScheme


class Absolute(PositionScheme):
    """Positions that are added to the embeddings."""

    why_not_cross = "absolute positions are part of the vectors that cross-attention compares; it needs no others"


@register("linear")
class Linear(Absolute):
    """PE[p] = a p + b, with learned vectors a and b: the counter-example, because it grows with length."""

    formula = r"$x_p \leftarrow x_p + a\,p + b$"

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.max_len = config.max_len
        self.a = nn.Parameter(torch.empty(config.d_model))
        self.b = nn.Parameter(torch.empty(config.d_model))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.a, std=1 / self.max_len)  # a p has unit variance at max_len
        nn.init.zeros_(self.b)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + (self.a * positions[..., None] + self.b).to(x.dtype)  # (B, T, C)


@register("sinusoidal")
class Sinusoidal(Absolute):
    """PE[p, 2i] = sin(p / base^(2i/C)), PE[p, 2i+1] = cos(p / base^(2i/C)): C/2 fixed frequencies.

    The encoding is bounded and unique, and a shift by c positions is the same rotation everywhere: P(t+c) = M_c P(t).
    """

    @dataclass(frozen=True)
    class Settings:
        base: float = setting(10000.0, "base of the wavelengths, the longest of which is 2 pi base", above=1)

    formula = r"$PE_{p,2m} = \sin(p\,/\,N^{2m/C}),\quad PE_{p,2m+1} = \cos(p\,/\,N^{2m/C})$"
    encoding: Tensor

    def __init__(self, settings: Settings, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.base = settings.base
        self.register_buffer("encoding", torch.empty(config.max_len, config.d_model), persistent=False)
        self.init_weights()

    @classmethod
    def check(cls, settings: Settings, config: ModelConfig, place: Place) -> None:
        if config.max_len * config.d_model > LARGEST_TABLE:
            raise RegardError(
                f"sinusoidal positions are a table of model.max_len {config.max_len:,} x model.d_model "
                f"{config.d_model:,} numbers, and at most {LARGEST_TABLE:,} are made: choose a smaller model.max_len, "
                f"or rope"
            )

    def init_weights(self) -> None:
        self.encoding.copy_(sinusoids(len(self.encoding), self.d_model, self.base))  # (max_len, C)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.encoding[positions.clamp(min=0)].to(x.dtype)  # (B, T, C)


@register("learned")
class Learned(Absolute):
    """A learned vector for each position up to max_len."""

    formula = r"$x_p \leftarrow x_p + E_p$"

    def __init__(self, settings: Any, config: ModelConfig, place: Place) -> None:
        super().__init__(settings, config, place)
        self.encoding = nn.Parameter(torch.empty(config.max_len, config.d_model))
        self.init_weights()

    def init_weights(self) -> None:
        nn.init.normal_(self.encoding, std=0.02)

    def embed(self, x: Tensor, positions: Tensor) -> Tensor:
        return x + self.encoding[positions.clamp(min=0)].to(x.dtype)  # (B, T, C)


def sinusoids(n: int, d_model: int, base: float) -> Tensor:
    """Return the encoding of positions 0..n-1, (n, d_model) fp32, computed in fp64; odd widths end on a sine."""
    position = torch.arange(n, dtype=torch.float64, device="cpu")[:, None]
    even = torch.arange(0, d_model, 2, dtype=torch.float64, device="cpu")
    angle = position / base ** (even / d_model)  # (n, ceil(C/2))
    return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)[:, :d_model].float()
