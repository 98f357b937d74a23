"""Filters as heat that flows: the heat equation, and Perona and Malik's, which hardly flows across edges.

Both are du/dt = div(g grad u) with nothing flowing over the border. With g = 1 the picture after the time t is the one
that a Gaussian of sigma = sqrt(2 t) makes. With a g that falls where neighbours differ, noise is evened out and edges stay:
an attention of each pixel to its four neighbours by their values, layer after layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.filters.images import apply

STABLE = 0.25  # of a difference, that flows in a step: with four neighbours a pixel then never gives more than it has

CONDUCTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {  # of a difference d and s = (d / kappa)^2: what flows
    "exponential": lambda d, s: d * torch.exp(-s),
    "rational": lambda d, s: d / (1 + s),
}


def heat(image: Any, time: float, steps: int | None = None, channel_axis: int | None = None) -> Any:
    """du/dt = laplace u after `time`, in square pixels: the Gaussian of sigma = sqrt(2 time). Differentiable.

    Without `steps` it is solved exactly (`spread`); with them, by that many explicit steps, whose time may be 1/4 at most.
    """
    if not 0 <= time < math.inf:
        raise RegardError(f"a time of {time:g}: give 0 or more, in square pixels (sigma^2 / 2)")
    if steps is None:
        return apply(image, lambda x: spread(x, time), channel_axis)
    if steps < 1 or time > STABLE * steps:
        raise RegardError(
            f"{steps} steps for a time of {time:g}: a step above {STABLE} is unstable, "
            f"so give at least {max(1, math.ceil(time / STABLE))} steps, or none for the exact solution"
        )
    return apply(image, lambda x: repeat(x, steps, time / steps), channel_axis)


def perona_malik(
    image: Any,
    kappa: float,
    steps: int = 8,
    rate: float = 0.2,
    conductance: str = "rational",
    channel_axis: int | None = None,
) -> Any:
    """Anisotropic diffusion (Perona and Malik, 1990) with four neighbours. Differentiable.

    `kappa`, in the picture's own units, is the difference of neighbours at which flow begins to stop: the conductance is
    exp(-(d / kappa)^2), which prefers sharp edges to weak ones, or rational, 1 / (1 + (d / kappa)^2), which prefers large
    regions. `rate` is the time of a step, 1/4 at most. In colour d is the root mean square over the channels, so that edges
    are in one place in all.
    """
    if not kappa > 0 or steps < 1:
        raise RegardError(
            f"kappa {kappa:g}, {steps} steps: give a kappa above 0, in the picture's units, and 1 step or more"
        )
    if not 0 < rate <= STABLE:
        raise RegardError(f"a rate of {rate:g} is not above 0 and at most {STABLE}, where the steps are stable")
    if conductance not in CONDUCTANCES:
        raise RegardError(f"conductance {conductance!r}: give one of {', '.join(CONDUCTANCES)}")

    def slowed(difference: Tensor) -> Tensor:
        ratio = difference / kappa
        squares = ratio * ratio
        return CONDUCTANCES[conductance](difference, squares if len(squares[0]) == 1 else squares.mean(1, keepdim=True))

    return apply(image, lambda x: repeat(x, steps, rate, slowed), channel_axis)


def spread(x: Tensor, time: float) -> Tensor:
    """The heat equation solved exactly for the sum of cosines that x (B, C, H, W) is: cos(w i) fades by exp(-w^2 t).

    They are those of the picture beside its mirror image, which is what nothing flowing over the border means. The factor
    is a product over the axes, so one axis is done after the other. Below a time of about 1/2 the frequencies that pixels
    cannot show are missed: a hard edge then overshoots a little.
    """
    for dim in (-2, -1):
        size = x.shape[dim]
        frequency = torch.arange(size + 1, dtype=torch.float64) * (math.pi / size)
        fading = torch.exp(-time * frequency.square()).to(x)
        waves = torch.fft.rfft(torch.cat([x, x.flip(dim)], dim), dim=dim)
        waves = waves * (fading if dim == -1 else fading[:, None])
        x = torch.fft.irfft(waves, n=2 * size, dim=dim).narrow(dim, 0, size)
    return x


def repeat(x: Tensor, steps: int, rate: float, slowed: Callable[[Tensor], Tensor] | None = None) -> Tensor:
    """Explicit steps of x (B, C, H, W): between two neighbours flows rate * g * their difference, from one to the other."""
    for _ in range(steps):
        y = x.clone()
        for dim in (-2, -1):
            flow = x.diff(dim=dim)
            flow = slowed(flow) if slowed else flow
            n = flow.shape[dim]
            y.narrow(dim, 0, n).add_(flow, alpha=rate)
            y.narrow(dim, 1, n).sub_(flow, alpha=rate)
        x = y
    return x
