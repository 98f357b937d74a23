"""Attention of single queries: the formula in float64, and results that nothing else in the batch changes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.kernels.row_attention_numba import row_attention


def draw(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_formula(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> np.ndarray:
    """Return softmax(q k^T * scale + mask) v in float64; rows without any key are zeros."""
    group = q.shape[1] // k.shape[1]
    keys, values = (x.double().numpy().repeat(group, axis=1) for x in (k, v))
    scores = q.double().numpy() @ keys.swapaxes(2, 3) * scale + mask.double().numpy()
    largest = scores.max(-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isinf(largest), 0, largest))
    total = weights.sum(-1, keepdims=True)
    return (weights / np.where(total == 0, 1, total)) @ values


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (4, 2), (3, 1)])
def test_it_is_the_formula(heads: int, groups: int) -> None:
    q, k, v = draw((3, heads, 2, 16), 0), draw((3, groups, 9, 16), 1), draw((3, groups, 9, 16), 2)
    seen = draw((3, 1, 2, 9), 3) > -0.5
    seen[1, 0, 1] = False  # a query that sees nothing
    mask = torch.where(seen, draw((3, 1, 2, 9), 4), -torch.inf)
    found = row_attention(q, k, v, mask, 0.3)
    expected = by_formula(q, k, v, mask, 0.3)
    assert (
        np.abs(found.numpy() - expected).max() < 20 * 2.0**-24 * np.abs(expected).max()
    )  # sums of up to 16 and 9 terms
    assert not found[1, :, 1].any()


def test_without_a_mask_every_query_sees_every_key() -> None:
    q, k, v = draw((2, 2, 1, 8), 0), draw((2, 2, 5, 8), 1), draw((2, 2, 5, 8), 2)
    assert np.abs(row_attention(q, k, v, None, 1.0).numpy() - by_formula(q, k, v, torch.zeros(1), 1.0)).max() < 1e-5


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40), st.integers(0, 30), st.integers(0, 6), st.integers(1, 6), st.integers(0, 2**31))
def test_padding_and_other_rows_change_no_bit(keys: int, padding: int, others: int, queries: int, seed: int) -> None:
    """A row alone, and among others with more keys: columns that are masked, wherever they are, and memory of any stride."""
    rows, columns = others + 1, keys + padding
    q, k, v = (draw((rows, 2, n, 16), seed + i) for i, n in enumerate((queries, columns, columns)))
    row = seed % rows
    own = torch.randperm(columns, generator=torch.Generator().manual_seed(seed))[:keys].sort().values
    mask = torch.full((rows, 1, queries, columns), -torch.inf)
    mask[..., : columns // 2 + 1] = 0.0
    mask[row, :, :, :] = -torch.inf
    mask[row, :, :, own] = 0.0
    room = torch.full((rows, 2, columns + 3, 16), torch.nan)  # a cache with room for more columns
    room[:, :, :columns] = k
    among = row_attention(q, room[:, :, :columns], v, mask, 0.25)[row]
    alone = row_attention(q[row : row + 1], k[row : row + 1, :, own], v[row : row + 1, :, own], None, 0.25)[0]
    assert torch.equal(among, alone)
