"""Conversion of images for all filters: any kind of image becomes (B, C, H, W), and the result the same kind of image.

- NumPy: (H, W) is grey, (B, H, W) a batch of grey images; colours need `channel_axis`, -1 for (H, W, C) and (B, H, W,
  C).
- torch: (H, W), (C, H, W) or (B, C, H, W), on any device, unless `channel_axis` says otherwise.
- Pillow: modes L, LA, RGB, RGBA, I;16 and F. Alpha is not filtered but copied.

The result of uint8, uint16 and floating-point images has the same dtype; integers are rounded and clipped to their
range. Filters compute in float32 (float64 for float64), on the device of the image. Values are never rescaled, so
parameters that are compared with values (sigma, h, kappa, weight) are in the units of the image: out of 255 for uint8,
out of 65535 for uint16, as given for floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

Function = Callable[[Tensor], Tensor]  # (B, C, H, W) -> (B, C, H', W'), float32 or float64
MAX_VALUES = {torch.uint8: 255, torch.uint16: 65535}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
WITHOUT_ALPHA = {"LA": "L", "RGBA": "RGB"}
BORDERS = ("reflect", "symmetric", "edge", "constant", "wrap")  # numpy.pad's names and meanings


def apply(image: Any, function: Function, channel_axis: int | None = None) -> Any:
    """Return `function`, which filters (B, C, H, W), applied to an image of any kind, as the same kind of image."""
    if isinstance(image, Tensor):
        axis = -3 if channel_axis is None and image.dim() > 2 else channel_axis
        return apply_to_tensor(image, function, axis)
    if isinstance(image, np.ndarray):
        return apply_to_array(image, function, channel_axis)
    if hasattr(image, "getbands"):
        return apply_to_pil(image, function)
    raise RegardError(f"a picture is a NumPy array, a torch tensor or a Pillow image, not {type(image).__name__}")


def apply_to_tensor(image: Tensor, function: Function, axis: int | None) -> Tensor:
    """Return `function` applied to a tensor whose channels are at `axis`."""
    planes = to_batch(image, axis)  # (B, C, H, W)
    inside = torch.float64 if image.dtype == torch.float64 else torch.float32
    made = to_dtype(function(planes.to(inside)), image.dtype)
    return made.reshape(made.shape[-2:]) if axis is None and image.dim() == 2 else from_batch(made, image, axis)


def to_batch(image: Tensor, axis: int | None) -> Tensor:
    """Return an image as (B, C, H, W), a view where possible."""
    if image.dtype not in MAX_VALUES and image.dtype not in FLOATS:
        raise RegardError(f"a picture of {image.dtype}: give uint8, uint16 or floats")
    flat = image.dim() - (axis is not None)  # axes other than channels
    if flat not in (2, 3) or not image.numel():
        raise RegardError(
            f"a picture of shape {tuple(image.shape)} with {'no channel axis' if axis is None else f'channel axis {axis}'}: "
            f"give (H, W), (H, W, C) with channel_axis=-1, or torch's (C, H, W) and (B, C, H, W)"
        )
    planes = image.unsqueeze(-3) if axis is None else image.movedim(axis, -3)
    return planes if planes.dim() == 4 else planes[None]


def from_batch(made: Tensor, image: Tensor, axis: int | None) -> Tensor:
    """Return a result (B, C, H', W') with the axes of `image`, which has an axis of channels or of a batch."""
    if axis is None:
        return made[:, 0]
    planes = made if image.dim() == 4 else made[0]
    return planes.movedim(-3, axis).contiguous()


def to_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in another dtype; integers are rounded and clipped to their range."""
    peak = MAX_VALUES.get(dtype)
    return x.to(dtype) if peak is None else x.round().clamp(0, peak).to(dtype)


def apply_to_array(image: np.ndarray, function: Function, axis: int | None) -> np.ndarray:
    """Return `function` applied to a NumPy array whose channels are at `axis`."""
    if axis is None and image.ndim == 3 and image.shape[-1] in (3, 4):
        raise RegardError(
            f"an array of shape {image.shape} looks like colours: give channel_axis=-1 "
            f"(without one the first axis counts grey pictures)"
        )
    try:
        given = torch.from_numpy(np.ascontiguousarray(image))
    except TypeError as error:
        raise RegardError(f"a picture of {image.dtype}: give uint8, uint16 or floats") from error
    return apply_to_tensor(given, function, axis).numpy()


