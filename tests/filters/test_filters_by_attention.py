"""The filters are attention: the Transformer's own functions on patches or (position, value) give the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard.filters.attention_filters import (
    bilateral_by_attention,
    dot_product_features,
    nonlocal_means_by_attention,
)
from regard.filters.bilateral import bilateral
from regard.filters.nonlocal_means import nonlocal_means
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import AttentionPlan, reference


def pictures(channels: int) -> Tensor:
    return torch.rand(2, channels, 9, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(channels))


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("weights", ["flat", "gaussian"])
def test_non_local_means_is_attention_of_patches(channels: int, weights: str) -> None:
    x = pictures(channels)
    found, _ = nonlocal_means_by_attention(x, 0.2, 5, 3, weights)
    torch.testing.assert_close(found, nonlocal_means(x, 0.2, 5, 3, patch_weights=weights), atol=1e-10, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
def test_the_bilateral_filter_is_attention_of_positions_and_values(channels: int) -> None:
    x = pictures(channels)
    found, _ = bilateral_by_attention(x, 0.2, 1.5, 7)
    torch.testing.assert_close(found, bilateral(x, 0.2, 1.5, 7), atol=1e-10, rtol=0)


def test_weights_sum_to_one_over_the_window_and_are_nothing_beyond() -> None:
    _, weights = nonlocal_means_by_attention(pictures(1), 0.2, 3, 2)
    assert weights.shape == (2, 9 * 7, 13 * 11)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 63, dtype=torch.float64))
    assert ((weights > 0).sum(-1) <= 25).all()
    assert (weights > 0).sum(-1).max() == 25


def test_what_products_leave_out_is_the_same_for_every_key() -> None:
    a, b = torch.randn(2, 5, 3, dtype=torch.float64), torch.randn(2, 8, 3, dtype=torch.float64)
    queries, keys = dot_product_features(a, b)
    left = torch.cdist(a, b).square() + queries @ keys.mT
    torch.testing.assert_close(left, a.square().sum(-1, keepdim=True).expand_as(left))


def test_the_kernel_of_the_layers_gives_the_same() -> None:
    """`reference`, with its scale and its softmax in float32, over a whole image: no mask, reach beyond every border."""
    a = torch.randn(1, 1, 30, 4, generator=torch.Generator().manual_seed(0))  # (B, H, T, D): 30 patches of 4 pixels
    values = torch.randn(1, 1, 30, 2, generator=torch.Generator().manual_seed(1))
    queries, keys = dot_product_features(a, a)
    places = torch.arange(30)[None]
    found = reference(queries * 5**0.5, keys, values, AttentionPlan(reference, FULL, places, places), 0.0)
    expected = torch.softmax(-torch.cdist(a.double(), a.double()).square(), -1) @ values.double()
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)
