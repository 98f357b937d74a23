"""Non-local means (Buades, Coll and Morel 2005): each pixel becomes a mean of pixels with similar surroundings.

    out(p) = sum_q w(p, q) I(q) / sum_q w(p, q),    w(p, q) = exp(-max(d(p, q) - 2 sigma^2, 0) / h^2)

where d(p, q) is the mean squared difference of the patches around p and q. That is attention, softmax(-||patch_p -
patch_q||^2 / h^2) V (attention_filters.py). Noise of standard deviation sigma alone makes two equal patches differ by 2
sigma^2, which is therefore subtracted. The weight of a pixel itself is 1, weighting that of any perfect match. The
image is reflected at its borders.

- `mode="pixel"` is the formula above.
- `mode="patch"` (Buades, Coll and Morel 2011) replaces every patch by the weighted mean of patches, and a pixel by the
  mean of all patches that contain it. With u(i) = 1 / sum_q w(i, q), that is

    out(p) = mean over the centres i of patches that contain p of sum_s u(i) w(i, i + s) I(p + s)

  so for every shift s the field u(i) w(i, i + s) is averaged over a patch and multiplied with the shifted image.
- `patch_weights="flat"` weights all pixels of a patch equally in d; "gaussian" by a Gaussian of standard deviation
  (patch - 1) / 4 around its centre.
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
from regard.filters.image_arrays import apply, pad
from regard.kernels.attention_functions import has_triton

# (sigma / standard deviation of the image below this, patch, h / sigma), tuned on six photographs with sigma 10 to 75 of 255
NOISE_LEVELS = ((0.4, 5, 0.8), (0.6, 7, 0.65), (math.inf, 9, 0.5))


@dataclass(frozen=True)
class PatchWeighting:
    """The parameters of the weight of two patches."""

    h: float
    sigma: float
    taps: tuple[float, ...]  # weights along a side of a patch, sum 1; the weight of a pixel is a product of two
    reach: int

    @property
    def radius(self) -> int:
        """Half the side of a patch."""
        return len(self.taps) // 2

    @property
    def edge(self) -> int:
        """The width of the border that is needed around an image."""
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
    """Return `image` denoised by non-local means.

    `h` and `sigma`, the standard deviation of the noise, are in the units of the image's values (out of 255 for uint8).
    `patch` is the odd side of a patch; patches are compared up to `reach` pixels away in each direction. With h, the
    defaults are patch 7, reach 11 and mode "pixel"; with sigma alone, reach 6 and mode "patch", and h and patch come
    from `NOISE_LEVELS`.
    """
    if h is None and not sigma:
        raise RegardError("non-local means needs h, or sigma, the standard deviation of the noise")
    given = make_weighting(
        sigma if h is None else h, patch, 11 if reach is None else reach, sigma, mode or "pixel", patch_weights
    )

    def denoise(x: Tensor) -> Tensor:
        if h is not None:
            return run(x, *given)
        far, how = 6 if reach is None else reach, mode or "patch"
        return torch.cat(
            [run(one, *weighting_for_noise(one, patch, far, sigma, how, patch_weights)) for one in x.split(1)]
        )

    return apply(image, denoise, channel_axis)


def run(x: Tensor, weighting: PatchWeighting, mode: str) -> Tensor:
    """Filter x (B, C, H, W) by the fastest implementation for its device and dtype."""
    quick = x.dtype == torch.float32 and not x.requires_grad
    if quick and x.device.type == "cpu":
        return nonlocal_means_numba(x, weighting, mode)
    if quick and x.is_cuda and mode == "pixel" and has_triton():
        return pixelwise_triton(x, weighting)
    return pixelwise(x, weighting) if mode == "pixel" else patchwise(x, weighting)


def weighting_for_noise(
    x: Tensor, patch: int | None, reach: int, sigma: float, mode: str, patch_weights: str
) -> tuple[PatchWeighting, str]:
    """Return the weighting and mode of one image (1, C, H, W) by the share of noise in its standard deviation."""
    share = sigma / x.detach().var((-2, -1), correction=0).mean().sqrt().clamp(min=1e-30).item()
    side, ratio = next((side, ratio) for limit, side, ratio in NOISE_LEVELS if share < limit)
    return make_weighting(ratio * sigma, patch or side, reach, sigma, mode, patch_weights)


def make_weighting(
    h: float, patch: int | None, reach: int, sigma: float, mode: str, patch_weights: str
) -> tuple[PatchWeighting, str]:
    """Check the parameters; return the weighting and the mode."""
    side = 7 if patch is None else patch
    if h <= 0 or sigma < 0:
        raise RegardError(f"h {h:g} and sigma {sigma:g}: h must be above 0, and sigma not below")
    if side < 1 or side % 2 == 0 or reach < 0:
        raise RegardError(
            f"a patch of {side} pixels and a reach of {reach}: give an odd side, and a reach of 0 or more"
        )
    if mode not in ("pixel", "patch") or patch_weights not in ("flat", "gaussian"):
        raise RegardError(f"mode {mode!r} is pixel or patch, patch_weights {patch_weights!r} flat or gaussian")
    return PatchWeighting(h, sigma, patch_taps(side, patch_weights), reach), mode


def patch_taps(patch: int, weights: str) -> tuple[float, ...]:
    """Return the weights along a side of a patch, which sum to 1."""
    if weights == "flat" or patch == 1:
        return (1 / patch,) * patch
    steps = torch.arange(patch, dtype=torch.float64) - patch // 2
    taps = torch.exp(-(steps**2) / (2 * ((patch - 1) / 4) ** 2))
    return tuple((taps / taps.sum()).tolist())


# ---- the definition ---------------------------------------------------------------------------------------------------


def pixelwise(x: Tensor, weighting: PatchWeighting) -> Tensor:
    """Return non-local means of x (B, C, H, W) in mode "pixel", in plain torch."""
    sums, total = torch.zeros_like(x), torch.zeros_like(x[:, :1])
    for weight, there in shifts(x, weighting):
        sums, total = sums + weight * there, total + weight
    return sums / total


def patchwise(x: Tensor, weighting: PatchWeighting) -> Tensor:
    """Return non-local means of x (B, C, H, W) in mode "patch", in plain torch."""
    total, sums = torch.zeros_like(x[:, :1]), torch.zeros_like(x)
    for weight, _ in shifts(x, weighting):
        total = total + weight
    for weight, there in shifts(x, weighting):
        sums = sums + box_sum(weight / total, weighting.radius) * there
    return sums / box_sum(torch.ones_like(total), weighting.radius)


def shifts(x: Tensor, weighting: PatchWeighting) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield for every shift within reach the weight of each pixel (B, 1, H, W), and the shifted image (B, C, H, W)."""
    (height, width), r = x.shape[-2:], weighting.radius
    wide = pad(x, weighting.edge, weighting.edge)
    middle = wide[
        ..., weighting.reach : weighting.reach + height + 2 * r, weighting.reach : weighting.reach + width + 2 * r
    ]
    for dy in range(2 * weighting.reach + 1):
        for dx in range(2 * weighting.reach + 1):
            moved = wide[..., dy : dy + height + 2 * r, dx : dx + width + 2 * r]
            distance = patch_mean((middle - moved).square().mean(1, keepdim=True), weighting.taps)  # (B, 1, H, W)
            weight = torch.exp(-(distance - 2 * weighting.sigma**2).clamp(min=0) / weighting.h**2)
            yield weight, moved[..., r : r + height, r : r + width]


