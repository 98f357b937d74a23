"""Shaw and CoPE, by hand and against slow float64 loops over every query and key; disentangled attention by hand."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from configured import scheme as scheme_of
from kernel_cases import masked_scores
from torch import Tensor

from regard.kernels.masks import CAUSAL, FULL, Mask, with_window
from regard.layers.attention_kernels import attention_weights, make_plan, reference
from regard.layers.positions.contextual import Contextual, CoPE, Distances, Shaw, log_buckets

B, H, T, D = 2, 3, 7, 4
PLACES = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, -1, -1, -1]])  # the second row is padded


def sees(mask: Mask, q: int, k: int) -> bool:
    """Return the mask without the rows of padding, whose results do not matter."""
    back, ahead = T if mask.back is None else mask.back, T if mask.ahead is None else mask.ahead
    return min(q, k) >= 0 and q - back <= k <= q + ahead


def softmax(scores: dict[int, float]) -> dict[int, float]:
    top = max(scores.values())
    powers = {j: math.exp(s - top) for j, s in scores.items()}
    return {j: power / sum(powers.values()) for j, power in powers.items()}


def slow_shaw(scheme: Shaw, q: np.ndarray, k: np.ndarray, v: np.ndarray, places: list[int], mask: Mask) -> np.ndarray:
    """One head of one row, (T, D)."""
    on_keys, on_values = (p.detach().double().numpy() for p in (scheme.keys, scheme.added))
    result = np.zeros_like(v)
    for i, here in enumerate(places):
        seen = [j for j, there in enumerate(places) if sees(mask, here, there)]
        which = {j: min(max(places[j] - here, -scheme.clip), scheme.clip) + scheme.clip for j in seen}
        scores = {j: float(q[i] @ (k[j] + on_keys[which[j]])) / math.sqrt(D) for j in seen}
        for j, a in softmax(scores).items() if seen else ():
            result[i] += a * (v[j] + on_values[which[j]])
    return result


def slow_cope(scheme: CoPE, q: np.ndarray, k: np.ndarray, v: np.ndarray, places: list[int], mask: Mask) -> np.ndarray:
    vectors = scheme.vectors.detach().double().numpy()
    result = np.zeros_like(v)
    for i, here in enumerate(places):
        seen = [j for j, there in enumerate(places) if sees(mask, here, there)]
        gate = {j: 1 / (1 + math.exp(-float(q[i] @ k[j]) / math.sqrt(D))) for j in seen}
        scores = {}
        for j in seen:
            counted = min(sum(gate[t] for t in seen if t >= j), len(vectors) - 1)
            below, part = math.floor(counted), counted - math.floor(counted)
            e = vectors[below] * (1 - part) + (vectors[below + 1] * part if part else 0)
            scores[j] = float(q[i] @ (k[j] + e)) / math.sqrt(D)
        for j, a in softmax(scores).items() if seen else ():
            result[i] += a * v[j]
    return result


SLOW: dict[type[Contextual], Callable[..., np.ndarray]] = {Shaw: slow_shaw, CoPE: slow_cope}


def random_case(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    q, k, v = torch.randn(3, B, H, T, D)
    return q, k, v


def stirred(scheme: Contextual) -> Contextual:
    torch.manual_seed(1)
    with torch.no_grad():
        for p in scheme.parameters():
            p.normal_()
    return scheme


@pytest.mark.parametrize(
    ("scheme", "mask"),
    [
        (scheme_of("shaw", d_head=D, clip=2), FULL),
        (scheme_of("shaw", d_head=D, clip=2), CAUSAL),
        (scheme_of("shaw", d_head=D, clip=16), FULL),  # wider than the sentence
        (scheme_of("shaw", d_head=D, clip=1), with_window(FULL, 3)),
        (scheme_of("cope", d_head=D, **{"cope.positions": T + 1}), CAUSAL),
        (scheme_of("cope", d_head=D, **{"cope.positions": 3}), CAUSAL),  # counts beyond 2 share a position
        (scheme_of("cope", d_head=D, **{"cope.positions": T}), with_window(CAUSAL, 3)),
    ],
    ids=lambda x: type(x).__name__ if isinstance(x, Contextual) else str(x),
)
def test_they_are_their_formula_in_a_slow_loop(scheme: Contextual, mask: Mask) -> None:
    stirred(scheme)
    q, k, v = random_case()
    result = make_plan(mask, PLACES, PLACES, scheme)(q, k, v, 0.0).detach()
    for b, h in np.ndindex(B, H):
        one_head = (x[b, h].double().numpy() for x in (q, k, v))
        expected = SLOW[type(scheme)](scheme, *one_head, PLACES[b].tolist(), mask)
        real = PLACES[b].numpy() >= 0
        np.testing.assert_allclose(result[b, h].numpy()[real], expected[real], atol=5e-6)


@pytest.mark.parametrize(
    "scheme",
    [scheme_of("shaw", d_head=D, clip=2), scheme_of("cope", d_head=D, **{"cope.positions": T})],
    ids=["Shaw", "CoPE"],
)
def test_the_last_query_by_itself_over_a_cache_says_the_same(scheme: Contextual) -> None:
    stirred(scheme)
    q, k, v = random_case()
    places = torch.arange(T).expand(B, -1)
    whole = make_plan(CAUSAL, places, places, scheme)(q, k, v, 0.0)
    step = make_plan(CAUSAL, places[:, -1:], places, scheme)(q[:, :, -1:], k, v, 0.0)
    torch.testing.assert_close(step, whole[:, :, -1:])


# ---- Shaw ------------------------------------------------------------------------------------------------------------


def test_shaws_vectors_by_hand() -> None:
    # Width 1, queries of 1, keys and values of 0: scores are aK[j-i], results are weighted aV[j-i].
    scheme = scheme_of("shaw", d_head=1, clip=1)
    with torch.no_grad():
        scheme.keys.copy_(torch.tensor([[10.0], [20.0], [30.0]]))
        scheme.added.copy_(torch.tensor([[1.0], [2.0], [4.0]]))
    places, nothing = torch.arange(4)[None], torch.zeros(1, 1, 4, 1)
    plan = make_plan(FULL, places, places, scheme)
    scores = masked_scores(nothing + 1, nothing, plan)[0, 0]
    assert scores.tolist() == [[20, 30, 30, 30], [10, 20, 30, 30], [10, 10, 20, 30], [10, 10, 10, 20]]
    equal = plan(nothing, nothing, nothing, 0.0)[0, 0, :, 0]  # queries of 0: a quarter each
    assert equal.tolist() == [(2 + 4 + 4 + 4) / 4, (1 + 2 + 4 + 4) / 4, (1 + 1 + 2 + 4) / 4, (1 + 1 + 1 + 2) / 4]


def test_shaw_without_vectors_is_plain_attention() -> None:
    scheme = scheme_of("shaw", d_head=D, clip=2)
    torch.nn.init.zeros_(scheme.keys)
    torch.nn.init.zeros_(scheme.added)
    q, k, v = random_case()
    plain = make_plan(FULL, PLACES, PLACES, kernel="reference")(q, k, v, 0.0)
    assert torch.equal(make_plan(FULL, PLACES, PLACES, scheme)(q, k, v, 0.0), plain)


# ---- CoPE ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n_positions", "last_row"), [(9, [5, 4, 3, 2, 1]), (3, [4, 4, 3, 2, 1])])
def test_copes_counting_by_hand(n_positions: int, last_row: list[float]) -> None:
    # Width 1, keys of 0: every gate is 1/2, so key j stands (i - j + 1) / 2 before query i. With e[p] = p and queries
    # of 2 the score is 2 * (i - j + 1) / 2, at most 2 * 2 where there are but three positions.
    scheme = scheme_of("cope", d_head=1, **{"cope.positions": n_positions})
    with torch.no_grad():
        scheme.vectors.copy_(torch.arange(n_positions)[:, None])
    places, nothing = torch.arange(5)[None], torch.zeros(1, 1, 5, 1)
    scores = masked_scores(nothing + 2, nothing, make_plan(CAUSAL, places, places, scheme))[0, 0].tolist()
    rows: list[list[float]] = [[1], [2, 1], [3, 2, 1], [4, 3, 2, 1], last_row]
    assert scores == [row + [-math.inf] * (5 - len(row)) for row in rows]


@pytest.mark.parametrize("mask", [CAUSAL, with_window(CAUSAL, 3)], ids=str)
def test_a_fresh_cope_is_no_position_at_all(mask: Mask) -> None:
    q, k, v = random_case()
    cope, none = (
        make_plan(mask, PLACES, PLACES, s, kernel="reference")
        for s in (scheme_of("cope", d_head=D, **{"cope.positions": 5}), None)
    )
    assert torch.equal(attention_weights(q, k, cope), attention_weights(q, k, none))
    assert torch.equal(cope(q, k, v, 0.0), none(q, k, v, 0.0))


def test_cope_counts_nothing_that_the_query_cannot_see() -> None:
    scheme, (q, k, v) = stirred(scheme_of("cope", d_head=D, **{"cope.positions": T})), random_case()
    plan = make_plan(CAUSAL, PLACES, PLACES, scheme)
    before = plan(q, k, v, 0.0)
    k, v = k.clone(), v.clone()
    k[:, :, 3:], v[:, :, 3:] = 9.0, 9.0
    assert torch.equal(plan(q, k, v, 0.0)[:, :, :3], before[:, :, :3])
    assert not torch.allclose(plan(q, k, v, 0.0)[:, :, 3:4], before[:, :, 3:4])


# ---- disentangled ----------------------------------------------------------------------------------------------------


def test_disentangled_scores_by_hand() -> None:
    # Width 1; the distances i - j = -2, -1, 0, 1 have rows 1, 2, 3, 4 of a table, a 2 shares the last. Q = 10 P, K = P.
    scheme = scheme_of("disentangled", "encoder", d_model=1, d_head=1, n_heads=1, n_kv_heads=1, reach=2, buckets=0)
    assert scheme.projection is not None
    with torch.no_grad():
        scheme.distances.table.copy_(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))
        scheme.projection.weight.copy_(torch.tensor([[10.0], [1.0]]))
    places, nothing = torch.arange(3)[None], torch.zeros(1, 1, 3, 1)
    plan, rows = make_plan(FULL, places, places, scheme), torch.tensor([[3.0, 2, 1], [4, 3, 2], [4, 4, 3]])
    for q, k, expected in ((1, 0, rows), (0, 1, 10 * rows), (2, 3, 2 * 3 + 2 * rows + 3 * 10 * rows)):
        scores = masked_scores(nothing + q, nothing + k, plan)[0, 0]
        torch.testing.assert_close(scores, expected / math.sqrt(3))


def test_buckets_by_hand() -> None:
    # 8 buckets up to 16: 4 near ones, then 4 + ceil(3 log(d / 4) / log(15 / 4)); 15 is the last of them.
    expected = [0, 1, 2, 3, 4, 5, 5, 6, 6, 6, 7, 7, 7, 7, 7, 7, 8]
    assert log_buckets(torch.arange(17), 8, 16).tolist() == expected
    assert log_buckets(-torch.arange(17), 8, 16).tolist() == [-b for b in expected]


def test_vectors_in_buckets_are_normalised_and_others_are_not() -> None:
    each, bucketed = Distances(D, 5, 0, 1e-12), Distances(D, 16, 8, 1e-12)
    each.init_weights()
    bucketed.init_weights()
    assert each().std(-1).max() < 0.1
    torch.testing.assert_close(bucketed().std(-1, correction=0), torch.ones(16))


# ---- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "scheme",
    [
        scheme_of("shaw", d_head=D, clip=2),
        scheme_of("cope", d_head=D, **{"cope.positions": T}),
        scheme_of("disentangled", "encoder", d_model=H * D, d_head=D, n_heads=H, n_kv_heads=H, reach=3, buckets=0),
    ],
    ids=lambda scheme: type(scheme).__name__,
)
def test_they_run_on_the_reference_kernel_with_fp32_scores(scheme: Contextual) -> None:
    stirred(scheme)
    plan = make_plan(CAUSAL, PLACES, PLACES, scheme)
    assert plan.kernel is reference
    q, k, v = (x.bfloat16() for x in random_case())
    exact = plan(q.float(), k.float(), v.float(), 0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert masked_scores(q, k, plan).dtype == torch.float32
        result = plan(q, k, v, 0.0)
    assert result.dtype == torch.bfloat16
    torch.testing.assert_close(result.float(), exact, atol=0.1, rtol=0)
