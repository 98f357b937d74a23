"""Additive positions: slopes, buckets and tables worked by hand, in float64 NumPy or in whole numbers, and against T5."""

import numpy as np
import pytest
import torch
from configured import scheme as make
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import masked_scores

from regard.kernels.masks import FULL
from regard.layers.attention_kernels import make_plan
from regard.layers.positions.relative import FIRE, T5Bias, alibi_slopes, t5_bucket
from regard.layers.positions.scheme import PositionScheme

H, N = 3, 40
DISTANCES = np.arange(1 - N, N)  # k - q, as tables have them


def t5(n_heads: int, buckets: int, max_distance: int, bidirectional: bool) -> T5Bias:
    side = "encoder" if bidirectional else "decoder"
    found: T5Bias = make("t5", side, n_heads=n_heads, buckets=buckets, max_distance=max_distance)
    return found


def with_values(scheme: PositionScheme, **values: object) -> PositionScheme:
    """The scheme with these parameters."""
    with torch.no_grad():
        for name, value in values.items():
            getattr(scheme, name).copy_(torch.tensor(value))
    return scheme


def check_table(scheme: PositionScheme, expected: np.ndarray) -> None:
    """The (H, 2n-1) table, and the same numbers for a grid of pairs."""
    table = scheme.table(N).detach()
    assert table.dtype == torch.float32
    assert table.shape == expected.shape
    np.testing.assert_allclose(table.numpy(), expected, rtol=2e-6, atol=1e-6)
    places = torch.arange(N)
    grid = scheme.bias(places[:, None] + 3, places + 3).detach()  # (H, q, k)
    for q, k in ((0, 0), (0, N - 1), (N - 1, 0), (7, 20), (20, 7)):
        np.testing.assert_allclose(grid[:, q, k].numpy(), expected[:, k - q + N - 1], rtol=2e-6, atol=1e-6)


# ---- ALiBi -----------------------------------------------------------------------------------------------------------

EIGHT = [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625, 0.0078125, 0.00390625]
BETWEEN = [0.70710678, 0.35355339, 0.17677670, 0.08838835]  # every other slope of sixteen heads


@pytest.mark.parametrize(
    ("n_heads", "slopes"),
    [
        (1, [2**-8]),
        (2, [2**-4, 2**-8]),
        (3, [2**-4, 2**-8, 2**-2]),
        (8, EIGHT),
        (12, EIGHT + BETWEEN),
        (16, sorted(EIGHT + [2 ** (-h / 2) for h in range(1, 16, 2)], reverse=True)),
    ],
)
def test_the_slopes_of_alibi(n_heads: int, slopes: list[float]) -> None:
    assert alibi_slopes(n_heads).tolist() == pytest.approx(slopes)


def test_alibi_falls_in_a_straight_line_on_both_sides() -> None:
    check_table(make("alibi", n_heads=3), -np.array([[2**-4], [2**-8], [2**-2]]) * np.abs(DISTANCES))


def test_alibi_is_neither_trained_nor_saved() -> None:
    assert not list(make("alibi", n_heads=8).parameters())
    assert not make("alibi", n_heads=8).state_dict()


# ---- T5 --------------------------------------------------------------------------------------------------------------

BOTH_SIDES = {-128: 15, -64: 14, -20: 10, -8: 8, -7: 7, -1: 1, 0: 0, 1: 17, 7: 23, 8: 24, 20: 26, 64: 30, 128: 31}
ONE_SIDE = {-128: 31, -64: 26, -20: 17, -16: 16, -15: 15, -1: 1, 0: 0, 3: 0}


def exact_bucket(distance: int, buckets: int, max_distance: int, bidirectional: bool) -> int:
    """In whole numbers: bucket exact + i begins where (d / exact)^n >= (max / exact)^i, n buckets being logarithmic."""
    offset, back = 0, max(-distance, 0)
    if bidirectional:
        buckets //= 2
        offset, back = (buckets if distance > 0 else 0), abs(distance)
    exact = buckets // 2
    if back < exact:
        return offset + back
    n = buckets - exact
    reached = [i for i in range(n) if back**n >= exact ** (n - i) * max_distance**i]
    return offset + exact + max(reached)


