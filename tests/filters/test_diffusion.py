"""The heat equation against the Gaussian and its closed solutions; Perona-Malik against loops in float64."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy import ndimage

from regard.errors import RegardError
from regard.filters.diffusion import heat, perona_malik

PICTURES = arrays(np.float64, st.tuples(st.integers(2, 7), st.integers(2, 7)), elements=st.floats(-100, 100))


def noise(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).uniform(size=shape)


# ---- heat -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [2.0, 3.0, 5.5])
def test_heat_after_half_of_sigma_squared_is_the_gaussian(sigma: float) -> None:
    """On white noise the difference is the aliasing of a sampled Gaussian, exp(-2 pi^2) = 3e-9 at sigma 2."""
    image = noise(40, 31)
    expected = ndimage.gaussian_filter(image, sigma, mode="reflect", truncate=10)
    assert np.abs(heat(image, sigma**2 / 2) - expected).max() < (1e-9 if sigma == 2 else 1e-13)


def cosine(n: int, k: int) -> np.ndarray:
    """Return mode k of a bar with closed ends, at the middles of n pixels."""
    return np.cos(math.pi * k * (np.arange(n) + 0.5) / n)


def test_a_cosine_fades_as_the_equation_says() -> None:
    image = np.outer(cosine(12, 3), cosine(20, 5))
    rate = (math.pi * 3 / 12) ** 2 + (math.pi * 5 / 20) ** 2
    np.testing.assert_allclose(heat(image, 0.7), image * math.exp(-0.7 * rate), atol=1e-14)


def test_explicit_steps_come_nearer_with_the_square_of_the_pixels_size() -> None:
    """On a grid twice as fine a pixel is half as wide, so that the same time is four times as many steps."""
    errors = []
    for n in (16, 32, 64):
        image = np.outer(cosine(n, 2), cosine(n, 1)) + cosine(n, 3)
        time = 2.0 * (n / 16) ** 2
        errors.append(np.abs(heat(image, time, steps=round(10 * time)) - heat(image, time)).max())
    assert errors[0] < 0.02
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(4, rel=0.1)


@given(image=PICTURES)
def test_explicit_steps_are_those_of_a_loop(image: np.ndarray) -> None:
    expected = image
    for _ in range(3):
        expected = loop(expected, lambda d: 1.0, 0.2)
    np.testing.assert_allclose(heat(image, 0.6, steps=3), expected, atol=1e-12)


@given(first=st.floats(0, 5), second=st.floats(0, 5))
def test_two_times_are_their_sum(first: float, second: float) -> None:
    image = noise(6, 9)
    np.testing.assert_allclose(heat(heat(image, first), second), heat(image, first + second), atol=1e-13)


def test_no_heat_is_lost_and_all_of_it_is_even_in_the_end() -> None:
    image = noise(6, 9)
    assert heat(image, 3.0).mean() == pytest.approx(image.mean(), abs=1e-14)
    np.testing.assert_allclose(heat(image, 1e4), image.mean(), atol=1e-12)


@pytest.mark.parametrize(
    ("time", "steps", "enough"), [(1.0, 3, "at least 4"), (1.0, 0, "at least 4"), (0.0, 0, "at least 1")]
)
def test_steps_that_are_unstable_are_refused(time: float, steps: int, enough: str) -> None:
    with pytest.raises(RegardError, match=enough):
        heat(noise(4, 4), time, steps)


@pytest.mark.parametrize("time", [-1.0, float("nan"), float("inf")])
def test_a_time_that_is_none_is_refused(time: float) -> None:
    with pytest.raises(RegardError, match="give 0 or more"):
        heat(noise(4, 4), time)


# ---- Perona and Malik -------------------------------------------------------------------------------------------------

FORMULAS = {"exponential": lambda s: math.exp(-(s**2)), "rational": lambda s: 1 / (1 + s**2)}


def loop(u: np.ndarray, g, rate: float) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Return explicit steps pixel by pixel; u is (H, W) or (H, W, C), where g gets the difference of all channels."""
    out = u.copy()
    for i in range(u.shape[0]):
        for j in range(u.shape[1]):
            for a, b in ((i - 1, j), (i + 1, j), (i, j - 1), (i, j + 1)):
                if 0 <= a < u.shape[0] and 0 <= b < u.shape[1]:
                    difference = u[a, b] - u[i, j]
                    out[i, j] += rate * g(math.sqrt(np.mean(difference**2))) * difference
    return out


