"""Non-local means (Buades, Coll and Morel 2005): a mean of pixels whose surroundings look alike.

    out(p) = sum_q w(p, q) I(q) / sum_q w(p, q),    w(p, q) = exp(-max(d(p, q) - 2 sigma^2, 0) / h^2)

where d(p, q) is the mean squared difference of the patches around p and q: softmax(-||patch_p - patch_q||^2 / h^2) V,
an attention (attention.py). Two patches of one motif under noise of deviation sigma differ by 2 sigma^2 alone, so that
is taken off. A pixel's own weight is 1, as that of any perfect match. The picture is reflected at its borders, for
patches and for what they are compared with.

- `mode="pixel"` is the formula above.
- `mode="patch"` (Buades, Coll and Morel 2011) gives every patch the weighted mean of whole patches, and a pixel the
  mean of all patches that it is in: its own and those around it. With u(i) = 1 / sum_q w(i, q), that is

    out(p) = mean over the centres i of patches with p of: sum_s u(i) w(i, i + s) I(p + s)

  so, shift by shift, the field u(i) w(i, i + s) is averaged over a patch and then weighs the shifted picture.
- `patch_weights="flat"`: all pixels of a patch count alike in d. "gaussian": by a Gaussian of deviation (patch - 1) / 4
  about its centre.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.errors import RegardError
from regard.filters.images import apply, pad
from regard.kernels.attention_functions import has_triton

# Below this share of noise in a picture's deviation: patch, h / sigma. Chosen on six photographs, sigma 10 to 75 of 255.
LEVELS = ((0.4, 5, 0.8), (0.6, 7, 0.65), (math.inf, 9, 0.5))


@dataclass(frozen=True)
class PatchWeighting:
    """What makes two patches alike."""

    h: float
    sigma: float
    taps: tuple[float, ...]  # weights along a side of a patch, that sum to 1; a pixel's is the product of its two
    reach: int

    @property
    def radius(self) -> int:
        return len(self.taps) // 2

    @property
    def edge(self) -> int:
        """How far beyond the border one looks."""
        return self.radius + self.reach


def nonlocal_means(
    image: Any,
    h: float | None = None,
    patch: int | None = None,
    reach: int | None = None,
    sigma: float = 0.0,
    mode: str | None = None,
    patch_weights: str = "flat",
    channel_axis: int | None = None,
) -> Any:
    """`image` with less noise.

    `h` and `sigma`, the noise's standard deviation, are in the units of the picture's values (out of 255 for uint8).
    `patch` is a patch's odd side; patches are compared up to `reach` pixels away in each direction. Given h, it is
    patch 7, reach 11 and mode "pixel" unless said otherwise; given sigma alone reach 6 and mode "patch", with h and
    patch by `LEVELS`.
    """
    if h is None and not sigma:
        raise RegardError("non-local means needs h, or sigma, the standard deviation of the noise")
    given = settings(
        sigma if h is None else h, patch, 11 if reach is None else reach, sigma, mode or "pixel", patch_weights
    )

    def denoise(x: Tensor) -> Tensor:
        if h is not None:
            return run(x, *given)
        far, way = 6 if reach is None else reach, mode or "patch"
        return torch.cat([run(one, *by_level(one, patch, far, sigma, way, patch_weights)) for one in x.split(1)])

    return apply(image, denoise, channel_axis)


def run(x: Tensor, like: PatchWeighting, mode: str) -> Tensor:
    quick = x.dtype == torch.float32 and not x.requires_grad
    if quick and x.device.type == "cpu":
        return nonlocal_means_numba(x, like, mode)
    if quick and x.is_cuda and mode == "pixel" and has_triton():
        return in_tiles(x, like)
    return pixelwise(x, like) if mode == "pixel" else patchwise(x, like)


def by_level(
    x: Tensor, patch: int | None, reach: int, sigma: float, mode: str, patch_weights: str
) -> tuple[PatchWeighting, str]:
    """Settings for one picture (1, C, H, W) by how much of its deviation is noise."""
    share = sigma / x.detach().var((-2, -1), correction=0).mean().sqrt().clamp(min=1e-30).item()
    side, ratio = next((side, ratio) for limit, side, ratio in LEVELS if share < limit)
    return settings(ratio * sigma, patch or side, reach, sigma, mode, patch_weights)


def settings(
    h: float, patch: int | None, reach: int, sigma: float, mode: str, patch_weights: str
) -> tuple[PatchWeighting, str]:
    side = 7 if patch is None else patch
    if h <= 0 or sigma < 0:
        raise RegardError(f"h {h:g} and sigma {sigma:g}: h must be above 0, and sigma not below")
    if side < 1 or side % 2 == 0 or reach < 0:
        raise RegardError(
            f"a patch of {side} pixels and a reach of {reach}: give an odd side, and a reach of 0 or more"
        )
    if mode not in ("pixel", "patch") or patch_weights not in ("flat", "gaussian"):
        raise RegardError(f"mode {mode!r} is pixel or patch, patch_weights {patch_weights!r} flat or gaussian")
    return PatchWeighting(h, sigma, taps_of(side, patch_weights), reach), mode


def taps_of(patch: int, weights: str) -> tuple[float, ...]:
    if weights == "flat" or patch == 1:
        return (1 / patch,) * patch
    steps = torch.arange(patch, dtype=torch.float64) - patch // 2
    taps = torch.exp(-(steps**2) / (2 * ((patch - 1) / 4) ** 2))
    return tuple((taps / taps.sum()).tolist())


# ---- the definition ---------------------------------------------------------------------------------------------------


def pixelwise(x: Tensor, like: PatchWeighting) -> Tensor:
    """x (B, C, H, W)"""
    sums, total = torch.zeros_like(x), torch.zeros_like(x[:, :1])
    for weight, there in shifts(x, like):
        sums, total = sums + weight * there, total + weight
    return sums / total


def patchwise(x: Tensor, like: PatchWeighting) -> Tensor:
    total, sums = torch.zeros_like(x[:, :1]), torch.zeros_like(x)
    for weight, _ in shifts(x, like):
        total = total + weight
    for weight, there in shifts(x, like):
        sums = sums + around(weight / total, like.radius) * there
    return sums / around(torch.ones_like(total), like.radius)


def shifts(x: Tensor, like: PatchWeighting) -> Iterator[tuple[Tensor, Tensor]]:
    """For every shift within reach: each pixel's weight (B, 1, H, W), and what stands there (B, C, H, W)."""
    (height, width), r = x.shape[-2:], like.radius
    wide = pad(x, like.edge, like.edge)
    middle = wide[..., like.reach : like.reach + height + 2 * r, like.reach : like.reach + width + 2 * r]
    for dy in range(2 * like.reach + 1):
        for dx in range(2 * like.reach + 1):
            moved = wide[..., dy : dy + height + 2 * r, dx : dx + width + 2 * r]
            distance = weighed((middle - moved).square().mean(1, keepdim=True), like.taps)  # (B, 1, H, W)
            weight = torch.exp(-(distance - 2 * like.sigma**2).clamp(min=0) / like.h**2)
            yield weight, moved[..., r : r + height, r : r + width]


