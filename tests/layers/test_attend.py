"""The attention kernels against softmax attention written in float64 NumPy, forward and backward."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.layers.attend import Kernel, Plan, make_plan, reference, sdpa, weights
from regard.layers.masks import Causal, Full, Mask

KERNELS = [reference, sdpa]
B, H, D = 3, 2, 4


def numpy_weights(q: np.ndarray, k: np.ndarray, allowed: np.ndarray) -> np.ndarray:
    """softmax over the allowed keys, query by query; zeros where there are none."""
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(q.shape[-1])
    result = np.zeros_like(scores)
    for place in np.ndindex(*scores.shape[:-1]):
        seen = np.broadcast_to(allowed, scores.shape)[place]
        if seen.any():
            powers = np.exp(scores[place][seen] - scores[place][seen].max())
            result[place][seen] = powers / powers.sum()
    return result


def numpy_gradients(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, a: np.ndarray, g: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of sum(g * a v) with respect to q, k and v, by the chain rule on paper."""
    by_weight = g @ v.swapaxes(-1, -2)
    by_score = a * (by_weight - (by_weight * a).sum(-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return by_score @ k, by_score.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ g


def ragged(*lengths: int) -> Tensor:
    """Positions of rows of these lengths, padded on the right."""
    return torch.tensor([[i if i < n else -1 for i in range(max(lengths))] for n in lengths])


def case(name: str) -> tuple[int, int, dict[str, object], np.ndarray]:
    """T, S, the plan's fields, and who sees whom as NumPy has it."""
    if name == "none":
        return 5, 5, {}, np.ones((1, 1, 5, 5), bool)
    if name == "cross":
        return 3, 6, {}, np.ones((1, 1, 3, 6), bool)
    if name == "causal":
        return 5, 5, {"causal": True}, np.tri(5, dtype=bool)[None, None]
    if name == "padding":
        real = np.array([[i < n for i in range(6)] for n in (6, 2, 1)])[:, None, None]
        return 3, 6, {"mask": torch.from_numpy(real)}, real
    allowed = np.random.default_rng(0).random((B, 1, 4, 6)) < 0.5
    allowed[..., 0] = True
    return 4, 6, {"mask": torch.from_numpy(allowed)}, allowed


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["none", "cross", "causal", "padding", "scattered"])
def test_kernels_are_softmax_attention_forward_and_backward(kernel: Kernel, name: str) -> None:
    t, s, fields, allowed = case(name)
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(B, H, n, D)) for n in (t, s, s)]
    q, k, v = (torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in arrays)
    g = rng.normal(size=(B, H, t, D))

    result = Plan(kernel, **fields)(q, k, v, 0.0)  # type: ignore[arg-type]
    (result * torch.tensor(g, dtype=torch.float32)).sum().backward()

    a = numpy_weights(arrays[0], arrays[1], allowed)
    np.testing.assert_allclose(result.detach().numpy(), a @ arrays[2], atol=2e-6)
    for tensor, expected in zip((q, k, v), numpy_gradients(*arrays, a, g), strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), expected, atol=1e-5)