@pytest.mark.parametrize("conductance", FORMULAS)
@given(image=PICTURES, kappa=st.floats(5, 50), rate=st.floats(0.01, 0.25))
def test_perona_malik_is_that_of_a_loop(conductance: str, image: np.ndarray, kappa: float, rate: float) -> None:
    expected = image
    for _ in range(4):
        expected = loop(expected, lambda d: FORMULAS[conductance](d / kappa), rate)
    np.testing.assert_allclose(perona_malik(image, kappa, 4, rate, conductance), expected, atol=1e-10)


@pytest.mark.parametrize("conductance", FORMULAS)
def test_in_colour_the_difference_is_that_of_all_channels(conductance: str) -> None:
    image = noise(6, 5, 3)
    expected = loop(
        loop(image, lambda d: FORMULAS[conductance](d / 0.3), 0.2), lambda d: FORMULAS[conductance](d / 0.3), 0.2
    )
    found = perona_malik(image, 0.3, 2, 0.2, conductance, channel_axis=-1)
    np.testing.assert_allclose(found, expected, atol=1e-13)
    grey = perona_malik(image[..., 0], 0.3, 2, 0.2, conductance)
    same = perona_malik(np.repeat(image[..., :1], 3, -1), 0.3, 2, 0.2, conductance, channel_axis=-1)
    np.testing.assert_allclose(same, np.repeat(grey[..., None], 3, -1), atol=1e-14)


@pytest.mark.parametrize("conductance", FORMULAS)
def test_without_edges_it_is_the_heat_equation(conductance: str) -> None:
    image = noise(8, 8)
    found = perona_malik(image, 1e9, 5, 0.2, conductance)
    np.testing.assert_allclose(found, heat(image, 1.0, steps=5), atol=1e-13)


@pytest.mark.parametrize("conductance", FORMULAS)
@given(image=PICTURES, kappa=st.floats(0.01, 100))
def test_the_mean_stays_and_nothing_is_brighter_or_darker_than_before(
    conductance: str, image: np.ndarray, kappa: float
) -> None:
    found = perona_malik(image, kappa, 5, 0.25, conductance)
    assert found.mean() == pytest.approx(image.mean(), abs=1e-10)
    assert found.min() >= image.min() - 1e-10
    assert found.max() <= image.max() + 1e-10


def test_an_edge_stays_where_a_gaussian_blurs_it() -> None:
    image = np.repeat([[0.0] * 8 + [100.0] * 8], 16, axis=0) + np.random.default_rng(0).normal(0, 3, (16, 16))
    found = perona_malik(image, 10.0, 20)
    assert found[:, :8].std() < 0.5 * image[:, :8].std()
    assert np.abs(found[:, 8] - found[:, 7]).min() > 90
    assert np.abs(heat(image, 4.0)[:, 8] - heat(image, 4.0)[:, 7]).max() < 30


def test_pictures_of_a_batch_do_not_mix_and_bytes_are_rounded_once() -> None:
    batch = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 3, 6, 7)).astype(np.uint8))
    found = perona_malik(batch, 30.0)
    assert found.dtype == torch.uint8
    for one, alone in zip(found, batch, strict=True):
        exact = perona_malik(alone.double(), 30.0)
        assert (one - exact).abs().max() < 0.501


def test_gradients_are_those_of_differences() -> None:
    x = torch.from_numpy(noise(1, 2, 4, 3)).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: perona_malik(x, 0.5, 2), x)
    assert torch.autograd.gradcheck(lambda x: heat(x, 0.5), x)


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"kappa": 0.0}, "kappa above 0"),
        ({"kappa": 1.0, "steps": 0}, "1 step or more"),
        ({"kappa": 1.0, "rate": 0.26}, "at most 0.25"),
        ({"kappa": 1.0, "rate": 0.0}, "above 0"),
        ({"kappa": 1.0, "conductance": "linear"}, "exponential, rational"),
    ],
)
def test_what_is_out_of_range_is_refused(settings: dict, what: str) -> None:
    with pytest.raises(RegardError, match=what):
        perona_malik(noise(4, 4), **settings)
