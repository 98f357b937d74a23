"""Softmax attention against NumPy and the chain rule on paper; which kernel runs when; plans and their rows.

The whole matrix of kernels, schemes and masks is in tests/kernels/test_kernel_matrix.py.
"""

import logging
import math
from typing import Any

import numpy as np
import pytest
import torch
from configured import SCHEMES
from formula import SETTINGS, D, ragged, visible
from kernel_cases import allowed, cases, scheme_of
from torch import Tensor

from regard.kernels.masks import CAUSAL, FULL, Mask, document_mask, prefix, with_window
from regard.layers import attention_kernels
from regard.layers.attention_kernels import KERNELS, attention_weights, make_plan, reference, sdpa
from regard.layers.kernel_selection import Choice, Situation, choose
from regard.layers.positions.scheme import NoPositions, make_positions

B, H = 3, 2
ON_CPU = ["reference", "sdpa"]


# ---- the formula -----------------------------------------------------------------------------------------------------


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
    """Return the gradients of sum(g * a v) with respect to q, k and v, derived by hand."""
    by_weight = g @ v.swapaxes(-1, -2)
    by_score = a * (by_weight - (by_weight * a).sum(-1, keepdims=True)) / math.sqrt(q.shape[-1])
    return by_score @ k, by_score.swapaxes(-1, -2) @ q, a.swapaxes(-1, -2) @ g


FIVE = torch.arange(5).expand(B, 5)
AT_RANDOM = torch.from_numpy(np.random.default_rng(0).integers(-1, 9, (2, B, 6)))  # positions of queries and of keys
SEEN: dict[str, tuple[Mask, Tensor, Tensor, dict[str, Any]]] = {  # mask, positions of queries and keys, the rule
    "none": (FULL, FIVE, FIVE, {}),
    "cross": (FULL, ragged(3, 3, 3), ragged(6, 6, 6), {}),
    "causal": (CAUSAL, FIVE, FIVE, {"ahead": 0}),
    "padding": (FULL, ragged(3, 3, 3), ragged(6, 2, 1), {}),
    "scattered": (with_window(FULL, 4), AT_RANDOM[0].clamp(min=0), AT_RANDOM[1], {"back": 3, "ahead": 3}),
}
every_mask = pytest.mark.parametrize("name", SEEN)


def who_sees(name: str) -> np.ndarray:
    _, q, k, rule = SEEN[name]
    return visible(q.tolist(), k.tolist(), **rule)[:, None].numpy()


@pytest.mark.parametrize("kernel", ON_CPU)
@every_mask
def test_kernels_are_softmax_attention_forward_and_backward(kernel: str, name: str) -> None:
    mask, q_at, k_at, _ = SEEN[name]
    rng = np.random.default_rng(1)
    arrays = [rng.normal(size=(B, H, at.shape[1], D)) for at in (q_at, k_at, k_at)]
    q, k, v = (torch.tensor(x, dtype=torch.float32, requires_grad=True) for x in arrays)
    g = rng.normal(size=arrays[0].shape)

    result = make_plan(mask, q_at, k_at, kernel=kernel)(q, k, v, 0.0)
    (result * torch.tensor(g, dtype=torch.float32)).sum().backward()

    a = numpy_weights(arrays[0], arrays[1], who_sees(name))
    np.testing.assert_allclose(result.detach().numpy(), a @ arrays[2], atol=2e-6)
    by_hand = numpy_gradients(arrays[0], arrays[1], arrays[2], a, g)
    for tensor, expected in zip((q, k, v), by_hand, strict=True):
        assert tensor.grad is not None
        np.testing.assert_allclose(tensor.grad.numpy(), expected, atol=1e-5)


