"""Total variation denoising (Rudin, Osher and Fatemi 1992), solved by Chambolle's dual iteration.

The result u minimises 1/2 |u - f|^2 + weight TV(u), where TV(u) is the sum of the lengths of the gradient over all
pixels. Flat regions become exactly flat and edges stay, because a jump costs as much as a slope of the same height.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError
from regard.filters.image_arrays import apply

CHECK_STEPS = 10  # between two checks of convergence


def total_variation(
    image: Any, weight: float, tolerance: float = 0.05, max_steps: int = 500, channel_axis: int | None = None
) -> Any:
    """Return `image` denoised by total variation; a larger `weight` gives a smoother result.

    The weight is in the units of the image's values, as in skimage's denoise_tv_chambolle. The iteration stops when the
    root mean square distance from the exact solution is certainly at most `tolerance` * weight (it is about a tenth of
    that then), or after `max_steps`. Channels are filtered separately.
    """
    if not 0 <= weight < math.inf or not tolerance > 0 or max_steps < 1:
        raise RegardError(
            f"weight {weight:g}, tolerance {tolerance:g}, {max_steps} steps at most: "
            f"give a weight of 0 or more, in the picture's units, a tolerance above 0 and 1 step or more"
        )
    if weight == 0:
        return apply(image, Tensor.clone, channel_axis)
    return apply(image, lambda f: solve(f, weight, tolerance, max_steps), channel_axis)


@torch.no_grad()
def solve(f: Tensor, weight: float, tolerance: float, max_steps: int) -> Tensor:
    """Return the denoised f (B, C, H, W), which is u = f + weight div q for a field q of vectors no longer than 1.

    Chambolle's iteration is projected gradient ascent of the dual problem: along the gradient of u, then back to a
    length of at most 1. With Nesterov's momentum (Beck and Teboulle 2009) the duality gap decreases as 1 / steps^2.
    Half the squared distance from the solution is at most the gap, so the gap says when to stop.
    """
    f = f.detach().contiguous()
    q = f.new_zeros(2, *f.shape)  # down and to the right
    ahead, slope, u = q.clone(), torch.zeros_like(q), torch.empty_like(f)
    run = advance_numba if f.dtype == torch.float32 and f.device.type == "cpu" else advance
    momenta = nesterov_momenta(max_steps)
    for first in range(0, max_steps, CHECK_STEPS):
        q, ahead = run(f, q, ahead, weight, momenta[first : first + CHECK_STEPS])
        if distance_bound(primal(f, q, weight, u), q, weight, slope) <= tolerance * weight:
            break
    return u


def nesterov_momenta(steps: int) -> list[float]:
    """Return the momentum of each step: how far it extrapolates in the direction of the previous one."""
    t, momenta = 1.0, []
    for _ in range(steps):
        t, before = (1 + math.sqrt(1 + 4 * t * t)) / 2, t
        momenta.append((before - 1) / t)
    return momenta


def advance(f: Tensor, q: Tensor, ahead: Tensor, weight: float, momenta: list[float]) -> tuple[Tensor, Tensor]:
    """Take a step for each momentum, from q and its extrapolation `ahead`; both tensors are overwritten."""
    u, slope = torch.empty_like(f), torch.zeros_like(q)
    for momentum in momenta:
        gradient(primal(f, ahead, weight, u), slope)
        clip_length(ahead.add_(slope, alpha=1 / (8 * weight)))
        q, ahead = ahead, q.lerp_(ahead, 1 + momentum)
    return q, ahead


def advance_numba(f: Tensor, q: Tensor, ahead: Tensor, weight: float, momenta: list[float]) -> tuple[Tensor, Tensor]:
    """Do what `advance` defines, for float32 on a CPU, plane by plane, on as many threads as torch uses."""
    from regard.filters.filters_numba import advance_plane

    run: Callable[..., None] = advance_plane
    numbers = np.float32(weight), np.array(momenta, np.float32)
    fields = (x.flatten(0, 1).numpy() for x in (f, *q, *ahead))  # (B C, H, W) each
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(lambda *planes: run(*planes, *numbers), *fields))
    return q, ahead


def primal(f: Tensor, q: Tensor, weight: float, u: Tensor) -> Tensor:
    """Return f + weight div q, written into `u`; vectors of q that point out of the image are 0."""
    torch.add(f, q[0], alpha=weight, out=u).add_(q[1], alpha=weight)
    u[..., 1:, :].sub_(q[0][..., :-1, :], alpha=weight)
    u[..., 1:].sub_(q[1][..., :-1], alpha=weight)
    return u


def gradient(u: Tensor, slope: Tensor) -> Tensor:
    """Return the differences to the pixel below and to the right, written into `slope` (2, B, C, H, W).

    Its last row and column stay 0.
    """
    torch.sub(u[..., 1:, :], u[..., :-1, :], out=slope[0][..., :-1, :])
    torch.sub(u[..., 1:], u[..., :-1], out=slope[1][..., :-1])
    return slope


def clip_length(q: Tensor) -> Tensor:
    """Scale the vectors of q that are longer than 1 to length 1, in place."""
    return q.div_(length(q).clamp_(min=1))


def length(q: Tensor) -> Tensor:
    """Return the length of each vector of q (2, B, C, H, W): (B, C, H, W)."""
    return q[0].square().addcmul_(q[1], q[1]).sqrt_()


def distance_bound(u: Tensor, q: Tensor, weight: float, slope: Tensor) -> float:
    """Return an upper bound of the root mean square distance of u from the solution, for the worst image of the batch."""
    gradient(u, slope)
    gap = weight * (length(slope) - slope[0] * q[0] - slope[1] * q[1]).mean(
        (1, 2, 3)
    )  # (B,), duality gap per pixel and channel
    return math.sqrt(2 * max(gap.max().item(), 0.0))
