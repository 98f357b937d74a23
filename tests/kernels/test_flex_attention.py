"""The blocks that FlexAttention visits, against the dense mask split into blocks; the kernel itself needs a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import Case, cases
from torch import Tensor

from regard.kernels import flex_attention
from regard.kernels.masks import dense_mask, key_intervals

OWN = {name: case for name, case in cases(23).items() if case.k is None}


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "BLOCK", 4)


def in_blocks(case: Case) -> Tensor:
    """Return the dense mask in blocks, (B, blocks of queries, blocks of keys, 4, 4); padding has no True."""
    index = torch.arange(case.q.shape[1])
    seen = dense_mask(case.mask, case.q, case.q, index)[:, 0] & (case.q >= 0)[:, :, None]
    short = -seen.shape[1] % 4
    seen = torch.nn.functional.pad(seen.expand(-1, len(index), -1), (0, short, 0, short))
    return seen.unflatten(2, (-1, 4)).unflatten(1, (-1, 4)).transpose(2, 3)


@pytest.mark.parametrize("case", OWN.values(), ids=OWN)
def test_no_block_that_somebody_sees_is_left_out_and_whole_ones_are_seen_by_all(case: Case) -> None:
    some, every = (x[:, 0] for x in flex_attention.block_spans(*key_intervals(case.mask, case.q)))
    seen = in_blocks(case)
    assert (some >= seen.any((-1, -2))).all()
    inside = seen[:, :-1]  # the last block of queries reaches over the end
    assert (every[:, :-1] <= inside.all((-1, -2))).all()
    assert every.any() or case.mask.packed or case.mask.back is not None  # few blocks lie wholly in a window


@pytest.mark.parametrize("name", ["causal", "causal window", "bidirectional window"])
def test_what_a_mask_hides_is_skipped(name: str) -> None:
    case = OWN[name]
    some, _ = flex_attention.block_spans(*key_intervals(case.mask, case.q[:1]))
    assert torch.equal(some[0, 0], in_blocks(case)[0].any((-1, -2)))


def test_blocks_are_listed_before_those_that_are_not_visited() -> None:
    count, order = flex_attention.count_and_order(torch.tensor([[False, True, False, True]]))
    assert (count.tolist(), order.tolist()) == ([2], [[1, 3, 0, 2]])