@pytest.mark.parametrize(("bidirectional", "golden"), [(True, BOTH_SIDES), (False, ONE_SIDE)])
def test_the_worked_buckets_of_t5(bidirectional: bool, golden: dict[int, int]) -> None:
    buckets = t5_bucket(torch.tensor(list(golden)), 32, 128, bidirectional)
    assert dict(zip(golden, buckets.tolist(), strict=True)) == golden
    assert {d: exact_bucket(d, 32, 128, bidirectional) for d in golden} == golden


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (32, 100), (64, 50), (9, 50), (4, 7)])
def test_the_buckets_of_all_distances_are_transformers(buckets: int, max_distance: int, bidirectional: bool) -> None:
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    distances = torch.arange(-300, 301)
    ours = t5_bucket(distances, buckets, max_distance, bidirectional)
    theirs = t5.T5Attention._relative_position_bucket(distances, bidirectional, buckets, max_distance)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_no_distance_falls_into_its_neighbours_bucket_by_rounding(bidirectional: bool) -> None:
    """16, 32 and 64 lie exactly on the edges of buckets."""
    expected = [exact_bucket(d, 32, 128, bidirectional) for d in range(-300, 301)]
    assert t5_bucket(torch.arange(-300, 301), 32, 128, bidirectional).tolist() == expected


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_looks_its_numbers_up_by_bucket(bidirectional: bool) -> None:
    scheme = t5(H, 8, 30, bidirectional)
    assert (scheme.table(N) == 0).all()  # initialized to zero
    weight = np.random.default_rng(0).normal(size=(H, 8)).astype(np.float32)
    with_values(scheme, weight=weight)
    check_table(scheme, weight[:, [exact_bucket(d, 8, 30, bidirectional) for d in DISTANCES.tolist()]])


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_is_flat_beyond_its_largest_distance(bidirectional: bool) -> None:
    scheme = t5(H, 8, 30, bidirectional)
    torch.nn.init.normal_(scheme.weight)
    assert scheme.flat == 30
    for side in (-1, 1):
        far = scheme.bias(torch.zeros(1, dtype=torch.long), side * torch.arange(30, 2000))
        assert (far == far[:, :1]).all()


def test_t5_scores_are_not_divided_by_the_root_of_the_width() -> None:
    q, k = torch.full((1, 1, 1, 4), 2.0), torch.full((1, 1, 1, 4), 3.0)
    place = torch.zeros(1, 1, dtype=torch.long)
    for scheme, expected in ((t5(1, 32, 128, True), 24.0), (make("alibi", n_heads=1), 12.0)):
        assert masked_scores(q, k, make_plan(FULL, place, place, scheme, kernel="reference")).item() == expected


# ---- KERPLE ----------------------------------------------------------------------------------------------------------


def test_kerple_by_hand() -> None:
    log = with_values(make("kerple-log", n_heads=2), r1=[1.0, 0.5], r2=[1.0, 2.0])
    three = torch.tensor([3, -3, 0])
    assert log.bias(torch.zeros(1), three)[0].tolist() == pytest.approx([-1.386294, -1.386294, 0])  # ln 4
    assert log.bias(torch.zeros(1), three)[1].tolist() == pytest.approx([-0.972955, -0.972955, 0])  # ln(7) / 2
    power = with_values(make("kerple-power", n_heads=2), a=[2.0, 0.25], p=[0.5, 2.0])
    assert power.bias(torch.zeros(1), three)[0].tolist() == pytest.approx([-3.464102, -3.464102, 0])  # 2 sqrt 3
    assert power.bias(torch.zeros(1), three)[1].tolist() == pytest.approx([-2.25, -2.25, 0])


def test_the_tables_of_kerple() -> None:
    one, two = np.array([[1.7], [0.3], [0.02]]), np.array([[0.9], [0.05], [1.6]])
    apart = np.abs(DISTANCES).astype(np.float64)
    check_table(with_values(make("kerple-log", n_heads=H), r1=one[:, 0], r2=two[:, 0]), -one * np.log(1 + two * apart))
    check_table(with_values(make("kerple-power", n_heads=H), a=one[:, 0], p=two[:, 0]), -one * apart**two)