@every_mask
def test_weights_are_probabilities_over_the_allowed_keys(name: str) -> None:
    mask, q_at, k_at, _ = SEEN[name]
    q, k = torch.randn(B, H, q_at.shape[1], D), torch.randn(B, H, k_at.shape[1], D)
    a, seen = attention_weights(q, k, make_plan(mask, q_at, k_at)), who_sees(name)
    sums = np.broadcast_to(seen.any(-1), (B, H, q_at.shape[1])).astype(np.float32)
    np.testing.assert_allclose(a.sum(-1).numpy(), sums, atol=1e-6)
    assert (a.numpy()[~np.broadcast_to(seen, a.shape)] == 0).all()
    np.testing.assert_allclose(a.numpy(), numpy_weights(q.double().numpy(), k.double().numpy(), seen), atol=1e-6)


@pytest.mark.parametrize("scheme", ["none", "alibi", "t5"])
@pytest.mark.parametrize("kernel", ON_CPU)
def test_a_query_that_may_look_nowhere_gets_zeros_and_harms_no_gradient(kernel: str, scheme: str) -> None:
    q_at, k_at = torch.tensor([[5, 1, 8]]), torch.tensor([[5, 4, 7]])  # nothing up to position 1
    q, k, v = (torch.randn(1, 4, 3, D, requires_grad=True) for _ in range(3))
    result = make_plan(CAUSAL, q_at, k_at, scheme_of(scheme, "decoder"), kernel=kernel)(q, k, v, 0.0)
    assert (result[:, :, 1] == 0).all()
    assert (result[:, :, [0, 2]] != 0).all()
    result.square().sum().backward()
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert q.grad is not None
    assert (q.grad[:, :, 1] == 0).all()


@pytest.mark.parametrize("scheme", ["none", "alibi", "fire", "shaw", "cope"])
def test_the_softmax_is_worked_in_fp32_whatever_the_inputs(scheme: str) -> None:
    q, k = (torch.randn(1, 4, 3, D, dtype=torch.bfloat16) for _ in range(2))
    at = torch.arange(3)[None]
    plan = make_plan(CAUSAL, at, at, scheme_of(scheme, "decoder"), kernel="reference")
    assert attention_weights(q, k, plan).dtype == torch.float32
    assert plan(q, k, k, 0.0).dtype == torch.bfloat16


@pytest.mark.parametrize("scheme", ["none", "alibi", "fire"])
@pytest.mark.parametrize("kernel", ON_CPU)
def test_the_triangle_and_the_dense_mask_agree_on_every_real_query(kernel: str, scheme: str) -> None:
    positions, chosen = ragged(5, 2, 1), scheme_of(scheme, "decoder")
    q, k, v = (torch.randn(B, 4, 5, D) for _ in range(3))
    own, other = (make_plan(CAUSAL, positions, p, chosen, kernel=kernel) for p in (positions, positions.clone()))
    assert own.index is not None
    assert other.index is None
    real = (positions >= 0)[:, None, :, None]
    torch.testing.assert_close(own(q, k, v, 0.0) * real, other(q, k, v, 0.0) * real)


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ON_CPU)
def test_dropout_on_weights_keeps_their_expectation(kernel: str) -> None:
    # Equal weights 1/S on values of one: each result is the share of kept weights over 1 - p, with mean 1.
    torch.manual_seed(0)
    p, s = 0.3, 10
    q, k = torch.zeros(50, 4, 50, D), torch.zeros(50, 4, s, D)
    plan = make_plan(FULL, torch.arange(50).expand(50, 50), torch.arange(s).expand(50, s), kernel=kernel)
    result = plan(q, k, torch.ones(50, 4, s, D), p)
    n, sigma = 50 * 4 * 50, math.sqrt(p / (1 - p) / s)
    assert abs(result[..., 0].mean().item() - 1) < 5 * sigma / math.sqrt(n)
    assert result[..., 0].std().item() == pytest.approx(sigma, rel=0.1)
    kept = result * s * (1 - p)
    torch.testing.assert_close(kept, kept.round(), atol=1e-4, rtol=0)  # a weight is dropped or kept as a whole


# ---- plans -----------------------------------------------------------------------------------------------------------

