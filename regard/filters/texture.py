"""Texture synthesis (Efros and Leung 1999): a picture grown pixel by pixel out of a sample that looks like it.

A 3 x 3 piece of the sample stands in the middle. Then layer after layer: all pixels next to what is there, those with
the most known pixels around them first, ties in random order. A pixel's window is compared with that of every pixel of
the sample whose window is whole: squared differences over what is known, weighted by a Gaussian of deviation window /
6.4. One of the candidates within (1 + epsilon) of the best is drawn, and its middle pixel is copied. It is attention
again, with the hardest of weights: a draw in place of a mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError
from regard.filters.images import apply

Fill = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, np.ndarray], None]
SEED = 3  # side of the piece that it grows from


def synthesise(
    sample: Any,
    height: int,
    width: int,
    window: int = 11,
    epsilon: float = 0.1,
    seed: int = 0,
    channel_axis: int | None = None,
) -> Any:
    """A picture of height x width pixels that looks like `sample`, from its pixels alone. The same seed gives the same
    picture.

    `window` is the odd side of the surroundings that are compared, in pixels: as large as the texture's largest regular
    thing. `epsilon`: how much worse than the best match a candidate may be; 0 copies whole pieces, more makes it
    wilder.
    """
    if window < 3 or window % 2 == 0:
        raise RegardError(f"a window of {window} pixels: give an odd number from 3 on")
    if epsilon < 0:
        raise RegardError(f"epsilon {epsilon}: give 0 or more")
    if min(height, width) < SEED:
        raise RegardError(f"{height} x {width} pixels are too few to grow in: give {SEED} x {SEED} or more")

    def grow(x: Tensor) -> Tensor:
        if min(x.shape[-2:]) < window:
            raise RegardError(
                f"a sample of {x.shape[-2]} x {x.shape[-1]} pixels has no window of {window} x {window}: give a smaller one"
            )
        from regard.filters.texture_numba import fill as compiled

        samples = x.detach().float().cpu().contiguous().numpy()
        made = [grown(one, (height, width), gaussian(window), epsilon, seed, compiled) for one in samples]
        return torch.from_numpy(np.stack(made)).to(x)

    return apply(sample, grow, channel_axis)


def gaussian(window: int) -> np.ndarray:
    """(window, window) float32, weights of a window's pixels."""
    steps = (np.arange(window) - window // 2) ** 2 / (2 * (window / 6.4) ** 2)
    return np.exp(-steps[:, None] - steps).astype(np.float32)


def grown(
    sample: np.ndarray, size: tuple[int, int], weights: np.ndarray, epsilon: float, seed: int, fill: Fill
) -> np.ndarray:
    """(C, *size) out of a sample (C, H, W)."""
    rng, r = np.random.default_rng(seed), len(weights) // 2
    picture, known = beginning(sample, size, r, rng)
    while not known[r:-r, r:-r].all():
        layer = next_layer(known, r, rng)  # (n, 2)
        fill(sample, picture, known, layer, weights, epsilon, rng.random(len(layer)))
    return picture[:, r:-r, r:-r]


def beginning(
    sample: np.ndarray, size: tuple[int, int], r: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The picture, r pixels wider all around, with its seed in the middle; and which of it is known."""
    picture = np.zeros((len(sample), size[0] + 2 * r, size[1] + 2 * r), np.float32)
    known = np.zeros(picture.shape[1:], bool)
    y, x = rng.integers(0, np.array(sample.shape[1:]) - SEED + 1)
    top, left = r + (size[0] - SEED) // 2, r + (size[1] - SEED) // 2
    picture[:, top : top + SEED, left : left + SEED] = sample[:, y : y + SEED, x : x + SEED]
    known[top : top + SEED, left : left + SEED] = True
    return picture, known


def next_layer(known: np.ndarray, r: int, rng: np.random.Generator) -> np.ndarray:
    """Corners (n, 2) of the windows of the unknown pixels with a known one among their eight neighbours, in their
    order."""
    inside = known[r:-r, r:-r]
    touched = around(known, 1)[r:-r, r:-r] > 0
    corners = rng.permutation(np.argwhere(touched & ~inside))
    counts = around(known, r)[r:-r, r:-r][tuple(corners.T)]
    return corners[np.argsort(-counts, kind="stable")]


def around(known: np.ndarray, r: int) -> np.ndarray:
    """How many are known in the square around each pixel."""
    sums = np.pad(known, r).astype(np.int64).cumsum(0).cumsum(1)
    sums, side = np.pad(sums, ((1, 0), (1, 0))), 2 * r + 1
    return sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]


def fill(
    sample: np.ndarray,
    picture: np.ndarray,
    known: np.ndarray,
    layer: np.ndarray,
    weights: np.ndarray,
    epsilon: float,
    draws: np.ndarray,
) -> None:
    """One pixel after the other, in place; `draws` in [0, 1) say which candidate. The definition: texture_numba.py
    runs."""
    side = len(weights)
    windows = np.lib.stride_tricks.sliding_window_view(sample, (side, side), axis=(1, 2))  # (C, Y, X, side, side)
    for (y, x), draw in zip(layer, draws, strict=True):
        there = known[y : y + side, x : x + side]
        squares = (windows - picture[:, None, None, y : y + side, x : x + side]) ** 2
        distance = (squares * (weights * there)).sum((0, 3, 4), dtype=np.float64)  # (Y, X)
        candidates = np.argwhere(distance <= (1 + epsilon) * distance.min())
        row, column = candidates[int(draw * len(candidates))]
        picture[:, y + side // 2, x + side // 2] = sample[:, row + side // 2, column + side // 2]
        known[y + side // 2, x + side // 2] = True
