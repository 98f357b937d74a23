"""Positions: worked values, and what sinusoids are chosen for: bounded, unique, and a step is a rotation."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.positions import NoPositions, Sinusoidal, make_positions, sinusoids


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
    # Width 4: the second hand of the clock turns by 1 / 100000^(2/4) = 1 / 316.22777 a position.
    table = sinusoids(101, 4, 100000.0)
    torch.testing.assert_close(table[0], torch.tensor([0.0, 1.0, 0.0, 1.0]))
    torch.testing.assert_close(table[1], torch.tensor([0.841471, 0.540302, 0.00316227, 0.999995]), atol=1e-6, rtol=0)
    torch.testing.assert_close(table[100], torch.tensor([-0.506366, 0.862319, 0.310984, 0.950415]), atol=1e-6, rtol=0)


def rotation(c: int, width: int, base: float) -> np.ndarray:
    """M_c: each pair (sin, cos) turned by c times its own frequency."""
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


def test_embed_adds_the_row_of_each_position() -> None:
    scheme = Sinusoidal(6, max_len=12, base=10000.0)
    x = torch.randn(2, 3, 6)
    positions = torch.tensor([[0, 1, 11], [7, 3, -1]])  # a cache's offset, any order, padding
    added = scheme.embed(x, positions) - x
    table = sinusoids(12, 6, 10000.0)
    for row in range(2):
        for column in range(3):
            if (p := positions[row, column].item()) >= 0:
                torch.testing.assert_close(added[row, column], table[p], atol=1e-6, rtol=0)


def test_the_table_is_neither_trained_nor_saved() -> None:
    scheme = Sinusoidal(6, max_len=12, base=10000.0)
    assert not list(scheme.parameters())
    assert not scheme.state_dict()


def test_embedding_keeps_the_precision_of_its_input() -> None:
    scheme = Sinusoidal(4, max_len=8, base=10000.0)
    assert scheme.embed(torch.zeros(1, 1, 4, dtype=torch.bfloat16), torch.zeros(1, 1).long()).dtype == torch.bfloat16


def test_schemes_by_name() -> None:
    config = ModelConfig(d_model=8, max_len=20, position_base=100000.0)
    chosen = make_positions(config)
    assert isinstance(chosen, Sinusoidal)
    torch.testing.assert_close(chosen.encoding, sinusoids(20, 8, 100000.0))
    nothing = make_positions(ModelConfig(positions="none"))
    x = torch.randn(1, 2, 8)
    assert isinstance(nothing, NoPositions)
    assert nothing.embed(x, torch.tensor([[0, 1]])) is x
    with pytest.raises(RegardError, match="unknown position scheme 'clock'"):
        make_positions(ModelConfig(positions="clock"))