def test_kerples_parameters_stay_in_their_range() -> None:
    beyond = with_values(make("kerple-log", n_heads=1), r1=[-1.0], r2=[0.0])
    assert beyond.table(3)[0, -1].item() == pytest.approx(-0.01 * np.log(1 + 0.01 * 2))
    beyond = with_values(make("kerple-power", n_heads=1), a=[-1.0], p=[3.0])
    assert beyond.table(3)[0, -1].item() == pytest.approx(-0.01 * 4)
    beyond = with_values(make("kerple-power", n_heads=1), a=[1.0], p=[-2.0])
    assert beyond.table(3)[0, -1].item() == pytest.approx(-(2**0.01))
    beyond.table(3).sum().backward()
    assert beyond.p.grad is not None
    assert beyond.p.grad.item() != 0  # the straight-through gradient can bring it back


def test_kerple_starts_as_its_paper_says() -> None:
    torch.manual_seed(0)
    log, power = make("kerple-log", n_heads=20000), make("kerple-power", n_heads=20000)
    for values, top in ((log.r1, 2), (log.r2, 1), (power.a, 1), (power.p, 2)):  # uniform from 0
        assert 0 <= values.min().item() < 0.001
        assert 0.999 * top < values.max().item() <= top
        assert values.mean().item() == pytest.approx(top / 2, rel=0.02)


@pytest.mark.parametrize("kind", ["kerple-log", "kerple-power"])
def test_kerples_gradients_are_those_of_finite_differences(kind: str) -> None:
    torch.manual_seed(0)
    scheme, distances = make(kind, n_heads=H).double(), torch.arange(-4, 5)
    with torch.no_grad():
        for p in scheme.parameters():
            p.mul_(0.8).add_(0.1)  # clear of the edges of its range
    assert torch.autograd.gradcheck(lambda *_: scheme.bias_at(distances), tuple(scheme.parameters()))


# ---- FIRE ------------------------------------------------------------------------------------------------------------


def numpy_fire(scheme: FIRE, q: np.ndarray, k: np.ndarray, c: float, threshold: float) -> np.ndarray:
    """f(ln(c |q - k| + 1) / ln(c max(L, the later) + 1)), (H, *shape)"""
    w1, b1, w2, b2 = (p.detach().double().numpy() for p in (*scheme.inner.parameters(), *scheme.outer.parameters()))
    share = np.log(c * np.abs(q - k) + 1) / np.log(c * np.maximum(threshold, np.maximum(q, k)) + 1)
    hidden = np.maximum(share[..., None] * w1[:, 0] + b1, 0)
    return np.moveaxis(hidden @ w2.T + b2, -1, 0)


def test_the_worked_arguments_of_fire() -> None:
    scheme = make("fire", n_heads=H, width=32, threshold=512.0)  # c = 0.1, L = 512
    q, k = torch.tensor([10, 1000, 300, 600]), torch.tensor([5, 500, 300, 0])
    assert scheme.relative_distance(q, k).tolist() == pytest.approx([0.1025175, 0.8519443, 0, 1], abs=1e-6)
    assert scheme.relative_distance(k, q).tolist() == pytest.approx(
        [0.1025175, 0.8519443, 0, 1], abs=1e-6
    )  # an encoder's


@pytest.mark.parametrize(("c", "stretch"), [(0.1, 1.0), (-0.7, 1.0), (0.1, -2.5)])
def test_fire_is_its_network_of_the_relative_distance(c: float, stretch: float) -> None:
    torch.manual_seed(0)
    scheme = make("fire", n_heads=H, width=32, threshold=16.0)
    with_values(scheme, c=c, stretch=stretch)
    places = np.arange(60)
    q, k = places[:, None], places[None]
    expected = numpy_fire(scheme, q, k, abs(c), abs(16.0 * stretch))
    result = scheme.bias(torch.tensor(q), torch.tensor(k)).detach()
    assert result.shape == (H, 60, 60)
    np.testing.assert_allclose(result.numpy(), expected, atol=1e-5)


