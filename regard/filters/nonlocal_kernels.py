"""Non-local means on a GPU, in Triton. `pixelwise` of nonlocal_means.py defines it.

A program owns a tile of pixels and goes through all shifts: sums stay in registers, and what it reads again and again
is in the cache next to it. Patches are compared pixel by pixel. Running sums would read less, but they drift, and on
this device the reading is not what is short.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

TILE, WARPS = (4, 64), 8  # one pixel a thread


@triton.jit(do_not_specialize=["height", "width", "rows", "reach"])
def pixels_kernel(
    wide, taps, out, noise, share, height, width, rows, columns, reach, C: tl.constexpr, CHANNELS: tl.constexpr, SIDE:
    tl.constexpr, FLAT: tl.constexpr, TALL: tl.constexpr, BROAD: tl.constexpr,
):  # fmt: skip
    """out (B, C, height, width) of wide (B, C, rows, columns), which begins reach + r pixels before it."""
    down = tl.program_id(1) * TALL + tl.arange(0, TALL)[:, None]
    right = tl.program_id(0) * BROAD + tl.arange(0, BROAD)[None, :]
    plane = rows.to(tl.int64) * columns
    image = wide + tl.program_id(2) * C * plane
    channel = tl.arange(0, CHANNELS)[:, None, None]
    corner = down * columns + right  # of the patch at shift (-reach, -reach)
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
                        apart = tl.load(at + here) - tl.load(at + there)
                        line += apart * apart if FLAT else apart * apart * tl.load(taps + kx)
                    distance += line if FLAT else line * tl.load(taps + ky)
            weight = tl.exp(-tl.maximum(distance - noise, 0.0) * share)
            middle = image + channel * plane + (SIDE // 2) * columns + SIDE // 2 + there[None]
            total += weight
            sums += weight[None] * tl.load(middle, channel < C, 0.0)
    size = height.to(tl.int64) * width
    place = out + tl.program_id(2) * C * size + channel * size + (down * width + right)[None]
    tl.store(place, sums / total[None], (channel < C) & ((down < height) & (right < width))[None])


def pixels(wide: Tensor, size: tuple[int, int], h: float, sigma: float, taps: tuple[float, ...], reach: int) -> Tensor:
    """Pictures (B, C, *size), from the same with reach + r pixels of border all around, in float32."""
    (pictures, channels), (height, width) = wide.shape[:2], size
    (tall, broad), side, flat = TILE, len(taps), len(set(taps)) == 1
    grid = (triton.cdiv(width, broad), triton.cdiv(height, tall), pictures)
    wide = F.pad(wide, (0, grid[0] * broad - width, 0, grid[1] * tall - height))  # so that tiles are whole
    out = wide.new_empty(pictures, channels, height, width)
    unit = channels * (side**2 if flat else 1)  # flat sums are not divided by the size of a patch
    pixels_kernel[grid](
        wide, torch.tensor(taps, device=wide.device), out, 2 * sigma**2 * unit, 1 / (h**2 * unit), height, width,
        *wide.shape[-2:], reach, C=channels, CHANNELS=triton.next_power_of_2(channels), SIDE=side, FLAT=flat, TALL=tall,
        BROAD=broad, num_warps=WARPS,
    )  # fmt: skip
    return out
