"""Triton kernel of pixelwise non-local means, which `pixelwise` of nonlocal_means.py defines.

A program has a tile of pixels and loops over all shifts: sums stay in registers, and the pixels that it reads
repeatedly in the L1 cache. Patches are compared pixel by pixel. Running sums would read less, but lose precision, and
reading is not the bottleneck.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = (4, 64), 8  # one pixel per thread


@triton.jit(do_not_specialize=["height", "width", "rows", "reach"])
def pixels_kernel(
    wide, taps, out, noise, share, height, width, rows, columns, reach, C: tl.constexpr, CHANNELS: tl.constexpr, SIDE:
    tl.constexpr, FLAT: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr,
):  # fmt: skip
    """Write out (B, C, height, width) from wide (B, C, rows, columns), which has a border of reach + r pixels."""
    down = tl.program_id(1) * TALL + tl.arange(0, TALL)[:, None]
    right = tl.program_id(0) * BROAD + tl.arange(0, BROAD)[None, :]
    plane = rows.to(tl.int64) * columns
    image = wide + tl.program_id(2) * C * plane
    channel = tl.arange(0, CHANNELS)[:, None, None]
    corner = down * columns + right  # top left pixel of the patch at shift (-reach, -reach)
    here = corner + reach * columns + reach
    total = tl.zeros([TALL, BROAD], tl.float32)
    sums = tl.zeros([CHANNELS, TALL, BROAD], tl.float32)
    for dy in range(0, 2 * reach + 1):
        for dx in range(0, 2 * reach + 1):
            there = corner + dy * columns + dx
            distance = tl.zeros([TALL, BROAD], tl.float32)
            for c in tl.static_range(C):
                for ky in tl.static_range(SIDE):
                    line = tl.zeros([TALL, BROAD], tl.float32)
                    for kx in tl.static_range(SIDE):
                        at = image + c * plane + ky * columns + kx
                        difference = tl.load(at + here) - tl.load(at + there)
                        line += difference * difference if FLAT else difference * difference * tl.load(taps + kx)
                    distance += line if FLAT else line * tl.load(taps + ky)
            weight = tl.exp(-tl.maximum(distance - noise, 0.0) * share)
            middle = image + channel * plane + (SIDE // 2) * columns + SIDE // 2 + there[None]
            total += weight
            sums += weight[None] * tl.load(middle, channel < C, 0.0)
    size = height.to(tl.int64) * width
    place = out + tl.program_id(2) * C * size + channel * size + (down * width + right)[None]
    tl.store(place, sums / total[None], (channel < C) & ((down < height) & (right < width))[None])


def pixels(wide: Tensor, size: tuple[int, int], h: float, sigma: float, taps: tuple[float, ...], reach: int) -> Tensor:
    """Return pixelwise non-local means (B, C, *size) in float32; `wide` are the images with a border of reach + r pixels."""
    (images, channels), (height, width) = wide.shape[:2], size
    (tall, broad), side, flat = TILE, len(taps), len(set(taps)) == 1
    grid = (triton.cdiv(width, broad), triton.cdiv(height, tall), images)
    wide = F.pad(wide, (0, grid[0] * broad - width, 0, grid[1] * tall - height))  # to whole tiles
    out = wide.new_empty(images, channels, height, width)
    unit = channels * (side**2 if flat else 1)  # flat sums are not divided by the size of a patch
    pixels_kernel[grid](
        wide, torch.tensor(taps, device=wide.device), out, 2 * sigma**2 * unit, 1 / (h**2 * unit), height, width,
        *wide.shape[-2:], reach, C=channels, CHANNELS=triton.next_power_of_2(channels), SIDE=side, FLAT=flat, TALL=tall,
        BROAD=broad, num_warps=WARPS,
    )  # fmt: skip
    return out
