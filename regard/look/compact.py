"""Attention weights in a byte each: uint8 and one scale a head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Compact:
    """value = codes * scale[head] / levels: off by half a level at most, which is scale / levels / 2."""

    codes: Tensor  # (H, T, S) uint8, on the CPU
    scale: Tensor  # (H,) fp32: the largest weight of each head
    levels: int = 255

    @classmethod
    def of(cls, weights: Tensor, levels: int = 255) -> Compact:
        """weights (H, T, S), none below zero; at most 255 levels above it."""
        w = weights.detach().float().cpu()
        scale = w.flatten(1).amax(1)
        codes = (w * (levels / scale.clamp(min=1e-30))[:, None, None]).round().to(torch.uint8)
        return cls(codes, scale, levels)

    def weights(self) -> Tensor:
        return self.codes.float() * (self.scale / self.levels)[:, None, None]

    def bytes(self) -> bytes:
        """The codes, row by row."""
        return self.codes.contiguous().numpy().tobytes()