@pytest.mark.parametrize("name", ["none", "cross", "causal", "padding", "scattered"])
def test_weights_are_probabilities_over_the_allowed_keys(name: str) -> None:
    t, s, fields, allowed = case(name)
    q, k = torch.randn(B, H, t, D), torch.randn(B, H, s, D)
    a = weights(q, k, Plan(reference, **fields))  # type: ignore[arg-type]
    torch.testing.assert_close(a.sum(-1), torch.ones(B, H, t))
    assert (a.numpy()[~np.broadcast_to(allowed, a.shape)] == 0).all()
    np.testing.assert_allclose(a.numpy(), numpy_weights(q.double().numpy(), k.double().numpy(), allowed), atol=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_query_that_may_look_nowhere_gets_zeros_and_harms_no_gradient(kernel: Kernel) -> None:
    mask = torch.tensor([[True, True, False], [False, False, False], [True, True, True]])[None, None]
    q, k, v = (torch.randn(1, H, 3, D, requires_grad=True) for _ in range(3))
    result = Plan(kernel, mask)(q, k, v, 0.0)
    assert (result[:, :, 1] == 0).all()
    assert (result[:, :, [0, 2]] != 0).all()
    result.square().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert q.grad is not None
    assert (q.grad[:, :, 1] == 0).all()


def test_the_softmax_is_worked_in_fp32_whatever_the_inputs() -> None:
    q, k = (torch.randn(1, 1, 3, D, dtype=torch.bfloat16) for _ in range(2))
    plan = Plan(reference)
    assert weights(q, k, plan).dtype == torch.float32
    assert plan(q, k, k, 0.0).dtype == torch.bfloat16


# ---- which plan ------------------------------------------------------------------------------------------------------

PREFIX = torch.arange(4)[None]
NEXT = torch.tensor([[4]])
PLANS: list[tuple[str, Mask, Tensor, Tensor, bool, object]] = [
    ("its own keys: the triangle", Causal(), PREFIX, PREFIX, True, None),
    ("other keys: dense", Causal(), PREFIX, PREFIX.clone(), False, np.tri(4, dtype=bool).tolist()),
    ("one step after a cache", Causal(), NEXT, torch.arange(5)[None], False, [[True] * 5]),
    ("two steps after a cache", Causal(), torch.tensor([[1, 2]]), torch.arange(3)[None], False, [[1, 1, 0], [1, 1, 1]]),
    ("a cache with padding in it", Causal(), torch.tensor([[2]]), torch.tensor([[0, 1, -1, 2]]), False, [[1, 1, 0, 1]]),
    ("an encoder's padding", Full(), ragged(2, 3)[:1], ragged(2, 3)[:1], False, [[True, True, False]]),
    ("memory of another length", Full(), NEXT, torch.tensor([[0, 1, -1]]), False, [[True, True, False]]),
]


@pytest.mark.parametrize(("mask", "q", "k", "causal", "expected"), [p[1:] for p in PLANS], ids=[p[0] for p in PLANS])
def test_what_make_plan_chooses(mask: Mask, q: Tensor, k: Tensor, causal: bool, expected: object) -> None:
    plan = make_plan(mask, q, k)
    assert plan.kernel is sdpa
    assert plan.causal is causal
    assert (plan.mask if plan.mask is None else plan.mask[0, 0].tolist()) == expected
    assert make_plan(mask, q, k, kernel=reference).kernel is reference


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_triangle_and_the_dense_mask_agree_on_every_real_query(kernel: Kernel) -> None:
    positions = ragged(5, 2, 1)
    q, k, v = (torch.randn(B, H, 5, D) for _ in range(3))
    triangle, masked = (make_plan(Causal(), positions, p, kernel=kernel) for p in (positions, positions.clone()))
    assert triangle.causal
    assert not masked.causal
    real = (positions >= 0)[:, None, :, None]
    torch.testing.assert_close(triangle(q, k, v, 0.0) * real, masked(q, k, v, 0.0) * real)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", KERNELS)
def test_dropout_on_weights_keeps_their_expectation(kernel: Kernel) -> None:
    # Equal weights 1/S on values of one: each result is the share of kept weights over 1 - p, with mean 1.
    torch.manual_seed(0)
    p, s = 0.3, 10
    q, k = torch.zeros(50, 4, 50, D), torch.zeros(50, 4, s, D)
    result = Plan(kernel)(q, k, torch.ones(50, 4, s, D), p)
    n, sigma = 50 * 4 * 50, math.sqrt(p / (1 - p) / s)
    assert abs(result[..., 0].mean().item() - 1) < 5 * sigma / math.sqrt(n)
    assert result[..., 0].std().item() == pytest.approx(sigma, rel=0.1)
    kept = result * s * (1 - p)
    torch.testing.assert_close(kept, kept.round(), atol=1e-4, rtol=0)  # whole weights go, never parts of them
