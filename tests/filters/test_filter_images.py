"""Conversion of images: the result is the same kind of image, and a filter gets (B, C, H, W)."""

from __future__ import annotations

from typing import Any

import hypothesis.extra.numpy as npst
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given
from PIL import Image
from torch import Tensor

from regard.errors import RegardError
from regard.filters.image_arrays import BORDERS, apply, pad, psnr

TYPES = ("uint8", "uint16", "float16", "float32", "float64")


def same(x: Tensor) -> Tensor:
    assert x.dim() == 4
    assert x.dtype in (torch.float32, torch.float64)
    return x.clone()


def pixels(*shape: int, dtype: str = "uint8") -> np.ndarray:
    return (np.random.default_rng(sum(shape)).random(shape) * 255).astype(dtype)


@given(st.data(), st.sampled_from(TYPES), st.integers(2, 4))
def test_arrays_come_back_with_their_type_shape_and_values(data: st.DataObject, dtype: str, dims: int) -> None:
    axes: dict[int, list[int | None]] = {2: [None], 3: [None, 0, 1, -1], 4: [0, 1, 2, -1]}
    axis = data.draw(st.sampled_from(axes[dims]))
    shape = data.draw(st.tuples(*[st.integers(1, 6)] * dims).filter(lambda s: axis is not None or s[-1] not in (3, 4)))
    finite: dict[str, Any] = {"allow_nan": False, "allow_infinity": False} if dtype.startswith("float") else {}
    given_array = data.draw(npst.arrays(dtype, shape, elements=npst.from_dtype(np.dtype(dtype), **finite)))
    made = apply(given_array, same, axis)
    assert made.dtype == given_array.dtype
    np.testing.assert_array_equal(made, given_array)


@pytest.mark.parametrize("dtype", [*TYPES, "bfloat16"])
@pytest.mark.parametrize("shape", [(4, 5), (3, 4, 5), (2, 3, 4, 5)])
def test_tensors_come_back_with_their_type_and_shape(dtype: str, shape: tuple[int, ...]) -> None:
    image = torch.from_numpy(pixels(*shape)).to(getattr(torch, dtype))
    made = apply(image, same)
    assert made.dtype == image.dtype
    assert torch.equal(made, image)


@pytest.mark.parametrize("mode", ["L", "LA", "RGB", "RGBA", "I;16", "F"])
def test_pillow_images_keep_their_mode_and_their_alpha(mode: str) -> None:
    colours = Image.fromarray(pixels(4, 5, 4), "RGBA")
    image = Image.fromarray(pixels(4, 5, dtype="uint16") * 200) if mode == "I;16" else colours.convert(mode)
    made = apply(image, lambda x: x + 1)
    assert made.mode == mode
    before, after = (np.array(x).astype(int).reshape(4, 5, -1) for x in (image, made))
    if mode.endswith("A"):
        np.testing.assert_array_equal(after[..., -1], before[..., -1])
        before, after = before[..., :-1], after[..., :-1]
    top = {"I;16": 65535, "F": 10**9}.get(mode, 255)
    np.testing.assert_array_equal(after, np.minimum(before + 1, top))


def test_channels_are_where_the_axis_says() -> None:
    seen: list[tuple[int, ...]] = []

    def look(x: Tensor) -> Tensor:
        seen.append(tuple(x.shape))
        return x * torch.arange(x.shape[1]).view(-1, 1, 1)

    image = np.ones((4, 5, 3), np.float32)
    assert (apply(image, look, -1) == [0, 1, 2]).all()
    assert (apply(image, look, 0) == np.arange(4)[:, None, None]).all()
    apply(np.ones((7, 4, 5), np.float32), look)
    apply(torch.ones(3, 4, 5), look)
    assert seen == [(1, 3, 4, 5), (1, 4, 5, 3), (7, 1, 4, 5), (1, 3, 4, 5)]


def test_whole_numbers_are_rounded_and_clipped() -> None:
    image = np.array([[0, 10, 20, 255]], np.uint8)
    np.testing.assert_array_equal(apply(image, lambda x: x * 1.26), [[0, 13, 25, 255]])
    np.testing.assert_array_equal(apply(image, lambda x: x - 15), [[0, 0, 5, 240]])
    wide = torch.tensor([[0, 65535]], dtype=torch.uint16)
    assert apply(wide, lambda x: x + 9.6).tolist() == [[10, 65535]]


def test_a_filter_may_change_the_size() -> None:
    made = apply(pixels(4, 5, 3), lambda x: torch.nn.functional.interpolate(x, scale_factor=2), -1)
    assert made.shape == (8, 10, 3)


@pytest.mark.parametrize(
    ("image", "axis", "said"),
    [
        (pixels(4, 5, 3), None, "channel_axis=-1"),
        (pixels(4), None, "shape"),
        (pixels(0, 3), None, "shape"),
        (np.ones((3, 4), bool), None, "bool"),
        (np.ones((3, 4), complex), None, "complex"),
        (np.full((3, 4), "a"), None, "uint8"),
        ([[1, 2]], None, "list"),
        (Image.new("P", (3, 4)), None, "mode P"),
    ],
)
def test_what_is_no_picture_is_refused(image: Any, axis: int | None, said: str) -> None:
    with pytest.raises(RegardError, match=said):
        apply(image, same, axis)


def test_alpha_cannot_grow() -> None:
    with pytest.raises(RegardError, match="alpha"):
        apply(Image.new("RGBA", (3, 4)), lambda x: x.repeat(1, 1, 2, 2))


@given(st.sampled_from(BORDERS), st.integers(1, 5), st.integers(1, 5), st.integers(0, 9), st.integers(0, 9))
def test_borders_are_those_of_numpy(border: str, height: int, width: int, rows: int, columns: int) -> None:
    image = pixels(height, width, dtype="float32")
    expected = np.pad(image, ((rows, rows), (columns, columns)), mode=border)  # type: ignore[call-overload]
    for gradients in (False, True):
        x = torch.from_numpy(image).requires_grad_(gradients)
        np.testing.assert_array_equal(pad(x, rows, columns, border).detach().numpy(), expected)


def test_an_unknown_border_is_refused() -> None:
    with pytest.raises(RegardError, match="reflect"):
        pad(torch.ones(2, 2), 1, 1, "mirror")


def test_psnr_is_about_the_range_of_the_type() -> None:
    clean = np.zeros((2, 2), np.uint8)
    assert psnr(clean, clean) == float("inf")
    assert psnr(clean, clean + 51.0) == pytest.approx(20 * np.log10(5))  # 255 / 51
    assert psnr(torch.zeros(2, 2), torch.full((2, 2), 0.1)) == pytest.approx(20)
    assert psnr(Image.fromarray(clean), Image.fromarray(clean + 51)) == pytest.approx(20 * np.log10(5))
    assert psnr(clean.astype("float32"), clean + 0.5, peak=2) == pytest.approx(20 * np.log10(4))
