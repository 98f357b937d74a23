"""Picture files in and out, with all the bits they have."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import RegardError
from regard.files import disk_errors, temporary_path

if TYPE_CHECKING:
    from PIL.Image import Image as Picture

# What a filter has no use for becomes the nearest that it has; 16 bits of grey stay 16.
MODES = {"1": "L", "P": "RGB", "PA": "RGBA", "CMYK": "RGB", "YCbCr": "RGB", "LAB": "RGB", "HSV": "RGB", "RGBX": "RGB"}
ENDINGS = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".webp", ".pgm", ".ppm")


def open_picture(path: Path) -> Picture:
    """Upright; L, LA, RGB, RGBA, I;16 or F."""
    from PIL import Image, ImageOps

    if not path.is_file():
        raise RegardError(f"there is no picture {path}; check its name")
    if deep_colour(path):
        raise RegardError(
            f"{path} has 16 bits for each colour, of which 8 would be lost: convert it to grey or to 8 bits"
        )
    try:
        with Image.open(path) as image:
            image.load()
            upright = ImageOps.exif_transpose(image)
    except Exception as error:  # a decoder may raise anything
        raise RegardError(f"{path} cannot be read as a picture ({error}); mend or convert it") from error
    if upright.mode == "P" and "transparency" in upright.info:
        return upright.convert("RGBA")
    if upright.mode in ("I", "I;16B", "I;16L", "I;16N"):
        return sixteen_bits(upright, path)
    return upright.convert(MODES[upright.mode]) if upright.mode in MODES else upright


def deep_colour(path: Path) -> bool:
    """A PNG of 16 bits that is not grey alone: Pillow would read the upper half of each number, and not say so."""
    with path.open("rb") as file:
        head = file.read(26)
    return head.startswith(b"\x89PNG") and len(head) == 26 and head[24] == 16 and head[25] != 0


def sixteen_bits(image: Picture, path: Path) -> Picture:
    """Whole numbers as Pillow has them in many ways, in one."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    if values.min() < 0 or values.max() > 65535:
        raise RegardError(f"{path} has values from {values.min()} to {values.max()}, and 16 bits are 0 to 65535")
    return Image.fromarray(values.astype(np.uint16))


def check_ending(path: Path, picture: Picture) -> None:
    """Before any work: whether this kind of file can hold this picture."""
    if path.suffix.lower() not in ENDINGS:
        raise RegardError(f"{path}: a picture's name ends in {', '.join(ENDINGS)}")
    if picture.mode == "I;16" and path.suffix.lower() not in (".png", ".tif", ".tiff", ".pgm"):
        raise RegardError(f"{path} cannot hold 16 bits: write a .png")
    if picture.mode == "F" and path.suffix.lower() not in (".tif", ".tiff"):
        raise RegardError(f"{path} cannot hold floating-point numbers: write a .tif")
    if picture.mode in ("LA", "RGBA") and path.suffix.lower() not in (".png", ".tif", ".tiff", ".webp"):
        raise RegardError(f"{path} cannot hold what is transparent: write a .png")


def save_picture(picture: Picture, path: Path) -> None:
    """Whole or not at all; the kind of file is that of the name."""
    from PIL import Image

    kind = Image.registered_extensions()[path.suffix.lower()]
    draft = temporary_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            picture.save(draft, kind, **({"quality": 95} if kind in ("JPEG", "WEBP") else {}))
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)
