"""Image files: idx files in the format of MNIST, or a folder with a sub-folder for each class; and augmentation.

Images in memory are uint8 (N, height, width, channels); images for a model are floats (B, channels, height, width).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.nn import functional as F

from regard.data.parallel_corpus import read_blocks
from regard.errors import RegardError

MODES = {1: "L", 3: "RGB"}
IDX_BYTES = 0x08  # the third byte of an idx file: its numbers are unsigned bytes


# ---- reading -----------------------------------------------------------------------------------------------------


def read_images(spec: str, root: Path, size: int = 0, channels: int = 1) -> tuple[np.ndarray, list[str]]:
    """Read images (N, H, W, channels) and their labels from "images|labels" (idx files, maybe compressed) or a folder.

    With a `size` each image is scaled to size x size; without, all must have one size.
    """
    if channels not in MODES:
        raise RegardError(f"images have 1 channel (grey) or 3 (colour), not {channels}; set model.vit.image_channels")
    if "|" in spec:
        return _read_idx_pair(spec, root, size, channels)
    return _read_folder(root / spec, size, channels)


def _read_idx_pair(spec: str, root: Path, size: int, channels: int) -> tuple[np.ndarray, list[str]]:
    names = spec.split("|")
    if len(names) != 2:
        raise RegardError(f"cannot tell what images {spec!r} are; give 'images|labels', two idx files, or a folder")
    images, labels = read_idx(root / names[0], 3), read_idx(root / names[1], 1)
    if len(images) != len(labels):
        counts = f"{root / names[0]} has {len(images):,} images but {root / names[1]} has {len(labels):,} labels"
        raise RegardError(f"{counts}; give two files that belong together")
    if size and images.shape[1:] != (size, size):
        images = np.stack([_fit(Image.fromarray(image), (size, size), 1)[..., 0] for image in images])
    return np.repeat(images[..., None], channels, axis=-1), [str(label) for label in labels.tolist()]


def read_idx(path: Path, dimensions: int) -> np.ndarray:
    """Read an idx file of unsigned bytes.

    Its bytes are 0, 0, the data type, the number of dimensions, each dimension (big-endian, 4 bytes), then the data.
    """
    data = b"".join(read_blocks(path))
    start = 4 + 4 * dimensions
    if data[:4] != bytes([0, 0, IDX_BYTES, dimensions]):
        magic = f"{path} begins with {data[:4].hex(' ')}, not 00 00 08 {dimensions:02x}"
        raise RegardError(f"{magic}: it is no idx file of {'images' if dimensions == 3 else 'labels'}")
    shape = tuple(np.frombuffer(data[4:start], ">u4").tolist()) if len(data) >= start else ()
    if len(shape) < dimensions or len(data) - start != math.prod(shape):
        promised = " x ".join(map(str, shape)) or "a longer header"
        raise RegardError(f"{path} has {len(data):,} bytes, but promises {promised}: copy or download it again")
    if not math.prod(shape):
        raise RegardError(f"{path} holds nothing; give a file with at least one entry")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _read_folder(folder: Path, size: int, channels: int) -> tuple[np.ndarray, list[str]]:
    images: list[np.ndarray] = []
    labels: list[str] = []
    for path, label in _image_files(folder):
        images.append(_fit(_open_image(path), (size, size), channels))
        labels.append(label)
        if images[-1].shape != images[0].shape:
            (h, w), (first_h, first_w) = images[-1].shape[:2], images[0].shape[:2]
            raise RegardError(f"{path} is {w} x {h}, images before are {first_w} x {first_h}: set data.image_size")
    if not images:
        raise RegardError(f"no images in {folder}; put those of each class into a sub-folder named after the class")
    return np.stack(images), labels


def _image_files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield every image file and its class, in the order of their names; hidden files are skipped."""
    if not folder.is_dir():
        raise RegardError(f"there is no image folder {folder}; check its name and the data folder")
    for label in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
        for path in sorted(label.rglob("*")):
            if path.is_file() and not path.name.startswith("."):
                yield path, label.name


def read_image(path: Path, height: int, width: int, channels: int) -> np.ndarray:
    """Read one image, scaled to (height, width, channels)."""
    if not path.is_file():
        raise RegardError(f"there is no image {path}; check its name")
    return _fit(_open_image(path), (width, height), channels)


