"""Sampling from probabilities on a CPU, compiled by numba: the exponential race of decode/sampling.py without its noise.

Token i with probability p_i and noise e_i ~ Exp(1) wins where p_i / e_i is the largest. The noise of a token is a hash of
the key of its row and its column, so tokens that cannot win need none: with u uniform and e = -log(u) >= 1 - u, the ratio
is at most p_i / (1 - u), and never above p_i * 2^24. The likeliest token is the first to run; after it, most of a vocabulary
is ruled out by its probability alone, and nearly all of the rest by u, without a logarithm.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numba import njit
from torch import Tensor

SLACK = np.float32(1.0001)  # more than the rounding of the comparisons that rule tokens out


def run_race(p: Tensor, keys: Tensor) -> Tensor:
    """Return the winner of each row (N,) for probabilities p (N, V), fp32, and the keys of the rows (N,), 32 bits each."""
    out = torch.empty(len(p), dtype=torch.int64)
    race_rows(p.contiguous().numpy(), keys.numpy().astype(np.uint32), out.numpy())
    return out


@njit(cache=True, nogil=True, inline="always")
def fmix32(x):
    """Return a hash of 32 bits: MurmurHash3's finalizer, as in kernels/hashing.py."""
    x = np.uint32(x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = np.uint32(x)
    x = np.uint32(x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    x = np.uint32(x)
    return np.uint32(x ^ (x >> np.uint32(16)))


@njit(cache=True, nogil=True, inline="always")
def uniform(key, column):
    """Return the number between 0 and 1 of a column: an odd multiple of 2^-24."""
    inner = fmix32(np.uint32(np.uint32(column) * np.uint32(0x9E3779B1)) ^ key)
    bits = fmix32(np.uint32(inner + key))
    return (np.float32(bits >> np.uint32(9)) + np.float32(0.5)) * np.float32(2.0**-23)


@njit(cache=True, nogil=True)
def race_rows(p, keys, out):
    """Write the winner of each row of p (N, V) into `out` (N,)."""
    rows, columns = p.shape
    for row in range(rows):
        key = keys[row]
        winner = 0
        for j in range(1, columns):
            if p[row, j] > p[row, winner]:
                winner = j
        best = p[row, winner] / np.float32(-math.log(uniform(key, winner)))
        for j in range(columns):
            mine = p[row, j] * SLACK
            if mine < best * np.float32(2.0**-24):
                continue
            u = uniform(key, j)
            if mine < best * (np.float32(1.0) - u):
                continue
            ratio = p[row, j] / np.float32(-math.log(u))
            if ratio > best:
                best, winner = ratio, j
        out[row] = winner