def increasing(threshold: float) -> FIRE:
    """A FIRE whose bias grows with its argument, whatever the head."""
    scheme = make("fire", n_heads=H, width=4, threshold=threshold)
    with torch.no_grad():
        for p in (*scheme.inner.parameters(), *scheme.outer.parameters()):
            p.uniform_(0.5, 1.5)
    return scheme


@given(q=st.integers(0, 64), k=st.integers(0, 64), shift=st.integers(1, 64))
def test_below_the_threshold_fire_knows_distances_alone(q: int, k: int, shift: int) -> None:
    scheme = increasing(128.0)
    at, of = torch.tensor([q]), torch.tensor([k])
    torch.testing.assert_close(scheme.bias(at + shift, of + shift), scheme.bias(at, of), atol=0, rtol=0)


@given(q=st.integers(0, 200), back=st.integers(1, 100), shift=st.integers(1, 100))
def test_beyond_the_threshold_fire_measures_against_the_query(q: int, back: int, shift: int) -> None:
    scheme = increasing(16.0)
    at = torch.tensor([max(q, back)])
    here, later = scheme.bias(at, at - back), scheme.bias(at + shift, at + shift - back)
    assert bool((later < here).all()) == (max(q, back) + shift > 16)


# ---- all of them -----------------------------------------------------------------------------------------------------


def stirred_schemes(threshold: float = 512.0) -> list[PositionScheme]:
    torch.manual_seed(0)
    both = [t5(H, 32, 128, bidirectional) for bidirectional in (True, False)]
    for scheme in both:
        torch.nn.init.normal_(scheme.weight)
    return [
        make("alibi", n_heads=H),
        *both,
        make("kerple-log", n_heads=H),
        make("kerple-power", n_heads=H),
        make("fire", n_heads=H, width=8, threshold=threshold),
    ]


@settings(max_examples=40)
@given(
    scheme=st.sampled_from(stirred_schemes()),
    q_places=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    k_places=st.lists(st.integers(0, 200), min_size=1, max_size=5),
    shift=st.integers(1, 300),
)
def test_shifting_both_positions_changes_no_score(
    scheme: PositionScheme, q_places: list[int], k_places: list[int], shift: int
) -> None:
    q, k = torch.randn(1, H, len(q_places), 4), torch.randn(1, H, len(k_places), 4)
    at, of = torch.tensor([q_places]), torch.tensor([k_places])
    here, there = (masked_scores(q, k, make_plan(FULL, at + s, of + s, scheme, kernel="reference")) for s in (0, shift))
    assert torch.equal(here, there)
    nothing = masked_scores(q, k, make_plan(FULL, at, of, kernel="reference")) * (scheme.scale or 0.5) / 0.5
    bias = scheme.bias(at[0, :, None], of[0, None, :])[None]  # (1, H, T, S)
    torch.testing.assert_close(here, nothing + bias)  # after the scaling, not before


@pytest.mark.parametrize("scheme", stirred_schemes(), ids=lambda s: type(s).__name__)
def test_biases_stay_fp32_under_autocast(scheme: PositionScheme) -> None:
    """bf16 has whole numbers up to 256 only: far distances would all look the same."""
    q, k = torch.tensor([1000, 0]), torch.tensor([[1], [998], [1001]])
    expected = scheme.bias(q, k)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        bias = scheme.bias(q, k)
        table = scheme.table(5) if scheme.toeplitz else bias
        plan = make_plan(FULL, q[None], k.T, scheme, kernel="reference")
        scores = masked_scores(torch.randn(1, H, 2, 4), torch.randn(1, H, 3, 4), plan)
    assert bias.dtype == table.dtype == scores.dtype == torch.float32
    assert torch.equal(bias, expected)


def test_all_but_fire_are_tables() -> None:
    assert [scheme.toeplitz for scheme in stirred_schemes()] == [True] * 5 + [False]
    assert all(scheme.relative for scheme in stirred_schemes())
