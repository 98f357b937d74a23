"""Inner loops of the filters on a CPU, compiled by numba, for float32. The modules of the filters define what they compute.

Inner loops run along rows, so that they are vectorised. In the bilateral filter and non-local means every thread has a
band of rows of its own, and sums over a patch are computed anew for every row, since running sums would lose precision
in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numba import njit

BAND_PIXELS = 1 << 17  # of a band of rows, so that its sums stay in the cache of a core


def in_bands(out: np.ndarray, work: Callable[[int, int], Any]) -> None:
    """Call work(first, end) for bands of rows that cover out (..., H, W), on as many threads as torch uses."""
    (height, width), threads = out.shape[-2:], torch.get_num_threads()
    bands = threads * -(-height * width // (threads * BAND_PIXELS))
    ends = [height * i // bands for i in range(bands + 1)]
    if threads == 1:
        for first, after in pairwise(ends):
            work(first, after)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, ends, ends[1:]))


@njit(fastmath=True, inline="always")
def exponential(x: np.float32) -> np.float32:
    """Return exp(x) for x <= 0 with a relative error of 2e-7; unlike np.exp, a loop over it is vectorised.

    It is 2^n, made of the bits of a float, times 2^f, by a polynomial.
    """
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
    """Filter rows first to after (exclusive) of x (C, H + 2r, W + 2r) into out (C, H, W).

    The weights are exp(spatial + share * squared difference).
    """
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
    """Write the squared differences of row y and the row shifted by (dy, dx), weighted along the row by `taps`, into `row`.

    row[i] belongs to the pixels (y, left + i) and (y + dy, left + dx + i). `squares` is scratch memory.
    """
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
    """Write exp(-max(distance - noise, 0) * share) into `weight`; the distances are sums over the rows of `ring` around y.

    `ring` is a ring buffer of what `distances_row` wrote for the last rows, as many as `taps`.
    """
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
    """Add weight (n,) * values (C, n) to sums (C, n)."""
    for c in range(values.shape[0]):
        value, summed = values[c], sums[c]
        for i in range(weight.size):
            summed[i] += weight[i] * value[i]


@njit(fastmath=True, nogil=True, cache=True)
def pixels_band(x, taps, reach, noise, share, sums, total, first, after):  # type: ignore[no-untyped-def]
    """Compute rows first to after (exclusive) of pixelwise non-local means: sums (C, H, W) and total weights (H, W).

    x has a border of reach + r pixels. A pair of pixels has the same weight in both directions, so only half of the
    shifts are visited, and each row of weights is used for both pixels of its pairs.
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
        here, there = -left, -dx - left  # index of column 0 in a row of weights, for either pixel of a pair
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
    """Compute rows first to after (exclusive) of the sums (C, H, W) of patchwise non-local means.

    `inverse` (H, W) is 1 / total weight of the patch around each pixel.
    """
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


# ---- total variation -------------------------------------------------------------------------------------------------


@njit(fastmath=True, nogil=True, cache=True)
def advance_plane(f, down, right, down_ahead, right_ahead, weight, momenta):  # type: ignore[no-untyped-def]
    """Run a step of the dual ascent for each momentum on one plane f (H, W), in place, in one pass over memory each.

    Only two rows of the primal image u are kept: the current one and the one below.
    """
    height, width = f.shape
    rate = np.float32(1 / (8 * weight))
    here, below = np.empty(width + 1, np.float32), np.empty(width + 1, np.float32)
    for momentum in momenta:
        primal_row(f, down_ahead, right_ahead, weight, 0, here)
        for i in range(height):
            if i + 1 < height:
                primal_row(f, down_ahead, right_ahead, weight, i + 1, below)
            else:
                below[:] = here
            for j in range(width):
                a = down_ahead[i, j] + rate * (below[j] - here[j])
                b = right_ahead[i, j] + rate * (here[j + 1] - here[j])
                share = np.float32(1) / max(np.float32(1), np.sqrt(a * a + b * b))
                a, b = a * share, b * share
                down_ahead[i, j] = a + momentum * (a - down[i, j])
                right_ahead[i, j] = b + momentum * (b - right[i, j])
                down[i, j], right[i, j] = a, b
            here, below = below, here


@njit(fastmath=True, nogil=True, inline="always")
def primal_row(f, down, right, weight, i, u):  # type: ignore[no-untyped-def]
    """Write row i of u = f + weight div q; the last number is repeated, so that the difference across the border is 0."""
    width = f.shape[1]
    u[0] = f[i, 0] + weight * (down[i, 0] + right[i, 0])
    for j in range(1, width):
        u[j] = f[i, j] + weight * (down[i, j] + right[i, j] - right[i, j - 1])
    if i > 0:
        for j in range(width):
            u[j] -= weight * down[i - 1, j]
    u[width] = u[width - 1]


# ---- texture synthesis -----------------------------------------------------------------------------------------------


@njit(fastmath=True, nogil=True, cache=True)
def fill_layer(sample, image, known, layer, weights, epsilon, draws):  # type: ignore[no-untyped-def]
    """Fill the pixels of a layer in place, one after the other, as `texture.fill_layer` defines it.

    For every known pixel of a window, the distances of all windows of the sample are updated at once.
    """
    side = weights.shape[0]
    r, rows, columns = side // 2, sample.shape[1] - side + 1, sample.shape[2] - side + 1
    distance = np.empty((rows, columns), np.float32)
    for at in range(layer.shape[0]):
        y, x = layer[at]
        distance[:] = 0
        for dy in range(side):
            for dx in range(side):
                if known[y + dy, x + dx]:
                    add_squares(distance, sample, image[:, y + dy, x + dx], dy, dx, weights[dy, dx])
        row, column = draw_candidate(distance, epsilon, draws[at])
        image[:, y + r, x + r] = sample[:, row + r, column + r]
        known[y + r, x + r] = True


@njit(fastmath=True, nogil=True, inline="always")
def add_squares(distance, sample, colour, dy, dx, weight):  # type: ignore[no-untyped-def]
    """Add the weighted squared difference of a colour and the pixel at (dy, dx) of every window of the sample."""
    rows, columns = distance.shape
    for c in range(sample.shape[0]):
        value = colour[c]
        for i in range(rows):
            line, row = sample[c, i + dy, dx : dx + columns], distance[i]
            for j in range(columns):
                row[j] += weight * (line[j] - value) ** 2


@njit(fastmath=True, nogil=True, inline="always")
def draw_candidate(distance, epsilon, draw):  # type: ignore[no-untyped-def]
    """Return the row and column of the candidate, within (1 + epsilon) of the best, that `draw` in [0, 1) selects."""
    limit = np.float32((1 + epsilon) * distance.min())
    left = int(draw * (distance <= limit).sum())
    for i in range(distance.shape[0]):
        for j in range(distance.shape[1]):
            if distance[i, j] <= limit:
                if left == 0:
                    return i, j
                left -= 1
    return 0, 0
