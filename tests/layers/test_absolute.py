"""Positions added to embeddings: worked values, and what sinusoids are chosen for: bounded, unique, a step is a rotation."""

import numpy as np
import pytest
import torch
from configured import scheme as make
from hypothesis import given
from hypothesis import strategies as st

from regard.layers.positions.absolute import sinusoids
from regard.layers.positions.scheme import NoPositions, PositionScheme

PLACES = torch.tensor([[0, 1, 11], [7, 3, 0]])  # a cache's offset, any order


def test_the_worked_table_of_width_five() -> None:
    dimensions = [  # one row a dimension, one column a position 0..4; base 10,000
        [0, 0.841, 0.909, 0.141, -0.757],
        [1, 0.540, -0.416, -0.990, -0.654],
        [0, 0.025, 0.050, 0.075, 0.100],
        [1, 1, 0.999, 0.997, 0.995],
        [0, 0.001, 0.001, 0.002, 0.003],
    ]
    table = sinusoids(5, 5, 10000.0).T
    assert [[round(x, 3) + 0.0 for x in row] for row in table.tolist()] == dimensions


def test_base_100000_by_hand() -> None:
    # Width 4: the second frequency is 1 / 100000^(2/4) = 1 / 316.22777.
    table = sinusoids(101, 4, 100000.0)
    torch.testing.assert_close(table[0], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(table[1], torch.tensor([0.841471, 0.540302, 0.00316227, 0.999995]), atol=1e-6, rtol=0)
    torch.testing.assert_close(table[100], torch.tensor([-0.506366, 0.862319, 0.310984, 0.950415]), atol=1e-6, rtol=0)


def rotation(c: int, width: int, base: float) -> np.ndarray:
    """Return M_c, which rotates each pair (sin, cos) by c times its frequency."""
    matrix = np.zeros((width, width))
    for i in range(0, width, 2):
        turn = c / base ** (i / width)
        matrix[i : i + 2, i : i + 2] = [[np.cos(turn), np.sin(turn)], [-np.sin(turn), np.cos(turn)]]
    return matrix


@given(
    t=st.integers(0, 400),
    c=st.integers(-200, 200),
    width=st.integers(1, 24).map(lambda half: 2 * half),
    base=st.sampled_from([100.0, 10000.0, 100000.0]),
)
def test_a_step_of_c_is_one_rotation_whatever_the_position(t: int, c: int, width: int, base: float) -> None:
    t = max(t, -c)
    table = sinusoids(t + max(c, 0) + 1, width, base).double().numpy()
    np.testing.assert_allclose(table[t + c], rotation(c, width, base) @ table[t], atol=5e-7)


@given(width=st.integers(2, 33), base=st.sampled_from([10000.0, 100000.0]))
def test_every_position_is_bounded_and_unique(width: int, base: float) -> None:
    table = sinusoids(512, width, base)
    assert table.shape == (512, width)
    assert table.abs().max() <= 1
    assert len(table.unique(dim=0)) == 512


@given(width=st.integers(1, 20))
def test_odd_and_even_widths_follow_the_formula(width: int) -> None:
    expected = [
        [(np.cos if d % 2 else np.sin)(p / 10000.0 ** ((d - d % 2) / width)) for d in range(width)] for p in range(7)
    ]
    np.testing.assert_allclose(sinusoids(7, width, 10000.0).numpy(), expected, atol=1e-7)


@given(base=st.floats(2.0, 1e6), p=st.integers(0, 300))
def test_any_base_follows_the_formula(base: float, p: int) -> None:
    expected = [f(p / base ** (even / 6)) for even in (0, 2, 4) for f in (np.sin, np.cos)]
    np.testing.assert_allclose(sinusoids(301, 6, base)[p].numpy(), expected, atol=1e-6)


def test_embed_adds_the_row_of_each_position() -> None:
    scheme = make("sinusoidal", d_model=6, max_len=12, base=100.0)
    x = torch.randn(2, 3, 6)
    even = np.array([0, 0, 2, 2, 4, 4])
    angle = PLACES[..., None].numpy() / 100.0 ** (even / 6)
    expected = np.where(np.arange(6) % 2, np.cos(angle), np.sin(angle))
    np.testing.assert_allclose((scheme.embed(x, PLACES) - x).numpy(), expected, atol=1e-6)


def test_the_table_is_neither_trained_nor_saved() -> None:
    scheme = make("sinusoidal", d_model=6, max_len=12)
    assert not list(scheme.parameters())
    assert not scheme.state_dict()


def test_linear_is_a_straight_line_that_grows() -> None:
    scheme = make("linear", d_model=2, max_len=10)
    with torch.no_grad():
        scheme.a.copy_(torch.tensor([0.5, -2.0]))
        scheme.b.copy_(torch.tensor([1.0, 3.0]))
    x = torch.ones(1, 3, 2)
    added = scheme.embed(x, torch.tensor([[0, 4, 1000]])) - x  # it is not limited to max_len
    assert added.tolist() == [[[1.0, 3.0], [3.0, -5.0], [501.0, -1997.0]]]


def test_a_fresh_line_reaches_unit_size_at_the_longest_input() -> None:
    torch.manual_seed(0)
    added = make("linear", d_model=4096, max_len=50).embed(torch.zeros(1, 2, 4096), torch.tensor([[0, 50]]))[0]
    assert (added[0] == 0).all()
    assert added[1].std().item() == pytest.approx(1, rel=0.05)


def test_learned_is_a_look_up() -> None:
    scheme = make("learned", d_model=4, max_len=12)
    x = torch.randn(2, 3, 4)
    result = scheme.embed(x, PLACES)
    for row, column in np.ndindex(2, 3):
        assert torch.equal(result[row, column], x[row, column] + scheme.encoding[PLACES[row, column]])
    result.sum().backward()
    assert scheme.encoding.grad is not None
    assert scheme.encoding.grad[:, 0].tolist() == [2, 1, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]  # how often each row was read


SCHEMES = [
    NoPositions(),
    make("linear", d_model=4, max_len=8),
    make("sinusoidal", d_model=4, max_len=8),
    make("learned", d_model=4, max_len=8),
]


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_padding_is_harmless_and_the_precision_stays(scheme: PositionScheme) -> None:
    x = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
    result = scheme.embed(x, torch.tensor([[3, -1]]))
    assert result.dtype == torch.bfloat16
    assert result.isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES, ids=lambda s: type(s).__name__)
def test_what_is_added_to_embeddings_leaves_attention_alone(scheme: PositionScheme) -> None:
    assert scheme.rotation(PLACES) is None
    assert not scheme.relative
    assert not scheme.contextual
    assert scheme.scale is None


def test_no_positions_add_nothing() -> None:
    x = torch.randn(1, 2, 8)
    assert NoPositions().embed(x, torch.tensor([[0, 1]])) is x
