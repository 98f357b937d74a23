"""The Gaussian filter against SciPy's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage

from regard.errors import RegardError
from regard.filters.gaussian import gaussian, gaussian_kernel

SCIPYS = {"symmetric": "reflect", "edge": "nearest", "reflect": "mirror", "wrap": "wrap", "constant": "constant"}


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("border", SCIPYS)
@given(height=st.integers(2, 20), width=st.integers(2, 20), sigma=st.floats(0, 6), truncate=st.floats(0.5, 6))
def test_it_is_scipys_on_any_shape_even_where_the_kernel_is_longer_than_the_picture(
    border: str, height: int, width: int, sigma: float, truncate: float
) -> None:
    image = noise(height, width)
    expected = ndimage.gaussian_filter(image, sigma, mode=SCIPYS[border], truncate=truncate)
    np.testing.assert_allclose(gaussian(image, sigma, truncate, border), expected, atol=1e-13)


def test_a_picture_of_one_row_is_scipys_too() -> None:
    image = noise(1, 9)
    np.testing.assert_allclose(gaussian(image, 2.0), ndimage.gaussian_filter(image, 2.0), atol=1e-13)


def test_colours_and_pictures_of_a_batch_do_not_mix() -> None:
    colours = noise(7, 9, 3)
    expected = ndimage.gaussian_filter(colours, (1.5, 1.5, 0))
    np.testing.assert_allclose(gaussian(colours, 1.5, channel_axis=-1), expected, atol=1e-13)
    batch = torch.from_numpy(noise(2, 3, 7, 9))
    expected = ndimage.gaussian_filter(batch.numpy(), (0, 0, 1.5, 1.5))
    np.testing.assert_allclose(gaussian(batch, 1.5).numpy(), expected, atol=1e-13)


def test_bytes_are_rounded_from_the_exact_result() -> None:
    image = np.random.default_rng(1).integers(0, 256, (32, 32)).astype(np.uint8)
    found, exact = gaussian(image, 1.0), ndimage.gaussian_filter(image.astype(float), 1.0)
    assert found.dtype == np.uint8
    assert np.abs(found - exact).max() < 0.5001


def test_the_weights_of_sigma_one_are_those_of_the_formula() -> None:
    half = np.exp(-0.5 * np.arange(5) ** 2)
    assert gaussian_kernel(1.0, 4.0) == pytest.approx(half / (half[0] + 2 * half[1:].sum()))


def test_gradients_are_those_of_differences() -> None:
    x = torch.from_numpy(noise(1, 1, 4, 5)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gaussian(x, 0.8), x)


@pytest.mark.parametrize(("sigma", "truncate"), [(-1.0, 4.0), (float("inf"), 4.0), (float("nan"), 4.0), (1.0, 0.0)])
def test_what_is_out_of_range_is_refused(sigma: float, truncate: float) -> None:
    with pytest.raises(RegardError, match="give a sigma of 0 or more"):
        gaussian(noise(4, 4), sigma, truncate)
