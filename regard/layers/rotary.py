"""Rotary positions: the pair (2m, 2m+1) of queries and keys is turned by p * theta_m, theta_m = base^(-2m/D).

The product of a query turned by i and a key turned by j depends on i - j alone. A model trained on L tokens meets new angles
beyond them; the scalings squeeze a context s times as long into the angles it knows.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from regard.layers.positions import Positions, Rotation


class Rotary(Positions):
    """RoPE. `turn` is theta (D/2,), `temperature` multiplies cosines and sines (so the scores by its square)."""

    refuses: ClassVar = {
        "cross": "rotary positions compare a place in the target with a place in the source, whose difference means nothing"
    }
    turn: Tensor

    def __init__(self, turn: Tensor, temperature: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("turn", torch.empty(len(turn)), persistent=False)  # (D/2,)
        self.theta, self.temperature = turn, temperature
        self.init_weights()

    def init_weights(self) -> None:
        self.turn.copy_(self.theta)

    def rotation(self, positions: Tensor) -> Rotation:
        angle = positions[:, None, :, None] * self.turn  # (B, 1, T, D/2) fp32
        return angle.cos() * self.temperature, angle.sin() * self.temperature


def rotate(x: Tensor, rotation: Rotation | None) -> Tensor:
    """Turn the pairs of x (B, H, T, D), in fp32."""
    if rotation is None:
        return x
    cos, sin = rotation
    a, b = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # (B, H, T, D/2) each
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2).to(x.dtype)


def frequencies(d_head: int, base: float) -> Tensor:
    """theta_m for m = 0 .. D/2-1, fp64."""
    return base ** -(torch.arange(0, d_head, 2, dtype=torch.float64, device="cpu") / d_head)


def rope(d_head: int, base: float, scaling: str = "none", factor: float = 1.0) -> Rotary:
    """Plain; `linear` (position interpolation: p / s); or `ntk` (a larger base: the slowest hand slows down by s, the
    fastest keeps its pace)."""
    if scaling == "ntk":
        return Rotary(frequencies(d_head, base * factor ** (d_head / (d_head - 2))))
    return Rotary(frequencies(d_head, base) / (factor if scaling == "linear" else 1.0))


def yarn(d_head: int, base: float, factor: float, trained_len: int, slow: float = 1.0, fast: float = 32.0) -> Rotary:
    """YaRN: hands that turn more than `fast` times in the trained length stay, those that turn less than `slow` times are
    interpolated by s, with a ramp between; and the softmax is sharpened a little.
    """

    def hand(turns: float) -> float:
        """The (fractional) index m of the hand that turns this often in the trained length."""
        return d_head * math.log(trained_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(math.floor(hand(fast)), 0), min(math.ceil(hand(slow)), d_head - 1)
    m = torch.arange(d_head // 2, dtype=torch.float64, device="cpu")
    interpolated = ((m - low) / max(high - low, 0.001)).clamp(0, 1)  # 0: stays, 1: slowed down by s
    theta = frequencies(d_head, base)
    return Rotary(theta / factor * interpolated + theta * (1 - interpolated), 0.1 * math.log(factor) + 1)