PROMPT = torch.arange(4)[None]
NEXT = torch.tensor([[4]])
PLANS: list[tuple[str, Mask, Tensor, Tensor, object]] = [
    ("its own keys: the triangle", CAUSAL, PROMPT, PROMPT, None),
    ("other keys: dense", CAUSAL, PROMPT, PROMPT.clone(), np.tri(4, dtype=bool).tolist()),
    ("one step after a cache", CAUSAL, NEXT, torch.arange(5)[None], [[True] * 5]),
    ("two steps after a cache", CAUSAL, torch.tensor([[1, 2]]), torch.arange(3)[None], [[1, 1, 0], [1, 1, 1]]),
    ("a cache with padding in it", CAUSAL, torch.tensor([[2]]), torch.tensor([[0, 1, -1, 2]]), [[1, 1, 0, 1]]),
    ("a window over a cache", with_window(CAUSAL, 2), NEXT, torch.arange(5)[None], [[0, 0, 0, 1, 1]]),
    ("a window over its own keys", with_window(CAUSAL, 2), PROMPT[:, :2], PROMPT[:, :2], [[1, 0], [1, 1]]),
    ("an encoder's padding", FULL, ragged(2, 3)[:1], ragged(2, 3)[:1], [[True, True, False]]),
    ("memory of another length", FULL, NEXT, torch.tensor([[0, 1, -1]]), [[True, True, False]]),
]


@pytest.mark.parametrize(("mask", "q", "k", "expected"), [p[1:] for p in PLANS], ids=[p[0] for p in PLANS])
def test_what_make_plan_makes_ready(mask: Mask, q: Tensor, k: Tensor, expected: object) -> None:
    plan = make_plan(mask, q, k)
    assert plan.kernel is sdpa
    assert (plan.kernel_input if plan.kernel_input is None else plan.kernel_input[0, 0].tolist()) == expected
    assert make_plan(mask, q, k, kernel="reference").kernel is reference


def test_a_triangle_with_a_bias_is_the_same_for_every_row_where_the_bias_is() -> None:
    rows = ragged(4, 2, 3)
    for scheme in ("alibi", "t5", "fire"):
        ready = make_plan(CAUSAL, rows, rows, scheme_of(scheme, "decoder"), kernel="sdpa").kernel_input
        assert ready.shape == (1, 4, 4, 4)
        assert torch.equal(ready[0].isinf(), torch.ones(4, 4, 4).triu(1).bool())


OWN = {name: case for name, case in cases(9).items() if case.k is None}


@pytest.mark.parametrize(("name", "case_name"), allowed(OWN))
def test_some_rows_of_a_plan_have_the_weights_they_have_in_the_whole(name: str, case_name: str) -> None:
    case = OWN[case_name]
    torch.manual_seed(0)
    q, k = torch.randn(len(case.q), 4, 9, D), torch.randn(len(case.q), case.groups, 9, D)
    plan = make_plan(case.mask, case.q, case.q, scheme_of(name, case.place))
    whole = attention_weights(q, k, plan)
    for rows in (torch.tensor([8]), torch.tensor([5, 0, 3]), torch.arange(9)):
        part = plan.for_queries(rows)
        assert part.kernel is reference
        torch.testing.assert_close(attention_weights(q[:, :, rows], k, part), whole[:, :, rows])
        torch.testing.assert_close(part(q[:, :, rows], k, k, 0.0), reference(q, k, k, plan, 0.0)[:, :, rows])


# ---- which kernel ----------------------------------------------------------------------------------------------------

