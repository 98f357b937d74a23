"""The Gaussian filter: every pixel becomes the mean of its surroundings, weighted by nearness alone.

As attention: softmax over j of -|i - j|^2 / (2 sigma^2), a score of positions only. So it blurs edges as it blurs noise.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.filters.images import apply, pad


def gaussian(
    image: Any, sigma: float, truncate: float = 4.0, border: str = "symmetric", channel_axis: int | None = None
) -> Any:
    """`sigma` in pixels; weights end at `truncate` sigma. `border` is one of numpy.pad's, as in all filters. Differentiable.

    Equals scipy.ndimage.gaussian_filter, whose default border "reflect" is numpy's "symmetric". Colours do not mix.
    """
    if not 0 <= sigma < math.inf or not 0 < truncate < math.inf:
        raise RegardError(f"sigma {sigma:g} pixels, truncate {truncate:g}: give a sigma of 0 or more, truncate above 0")
    weights = kernel(sigma, truncate)
    more = len(weights) - 1
    return apply(image, lambda x: along(along(pad(x, more, more, border), weights, -2), weights, -1), channel_axis)


def kernel(sigma: float, truncate: float) -> list[float]:
    """Weights at the distances 0 to r, which with their mirror images sum to 1; r = truncate sigma, rounded."""
    weights = [1.0]
    weights += [math.exp(-0.5 * (i / sigma) ** 2) for i in range(1, int(truncate * sigma + 0.5) + 1)]
    total = 2 * sum(weights) - 1
    return [weight / total for weight in weights]


def along(x: Tensor, weights: list[float], dim: int) -> Tensor:
    """One axis of x (B, C, H, W), which loses its border: a sum of shifted pictures, faster than a convolution on a CPU.

    The Gaussian of two dimensions is that of one, along both.
    """
    radius = len(weights) - 1
    size = x.shape[dim] - 2 * radius
    y = x.narrow(dim, radius, size) * weights[0]
    for i, weight in enumerate(weights[1:], 1):
        y.add_(x.narrow(dim, radius - i, size), alpha=weight)
        y.add_(x.narrow(dim, radius + i, size), alpha=weight)
    return y
