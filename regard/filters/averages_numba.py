"""Weighted means on a CPU: the bilateral filter and non-local means as loops over rows, compiled.

What they compute is defined in bilateral.py and nonlocal_means.py. Threads share nothing: each owns a band of rows.
Inner loops run along rows, so that they are vectorised; sums over a patch are made anew for every row, since running
sums would drift in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit

NUMBERS = 1 << 17  # of a band, so that its sums stay in a core's cache


def in_bands(out: np.ndarray, work: Callable[[int, int], Any]) -> None:
    """`work(first row, row after the last)` for bands of all rows of out (..., H, W), on as many threads as torch may
    use."""
    (height, width), threads = out.shape[-2:], torch.get_num_threads()
    bands = threads * -(-height * width // (threads * NUMBERS))
    ends = [height * i // bands for i in range(bands + 1)]
    if threads == 1:
        for first, after in pairwise(ends):
            work(first, after)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, ends, ends[1:]))


@njit(fastmath=True, inline="always")
def exponential(x: np.float32) -> np.float32:
    """exp(x) for x <= 0 to 2e-7 of itself: 2^n as bits times 2^f by a polynomial. A loop over it is vectorised."""
    t = max(x * np.float32(1.4426950408889634), np.float32(-126))
    n = np.int32(t)
    f = t - np.float32(n)  # in (-1, 0]
    p = np.float32(9.4351e-4) * f + np.float32(9.20218e-3)
    p = p * f + np.float32(5.529404e-2)
    p = p * f + np.float32(2.401789e-1)
    p = p * f + np.float32(6.9314357e-1)
    return (np.float32(1) + p * f) * np.int32((n + np.int32(127)) << np.int32(23)).view(np.float32)


# ---- bilateral --------------------------------------------------------------------------------------------------------


@njit(fastmath=True, nogil=True, cache=True)
def bilateral_band(x, spatial, share, out, first, after):  # type: ignore[no-untyped-def]
    """Rows first..after of out (C, H, W), of x (C, H + 2r, W + 2r); weights are exp(spatial + share * squares)."""
    channels, _, width = out.shape
    side = spatial.shape[0]
    r = side // 2
    squares, weight = np.empty(width, np.float32), np.empty(width, np.float32)
    total, sums = np.empty(width, np.float32), np.empty((channels, width), np.float32)
    for y in range(first, after):
        total[:] = 0
        sums[:] = 0
        for dy in range(side):
            for dx in range(side):
                squares[:] = 0
                for c in range(channels):
                    here, there = x[c, y + r, r : r + width], x[c, y + dy, dx : dx + width]
                    for i in range(width):
                        squares[i] += (here[i] - there[i]) ** 2
                for i in range(width):
                    weight[i] = exponential(spatial[dy, dx] + share * squares[i])
                    total[i] += weight[i]
                for c in range(channels):
                    there, summed = x[c, y + dy, dx : dx + width], sums[c]
                    for i in range(width):
                        summed[i] += weight[i] * there[i]
        for c in range(channels):
            out[c, y] = sums[c] / total


# ---- non-local means --------------------------------------------------------------------------------------------------


@njit(fastmath=True, nogil=True, inline="always")
def distances_row(x, y, left, dy, dx, taps, squares, row):  # type: ignore[no-untyped-def]
    """row[i]: the squares at (y, left + i) beside those at (y + dy, left + dx + i), weighed along the row by the taps."""
    channels, n, side = x.shape[0], row.size, taps.size
    r = side // 2
    for c in range(channels):
        here, there = x[c, y, left - r :], x[c, y + dy, left + dx - r :]
        for i in range(n + side - 1):
            squared = (here[i] - there[i]) ** 2
            squares[i] = squared if c == 0 else squares[i] + squared
    row[:] = 0
    for k in range(side):
        tap, moved = taps[k], squares[k:]
        for i in range(n):
            row[i] += tap * moved[i]


@njit(fastmath=True, nogil=True, inline="always")
def weights_row(ring, y, taps, noise, share, weight):  # type: ignore[no-untyped-def]
    """weight[i] = exp(-max(distance - noise, 0) * share), the distance from the rows of `ring` around y."""
    side, n = taps.size, weight.size
    weight[:] = 0
    for k in range(side):
        tap, row = taps[k], ring[(y - side // 2 + k) % side]
        for i in range(n):
            weight[i] += tap * row[i]
    for i in range(n):
        weight[i] = exponential(-max(weight[i] - noise, np.float32(0)) * share)


@njit(fastmath=True, nogil=True, inline="always")
def add_row(weight, values, sums):  # type: ignore[no-untyped-def]
    """sums (C, n) += weight * values (C, n)"""
    for c in range(values.shape[0]):
        value, summed = values[c], sums[c]
        for i in range(weight.size):
            summed[i] += weight[i] * value[i]


@njit(fastmath=True, nogil=True, cache=True)
def pixels_band(x, taps, reach, noise, share, sums, total, first, after):  # type: ignore[no-untyped-def]
    """Rows first..after of the sums (C, H, W) of weighted values and of their total weight (H, W); x is reach + r wider.

    A pair has one weight both ways, so half of the shifts are gone through, and each row of weights serves both its ends.
    """
    width, r = total.shape[1], taps.size // 2
    edge = reach + r
    squares, weight = np.empty(width + reach + 2 * r, np.float32), np.empty(width + reach, np.float32)
    ring = np.empty((taps.size, width + reach), np.float32)
    total[first:after] = 1
    sums[:, first:after] = x[:, edge + first : edge + after, edge : edge + width]
    for shift in range(1, (2 * reach + 1) ** 2 // 2 + 1):
        dy = (shift + reach) // (2 * reach + 1)
        dx = (shift + reach) % (2 * reach + 1) - reach
        n, left = width + abs(dx), min(0, -dx)
        here, there = -left, -dx - left  # where column 0 stands in a row of weights, for either end
        for y in range(first - dy - r, after + r):
            distances_row(x, edge + y, edge + left, dy, dx, taps, squares, ring[y % taps.size, :n])
            at = y - r
            if at < first - dy:
                continue
            weights_row(ring[:, :n], at, taps, noise, share, weight[:n])
            if at >= first:
                values = x[:, edge + at + dy, edge + dx : edge + dx + width]
                add_row(weight[here : here + width], values, sums[:, at])
                total[at] += weight[here : here + width]
            if at + dy < after and at + dy >= first:
                values = x[:, edge + at, edge - dx : edge - dx + width]
                add_row(weight[there : there + width], values, sums[:, at + dy])
                total[at + dy] += weight[there : there + width]


@njit(fastmath=True, nogil=True, cache=True)
def patches_band(x, taps, reach, noise, share, inverse, sums, first, after):  # type: ignore[no-untyped-def]
    """Rows first..after of the sums (C, H, W) over all patches; `inverse` (H, W) is one over a patch's total weight."""
    (height, width), side = inverse.shape, taps.size
    r = side // 2
    edge = reach + r
    squares, weight = np.empty(width + 2 * r, np.float32), np.zeros(width + 2 * r, np.float32)
    ring, boxes = np.empty((side, width), np.float32), np.empty((side, width), np.float32)
    box = np.empty(width, np.float32)
    sums[:, first:after] = 0
    for dy in range(-reach, reach + 1):
        for dx in range(-reach, reach + 1):
            boxes[:] = 0
            for y in range(max(first - r, 0) - r, after + 2 * r):
                at = y - r  # the centres of this row of patches
                if y < min(after + r, height) + r:
                    distances_row(x, edge + y, edge, dy, dx, taps, squares, ring[y % side])
                if at < max(first - r, 0):
                    continue
                summed = boxes[at % side]
                summed[:] = 0
                if at < height:
                    weights_row(ring, at, taps, noise, share, weight[r : r + width])
                    for i in range(width):
                        weight[r + i] *= inverse[at, i]
                    for k in range(side):
                        moved = weight[k:]
                        for i in range(width):
                            summed[i] += moved[i]
                if at - r >= first:
                    box[:] = 0
                    for k in range(side):
                        row = boxes[k]
                        for i in range(width):
                            box[i] += row[i]
                    values = x[:, edge + at - r + dy, edge + dx : edge + dx + width]
                    add_row(box, values, sums[:, at - r])