def apply_to_pil(image: PILImage, function: Function) -> PILImage:
    """Return `function` applied to a Pillow image."""
    from PIL import Image

    if image.mode not in ("L", "RGB", "I;16", "F", *WITHOUT_ALPHA):
        raise RegardError(f"a picture of mode {image.mode}: convert it first, with .convert('RGB') or .convert('L')")
    bands, alpha = image, None
    if image.mode in WITHOUT_ALPHA:
        bands, alpha = image.convert(WITHOUT_ALPHA[image.mode]), image.getchannel("A")
    made = Image.fromarray(apply_to_array(np.array(bands), function, None if len(bands.getbands()) == 1 else -1))
    if alpha is not None:
        if made.size != image.size:
            raise RegardError("a picture with alpha cannot change its size: convert it first, with .convert('RGB')")
        made.putalpha(alpha)
    return made


# ---- borders ----------------------------------------------------------------------------------------------------------


def pad(x: Tensor, rows: int, columns: int, border: str = "reflect") -> Tensor:
    """Return x (..., H, W) padded to (..., H + 2 rows, W + 2 columns); `border` is a mode of numpy.pad.

    The border may be wider than the image, which is then reflected repeatedly. Without gradients on a CPU, NumPy pads:
    it is as fast as torch, and does not wait for torch's threads if the cores are busy.
    """
    if border not in BORDERS:
        raise RegardError(f"border {border!r}: give one of {', '.join(BORDERS)}")
    if x.device.type == "cpu" and not x.requires_grad:
        around = [(0, 0)] * (x.dim() - 2) + [(rows, rows), (columns, columns)]
        return torch.from_numpy(np.pad(x.numpy(), around, mode=border))  # type: ignore[call-overload]
    if border == "constant":
        return torch.nn.functional.pad(x, (columns, columns, rows, rows))
    down, right = (
        border_index(n, more, border).to(x.device) for n, more in zip(x.shape[-2:], (rows, columns), strict=True)
    )
    return x.index_select(-2, down).index_select(-1, right)


def border_index(n: int, more: int, border: str) -> Tensor:
    """Return the row (of n) that each row of the padded image copies, `more` before the first to `more` after the last."""
    at = torch.arange(-more, n + more)
    if border == "edge" or n == 1:
        return at.clamp(0, n - 1)
    if border == "wrap":
        return at % n
    twice = int(border == "symmetric")  # "symmetric" repeats the first and last row
    period = 2 * n - 2 + 2 * twice
    at = at % period
    return torch.minimum(at, period - twice - at)


# ---- quality ---------------------------------------------------------------------------------------------------------


def peak_of(image: Any) -> float:
    """Return the largest value of an image's dtype: 255, 65535, or 1 for floats."""
    kind = str(image.dtype) if hasattr(image, "dtype") else {"I;16": "uint16", "F": "float32"}.get(image.mode, "uint8")
    return {"uint8": 255.0, "uint16": 65535.0}.get(kind.removeprefix("torch."), 1.0)


def psnr(clean: Any, other: Any, peak: float | None = None) -> float:
    """Return the peak signal-to-noise ratio in dB, 10 log10(peak^2 / mean squared error).

    `peak` is the largest value of the clean image's dtype unless given.
    """
    a, b = (np.asarray(x.cpu() if isinstance(x, Tensor) else x, dtype=np.float64) for x in (clean, other))
    error = np.mean((a - b) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10((peak or peak_of(clean)) ** 2 / error))


# ---- noise -----------------------------------------------------------------------------------------------------------

# The high-pass filter of Daubechies' wavelet of two vanishing moments (db2): constant and linear parts of an image give 0.
DB2_HIGH_PASS = (-0.48296291314469025, 0.836516303737469, -0.22414386804185735, -0.12940952255092145)


def estimate_noise(image: Any, channel_axis: int | None = None) -> float:
    """Return an estimate of the standard deviation of white Gaussian noise in an image, in the image's units.

    It is the median absolute value of the finest diagonal wavelet coefficients, divided by that of a unit normal variable
    (Donoho and Johnstone 1994): edges and textures change few of these coefficients, noise changes all. Of colours it is
    the mean over channels. An image of fewer than 8 x 8 pixels has too few coefficients, and gives 0.
    """
    found: list[float] = []

    def measure(x: Tensor) -> Tensor:
        if min(x.shape[-2:]) >= 8:
            taps = x.new_tensor(DB2_HIGH_PASS)
            kernel = (taps[:, None] * taps)[None, None]
            diagonal = torch.nn.functional.conv2d(x.flatten(0, 1)[:, None], kernel, stride=2)  # (B * C, 1, H', W')
            found.extend((diagonal.abs().flatten(1).median(1).values / MEDIAN_OF_ABSOLUTE_NORMAL).tolist())
        return x

    apply(image, measure, channel_axis)
    return sum(found) / len(found) if found else 0.0


MEDIAN_OF_ABSOLUTE_NORMAL = 0.6744897501960817
