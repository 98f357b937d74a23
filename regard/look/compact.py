"""Attention weights in a byte each: uint8 and one scale a row.

Levels lie as the squares do, close together near zero: in a long row most weights are small beside its largest, and even
steps would make them nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Compact:
    """value = scale[row] * (code / levels)^2, the level nearest to the weight's root."""

    codes: Tensor  # (H, T, S) uint8, on the CPU
    scale: Tensor  # (H, T) fp32: the largest weight of each row
    levels: int = 255

    @classmethod
    def of(cls, weights: Tensor, levels: int = 255) -> Compact:
        """weights (H, T, S), none below zero; at most 255 levels above it."""
        w = weights.detach().float().cpu()
        scale = w.amax(-1)
        codes = ((w / scale.clamp(min=1e-30)[..., None]).sqrt() * levels).round().to(torch.uint8)
        return cls(codes, scale, levels)

    def weights(self) -> Tensor:
        return self.scale[..., None] * (self.codes.float() / self.levels) ** 2

    def bytes(self) -> bytes:
        """The codes, row by row."""
        return self.codes.contiguous().numpy().tobytes()
