"""Total variation: the nearest picture with little sum of differences (Rudin, Osher and Fatemi), by Chambolle's dual.

u minimises 1/2 |u - f|^2 + weight TV(u), where TV sums the length of the gradient over all pixels. Flat regions become
exactly flat and edges stay, because a jump costs the same as a slope of the same height.
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
from regard.filters.images import apply

CHECK = 10  # steps between two looks at how far it is


def total_variation(
    image: Any, weight: float, tolerance: float = 0.05, max_steps: int = 500, channel_axis: int | None = None
) -> Any:
    """`weight`, in the picture's own units, as in skimage's denoise_tv_chambolle: the bigger, the smoother.

    It stops when the root mean square distance from the exact solution is certain to be at most `tolerance` weights (it is
    about a tenth of that then), or after `max_steps`. Each colour is a picture of its own.
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
    """f (B, C, H, W). The solution is u = f + weight div q for some field q of vectors no longer than 1.

    Chambolle's iteration ascends the dual along the gradient of u and pulls each vector back to length 1; with Nesterov's
    momentum (Beck and Teboulle, 2009) the gap closes as 1 / steps^2. Half the squared distance from the solution is at most
    the gap between both problems, so the gap says when to stop.
    """
    f = f.detach().contiguous()
    q = f.new_zeros(2, *f.shape)  # down and to the right
    ahead, slope, u = q.clone(), torch.zeros_like(q), torch.empty_like(f)
    run = compiled if f.dtype == torch.float32 and f.device.type == "cpu" else advance
    momenta = nesterov(max_steps)
    for first in range(0, max_steps, CHECK):
        q, ahead = run(f, q, ahead, weight, momenta[first : first + CHECK])
        if distance(primal(f, q, weight, u), q, weight, slope) <= tolerance * weight:
            break
    return u


def nesterov(steps: int) -> list[float]:
    """How far each step goes on in the direction of the last."""
    t, momenta = 1.0, []
    for _ in range(steps):
        t, before = (1 + math.sqrt(1 + 4 * t * t)) / 2, t
        momenta.append((before - 1) / t)
    return momenta


def advance(f: Tensor, q: Tensor, ahead: Tensor, weight: float, momenta: list[float]) -> tuple[Tensor, Tensor]:
    """One step for each momentum, from q and where its momentum brings it; the memory of both is used."""
    u, slope = torch.empty_like(f), torch.zeros_like(q)
    for momentum in momenta:
        gradient(primal(f, ahead, weight, u), slope)
        shorten(ahead.add_(slope, alpha=1 / (8 * weight)))
        q, ahead = ahead, q.lerp_(ahead, 1 + momentum)
    return q, ahead


def compiled(f: Tensor, q: Tensor, ahead: Tensor, weight: float, momenta: list[float]) -> tuple[Tensor, Tensor]:
    """The same for float32 on a CPU, plane by plane, on as many threads as torch may use."""
    from regard.filters.total_variation_numba import advance_plane

    run: Callable[..., None] = advance_plane
    numbers = np.float32(weight), np.array(momenta, np.float32)
    fields = (x.flatten(0, 1).numpy() for x in (f, *q, *ahead))  # (B C, H, W) each
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        list(pool.map(lambda *planes: run(*planes, *numbers), *fields))
    return q, ahead


def primal(f: Tensor, q: Tensor, weight: float, u: Tensor) -> Tensor:
    """f + weight div q, in `u`. Of q, what points out of the picture is 0."""
    torch.add(f, q[0], alpha=weight, out=u).add_(q[1], alpha=weight)
    u[..., 1:, :].sub_(q[0][..., :-1, :], alpha=weight)
    u[..., 1:].sub_(q[1][..., :-1], alpha=weight)
    return u


def gradient(u: Tensor, slope: Tensor) -> Tensor:
    """Differences to the next pixel below and to the right, in `slope` (2, B, C, H, W), whose last row and column stay 0."""
    torch.sub(u[..., 1:, :], u[..., :-1, :], out=slope[0][..., :-1, :])
    torch.sub(u[..., 1:], u[..., :-1], out=slope[1][..., :-1])
    return slope


def shorten(q: Tensor) -> Tensor:
    """Vectors longer than 1 are made 1 long."""
    return q.div_(length(q).clamp_(min=1))


def length(q: Tensor) -> Tensor:
    return q[0].square().addcmul_(q[1], q[1]).sqrt_()


def distance(u: Tensor, q: Tensor, weight: float, slope: Tensor) -> float:
    """An upper bound of the root mean square distance of u from the solution, of the worst picture of the batch."""
    gradient(u, slope)
    gap = weight * (length(slope) - slope[0] * q[0] - slope[1] * q[1]).mean((1, 2, 3))  # (B,), per number
    return math.sqrt(2 * max(gap.max().item(), 0.0))
