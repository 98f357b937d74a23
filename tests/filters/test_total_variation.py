"""Total variation against scikit-image, and against the optimality conditions of its minimum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from skimage.restoration import denoise_tv_chambolle

from regard.errors import RegardError
from regard.filters.total_variation import advance, advance_numba, nesterov_momenta, total_variation


def steps(*shape: int) -> np.ndarray:
    """Return flat regions with edges and noise, from 0 to 1."""
    rng = np.random.default_rng(0)
    image = np.full(shape, 0.2)
    image[shape[0] // 4 :, shape[1] // 3 :] += 0.5
    return image + rng.normal(0, 0.08, shape)


def energy(u: np.ndarray, f: np.ndarray, weight: float) -> float:
    down, right = np.diff(u, axis=0, append=u[-1:]), np.diff(u, axis=1, append=u[:, -1:])
    return 0.5 * ((u - f) ** 2).sum() + weight * np.hypot(down, right).sum()


@pytest.mark.parametrize("weight", [0.03, 0.1, 0.4])
def test_it_is_what_scikit_image_comes_to(weight: float) -> None:
    image = steps(24, 30)
    expected = denoise_tv_chambolle(image, weight=weight, eps=1e-12, max_num_iter=5000)
    found = total_variation(image, weight, tolerance=1e-3, max_steps=5000)
    assert math.sqrt(np.mean((found - expected) ** 2)) < 2e-3 * weight  # most of it theirs


def test_colours_are_scikit_images_too() -> None:
    image = steps(16, 20, 3)
    expected = denoise_tv_chambolle(image, weight=0.1, eps=1e-12, max_num_iter=5000, channel_axis=-1)
    np.testing.assert_allclose(total_variation(image, 0.1, 1e-3, 5000, channel_axis=-1), expected, atol=5e-4)


def test_the_promised_distance_from_the_solution_is_kept() -> None:
    image, weight = steps(32, 32), 0.15
    exact = total_variation(image, weight, tolerance=2e-4, max_steps=10000)
    distances = []
    for tolerance in (0.2, 0.05, 0.01):
        found = total_variation(image, weight, tolerance)
        distances.append(math.sqrt(np.mean((found - exact) ** 2)))
        assert distances[-1] <= tolerance * weight
    assert distances[0] > distances[1] > distances[2] > 0


def test_nothing_near_it_has_less_energy() -> None:
    image, weight, rng = steps(12, 9), 0.1, np.random.default_rng(1)
    found = total_variation(image, weight, tolerance=2e-4, max_steps=10000)
    least = energy(found, image, weight)
    for size in (1e-3, 1e-2, 1e-1):
        for _ in range(20):
            assert energy(found + size * rng.normal(size=image.shape), image, weight) > least
    for share in (0.9, 0.99, 1.01, 1.1):
        assert energy(image + share * (found - image), image, weight) > least


def test_energy_falls_as_it_goes_on() -> None:
    image = steps(20, 20)
    energies = [energy(total_variation(image, 0.2, 1e-9, n), image, 0.2) for n in (1, 2, 4, 8, 16, 32, 64, 128)]
    assert energies == sorted(energies, reverse=True)
    assert energies[0] < energy(image, image, 0.2)


def test_two_pixels_move_towards_each_other_by_the_weight_until_they_meet() -> None:
    """1/2 (a-0)^2 + 1/2 (b-1)^2 + w |b - a| is least at a = w, b = 1 - w, and at 1/2 from w = 1/2 on."""
    image = np.array([[0.0, 1.0]])
    np.testing.assert_allclose(total_variation(image, 0.2, 1e-7), [[0.2, 0.8]], atol=1e-6)
    np.testing.assert_allclose(total_variation(image, 0.7, 1e-7), [[0.5, 0.5]], atol=1e-6)


def test_the_mean_stays_and_a_large_weight_leaves_nothing_else() -> None:
    image = steps(10, 14)
    assert total_variation(image, 0.1).mean() == pytest.approx(image.mean(), abs=1e-12)
    np.testing.assert_allclose(total_variation(image, 100.0, 1e-4, 5000), image.mean(), atol=1e-3)


def test_the_weight_is_in_the_pictures_own_units() -> None:
    image = np.clip(steps(16, 16) * 255, 0, 255).astype(np.uint8)
    found = total_variation(image, 20.0)
    assert found.dtype == np.uint8
    exact = total_variation(image / 255, 20 / 255) * 255
    assert np.abs(found - exact).max() < 0.51


def test_a_batch_is_its_pictures() -> None:
    batch = torch.from_numpy(np.stack([steps(12, 12), 3 * steps(12, 12)]))[:, None]
    together = total_variation(batch, 0.1, 1e-3, 5000)
    for one, alone in zip(together, batch, strict=True):
        torch.testing.assert_close(one, total_variation(alone, 0.1, 1e-3, 5000), atol=1e-4, rtol=0)


def test_easy_pictures_of_a_batch_do_not_make_a_hard_one_worse() -> None:
    batch = torch.zeros(50, 1, 16, 16, dtype=torch.float64)
    batch[7, 0] = torch.from_numpy(steps(16, 16))
    found = total_variation(batch, 0.1, 0.05)
    torch.testing.assert_close(found[7], total_variation(batch[7], 0.1, 0.05), atol=1e-12, rtol=0)


@pytest.mark.parametrize("shape", [(1, 1, 9, 33), (2, 3, 20, 17), (1, 2, 1, 5), (1, 1, 5, 1)])
def test_the_compiled_steps_are_those_in_torch(shape: tuple[int, ...]) -> None:
    f = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    momenta = nesterov_momenta(12)
    exact = advance(f.double(), *(torch.zeros(2, *shape, dtype=torch.float64) for _ in range(2)), 0.7, momenta)
    found = advance_numba(f, *(torch.zeros(2, *shape) for _ in range(2)), 0.7, momenta[:5])
    found = advance_numba(f, *found, 0.7, momenta[5:])  # continues where it stopped
    for mine, other in zip(found, exact, strict=True):
        torch.testing.assert_close(mine.double(), other, atol=2e-6, rtol=0)
    assert exact[0].abs().amax() > (0.9 if min(shape[2:]) > 1 else 0.3)


def test_float32_is_float64_but_for_rounding() -> None:
    image = steps(24, 30)
    found = total_variation(image.astype(np.float32), 0.1, 0.01)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, total_variation(image, 0.1, 0.01), atol=1e-5)


def test_no_weight_changes_nothing_and_gives_a_copy() -> None:
    image = torch.from_numpy(steps(4, 4))
    found = total_variation(image, 0.0)
    assert torch.equal(found, image)
    assert found.data_ptr() != image.data_ptr()


@pytest.mark.parametrize(
    ("weight", "tolerance", "most"), [(-0.1, 0.1, 9), (float("nan"), 0.1, 9), (1, 0.0, 9), (1, 1, 0)]
)
def test_what_is_out_of_range_is_refused(weight: float, tolerance: float, most: int) -> None:
    with pytest.raises(RegardError, match="a weight of 0 or more"):
        total_variation(steps(4, 4), weight, tolerance, most)


def test_a_picture_that_wants_gradients_is_filtered_without() -> None:
    image = torch.from_numpy(steps(6, 6)).float().requires_grad_()
    assert not total_variation(image, 0.1).requires_grad
