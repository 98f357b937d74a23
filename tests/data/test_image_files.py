"""Pictures: idx bytes and files written here come back; moves, turns and mirrors are NumPy's; broken files are named."""

import gzip
import lzma
import math
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from regard.data.image_files import augment, mean_and_std, normalize, read_images, to_floats, transform
from regard.errors import RegardError

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}
PICTURES = np.random.default_rng(0).integers(0, 256, (3, 2, 4), np.uint8)  # three pictures, 4 wide and 2 high
LABELS = np.array([7, 0, 10], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_pair(root: Path, images: bytes, labels: bytes) -> str:
    (root / "images").write_bytes(images)
    (root / "labels").write_bytes(labels)
    return "images|labels"


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(RegardError) as caught:
        read()
    message = str(caught.value)
    assert "\n" not in message
    return message


# ---- idx files ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", PACK)
@pytest.mark.parametrize("channels", [1, 3])
def test_idx_files_are_read_as_written(tmp_path: Path, suffix: str, channels: int) -> None:
    for name, array in (("x", PICTURES), ("y", LABELS)):
        (tmp_path / (name + suffix)).write_bytes(PACK[suffix](idx(array)))
    pictures, labels = read_images(f"x{suffix}|y{suffix}", tmp_path, channels=channels)
    assert pictures.dtype == np.uint8
    assert pictures.shape == (3, 2, 4, channels)
    assert all((pictures[..., c] == PICTURES).all() for c in range(channels))
    assert labels == ["7", "0", "10"]


def test_idx_pictures_are_scaled_on_demand(tmp_path: Path) -> None:
    flat = np.broadcast_to(np.array([10, 200], np.uint8)[:, None, None], (2, 4, 6))
    spec = write_pair(tmp_path, idx(np.ascontiguousarray(flat)), idx(LABELS[:2]))
    pictures, _ = read_images(spec, tmp_path, size=3)
    assert pictures.shape == (2, 3, 3, 1)
    assert (pictures == np.array([10, 200])[:, None, None, None]).all()


@pytest.mark.parametrize(
    ("images", "labels", "says"),
    [
        (idx(PICTURES), idx(PICTURES), "labels begins with 00 00 08 03, not 00 00 08 01"),
        (idx(LABELS), idx(LABELS), "images begins with 00 00 08 01, not 00 00 08 03"),
        (b"\x00\x00\x0d\x03" + idx(PICTURES)[4:], idx(LABELS), "images begins with 00 00 0d 03"),
        (b"PK", idx(LABELS), "images begins with 50 4b"),
        (idx(PICTURES)[:-1], idx(LABELS), "images has 39 bytes, but promises 3 x 2 x 4"),
        (idx(PICTURES) + b"\0", idx(LABELS), "images has 41 bytes, but promises 3 x 2 x 4"),
        (idx(PICTURES)[:9], idx(LABELS), "images has 9 bytes, but promises a longer header"),
        (idx(PICTURES), idx(LABELS)[:-2], "labels has 9 bytes, but promises 3"),
        (idx(PICTURES), idx(LABELS[:2]), "labels has 2 labels"),
        (idx(PICTURES[:0]), idx(LABELS[:0]), "images holds nothing"),
    ],
)
def test_broken_idx_files_are_named(tmp_path: Path, images: bytes, labels: bytes, says: str) -> None:
    spec = write_pair(tmp_path, images, labels)
    assert f"{tmp_path}/{says}" in refused(lambda: read_images(spec, tmp_path))


def test_a_damaged_compressed_idx_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.xz").write_bytes(lzma.compress(idx(PICTURES))[:-8])
    assert f"{tmp_path}/x.xz is damaged" in refused(lambda: read_images("x.xz|y", tmp_path))
    assert f"no file {tmp_path}/none" in refused(lambda: read_images("none|y", tmp_path))
    assert "cannot tell" in refused(lambda: read_images("a|b|c", tmp_path))


def test_mnist_is_what_it_is_known_for(data_folder: Path) -> None:
    def read(split: str) -> tuple[np.ndarray, list[str]]:
        return read_images(f"{split}-images-idx3-ubyte.xz|{split}-labels-idx1-ubyte.xz", data_folder / "mnist")

    pictures, labels = read("train")
    assert pictures.shape == (60000, 28, 28, 1)
    assert labels[:5] == ["5", "0", "4", "1", "9"]
    assert set(labels) == set("0123456789")
    (mean,), (std,) = mean_and_std(pictures)
    assert (round(mean, 4), round(std, 4)) == (0.1307, 0.3081)  # the numbers that everybody writes down
    pictures, labels = read("t10k")
    assert (len(pictures), len(labels), labels[0]) == (10000, 10000, "7")


# ---- folders -----------------------------------------------------------------------------------------------------


def test_a_folder_of_classes_is_read_in_order(tmp_path: Path) -> None:
    save(tmp_path / "set" / "dog" / "2.png", PICTURES[1])
    save(tmp_path / "set" / "dog" / "1.png", PICTURES[0])
    save(tmp_path / "set" / "cat" / "more" / "9.bmp", PICTURES[2])
    (tmp_path / "set" / "dog" / ".DS_Store").write_bytes(b"not a picture")
    save(tmp_path / "set" / ".thumbnails" / "1.png", PICTURES[0])
    pictures, labels = read_images("set", tmp_path)
    assert labels == ["cat", "dog", "dog"]
    assert (pictures[..., 0] == PICTURES[[2, 0, 1]]).all()


def test_colours_are_kept_or_made_grey(tmp_path: Path) -> None:
    """Grey is 0.299 red + 0.587 green + 0.114 blue, rounded."""
    colours = np.array([[[255, 0, 0], [0, 255, 0]], [[0, 0, 255], [90, 90, 90]]], np.uint8)
    save(tmp_path / "a" / "x.png", colours)
    assert (read_images(".", tmp_path, channels=3)[0] == colours).all()
    assert read_images(".", tmp_path, channels=1)[0].ravel().tolist() == [76, 150, 29, 90]
    save(tmp_path / "a" / "x.png", PICTURES[0])
    assert (read_images(".", tmp_path, channels=3)[0] == PICTURES[:1, ..., None]).all()


def test_photographs_are_turned_the_right_way_up(tmp_path: Path) -> None:
    """Orientation 3 of a camera: upside down."""
    exif = Image.Exif()
    exif[0x0112] = 3
    (tmp_path / "a").mkdir()
    Image.fromarray(PICTURES[0]).save(tmp_path / "a" / "x.png", exif=exif)
    assert (read_images(".", tmp_path)[0][0, ..., 0] == PICTURES[0][::-1, ::-1]).all()


def test_pictures_of_different_sizes_need_a_size(tmp_path: Path) -> None:
    save(tmp_path / "a" / "x.png", np.full((8, 6), 50, np.uint8))
    save(tmp_path / "b" / "y.png", np.full((9, 30), 200, np.uint8))
    message = refused(lambda: read_images(".", tmp_path))
    assert message == f"{tmp_path}/b/y.png is 30 x 9, images before are 6 x 8: set data.image_size"
    pictures, _ = read_images(".", tmp_path, size=5)
    assert (pictures == np.broadcast_to(np.array([50, 200])[:, None, None, None], (2, 5, 5, 1))).all()


@pytest.mark.parametrize("content", [b"no picture", b"", b"\x89PNG\r\n\x1a\n broken"])
def test_an_unreadable_picture_is_named(tmp_path: Path, content: bytes) -> None:
    save(tmp_path / "a" / "x.png", PICTURES[0])
    (tmp_path / "a" / "y.png").write_bytes(content)
    assert f"{tmp_path}/a/y.png cannot be read as an image" in refused(lambda: read_images(".", tmp_path))


def test_a_picture_cut_short_or_with_too_many_bits_is_named(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64), np.uint8)
    path = save(tmp_path / "a" / "x.png", noise)
    path.write_bytes(path.read_bytes()[:2000])
    assert f"{path} cannot be read as an image" in refused(lambda: read_images(".", tmp_path))
    save(path, noise.astype(np.uint16) * 256)
    assert "more than 8 bits a channel" in refused(lambda: read_images(".", tmp_path))


