"""Diffusion filters: the heat equation, and anisotropic diffusion (Perona and Malik 1990), which preserves edges.

Both solve du/dt = div(g grad u) with no flow across the border of the image. With conductance g = 1, the result after
time t is that of a Gaussian filter of sigma = sqrt(2 t). With a g that decreases where neighbours differ, noise is
smoothed and edges stay: a kind of attention of each pixel to its four neighbours by their values, layer after layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.filters.image_arrays import apply

MAX_RATE = 0.25  # largest stable time step: with four neighbours a pixel then never loses more than it has

CONDUCTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # flow g d of a difference d, with s = (d / kappa)^2
    "exponential": lambda d, s: d * torch.exp(-s),
    "rational": lambda d, s: d / (1 + s),
}


def heat(image: Any, time: float = 0.5, steps: int | None = None, channel_axis: int | None = None) -> Any:
    """Return the solution of the heat equation du/dt = laplace u after `time`: a Gaussian of sigma = sqrt(2 time).

    The time is in square pixels. Without `steps` the equation is solved exactly (`solve_heat`); with them, by that many
    explicit steps of a time of at most 1/4. Differentiable.
    """
    if not 0 <= time < math.inf:
        raise RegardError(f"a time of {time:g}: give 0 or more, in square pixels (sigma^2 / 2)")
    if steps is None:
        return apply(image, lambda x: solve_heat(x, time), channel_axis)
    if steps < 1 or time > MAX_RATE * steps:
        raise RegardError(
            f"{steps} steps for a time of {time:g}: a step above {MAX_RATE} is unstable, "
            f"so give at least {max(1, math.ceil(time / MAX_RATE))} steps, or none for the exact solution"
        )
    return apply(image, lambda x: explicit_steps(x, steps, time / steps), channel_axis)


def perona_malik(
    image: Any,
    kappa: float,
    steps: int = 8,
    rate: float = 0.2,
    conductance: str = "rational",
    channel_axis: int | None = None,
) -> Any:
    """Return `image` after anisotropic diffusion (Perona and Malik 1990) with four neighbours. Differentiable.

    `kappa`, in the units of the image's values, is the difference of neighbours from which on the flow decreases. The
    conductance is "exponential", exp(-(d / kappa)^2), which prefers sharp edges to weak ones, or "rational", 1 / (1 +
    (d / kappa)^2), which prefers large regions. `rate` is the time of a step, at most 1/4. For colours d is the root
    mean square over the channels, so that all channels have their edges in the same place.
    """
    if not kappa > 0 or steps < 1:
        raise RegardError(
            f"kappa {kappa:g}, {steps} steps: give a kappa above 0, in the picture's units, and 1 step or more"
        )
    if not 0 < rate <= MAX_RATE:
        raise RegardError(f"a rate of {rate:g} is not above 0 and at most {MAX_RATE}, where the steps are stable")
    if conductance not in CONDUCTANCES:
        raise RegardError(f"conductance {conductance!r}: give one of {', '.join(CONDUCTANCES)}")

    def conduct(difference: Tensor) -> Tensor:
        ratio = difference / kappa
        squares = ratio * ratio
        return CONDUCTANCES[conductance](difference, squares if len(squares[0]) == 1 else squares.mean(1, keepdim=True))

    return apply(image, lambda x: explicit_steps(x, steps, rate, conduct), channel_axis)


def solve_heat(x: Tensor, time: float) -> Tensor:
    """Return the exact solution of the heat equation for x (B, C, H, W) as a sum of cosines: cos(w i) decays by exp(-w^2 t).

    They are the frequencies of the image joined with its mirror image, which means no flow across the border. The
    factor is a product over the axes, so one axis is computed after the other. Below a time of about 1/2, frequencies
    too high for the pixel grid are missing: a hard edge then overshoots a little.
    """
    for dim in (-2, -1):
        size = x.shape[dim]
        frequency = torch.arange(size + 1, dtype=torch.float64) * (math.pi / size)
        decay = torch.exp(-time * frequency.square()).to(x)
        waves = torch.fft.rfft(torch.cat([x, x.flip(dim)], dim), dim=dim)
        waves = waves * (decay if dim == -1 else decay[:, None])
        x = torch.fft.irfft(waves, n=2 * size, dim=dim).narrow(dim, 0, size)
    return x


def explicit_steps(x: Tensor, steps: int, rate: float, conduct: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Return x (B, C, H, W) after explicit steps of diffusion.

    In a step, rate * conduct(difference) flows between two neighbours; without `conduct`, rate * difference.
    """
    for _ in range(steps):
        y = x.clone()
        for dim in (-2, -1):
            flow = x.diff(dim=dim)
            flow = conduct(flow) if conduct else flow
            n = flow.shape[dim]
            y.narrow(dim, 0, n).add_(flow, alpha=rate)
            y.narrow(dim, 1, n).sub_(flow, alpha=rate)
        x = y
    return x
