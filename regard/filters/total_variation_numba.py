"""Steps of total variation on a CPU, one pass through memory each; what they compute is `advance` in total_variation.py."""

from __future__ import annotations

import numpy as np
from numba import njit


@njit(fastmath=True, nogil=True, cache=True)
def advance_plane(f, down, right, down_ahead, right_ahead, weight, momenta):  # type: ignore[no-untyped-def]
    """All of one plane (H, W), in place. A row of u is worked out when the row above is done with, and kept for one row."""
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
    """Row i of f + weight div q, and its last number once more, so that the step over the border is 0."""
    width = f.shape[1]
    u[0] = f[i, 0] + weight * (down[i, 0] + right[i, 0])
    for j in range(1, width):
        u[j] = f[i, j] + weight * (down[i, j] + right[i, j] - right[i, j - 1])
    if i > 0:
        for j in range(width):
            u[j] -= weight * down[i - 1, j]
    u[width] = u[width - 1]
