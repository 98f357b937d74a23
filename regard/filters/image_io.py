"""Image files, read and written by Pillow without a loss of bits: 16-bit grey stays 16-bit."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import RegardError
from regard.files import disk_errors, temporary_path

if TYPE_CHECKING:
    from PIL.Image import Image as PILImage

# Modes that filters do not support are converted to these.
MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB", "RGBX": "RGB"}
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".pgm", ".ppm")


def open_picture(path: Path) -> PILImage:
    """Open an image, rotated as its EXIF data says, in a mode that filters support: L, LA, RGB, RGBA, I;16 or F."""
    from PIL import Image, ImageOps

    if not path.is_file():
        raise RegardError(f"there is no picture {path}; check its name")
    if is_16_bit_colour(path):
        raise RegardError(
            f"{path} has 16 bits for each colour, of which 8 would be lost: convert it to grey or to 8 bits"
        )
    try:
        with Image.open(path) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
    except Exception as error:  # a decoder may raise anything
        raise RegardError(f"{path} cannot be read as a picture ({error}); repair or convert it") from error
    if upright.mode == "P" and "transparency" in upright.info:
        return upright.convert("RGBA")
    if upright.mode in ("I", "I;16B", "I;16L", "I;16N"):
        return to_uint16(upright, path)
    return upright.convert(MODES[upright.mode]) if upright.mode in MODES else upright


def is_16_bit_colour(path: Path) -> bool:
    """Return whether a file is a 16-bit colour PNG, of which Pillow would silently read the upper 8 bits only."""
    with path.open("rb") as file:
        head = file.read(26)
    return head.startswith(b"\x89PNG") and len(head) == 26 and head[24] == 16 and head[25] != 0


def to_uint16(image: PILImage, path: Path) -> PILImage:
    """Return an image of one of Pillow's integer modes as uint16 (mode I;16)."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise RegardError(f"{path} has values from {values.min()} to {values.max()}, and 16 bits are 0 to 65535")
    return Image.fromarray(values.astype(np.uint16))


def check_ending(path: Path, image: PILImage) -> None:
    """Raise an error if a file of this suffix cannot hold this image; called before any work is done."""
    if path.suffix.lower() not in ENDINGS:
        raise RegardError(f"{path}: a picture's name ends in {', '.join(ENDINGS)}")
    if image.mode == "I;16" and path.suffix.lower() not in (".png", ".tif", ".tiff", ".pgm"):
        raise RegardError(f"{path} cannot hold 16 bits: write a .png")
    if image.mode == "F" and path.suffix.lower() not in (".tif", ".tiff"):
        raise RegardError(f"{path} cannot hold floating-point numbers: write a .tif")
    if image.mode in ("LA", "RGBA") and path.suffix.lower() not in (".png", ".tif", ".tiff", ".webp"):
        raise RegardError(f"{path} cannot hold what is transparent: write a .png")


def save_picture(image: PILImage, path: Path) -> None:
    """Save an image in the format of the suffix; the file appears under its name only when it is complete."""
    from PIL import Image

    kind = Image.registered_extensions()[path.suffix.lower()]
    draft = temporary_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            image.save(draft, kind, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
