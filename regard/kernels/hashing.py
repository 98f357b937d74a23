"""Counter-based random bits: a hash of integers, equal on every device and usable inside a CUDA graph.

A generator has a state that must be advanced; a hash of (seed, row, step, ...) needs none, so a replayed CUDA graph
draws other numbers when the seed or the step in its input changes.
"""

from __future__ import annotations

from torch import Tensor

UINT32_MAX = 0xFFFFFFFF


def hash_bits(x: Tensor) -> Tensor:
    """Return a 32-bit hash of the lower 32 bits of each int64 number: MurmurHash3's finalizer (fmix32)."""
    x = x & UINT32_MAX
    x = (x ^ x >> 16) * 0x85EBCA6B & UINT32_MAX
    x = (x ^ x >> 13) * 0xC2B2AE35 & UINT32_MAX
    return x ^ x >> 16
