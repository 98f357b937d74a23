"""Attention weights quantized to uint8: errors are within half a level."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from regard.look.page.document import QuantizedWeights

shapes = st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 6))
numbers = st.floats(0, 1, width=32)


@given(shapes.flatmap(lambda shape: arrays(np.float32, shape, elements=numbers)), st.sampled_from([255, 15, 1]))
def test_a_weight_comes_back_within_half_a_level(w: np.ndarray, levels: int) -> None:
    kept = QuantizedWeights.of(torch.from_numpy(w), levels)
    assert kept.codes.dtype == torch.uint8
    assert kept.codes.max() <= levels
    largest = w.astype(np.float64).max(2)
    np.testing.assert_allclose(kept.scale, largest)
    roots = [np.sqrt(x / np.maximum(largest, 1e-30)[..., None]) for x in (kept.weights().double().numpy(), w)]
    assert np.abs(roots[0] - roots[1]).max() <= 0.5 / levels + 1e-6


def test_each_row_has_its_own_scale_and_the_largest_is_exact() -> None:
    w = torch.tensor([[[0.5, 0.25, 0.0]], [[0.02, 0.01, 0.005]], [[0.0, 0.0, 0.0]]])
    kept = QuantizedWeights.of(w)
    assert kept.scale.tolist() == w.amax(2).tolist()
    assert kept.codes.tolist() == [
        [[255, 180, 0]],
        [[255, 180, 128]],
        [[0, 0, 0]],
    ]  # 255 sqrt(1/2) = 180.3; 127.5 to even
    assert kept.bytes() == bytes([255, 180, 0, 255, 180, 128, 0, 0, 0])
    torch.testing.assert_close(kept.weights()[:, 0, 0], w[:, 0, 0])
    found = (np.frombuffer(kept.bytes(), np.uint8).reshape(w.shape) / 255) ** 2 * kept.scale.numpy()[..., None]
    np.testing.assert_allclose(found, kept.weights(), rtol=1e-6)


def test_small_weights_of_a_row_that_also_has_a_large_one_are_told_apart() -> None:
    kept = QuantizedWeights.of(torch.tensor([[[1.0, 0.002, 0.001, 0.0002]]])).weights()[0, 0]
    np.testing.assert_allclose(kept[1:], [0.002, 0.001, 0.0002], rtol=0.25)


def test_what_was_turned_round_or_learned_is_kept_all_the_same() -> None:
    w = torch.rand(2, 3, 4, requires_grad=True).transpose(1, 2)
    kept = QuantizedWeights.of(w)
    assert kept.bytes() == kept.codes.contiguous().numpy().tobytes()
    assert not kept.weights().requires_grad
    torch.testing.assert_close(kept.weights(), w.detach(), atol=1 / 255, rtol=0)