def test_missing_and_empty_folders_and_odd_channels_are_refused(tmp_path: Path) -> None:
    assert f"no image folder {tmp_path}/none" in refused(lambda: read_images("none", tmp_path))
    save(tmp_path / "set" / "x.png", PICTURES[0])  # in no class
    assert f"no images in {tmp_path}/set" in refused(lambda: read_images("set", tmp_path))
    assert "not 2" in refused(lambda: read_images("set", tmp_path, channels=2))


# ---- for a model -------------------------------------------------------------------------------------------------


def test_bytes_become_floats_with_channels_first() -> None:
    images = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)  # one picture, 1 high, 2 wide, 2 channels
    assert to_floats(images).tolist() == [[[[0.0, pytest.approx(0.4)]], [[pytest.approx(0.2), 1.0]]]]


def test_normalising_by_hand_and_back_to_mean_0_and_std_1() -> None:
    images = torch.tensor([[[[0.5, 1.0]], [[0.0, 2.0]]]])
    assert normalize(images, (0.5, 1.0), (0.25, 2.0)).tolist() == [[[[0.0, 2.0]], [[-0.5, 0.5]]]]
    pictures = np.random.default_rng(1).integers(0, 256, (5, 4, 3, 2), np.uint8)
    mean, std = mean_and_std(pictures)
    doubles = pictures.astype(np.float64) / 255
    np.testing.assert_allclose(mean, doubles.mean((0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(std, doubles.std((0, 1, 2)), rtol=1e-12)
    assert mean_and_std(np.zeros((1, 2, 2, 1), np.uint8)) == ((0.0,), (1.0,))


def pictures(n: int, height: int, width: int) -> Tensor:
    return torch.rand(n, 2, height, width, generator=torch.Generator().manual_seed(0))


def moved(image: np.ndarray, right: int, down: int) -> np.ndarray:
    """(C, H, W) moved by whole pixels, zeros coming in."""
    _, h, w = image.shape
    result = np.zeros_like(image)
    for y in range(h):
        for x in range(w):
            if 0 <= y - down < h and 0 <= x - right < w:
                result[:, y, x] = image[:, y - down, x - right]
    return result


def apply(
    images: Tensor, move: tuple[int, int] = (0, 0), angle: float = 0.0, scale: float = 1.0, mirror: bool = False
) -> Tensor:
    n = len(images)
    moves = torch.tensor([move] * n, dtype=torch.float32)
    return transform(images, moves, torch.full((n,), angle), torch.full((n,), scale), torch.full((n,), mirror))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(-4, 4), st.integers(-4, 4), st.booleans())
def test_whole_moves_are_copies_with_zeros_coming_in(h: int, w: int, right: int, down: int, mirror: bool) -> None:
    images = pictures(2, h, w)
    ours = apply(images, (right, down), mirror=mirror)
    before = images.flip(3) if mirror else images
    theirs = np.stack([moved(image, right, down) for image in before.numpy()])
    np.testing.assert_allclose(ours.numpy(), theirs, atol=1e-5)


@pytest.mark.parametrize("size", [6, 7])
@pytest.mark.parametrize("quarters", [-1, 0, 1, 2, 3])
@pytest.mark.parametrize("mirror", [False, True])
def test_quarter_turns_are_exact_and_after_mirroring(size: int, quarters: int, mirror: bool) -> None:
    images = pictures(2, size, size)
    before = images.flip(3) if mirror else images
    ours = apply(images, angle=90.0 * quarters, mirror=mirror)
    torch.testing.assert_close(ours, torch.rot90(before, quarters, (2, 3)), atol=1e-5, rtol=0)


def test_a_turned_wide_picture_is_not_stretched() -> None:
    """A quarter turn of a 3 x 9 picture: its middle 3 x 3 square turns, the rest leaves."""
    images = pictures(1, 3, 9)
    ours = apply(images, angle=90.0)
    torch.testing.assert_close(ours[..., 3:6], torch.rot90(images[..., 3:6], 1, (2, 3)), atol=1e-5, rtol=0)
    assert ours[..., :3].abs().max() < 1e-5
    assert ours[..., 6:].abs().max() < 1e-5


def test_scaling_grows_about_the_centre_and_moves_come_last() -> None:
    """Three times as large, the middle 3 x 3 pixels fill the picture, and at their centres nothing is interpolated."""
    images = pictures(1, 9, 9)
    ours = apply(images, scale=3.0)
    for y in range(3):
        for x in range(3):  # the centres of the middle nine pixels
            torch.testing.assert_close(ours[..., 1 + 3 * y, 1 + 3 * x], images[..., 3 + y, 3 + x], atol=1e-5, rtol=0)
    both = apply(images, move=(2, -1), angle=90.0, scale=3.0)
    after = moved(apply(images, angle=90.0, scale=3.0)[0].numpy(), 2, -1)
    np.testing.assert_allclose(both[0].numpy()[:, :8, 2:], after[:, :8, 2:], atol=1e-5)


def test_no_augmentation_is_the_same_picture() -> None:
    images = pictures(3, 5, 4)
    assert augment(images, torch.Generator()) is images
    torch.testing.assert_close(apply(images), images, atol=1e-5, rtol=0)


def test_the_generator_decides() -> None:
    images = pictures(4, 8, 8)

    def run(seed: int) -> Tensor:
        return augment(images, torch.Generator().manual_seed(seed), shift=2, rotate=15.0, scale=0.1, flip=True)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


def test_moves_are_whole_and_all_equally_likely() -> None:
    """A lone bright pixel in the middle of 5 x 5, moved by up to 1: nine places, each within five standard deviations."""
    n = 1800
    images = torch.zeros(n, 1, 5, 5)
    images[:, :, 2, 2] = 1.0
    where = augment(images, torch.Generator().manual_seed(0), shift=1).sum(0)[0]
    assert where.sum() == pytest.approx(n, rel=1e-4)
    assert (where[1:4, 1:4] - n / 9).abs().max() < 5 * math.sqrt(n * 1 / 9 * 8 / 9)
    assert where[1:4, 1:4].sum() == pytest.approx(n, rel=1e-4)


def test_half_of_the_pictures_are_mirrored() -> None:
    n = 1000
    images = torch.zeros(n, 1, 2, 2)
    images[..., 0] = 1.0
    mirrored = (augment(images, torch.Generator().manual_seed(0), flip=True)[:, 0, 0, 1] > 0.5).sum().item()
    assert abs(mirrored - n / 2) < 5 * math.sqrt(n / 4)


def test_turns_and_scales_stay_within_their_limits() -> None:
    """The angle and size of a bar tell how it was turned and scaled: its second moments are those of a transformed bar."""
    n, size = 300, 65
    images = torch.zeros(n, 1, size, size)
    images[:, :, 31:34, 12:53] = 1.0  # 3 high, 41 wide, in the middle
    at = torch.arange(size) - 32.0
    x, y = torch.meshgrid(at, at, indexing="xy")

    def moments(result: Tensor) -> tuple[Tensor, Tensor]:
        mass = result.sum((1, 2, 3))
        xx, xy, yy = ((result[:, 0] * m).sum((1, 2)) / mass for m in (x * x, x * y, y * y))
        return torch.rad2deg(0.5 * torch.atan2(-2 * xy, xx - yy)), ((xx + yy) / (41**2 - 1) * 12).sqrt()

    angles, _ = moments(augment(images, torch.Generator().manual_seed(1), rotate=20.0))
    assert -20.1 < angles.min() < -18
    assert 18 < angles.max() < 20.1
    _, scales = moments(augment(images, torch.Generator().manual_seed(1), scale=0.2))
    assert 0.79 < scales.min() < 0.83
    assert 1.17 < scales.max() < 1.22
