"""Texture synthesis (Efros and Leung 1999): an image that looks like a sample, grown pixel by pixel.

Growth starts with a random 3 x 3 piece of the sample in the middle, and adds layer after layer: all pixels next to
known ones, those with most known pixels around them first, ties in random order. The window around a new pixel is
compared with every complete window of the sample: squared differences over the known pixels, weighted by a Gaussian of
standard deviation window / 6.4. One of the candidates within (1 + epsilon) of the best is drawn, and its middle pixel
is copied. It is hard attention: a random draw in place of a weighted mean.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError
from regard.filters.image_arrays import apply

Fill = Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, np.ndarray], None]
SEED = 3  # side of the piece of the sample that growth starts from


def synthesise(
    sample: Any,
    height: int | None = None,
    width: int | None = None,
    window: int = 11,
    epsilon: float = 0.1,
    seed: int = 0,
    channel_axis: int | None = None,
) -> Any:
    """Return an image of height x width pixels that looks like `sample`; the same seed gives the same image.

    By default it is twice as high and wide as the sample.
    `window` is the odd side of the windows that are compared, in pixels; it should be as large as the largest regular
    feature of the texture. `epsilon` is how much worse than the best match a candidate may be: 0 copies whole pieces,
    larger values give more variation.
    """
    if window < 3 or window % 2 == 0:
        raise RegardError(f"a window of {window} pixels: give an odd number from 3 on")
    if epsilon < 0:
        raise RegardError(f"epsilon {epsilon}: give 0 or more")

    def grow(x: Tensor) -> Tensor:
        size = (2 * x.shape[-2] if height is None else height, 2 * x.shape[-1] if width is None else width)
        if min(size) < SEED:
            raise RegardError(f"{size[0]} x {size[1]} pixels are too few to grow in: give {SEED} x {SEED} or more")
        if min(x.shape[-2:]) < window:
            raise RegardError(
                f"a sample of {x.shape[-2]} x {x.shape[-1]} pixels has no window of {window} x {window}: give a smaller one"
            )
        from regard.filters.filters_numba import fill_layer as fill_layer_numba

        samples = x.detach().float().cpu().contiguous().numpy()
        weights = gaussian_window(window)
        images = [grow_texture(one, size, weights, epsilon, seed, fill_layer_numba) for one in samples]
        return torch.from_numpy(np.stack(images)).to(x)

    return apply(sample, grow, channel_axis)


def gaussian_window(window: int) -> np.ndarray:
    """Return the weights of the pixels of a window, (window, window) float32."""
    steps = (np.arange(window) - window // 2) ** 2 / (2 * (window / 6.4) ** 2)
    return np.exp(-steps[:, None] - steps).astype(np.float32)


def grow_texture(
    sample: np.ndarray, size: tuple[int, int], weights: np.ndarray, epsilon: float, seed: int, fill: Fill
) -> np.ndarray:
    """Return an image (C, *size) grown from a sample (C, H, W); `fill` fills a layer of pixels (`fill_layer`)."""
    rng, r = np.random.default_rng(seed), len(weights) // 2
    image, known = seed_image(sample, size, r, rng)
    while not known[r:-r, r:-r].all():
        layer = next_layer(known, r, rng)  # (n, 2)
        fill(sample, image, known, layer, weights, epsilon, rng.random(len(layer)))
    return image[:, r:-r, r:-r]


def seed_image(
    sample: np.ndarray, size: tuple[int, int], r: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Return the initial image with a border of r pixels and its seed in the middle, and which pixels are known."""
    image = np.zeros((len(sample), size[0] + 2 * r, size[1] + 2 * r), np.float32)
    known = np.zeros(image.shape[1:], bool)
    y, x = rng.integers(0, np.array(sample.shape[1:]) - SEED + 1)
    top, left = r + (size[0] - SEED) // 2, r + (size[1] - SEED) // 2
    image[:, top : top + SEED, left : left + SEED] = sample[:, y : y + SEED, x : x + SEED]
    known[top : top + SEED, left : left + SEED] = True
    return image, known


def next_layer(known: np.ndarray, r: int, rng: np.random.Generator) -> np.ndarray:
    """Return the top left corners (n, 2) of the windows around the pixels of the next layer, in the order of filling.

    These are the unknown pixels with a known one among their eight neighbours.
    """
    inside = known[r:-r, r:-r]
    touched = count_known(known, 1)[r:-r, r:-r] > 0
    corners = rng.permutation(np.argwhere(touched & ~inside))
    counts = count_known(known, r)[r:-r, r:-r][tuple(corners.T)]
    return corners[np.argsort(-counts, kind="stable")]


def count_known(known: np.ndarray, r: int) -> np.ndarray:
    """Return how many pixels are known in the square of radius r around each pixel."""
    sums = np.pad(known, r).astype(np.int64).cumsum(0).cumsum(1)
    sums, side = np.pad(sums, ((1, 0), (1, 0))), 2 * r + 1
    return sums[side:, side:] - sums[:-side, side:] - sums[side:, :-side] + sums[:-side, :-side]


def fill_layer(
    sample: np.ndarray,
    image: np.ndarray,
    known: np.ndarray,
    layer: np.ndarray,
    weights: np.ndarray,
    epsilon: float,
    draws: np.ndarray,
) -> None:
    """Fill the pixels of a layer in place, one after the other; each of `draws`, in [0, 1), selects a candidate.

    This is the definition; `fill_layer` of filters_numba.py does the same, compiled.
    """
    side = len(weights)
    windows = np.lib.stride_tricks.sliding_window_view(sample, (side, side), axis=(1, 2))  # (C, Y, X, side, side)
    for (y, x), draw in zip(layer, draws, strict=True):
        is_known = known[y : y + side, x : x + side]
        squares = (windows - image[:, None, None, y : y + side, x : x + side]) ** 2
        distance = (squares * (weights * is_known)).sum((0, 3, 4), dtype=np.float64)  # (Y, X)
        candidates = np.argwhere(distance <= (1 + epsilon) * distance.min())
        row, column = candidates[int(draw * len(candidates))]
        image[:, y + side // 2, x + side // 2] = sample[:, row + side // 2, column + side // 2]
        known[y + side // 2, x + side // 2] = True
