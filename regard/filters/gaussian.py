"""The Gaussian filter: every pixel becomes a mean of its neighbours, weighted by distance alone.

As attention, the scores are -|i - j|^2 / (2 sigma^2): they depend on positions only, so edges are blurred like noise.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from regard.errors import RegardError
from regard.filters.image_arrays import apply, pad


def gaussian(
    image: Any, sigma: float = 1.0, truncate: float = 4.0, border: str = "symmetric", channel_axis: int | None = None
) -> Any:
    """Return `image` blurred by a Gaussian of `sigma` pixels, whose weights end at `truncate` sigmas. Differentiable.

    `border` is a mode of numpy.pad, as in all filters. The result equals that of scipy.ndimage.gaussian_filter, whose
    default border "reflect" is numpy's "symmetric". Channels are filtered separately.
    """
    if not 0 <= sigma < math.inf or not 0 < truncate < math.inf:
        raise RegardError(f"sigma {sigma:g} pixels, truncate {truncate:g}: give a sigma of 0 or more, truncate above 0")
    weights = gaussian_kernel(sigma, truncate)
    radius = len(weights) - 1

    def blur(x: Tensor) -> Tensor:
        return convolve_axis(convolve_axis(pad(x, radius, radius, border), weights, -2), weights, -1)

    return apply(image, blur, channel_axis)


def gaussian_kernel(sigma: float, truncate: float) -> list[float]:
    """Return the weights at the distances 0 to round(truncate * sigma), which with their mirror images sum to 1."""
    weights = [1.0]
    weights += [math.exp(-0.5 * (i / sigma) ** 2) for i in range(1, int(truncate * sigma + 0.5) + 1)]
    total = 2 * sum(weights) - 1
    return [weight / total for weight in weights]


def convolve_axis(x: Tensor, weights: list[float], dim: int) -> Tensor:
    """Return x (B, C, H, W) convolved along one axis with a symmetric kernel, without the border of that axis.

    The Gaussian is separable: two dimensions are one after the other. A sum of shifted images is faster than torch's
    convolution on a CPU.
    """
    radius = len(weights) - 1
    size = x.shape[dim] - 2 * radius
    y = x.narrow(dim, radius, size) * weights[0]
    for i, weight in enumerate(weights[1:], 1):
        y.add_(x.narrow(dim, radius - i, size), alpha=weight)
        y.add_(x.narrow(dim, radius + i, size), alpha=weight)
    return y
