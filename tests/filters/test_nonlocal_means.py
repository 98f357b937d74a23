"""Non-local means against its formula in float64, in all its forms, and against scikit-image."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.filters import nonlocal_means as module
from regard.filters.image_arrays import psnr
from regard.filters.nonlocal_means import (
    PatchWeighting,
    nonlocal_means,
    nonlocal_means_numba,
    patch_taps,
    patchwise,
    pixelwise,
)

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
FORMS = [(mode, weights) for mode in ("pixel", "patch") for weights in ("flat", "gaussian")]


def noisy(*shape: int, seed: int = 0) -> np.ndarray:
    """Return stripes with noise, from 0 to 1."""
    stripes = np.sin(np.indices(shape[:2]).sum(0) / 2.0) * 0.3 + 0.5
    rng = np.random.default_rng(seed)
    return stripes.reshape(*shape[:2], *[1] * (len(shape) - 2)) + 0.1 * rng.normal(size=shape)


def formula(image: np.ndarray, h: float, side: int, reach: int, sigma: float, mode: str, weights: str) -> np.ndarray:
    """Return the denoised image (H, W, C), patch by patch, as in the papers; the modes use different pixels of a patch."""
    (height, width, _), r = image.shape, side // 2
    edge = r + reach
    wide = np.pad(image, ((edge, edge), (edge, edge), (0, 0)), mode="reflect")
    steps = np.arange(-r, r + 1.0) ** 2 / (2 * ((side - 1) / 4) ** 2)
    share = np.exp(-steps[:, None] - steps) if weights == "gaussian" else np.ones((side, side))
    share /= share.sum()
    sums, counts = np.zeros_like(image), np.zeros((height, width, 1))
    for y in range(height):
        for x in range(width):
            own = wide[y + reach : y + reach + side, x + reach : x + reach + side]
            total, mean = 0.0, np.zeros_like(own)
            for dy in range(2 * reach + 1):
                for dx in range(2 * reach + 1):
                    other = wide[y + dy : y + dy + side, x + dx : x + dx + side]
                    apart = (((own - other) ** 2).mean(-1) * share).sum()
                    weight = np.exp(-max(apart - 2 * sigma**2, 0) / h**2)
                    total, mean = total + weight, mean + weight * other
            for oy in range(-r, r + 1) if mode == "patch" else [0]:
                for ox in range(-r, r + 1) if mode == "patch" else [0]:
                    if 0 <= y + oy < height and 0 <= x + ox < width:
                        sums[y + oy, x + ox] += mean[r + oy, r + ox] / total
                        counts[y + oy, x + ox] += 1
    return sums / counts


@pytest.mark.parametrize(("mode", "weights"), FORMS)
@pytest.mark.parametrize("channels", [1, 3])
def test_it_is_its_formula(mode: str, weights: str, channels: int) -> None:
    image = noisy(9, 7, channels)
    expected = formula(image, 0.15, 5, 3, 0.1, mode, weights)
    options: dict[str, Any] = {"sigma": 0.1, "mode": mode, "patch_weights": weights, "channel_axis": -1}
    np.testing.assert_allclose(nonlocal_means(image, 0.15, 5, 3, **options), expected, atol=1e-12)
    np.testing.assert_allclose(nonlocal_means(image.astype(np.float32), 0.15, 5, 3, **options), expected, atol=2e-6)


@given(
    st.integers(1, 22), st.integers(1, 22), st.sampled_from([1, 3]), *[st.integers(0, 3)] * 2, st.sampled_from(FORMS)
)
@settings(max_examples=60)
def test_the_compiled_one_is_the_definition(
    height: int, width: int, channels: int, r: int, reach: int, form: tuple[str, str]
) -> None:
    x = 255 * torch.rand(2, channels, height, width, generator=torch.Generator().manual_seed(width))
    like = PatchWeighting(60.0, 20.0, patch_taps(2 * r + 1, form[1]), reach)
    expected = (pixelwise if form[0] == "pixel" else patchwise)(x, like)
    torch.testing.assert_close(nonlocal_means_numba(x, like, form[0]), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("mode", ["pixel", "patch"])
def test_bands_of_rows_meet_without_a_seam(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.filters import filters_numba

    image = noisy(37, 20).astype(np.float32)
    whole = nonlocal_means(image, 0.1, 5, 4, mode=mode)
    monkeypatch.setattr(filters_numba, "BAND_PIXELS", 60)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    np.testing.assert_allclose(nonlocal_means(image, 0.1, 5, 4, mode=mode), whole, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("sigma", [0.0, 0.1])
def test_scikit_images_fast_mode_is_this_one_with_squares_of_a_pixel_less(channels: int, sigma: float) -> None:
    """For a patch of 7 scikit-image compares 6 x 6 pixels but divides by 49; weights below exp(-5) are 0, exp is rough."""
    restoration = pytest.importorskip("skimage.restoration")
    image = noisy(30, 27, channels)
    theirs = restoration.denoise_nl_means(image, 7, 4, 0.2, fast_mode=True, sigma=sigma, channel_axis=-1)
    x = torch.from_numpy(image).movedim(-1, 0)[None].float()
    ours = nonlocal_means_numba(x, PatchWeighting(0.2, sigma * 6 / 7, (0.0, *[1 / 7] * 6), 4), "pixel")[0].movedim(
        0, -1
    )
    theirs = theirs.reshape(image.shape)  # it drops an axis of one channel
    np.testing.assert_allclose(ours.numpy(), theirs, atol=8e-3)
    whole = nonlocal_means(image, 0.2, 7, 4, sigma, channel_axis=-1)
    assert np.abs(whole - theirs).max() > 2 * np.abs(ours.numpy() - theirs).max()


def test_scikit_images_slow_mode_is_the_gaussian_one_away_from_the_border() -> None:
    """scikit-image does not reflect the border for comparisons. Weights below exp(-5) are 0, and exp is rough."""
    restoration = pytest.importorskip("skimage.restoration")
    image = noisy(24, 22, 3)
    theirs = restoration.denoise_nl_means(image, 5, 4, 0.2, fast_mode=False, sigma=0.1, channel_axis=-1)
    ours = nonlocal_means(image, 0.2, 5, 4, 0.1, patch_weights="gaussian", channel_axis=-1)
    np.testing.assert_allclose(ours[4:-4, 4:-4], theirs[4:-4, 4:-4], atol=8e-3)


# ---- properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pixel", "patch"])
def test_a_flat_picture_stays(mode: str) -> None:
    flat = np.full((12, 10, 3), 777, np.uint16)
    np.testing.assert_array_equal(nonlocal_means(flat, 10, 3, 4, mode=mode, channel_axis=-1), flat)


@pytest.mark.parametrize("mode", ["pixel", "patch"])
def test_a_batch_is_its_pictures_and_channels_may_change_places(mode: str) -> None:
    batch = torch.from_numpy(np.stack([noisy(11, 9, 3, seed=i) for i in range(3)])).movedim(-1, 1).float()
    ways: list[dict[str, Any]] = [{"h": 0.1}, {"sigma": 0.1}]
    for options in ways:
        made = nonlocal_means(batch, patch=3, reach=3, mode=mode, **options)
        assert torch.equal(
            made, torch.stack([nonlocal_means(x, patch=3, reach=3, mode=mode, **options) for x in batch])
        )
        order = [2, 0, 1]
        swapped = nonlocal_means(batch[:, order], patch=3, reach=3, mode=mode, **options)
        torch.testing.assert_close(swapped, made[:, order])


@given(st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["pixel", "patch"]))
def test_flips_and_turns_commute_with_it(down: bool, across: bool, turn: bool, mode: str) -> None:
    def moved(x: np.ndarray) -> np.ndarray:
        x = x[::-1] if down else x
        x = x[:, ::-1] if across else x
        return np.ascontiguousarray(x.T if turn else x)

    image = noisy(10, 13)
    there = nonlocal_means(moved(image), 0.1, 3, 3, mode=mode)
    np.testing.assert_allclose(there, moved(nonlocal_means(image, 0.1, 3, 3, mode=mode)), atol=1e-12)


def test_parameters_are_in_the_units_of_the_picture() -> None:
    image = noisy(12, 12)
    ways: list[dict[str, Any]] = [{"h": 0.1, "sigma": 0.05}, {"sigma": 0.1}]
    for options in ways:
        larger: dict[str, Any] = {name: 255 * value for name, value in options.items()}
        np.testing.assert_allclose(
            nonlocal_means(image * 255, **larger), 255 * nonlocal_means(image, **options), atol=1e-9
        )


def test_a_small_h_changes_nothing_and_a_large_one_gives_the_mean_within_reach() -> None:
    image = noisy(12, 12)
    np.testing.assert_allclose(nonlocal_means(image, 1e-3, 3, 3), image, atol=1e-12)
    wide = np.lib.stride_tricks.sliding_window_view(np.pad(image, 3, mode="reflect"), (7, 7))
    np.testing.assert_allclose(nonlocal_means(image, 1e6, 3, 3), wide.mean((-2, -1)), atol=1e-9)


@pytest.mark.parametrize("sigma", [10, 25, 60])
def test_given_the_noise_alone_it_takes_most_of_it(sigma: int) -> None:
    clean = (np.indices((64, 64)).sum(0) // 16 % 2 * 150 + 50).astype(np.float32)
    given_noise = clean + sigma * np.random.default_rng(0).normal(size=clean.shape).astype(np.float32)
    assert psnr(clean, nonlocal_means(given_noise, sigma=sigma), 255) > psnr(clean, given_noise, 255) + 6


def test_the_camera_man_under_noise_of_20_comes_back_at_29_9_decibels_or_more() -> None:
    clean = pytest.importorskip("skimage.data").camera().astype(np.float32)
    given_noise = clean + 20 * np.random.default_rng(0).normal(size=clean.shape).astype(np.float32)
    assert psnr(clean, nonlocal_means(given_noise, sigma=20), 255) >= 29.9


@pytest.mark.parametrize("mode", ["pixel", "patch"])
def test_it_has_gradients(mode: str) -> None:
    x = torch.rand(1, 1, 4, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: nonlocal_means(x, 0.7, 3, 1, mode=mode), x)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"h": -1},
        {"h": 0},
        {"h": 0, "sigma": 5},
        {"sigma": -1.0},
        {"h": 1, "patch": 4},
        {"sigma": 1, "patch": 0},
        {"h": 1, "reach": -1},
        {"h": 1, "mode": "both"},
        {"h": 1, "patch_weights": "round"},
    ],
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RegardError):
        nonlocal_means(np.ones((5, 5)), **options)


# ---- the kernel -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("channels", "weights"), [(1, "gaussian"), (3, "flat")])
def test_the_kernel_is_the_definition(channels: int, weights: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The Triton kernel (interpreted on a CPU) with tiles that are not full, and two images."""
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")
    from regard.filters import nonlocal_means_triton

    monkeypatch.setattr(nonlocal_means_triton, "TILE", (4, 8))
    x = torch.rand(2, channels, 5, 9, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    like = PatchWeighting(0.3, 0.1, patch_taps(3, weights), 1)
    torch.testing.assert_close(module.pixelwise_triton(x, like), pixelwise(x, like), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
@pytest.mark.parametrize(("mode", "weights"), FORMS)
def test_a_gpu_gives_what_a_cpu_gives(mode: str, weights: str) -> None:
    image = torch.from_numpy(noisy(90, 70, 3)).movedim(-1, 0).float()
    options: dict[str, Any] = {"sigma": 0.1, "mode": mode, "patch_weights": weights}
    made = nonlocal_means(image.cuda(), 0.1, 7, 5, **options)
    assert made.is_cuda
    torch.testing.assert_close(made.cpu(), nonlocal_means(image, 0.1, 7, 5, **options), rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a GPU")
def test_memory_does_not_grow_with_the_window() -> None:
    image = torch.rand(1000, 1000, device="cuda")
    nonlocal_means(image, 0.1, 7, 11)  # what other tests keep, and what is made once, is there before
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    nonlocal_means(image, 0.1, 7, 11)
    assert torch.cuda.max_memory_allocated() - before < 20 * image.numel() * 4
