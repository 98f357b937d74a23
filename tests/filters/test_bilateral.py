"""The bilateral filter against its formula in float64 and against scikit-image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.filters.bilateral import bilateral, bilateral_numba, bilateral_reference
from regard.filters.image_arrays import BORDERS, pad


def noisy(*shape: int, seed: int = 0) -> np.ndarray:
    """Return an edge with noise, from 0 to 1."""
    edge = (np.indices(shape[:2]).sum(0) > shape[0]).astype(np.float64)
    rng = np.random.default_rng(seed)
    return (edge.reshape(*shape[:2], *[1] * (len(shape) - 2)) * 0.5 + 0.2) + 0.1 * rng.normal(size=shape)


def formula(image: np.ndarray, sigma_color: float, sigma_spatial: float, r: int, border: str) -> np.ndarray:
    """Return the filtered image (H, W, C), pixel by pixel."""
    height, width, _ = image.shape
    wide = np.pad(image, ((r, r), (r, r), (0, 0)), mode=border)  # type: ignore[call-overload]
    out = np.empty_like(image)
    for y in range(height):
        for x in range(width):
            total, summed = 0.0, 0.0
            for dy in range(-r, r + 1):
                for dx in range(-r, r + 1):
                    there = wide[y + r + dy, x + r + dx]
                    colour = ((there - image[y, x]) ** 2).sum() / sigma_color**2
                    weight = math.exp(-(colour + (dy * dy + dx * dx) / sigma_spatial**2) / 2)
                    total, summed = total + weight, summed + weight * there
            out[y, x] = summed / total
    return out


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("channels", [1, 3])
def test_it_is_its_formula(border: str, channels: int) -> None:
    image = noisy(9, 8, channels)
    expected = formula(image, 0.2, 1.5, 3, border)
    options: dict[str, Any] = {"window": 7, "border": border, "channel_axis": -1}
    np.testing.assert_allclose(bilateral(image, 0.2, 1.5, **options), expected, atol=1e-12)
    np.testing.assert_allclose(bilateral(image.astype(np.float32), 0.2, 1.5, **options), expected, atol=2e-6)


@given(st.integers(1, 20), st.integers(1, 20), st.sampled_from([1, 2, 3]), st.sampled_from([1, 2]), st.integers(0, 3))
def test_the_compiled_one_is_the_definition(height: int, width: int, channels: int, pictures: int, r: int) -> None:
    x = 255 * torch.rand(pictures, channels, height, width, generator=torch.Generator().manual_seed(height))
    wide = pad(x, r, r)
    torch.testing.assert_close(
        bilateral_numba(x, wide, 30.0, 1.5), bilateral_reference(x, wide, 30.0, 1.5), rtol=1e-5, atol=1e-3
    )


def test_threads_share_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.filters import filters_numba

    image = noisy(37, 20).astype(np.float32)
    alone = bilateral(image, 0.2)
    monkeypatch.setattr(filters_numba, "BAND_PIXELS", 60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    np.testing.assert_array_equal(bilateral(image, 0.2), alone)


def test_scikit_image_gives_the_same_once_its_table_fits_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """scikit-image's spatial table is one row and column larger than its window; its colours also differ (below)."""
    restoration = pytest.importorskip("skimage.restoration._denoise")

    def table(side: int, sigma: float, *, dtype: Any = float) -> np.ndarray:
        steps = np.arange(-(side // 2), side // 2 + 1.0) ** 2
        return np.exp(-0.5 * (steps[:, None] + steps) / sigma**2).astype(dtype).ravel()

    image = noisy(40, 33)
    assert len(restoration._compute_spatial_lut(7, 1.0)) == 8 * 8
    monkeypatch.setattr(restoration, "_compute_spatial_lut", table)
    for mode in ("constant", "reflect", "symmetric", "edge", "wrap"):
        theirs = restoration.denoise_bilateral(image - image.min(), sigma_color=0.2, sigma_spatial=1.0, mode=mode)
        ours = bilateral(image - image.min(), 0.2, 1.0, border=mode)
        np.testing.assert_allclose(ours, theirs, atol=2e-4)  # its table of colour weights has 10,000 entries


def test_scikit_images_colour_table_is_read_at_a_share_of_the_distance(monkeypatch: pytest.MonkeyPatch) -> None:
    """With C channels scikit-image looks a distance up at 1/C of it: its sigma_color is C times ours."""
    restoration = pytest.importorskip("skimage.restoration._denoise")
    image = noisy(30, 33, 3)
    image -= image.min()
    flat = 1e6  # spatial weights that are all 1, so that their table does not matter
    theirs = restoration.denoise_bilateral(image, 7, 0.1, flat, mode="reflect", channel_axis=-1)
    np.testing.assert_allclose(bilateral(image, 0.3, flat, 7, channel_axis=-1), theirs, atol=1e-3)


def test_a_flat_picture_stays_and_an_edge_stays_sharp() -> None:
    flat = np.full((12, 10, 3), 77, np.uint8)
    np.testing.assert_array_equal(bilateral(flat, 10, 2, channel_axis=-1), flat)
    edge = np.repeat(np.array([0, 255], np.uint8), 8)[None].repeat(9, 0)
    np.testing.assert_array_equal(bilateral(edge, 10, 2), edge)


def test_a_batch_is_its_pictures_and_channels_may_change_places() -> None:
    batch = torch.from_numpy(np.stack([noisy(11, 9, 3, seed=i) for i in range(3)])).movedim(-1, 1).float()
    made = bilateral(batch, 0.2, 1.5)
    assert torch.equal(made, torch.stack([bilateral(one, 0.2, 1.5) for one in batch]))
    order = [2, 0, 1]
    torch.testing.assert_close(bilateral(batch[:, order], 0.2, 1.5), made[:, order])


@given(st.booleans(), st.booleans(), st.booleans())
def test_flips_and_turns_commute_with_it(down: bool, across: bool, turn: bool) -> None:
    def moved(x: np.ndarray) -> np.ndarray:
        x = x[::-1] if down else x
        x = x[:, ::-1] if across else x
        return np.ascontiguousarray(x.T if turn else x)

    image = noisy(10, 13)
    np.testing.assert_allclose(bilateral(moved(image), 0.2), moved(bilateral(image, 0.2)), atol=1e-12)


def test_parameters_are_in_the_units_of_the_picture() -> None:
    image = noisy(12, 12)
    np.testing.assert_allclose(bilateral(image * 255, 0.2 * 255), bilateral(image, 0.2) * 255, atol=1e-10)


def test_a_wide_colour_sigma_leaves_the_gaussian() -> None:
    image = noisy(12, 12)
    blur = np.exp(-(np.arange(-3.0, 4) ** 2) / 2)
    blur /= blur.sum()
    wide = np.pad(image, 3, mode="reflect")
    along = np.apply_along_axis(np.convolve, 0, np.apply_along_axis(np.convolve, 1, wide, blur, "valid"), blur, "valid")
    np.testing.assert_allclose(bilateral(image, 1e6, 1.0), along, atol=1e-9)


def test_it_has_gradients() -> None:
    x = torch.rand(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: bilateral(x, 0.5, 1.0, 3), x)


@pytest.mark.parametrize("options", [{"sigma_color": 0}, {"sigma_spatial": -1.0}, {"window": 4}, {"window": -3}])
def test_parameters_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RegardError):
        bilateral(np.ones((5, 5)), **({"sigma_color": 0.1} | options))