def patch_mean(x: Tensor, taps: tuple[float, ...]) -> Tensor:
    """Return the weighted mean over the patch around each pixel of x (..., H, W), without the border of the image."""
    n, (height, width) = len(taps) - 1, x.shape[-2:]
    if len(set(taps)) == 1:
        return F.avg_pool2d(F.avg_pool2d(x, (n + 1, 1), 1), (1, n + 1), 1)
    zero = x.new_zeros(())
    rows = sum((tap * x[..., k : k + width - n] for k, tap in enumerate(taps)), zero)
    return sum((tap * rows[..., k : k + height - n, :] for k, tap in enumerate(taps)), zero)


def box_sum(x: Tensor, r: int) -> Tensor:
    """Return the sum over the square of radius r around each pixel of x (B, 1, H, W), within the image."""
    return F.avg_pool2d(x, 2 * r + 1, 1, r, divisor_override=1)


# ---- on a GPU ---------------------------------------------------------------------------------------------------------


def pixelwise_triton(x: Tensor, weighting: PatchWeighting) -> Tensor:
    """Return what `pixelwise` defines, for float32 on a GPU."""
    from regard.filters.nonlocal_means_triton import pixels

    return pixels(
        pad(x, weighting.edge, weighting.edge),
        (x.shape[-2], x.shape[-1]),
        weighting.h,
        weighting.sigma,
        weighting.taps,
        weighting.reach,
    )


# ---- on a CPU ---------------------------------------------------------------------------------------------------------


def nonlocal_means_numba(x: Tensor, weighting: PatchWeighting, mode: str) -> Tensor:
    """Return what `pixelwise` and `patchwise` define, for float32 on a CPU."""
    import numpy as np

    from regard.filters.filters_numba import in_bands, patches_band, pixels_band

    (_, channels, height, width), taps = x.shape, np.array(weighting.taps, np.float32)
    # The compiled loops sum over channels, where the definition takes the mean.
    noise, share = 2 * channels * weighting.sigma**2, 1 / (channels * weighting.h**2)
    out, total = np.empty(x.shape, np.float32), np.empty((height, width), np.float32)
    patches = np.outer(count_near(height, weighting.radius), count_near(width, weighting.radius))
    for wide, sums in zip(pad(x, weighting.edge, weighting.edge).contiguous().numpy(), out, strict=True):
        given = (wide, taps, weighting.reach, np.float32(noise), np.float32(share))
        in_bands(total, partial(pixels_band, *given, sums, total))
        if mode == "patch":
            in_bands(total, partial(patches_band, *given, 1 / total, sums))
        sums /= total if mode == "pixel" else patches
    return torch.from_numpy(out)


def count_near(n: int, r: int) -> list[float]:
    """Return for each of n pixels in a row how many pixels, itself included, are at most r away."""
    return [float(min(i + r, n - 1) - max(i - r, 0) + 1) for i in range(n)]