def _open_image(path: Path) -> Image.Image:
    try:
        with Image.open(path) as image:
            if image.mode.startswith(("I", "F")):
                raise ValueError("more than 8 bits a channel")
            return ImageOps.exif_transpose(image)  # upright, as the camera was held
    except Exception as error:  # a decoder may raise anything
        raise RegardError(f"{path} cannot be read as an image ({error}); repair, convert or remove it") from error


def _fit(image: Image.Image, size: tuple[int, int], channels: int) -> np.ndarray:
    """Return an image as (H, W, channels), scaled to (width, height) `size` unless that is (0, 0)."""
    image = image.convert(MODES[channels])
    if size != (0, 0) and image.size != size:
        image = image.resize(size, Image.Resampling.BILINEAR)
    return np.asarray(image).reshape(image.height, image.width, channels)


# ---- tensors for a model -------------------------------------------------------------------------------------------------


def to_floats(images: Tensor) -> Tensor:
    """Convert bytes (B, H, W, channels) to floats from 0 to 1, (B, channels, H, W)."""
    return images.permute(0, 3, 1, 2).float() / 255


def mean_and_std(images: np.ndarray) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return mean and standard deviation of each channel of uint8 images (N, H, W, channels), on the scale from 0 to 1.

    A constant channel has a standard deviation of 1.
    """
    levels = np.arange(256) / 255
    means, stds = [], []
    for channel in range(images.shape[-1]):
        share = np.bincount(images[..., channel].ravel(), minlength=256) / images[..., channel].size
        means.append(float(share @ levels))
        stds.append(math.sqrt(share @ (levels - means[-1]) ** 2) or 1.0)
    return tuple(means), tuple(stds)


def normalize(images: Tensor, mean: Sequence[float], std: Sequence[float]) -> Tensor:
    """Normalize images (B, channels, H, W) by the mean and standard deviation of each channel."""
    shift, scale = (images.new_tensor(numbers)[:, None, None] for numbers in (mean, std))
    return (images - shift) / scale


def augment(
    images: Tensor,
    generator: torch.Generator,
    shift: int = 0,
    rotate: float = 0.0,
    scale: float = 0.0,
    flip: bool = False,
) -> Tensor:
    """Randomly shift, rotate, scale and mirror each image of (B, channels, H, W); zeros fill the margins.

    By up to `shift` whole pixels, `rotate` degrees and a share `scale` of its size. Do this before `normalize`, while 0 is
    black. The random numbers depend on the generator alone, not on the device of the images.
    """
    if not (shift or rotate or scale or flip):
        return images
    draws = torch.rand(len(images), 5, generator=generator, device=generator.device).to(images.device)
    moves = torch.floor(draws[:, :2] * (2 * shift + 1)) - shift  # (B, 2): to the right, down
    angles = (2 * draws[:, 2] - 1) * rotate
    scales = 1 + (2 * draws[:, 3] - 1) * scale
    mirrored = draws[:, 4] < (0.5 if flip else 0.0)
    return transform(images, moves, angles, scales, mirrored)


def transform(images: Tensor, moves: Tensor, angles: Tensor, scales: Tensor, mirrored: Tensor) -> Tensor:
    """Mirror, scale, rotate (degrees, counter-clockwise, about the centre) and shift (pixels) each image, in this order.

    `affine_grid` needs the inverse map, from output pixels to input pixels, in units of half the width and height.
    """
    height, width = images.shape[-2:]
    radians = torch.deg2rad(angles)
    cos, sin = torch.cos(radians) / scales, torch.sin(radians) / scales
    sign = 1 - 2 * mirrored.to(cos.dtype)
    turn = torch.stack([torch.stack([sign * cos, -sign * sin], 1), torch.stack([sin, cos], 1)], 1)  # (B, 2, 2)
    move = -turn @ moves.to(cos.dtype)[..., None]  # (B, 2, 1)
    halves = turn.new_tensor([width / 2, height / 2])
    theta = torch.cat([turn * halves, move], 2) / halves[:, None]
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid.to(images.dtype), align_corners=False)