def weighed(x: Tensor, taps: tuple[float, ...]) -> Tensor:
    """The weighted mean over a patch around each pixel that has one whole."""
    n, (height, width) = len(taps) - 1, x.shape[-2:]
    if len(set(taps)) == 1:
        return F.avg_pool2d(F.avg_pool2d(x, (n + 1, 1), 1), (1, n + 1), 1)
    zero = x.new_zeros(())
    rows = sum((tap * x[..., k : k + width - n] for k, tap in enumerate(taps)), zero)
    return sum((tap * rows[..., k : k + height - n, :] for k, tap in enumerate(taps)), zero)


def around(x: Tensor, r: int) -> Tensor:
    """The sum over the square around each pixel, of what of it is in the picture."""
    return F.avg_pool2d(x, 2 * r + 1, 1, r, divisor_override=1)


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


def in_tiles(x: Tensor, like: PatchWeighting) -> Tensor:
    """`pixelwise` for float32 on a GPU."""
    from regard.filters.nonlocal_kernels import pixels

    return pixels(pad(x, like.edge, like.edge), (x.shape[-2], x.shape[-1]), like.h, like.sigma, like.taps, like.reach)


# ---- on a CPU ---------------------------------------------------------------------------------------------------------


def nonlocal_means_numba(x: Tensor, like: PatchWeighting, mode: str) -> Tensor:
    """The same for float32 on a CPU."""
    import numpy as np

    from regard.filters.averages_numba import in_bands, patches_band, pixels_band

    (_, channels, height, width), taps = x.shape, np.array(like.taps, np.float32)
    noise, share = 2 * channels * like.sigma**2, 1 / (channels * like.h**2)  # of sums over channels
    out, total = np.empty(x.shape, np.float32), np.empty((height, width), np.float32)
    patches = np.outer(covering(height, like.radius), covering(width, like.radius))
    for wide, sums in zip(pad(x, like.edge, like.edge).contiguous().numpy(), out, strict=True):
        given = (wide, taps, like.reach, np.float32(noise), np.float32(share))
        in_bands(total, partial(pixels_band, *given, sums, total))
        if mode == "patch":
            in_bands(total, partial(patches_band, *given, 1 / total, sums))
        sums /= total if mode == "pixel" else patches
    return torch.from_numpy(out)


def covering(n: int, r: int) -> list[float]:
    """How many of n places are at most r from each."""
    return [float(min(i + r, n - 1) - max(i - r, 0) + 1) for i in range(n)]
