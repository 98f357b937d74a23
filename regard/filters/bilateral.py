"""The bilateral filter (Tomasi and Manduchi 1998): a mean of nearby pixels, weighted by distance and by similarity of value.

    out(p) = sum_q w(p, q) I(q) / sum_q w(p, q)
    w(p, q) = exp(-|p - q|^2 / 2 sigma_spatial^2 - |I(p) - I(q)|^2 / 2 sigma_color^2)

over a square window of q around p. The weights are a softmax of negative squared distances of (position, value), so the
filter is attention (attention_filters.py).
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.filters.image_arrays import apply, pad


def bilateral(
    image: Any,
    sigma_color: float,
    sigma_spatial: float = 1.0,
    window: int | None = None,
    border: str = "reflect",
    channel_axis: int | None = None,
) -> Any:
    """Return `image` smoothed, but with its edges preserved.

    `sigma_color` is in the units of the image's values (out of 255 for uint8) and applies to the Euclidean distance of
    colours; `sigma_spatial` is in pixels. `window` is the odd side of the window, three sigma_spatial in each direction
    by default. `border` is a mode of numpy.pad.
    """
    if min(sigma_color, sigma_spatial) <= 0:
        raise RegardError(f"sigma_color {sigma_color} and sigma_spatial {sigma_spatial}: both must be above 0")
    side = window or max(5, 2 * math.ceil(3 * sigma_spatial) + 1)
    if side < 1 or side % 2 == 0:
        raise RegardError(f"a window of {window} pixels has no middle: give an odd number")

    def smooth(x: Tensor) -> Tensor:
        run = (
            bilateral_numba
            if x.dtype == torch.float32 and x.device.type == "cpu" and not x.requires_grad
            else bilateral_reference
        )
        return run(x, pad(x, side // 2, side // 2, border), sigma_color, sigma_spatial)

    return apply(image, smooth, channel_axis)


def bilateral_reference(x: Tensor, around: Tensor, sigma_color: float, sigma_spatial: float) -> Tensor:
    """Return the filtered x (B, C, H, W) in plain torch, one shift of the whole image at a time.

    `around` is x with its border; its width determines the window.
    """
    height, width = x.shape[-2:]
    r = (around.shape[-1] - width) // 2
    sums, total = torch.zeros_like(x), torch.zeros_like(x[:, :1])
    for dy in range(-r, r + 1):
        for dx in range(-r, r + 1):
            there = around[..., r + dy : r + dy + height, r + dx : r + dx + width]
            squares = (x - there).square().sum(1, keepdim=True)  # (B, 1, H, W)
            weight = torch.exp(-(dy**2 + dx**2) / (2 * sigma_spatial**2) - squares / (2 * sigma_color**2))
            sums, total = sums + weight * there, total + weight
    return sums / total


def bilateral_numba(x: Tensor, around: Tensor, sigma_color: float, sigma_spatial: float) -> Tensor:
    """Return what `bilateral_reference` defines, for float32 on a CPU."""
    import numpy as np

    from regard.filters.filters_numba import bilateral_band, in_bands

    r = (around.shape[-1] - x.shape[-1]) // 2
    steps = np.arange(-r, r + 1, dtype=np.float64) ** 2
    spatial = (-(steps[:, None] + steps) / (2 * sigma_spatial**2)).astype(np.float32)
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for given, made in zip(around.contiguous().numpy(), out.numpy(), strict=True):
        in_bands(made, partial(bilateral_band, given, spatial, np.float32(-0.5 / sigma_color**2), made))
    return out
