"""Texture synthesis: the compiled loop against its definition, and properties of a grown texture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.filters.filters_numba import fill_layer as fill_layer_numba
from regard.filters.texture import fill_layer, gaussian_window, grow_texture, next_layer, synthesise


def sample(*shape: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).random(shape) * 255).astype(np.float32)


@given(st.integers(0, 1000), st.sampled_from([1, 3]), st.sampled_from([3, 5, 7]), st.sampled_from([0.0, 0.1, 0.8]))
@settings(max_examples=15)
def test_the_compiled_loop_is_the_definition(seed: int, channels: int, window: int, epsilon: float) -> None:
    given_sample = sample(channels, 11, 9, seed=seed)
    a, b = (
        grow_texture(given_sample, (9, 12), gaussian_window(window), epsilon, seed, way)
        for way in (fill_layer, fill_layer_numba)
    )
    np.testing.assert_array_equal(a, b)


def test_the_best_match_is_copied() -> None:
    """One unknown pixel, whose surroundings occur at one place of the sample only."""
    given_sample, weights = sample(1, 12, 12), gaussian_window(5)
    for way in (fill_layer, fill_layer_numba):
        picture, known = given_sample[:, 2:7, 4:9].copy(), np.ones((5, 5), bool)
        known[2, 2], picture[0, 2, 2] = False, -1
        way(given_sample, picture, known, np.array([[0, 0]]), weights, 0.1, np.array([0.99]))
        assert picture[0, 2, 2] == given_sample[0, 4, 6]
        assert known.all()


def test_what_is_unknown_does_not_count() -> None:
    """The right half is unknown; with its values another place would match."""
    given_sample, weights = sample(1, 12, 12), gaussian_window(5)
    for way in (fill_layer, fill_layer_numba):
        picture, known = given_sample[:, 2:7, 4:9].copy(), np.zeros((5, 5), bool)
        known[:, :2] = True
        picture[:, :, 2:] = given_sample[:, 6:11, 2:5]
        way(given_sample, picture, known, np.array([[0, 0]]), weights, 0.0, np.array([0.5]))
        assert picture[0, 2, 2] == given_sample[0, 4, 6]


def test_those_with_the_most_known_around_them_go_first() -> None:
    known = np.zeros((9, 9), bool)
    known[3:6, 3:5] = True  # 2 pixels of border on each side
    layer = next_layer(known, 2, np.random.default_rng(0))
    middles = layer + 2
    assert not known[tuple(middles.T)].any()
    assert sorted(map(tuple, middles)) == sorted(
        (y, x) for y in range(2, 7) for x in range(2, 6) if not known[y, x]
    )  # the ring around them
    counts = [known[y : y + 5, x : x + 5].sum() for y, x in layer]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_a_periodic_texture_goes_on() -> None:
    stripes = np.tile(np.array([10, 200, 90, 160], np.uint8), (16, 4))
    made = synthesise(stripes, 30, 26, window=9)
    assert made.shape == (30, 26)
    assert made.dtype == np.uint8
    assert (made == made[0]).all()
    np.testing.assert_array_equal(made[0, 4:], made[0, :-4])
    assert set(made[0]) == {10, 200, 90, 160}


def test_colours_are_taken_whole() -> None:
    given_sample = np.random.default_rng(0).integers(0, 255, (12, 10, 3), np.uint8)
    made = synthesise(given_sample, 15, 14, window=5, channel_axis=-1)
    assert made.shape == (15, 14, 3)
    assert set(map(tuple, made.reshape(-1, 3))) <= set(map(tuple, given_sample.reshape(-1, 3)))


def test_a_seed_gives_one_picture_and_another_seed_another() -> None:
    given_sample = torch.from_numpy(sample(12, 12))
    first, again, other = (synthesise(given_sample, 14, 14, 5, 0.3, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "options", [{"window": 4}, {"window": 1}, {"window": 13}, {"epsilon": -0.1}, {"height": 2}, {"width": 0}]
)
def test_parameters_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(RegardError):
        synthesise(sample(12, 20), **({"height": 8, "width": 8} | options))
