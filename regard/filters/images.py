"""One way in and out for every filter: pictures of any kind become (B, C, H, W), and come back as what they were.

- NumPy: (H, W) is grey, (B, H, W) a batch of grey pictures; colours need `channel_axis`, -1 for (H, W, C), (B, H, W, C).
- torch: (H, W), (C, H, W) or (B, C, H, W), on any device; `channel_axis` says otherwise.
- Pillow: L, LA, RGB, RGBA, I;16 and F. Alpha is not filtered: it passes through.

uint8, uint16 and floats come back in their own type, whole numbers rounded and clipped to what they can hold. Inside
everything is float32 (float64 stays), on the picture's own device. Values are never rescaled, so parameters that are
compared with values (sigma, h, kappa, a weight) are in the picture's own units: out of 255 for uint8, out of 65535 for
uint16, as given for floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from regard.errors import RegardError

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

Function = Callable[[Tensor], Tensor]  # (B, C, H, W) -> (B, C, H', W'), float32 or float64
PEAKS = {torch.uint8: 255, torch.uint16: 65535}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
ALPHA = {"LA": "L", "RGBA": "RGB"}  # with and without
BORDERS = ("reflect", "symmetric", "edge", "constant", "wrap")  # numpy.pad's names and meanings


def apply(image: Any, function: Function, channel_axis: int | None = None) -> Any:
    """`function` of a picture, as the same kind of picture."""
    if isinstance(image, Tensor):
        axis = -3 if channel_axis is None and image.dim() > 2 else channel_axis
        return on_tensor(image, function, axis)
    if isinstance(image, np.ndarray):
        return on_array(image, function, channel_axis)
    if hasattr(image, "getbands"):
        return on_picture(image, function)
    raise RegardError(f"a picture is a NumPy array, a torch tensor or a Pillow image, not {type(image).__name__}")


def on_tensor(image: Tensor, function: Function, axis: int | None) -> Tensor:
    planes = batched(image, axis)  # (B, C, H, W)
    inside = torch.float64 if image.dtype == torch.float64 else torch.float32
    made = as_type(function(planes.to(inside)), image.dtype)
    return made.reshape(made.shape[-2:]) if axis is None and image.dim() == 2 else unbatched(made, image, axis)


def batched(image: Tensor, axis: int | None) -> Tensor:
    """(B, C, H, W), a view where it can be."""
    if image.dtype not in PEAKS and image.dtype not in FLOATS:
        raise RegardError(f"a picture of {image.dtype}: give uint8, uint16 or floats")
    flat = image.dim() - (axis is not None)  # the axes that are not channels
    if flat not in (2, 3) or not image.numel():
        raise RegardError(
            f"a picture of shape {tuple(image.shape)} with {'no channel axis' if axis is None else f'channel axis {axis}'}: "
            f"give (H, W), (H, W, C) with channel_axis=-1, or torch's (C, H, W) and (B, C, H, W)"
        )
    planes = image.unsqueeze(-3) if axis is None else image.movedim(axis, -3)
    return planes if planes.dim() == 4 else planes[None]


def unbatched(made: Tensor, image: Tensor, axis: int | None) -> Tensor:
    """The way back, for what has an axis of channels or of pictures."""
    if axis is None:
        return made[:, 0]
    planes = made if image.dim() == 4 else made[0]
    return planes.movedim(-3, axis).contiguous()


def as_type(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Whole numbers are rounded and clipped, not cut off."""
    peak = PEAKS.get(dtype)
    return x.to(dtype) if peak is None else x.round().clamp(0, peak).to(dtype)


def on_array(image: np.ndarray, function: Function, axis: int | None) -> np.ndarray:
    if axis is None and image.ndim == 3 and image.shape[-1] in (3, 4):
        raise RegardError(
            f"an array of shape {image.shape} looks like colours: give channel_axis=-1 "
            f"(without one the first axis counts grey pictures)"
        )
    try:
        given = torch.from_numpy(np.ascontiguousarray(image))
    except TypeError as error:
        raise RegardError(f"a picture of {image.dtype}: give uint8, uint16 or floats") from error
    return on_tensor(given, function, axis).numpy()


def on_picture(image: Picture, function: Function) -> Picture:
    from PIL import Image

    if image.mode not in ("L", "RGB", "I;16", "F", *ALPHA):
        raise RegardError(f"a picture of mode {image.mode}: convert it first, with .convert('RGB') or .convert('L')")
    bands, alpha = image, None
    if image.mode in ALPHA:
        bands, alpha = image.convert(ALPHA[image.mode]), image.getchannel("A")
    made = Image.fromarray(on_array(np.array(bands), function, None if len(bands.getbands()) == 1 else -1))
    if alpha is not None:
        if made.size != image.size:
            raise RegardError("a picture with alpha cannot change its size: convert it first, with .convert('RGB')")
        made.putalpha(alpha)
    return made


# ---- borders ----------------------------------------------------------------------------------------------------------


def pad(x: Tensor, rows: int, columns: int, border: str = "reflect") -> Tensor:
    """x (..., H, W) with more of it around: (..., H + 2 rows, W + 2 columns). `border` is a mode of numpy.pad.

    It may be wider than the picture, which is then reflected again and again. By index where there are gradients or a GPU;
    NumPy is as fast, and does not wait for torch's threads where the cores are busy.
    """
    if border not in BORDERS:
        raise RegardError(f"border {border!r}: give one of {', '.join(BORDERS)}")
    if x.device.type == "cpu" and not x.requires_grad:
        around = [(0, 0)] * (x.dim() - 2) + [(rows, rows), (columns, columns)]
        return torch.from_numpy(np.pad(x.numpy(), around, mode=border))  # type: ignore[call-overload]
    if border == "constant":
        return torch.nn.functional.pad(x, (columns, columns, rows, rows))
    down, right = (outside(n, more, border).to(x.device) for n, more in zip(x.shape[-2:], (rows, columns), strict=True))
    return x.index_select(-2, down).index_select(-1, right)


def outside(n: int, more: int, border: str) -> Tensor:
    """Which of n rows stands where, from `more` before the first to `more` after the last."""
    at = torch.arange(-more, n + more)
    if border == "edge" or n == 1:
        return at.clamp(0, n - 1)
    if border == "wrap":
        return at % n
    twice = int(border == "symmetric")  # whether the first and last row are their own mirror images
    period = 2 * n - 2 + 2 * twice
    at = at % period
    return torch.minimum(at, period - twice - at)


# ---- how good ---------------------------------------------------------------------------------------------------------


def peak_of(image: Any) -> float:
    """The largest value of the picture's type: 255, 65535, or 1 for floats."""
    kind = str(image.dtype) if hasattr(image, "dtype") else {"I;16": "uint16", "F": "float32"}.get(image.mode, "uint8")
    return {"uint8": 255.0, "uint16": 65535.0}.get(kind.removeprefix("torch."), 1.0)


def psnr(clean: Any, other: Any, peak: float | None = None) -> float:
    """10 log10(peak^2 / mean squared error), in dB; `peak` is that of the clean picture's type unless given."""
    a, b = (np.asarray(x.cpu() if isinstance(x, Tensor) else x, dtype=np.float64) for x in (clean, other))
    error = np.mean((a - b) ** 2)
    return float("inf") if error == 0 else float(10 * np.log10((peak or peak_of(clean)) ** 2 / error))
