"""Masks against double loops over positions."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.layers.masks import NOWHERE, Causal, Full, dense, positions_of

B = 2
positions = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(st.integers(-1, 8), min_size=n, max_size=n), min_size=B, max_size=B)
)


@given(ids=positions.map(lambda rows: [[abs(x) for x in row] for row in rows]), pad=st.integers(0, 3))
def test_positions_count_along_the_row_and_skip_padding(ids: list[list[int]], pad: int) -> None:
    expected = [[NOWHERE if token == pad else i for i, token in enumerate(row)] for row in ids]
    assert positions_of(torch.tensor(ids), pad).tolist() == expected


@given(q=positions, k=positions)
def test_full_lets_everyone_see_every_real_key(q: list[list[int]], k: list[list[int]]) -> None:
    mask = dense(Full(), torch.tensor(q), torch.tensor(k))
    allowed = mask.expand(B, 1, len(q[0]), len(k[0]))
    for b in range(B):
        for t in range(len(q[0])):
            for s in range(len(k[0])):
                assert allowed[b, 0, t, s] == (k[b][s] != NOWHERE)


@given(q=positions, k=positions)
def test_causal_hides_what_comes_later_and_padding(q: list[list[int]], k: list[list[int]]) -> None:
    mask = dense(Causal(), torch.tensor(q), torch.tensor(k))
    assert mask.shape == (B, 1, len(q[0]), len(k[0]))
    for b in range(B):
        for t in range(len(q[0])):
            for s in range(len(k[0])):
                assert mask[b, 0, t, s] == (k[b][s] in range(q[b][t] + 1))
