"""Random numbers as a pure function of who asks: a hash, the same on every device, which a recorded step can make."""

from __future__ import annotations

from torch import Tensor

UINT32_MAX = 0xFFFFFFFF  # 32 bits


def hash_bits(x: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers, stirred so that each depends on all (MurmurHash3's last step)."""
    x = x & UINT32_MAX
    x = (x ^ x >> 16) * 0x85EBCA6B & UINT32_MAX
    x = (x ^ x >> 13) * 0xC2B2AE35 & UINT32_MAX
    return x ^ x >> 16