SCHEME = {name: make_positions(SETTINGS, "decoder", name) for name in SCHEMES}
WINDOW, BOTH_SIDES = with_window(CAUSAL, 64), with_window(FULL, 64)
EACH = prefix(torch.tensor([[3], [0]]))
S, F, T, R, ONE = "sdpa", "flex", "toeplitz", "reference", "short"
# kernel, `fast`, part of the reason, and the fields that differ from causal training on 512 tokens on a GPU
RULES: list[tuple[str, bool, str, dict[str, Any]]] = [
    # contextual schemes come first: no fused kernel supports them
    (R, False, "Shaw looks at queries", {"scheme": "shaw"}),
    (R, False, "CoPE looks at queries", {"scheme": "cope"}),
    (R, False, "CoPE", {"scheme": "cope", "device": "cpu", "queries": 1, "self_attention": False}),
    # a causal mask or padding alone: torch's kernels
    (S, True, "the fused triangle", {}),
    (S, True, "the fused triangle", {"device": "cpu"}),
    (S, True, "the fused triangle", {"scheme": "rope", "queries": 4096, "dropout": 0.1}),
    (S, True, "the fused triangle", {"scheme": "learned", "d_head": 7}),
    (S, True, "a mask for padding", {"mask": FULL}),
    (S, True, "a mask for padding", {"mask": FULL, "dropout": 0.1, "d_head": 7}),
    (S, True, "a mask for padding", {"mask": FULL, "self_attention": False}),
    (S, True, "a mask for padding", {"self_attention": False, "queries": 1}),
    # queries and keys that fit into one tile
    (ONE, True, "one tile", {"queries": 128}),
    (S, True, "the fused triangle", {"queries": 129}),
    (ONE, True, "one tile", {"queries": 17, "mask": FULL, "scheme": "rope", "dropout": 0.1}),
    (ONE, True, "one tile", {"queries": 3, "keys": 128, "mask": FULL, "self_attention": False}),
    (S, True, "a mask for padding", {"queries": 3, "keys": 129, "mask": FULL, "self_attention": False}),
    (S, True, "a mask for padding", {"queries": 129, "keys": 3, "mask": FULL, "self_attention": False}),
    (S, True, "a mask for padding", {"queries": 3, "keys": 64, "self_attention": False}),  # a cache
    *((ONE, True, "one tile", {"queries": 64, "d_head": d}) for d in (16, 32, 128)),
    *((S, True, "the fused triangle", {"queries": 64, "d_head": d}) for d in (8, 48, 256)),
    (S, True, "the fused triangle", {"queries": 64, "triton": False}),
    (S, True, "the fused triangle", {"queries": 64, "device": "cpu"}),
    # on a CPU always sdpa
    (S, True, "on a CPU", {"device": "cpu", "mask": WINDOW}),
    (S, True, "on a CPU", {"device": "cpu", "scheme": "alibi"}),
    (S, True, "on a CPU", {"device": "cpu", "scheme": "fire", "mask": FULL, "dropout": 0.1}),
    (S, True, "on a CPU", {"device": "cpu", "scheme": "t5", "self_attention": False, "queries": 1}),
    # few queries over a cache or the encoder output
    (S, True, "over a cache", {"self_attention": False, "scheme": "alibi", "queries": 1}),
    (S, True, "over a cache", {"self_attention": False, "mask": WINDOW, "queries": 127}),
    (S, False, "T x S in memory", {"self_attention": False, "mask": WINDOW, "queries": 128}),
    (S, False, "T x S in memory", {"self_attention": False, "scheme": "t5", "mask": FULL, "dropout": 0.1}),
    # the limit of few queries
    (S, True, "fewer than 128", {"queries": 127, "mask": WINDOW}),
    (F, True, "earlier keys, 63 back", {"queries": 128, "mask": WINDOW}),
    (S, True, "fewer than 128", {"queries": 127, "scheme": "alibi"}),
    (T, True, "ALiBi", {"queries": 128, "scheme": "alibi"}),
    (S, True, "fewer than 128", {"queries": 127, "scheme": "fire", "dropout": 0.1}),
    # dropout on weights
    (S, False, "dropout on weights", {"scheme": "alibi", "dropout": 0.1}),
    (S, False, "dropout on weights", {"mask": WINDOW, "dropout": 0.1}),
    (S, False, "dropout on weights", {"mask": document_mask(CAUSAL), "dropout": 0.1}),
    # without Triton
    (S, False, "Triton is not installed", {"scheme": "alibi", "triton": False}),
    (S, False, "Triton is not installed", {"mask": WINDOW, "triton": False}),
    (S, True, "the fused triangle", {"scheme": "rope", "triton": False}),
    # narrow heads
    (S, False, "only 15 wide", {"mask": WINDOW, "d_head": 15}),
    (F, True, "63 back", {"mask": WINDOW, "d_head": 16}),
    (S, False, "only 8 wide", {"scheme": "alibi", "d_head": 8}),
    # masks without a bias
    (F, True, "3 keys ahead", {"mask": with_window(FULL, 4)}),
    (F, True, "own document", {"mask": document_mask(FULL)}),
    (F, True, "own document", {"mask": document_mask(CAUSAL), "scheme": "yarn"}),
    (F, True, "the prefix", {"mask": prefix(8)}),
    (F, True, "the prefix", {"mask": EACH, "scheme": "sinusoidal"}),
    # biases of distance
    *((T, True, "inside the kernel", {"scheme": name}) for name in ("alibi", "t5", "kerple-log", "kerple-power")),
    *((T, True, "inside the kernel", {"scheme": "t5", "d_head": d}) for d in (16, 32, 128)),
    *((F, False, f"heads {d} wide", {"scheme": "t5", "d_head": d}) for d in (48, 96, 256)),
    *((T, True, "T5Bias", {"scheme": "t5", "mask": m}) for m in (FULL, WINDOW, BOTH_SIDES, document_mask(FULL), EACH)),
    # FIRE: inside the kernel if the query is the last token that it sees, and only then
    (T, True, "FIRE", {"scheme": "fire"}),
    (T, True, "FIRE", {"scheme": "fire", "mask": WINDOW}),
    (S, False, "FIRE where a query sees every key", {"scheme": "fire", "mask": FULL}),
    (S, False, "FIRE", {"scheme": "fire", "mask": document_mask(CAUSAL)}),
    (S, False, "FIRE", {"scheme": "fire", "mask": prefix(8)}),
    (S, False, "FIRE", {"scheme": "fire", "mask": EACH}),
    (S, False, "FIRE with heads 48 wide", {"scheme": "fire", "d_head": 48}),
]


