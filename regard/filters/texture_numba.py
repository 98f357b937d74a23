"""Efros and Leung's inner loop, compiled. It is defined by `fill` of texture.py."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(fastmath=True, nogil=True, cache=True)
def fill(sample, picture, known, layer, weights, epsilon, draws):  # type: ignore[no-untyped-def]
    """One pixel after the other, in place; all windows of the sample at once for each known pixel around it."""
    side = weights.shape[0]
    r, rows, columns = side // 2, sample.shape[1] - side + 1, sample.shape[2] - side + 1
    distance = np.empty((rows, columns), np.float32)
    for at in range(layer.shape[0]):
        y, x = layer[at]
        distance[:] = 0
        for dy in range(side):
            for dx in range(side):
                if known[y + dy, x + dx]:
                    add_squares(distance, sample, picture[:, y + dy, x + dx], dy, dx, weights[dy, dx])
        row, column = chosen(distance, epsilon, draws[at])
        picture[:, y + r, x + r] = sample[:, row + r, column + r]
        known[y + r, x + r] = True


@njit(fastmath=True, nogil=True, inline="always")
def add_squares(distance, sample, colour, dy, dx, weight):  # type: ignore[no-untyped-def]
    """Of the pixel at (dy, dx) of every window of the sample, beside the one of this colour."""
    rows, columns = distance.shape
    for c in range(sample.shape[0]):
        value = colour[c]
        for i in range(rows):
            line, row = sample[c, i + dy, dx : dx + columns], distance[i]
            for j in range(columns):
                row[j] += weight * (line[j] - value) ** 2


@njit(fastmath=True, nogil=True, inline="always")
def chosen(distance, epsilon, draw):  # type: ignore[no-untyped-def]
    """The place of one of those within (1 + epsilon) of the best, counted row by row."""
    limit = np.float32((1 + epsilon) * distance.min())
    left = int(draw * (distance <= limit).sum())
    for i in range(distance.shape[0]):
        for j in range(distance.shape[1]):
            if distance[i, j] <= limit:
                if left == 0:
                    return i, j
                left -= 1
    return 0, 0