@pytest.mark.parametrize(("kernel", "fast", "reason", "changes"), RULES)
def test_which_kernel_runs(kernel: str, fast: bool, reason: str, changes: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"device": "cuda", "queries": 512, "self_attention": True, "mask": CAUSAL, "scheme": "none"}
    situation = {**usual, **changes}
    choice = choose(Situation(**{**situation, "scheme": SCHEME[situation["scheme"]]}))
    assert (choice.kernel, choice.fast) == (kernel, fast)
    assert reason in choice.why


def test_make_plan_asks_choose_with_the_situation_it_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Situation] = []

    def observe(situation: Situation) -> Choice:
        asked.append(situation)
        return Choice("reference", "for the test")

    monkeypatch.setattr(attention_kernels, "choose", observe)
    at, scheme = torch.arange(6)[None], SCHEME["alibi"]
    assert make_plan(WINDOW, at, at, scheme, d_head=48, dropout=0.2).kernel is reference
    make_plan(FULL, at[:, :2], at)
    assert asked[0] == Situation("cpu", 6, True, WINDOW, scheme, 48, 0.2, attention_kernels.has_triton(), 6)
    assert (asked[1].queries, asked[1].keys, asked[1].self_attention, asked[1].dropout) == (2, 6, False, 0.0)
    assert isinstance(asked[1].scheme, NoPositions)
    make_plan(WINDOW, at, at, scheme, kernel="sdpa")
    assert len(asked) == 2  # `choose` is not called for a kernel given by name


def test_every_choice_is_a_kernel() -> None:
    assert {kernel for kernel, *_ in RULES} == set(KERNELS)


def test_a_slow_kernel_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    attention_kernels.warn_once.cache_clear()
    at = torch.arange(3)[None]
    with caplog.at_level(logging.INFO, logger="regard"):
        for _ in range(3):
            make_plan(CAUSAL, at, at, SCHEME["cope"])
            make_plan(CAUSAL, at, at, SCHEME["alibi"])
        make_plan(CAUSAL, at, at, SCHEME["cope"], kernel="reference")  # asked for by name
        assert len(caplog.messages) == 1
        assert "'reference'" in caplog.messages[0]
        assert "CoPE" in caplog.messages[0]
        make_plan(CAUSAL, at, at, SCHEME["shaw"])  # another reason
        assert len(caplog.messages) == 2
