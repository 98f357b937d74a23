"""Masks against double loops over positions (`formula.visible`)."""

from typing import Any

import pytest
import torch
from formula import packed, ragged, visible
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.kernels.masks import (
    CAUSAL,
    FULL,
    PAD_POSITION,
    Mask,
    dense_mask,
    document_mask,
    key_intervals,
    positions_of,
    prefix,
    with_window,
)

B = 2
scattered = st.integers(1, 6).flatmap(  # in any order, with gaps, doubles and padding: what a cache may hold
    lambda n: st.lists(st.lists(st.integers(-1, 8), min_size=n, max_size=n), min_size=B, max_size=B)
)
lengths = st.lists(st.integers(0, 7), min_size=B, max_size=B).filter(any)
in_documents = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=4), min_size=B, max_size=B)


@st.composite
def masks(draw: st.DrawFn) -> tuple[Mask, dict[str, Any]]:
    """Draw a mask, and the arguments of `visible` for the same mask."""
    kind, width = draw(st.sampled_from(["full", "causal", "prefix", "prefixes"])), draw(st.integers(0, 5))
    if kind == "prefix":
        return prefix(width), {"ahead": 0, "prefix": width}
    if kind == "prefixes":
        each = draw(st.lists(st.integers(0, 9), min_size=B, max_size=B))
        return prefix(torch.tensor(each)[:, None]), {"ahead": 0, "prefix": each}
    ahead = {"full": width - 1, "causal": 0}[kind] if width else {"full": None, "causal": 0}[kind]
    return with_window({"full": FULL, "causal": CAUSAL}[kind], width), {
        "back": width - 1 if width else None,
        "ahead": ahead,
    }


def real_rows(mask: Tensor, positions: Tensor, keys: Tensor) -> Tensor:
    """Return a dense mask (B, T, S) with False for padded queries."""
    full = mask.expand(B, 1, positions.shape[1], keys.shape[1])[:, 0]
    return full & (positions > PAD_POSITION)[:, :, None]


@given(ids=scattered)
def test_positions_count_along_the_row_and_skip_padding(ids: list[list[int]]) -> None:
    expected = [[PAD_POSITION if token == -1 else i for i, token in enumerate(row)] for row in ids]
    assert positions_of(torch.tensor(ids)).tolist() == expected


@given(q=scattered, k=scattered)
def test_full_lets_everyone_see_every_real_key(q: list[list[int]], k: list[list[int]]) -> None:
    mask = dense_mask(FULL, torch.tensor(q), torch.tensor(k))
    allowed = mask.expand(B, 1, len(q[0]), len(k[0]))
    for b in range(B):
        for t in range(len(q[0])):
            for s in range(len(k[0])):
                assert allowed[b, 0, t, s] == (k[b][s] != PAD_POSITION)


@given(q=scattered, k=scattered)
def test_causal_hides_what_comes_later_and_padding(q: list[list[int]], k: list[list[int]]) -> None:
    mask = dense_mask(CAUSAL, torch.tensor(q), torch.tensor(k))
    assert mask.shape == (B, 1, len(q[0]), len(k[0]))
    for b in range(B):
        for t in range(len(q[0])):
            for s in range(len(k[0])):
                assert mask[b, 0, t, s] == (k[b][s] in range(q[b][t] + 1))


@given(mask=masks(), q=scattered, k=scattered)
def test_every_mask_over_any_keys(mask: tuple[Mask, dict[str, Any]], q: list[list[int]], k: list[list[int]]) -> None:
    """Queries over a cache, with keys in any order and some slots empty."""
    positions, keys = torch.tensor(q), torch.tensor(k)
    assert torch.equal(real_rows(dense_mask(mask[0], positions, keys), positions, keys), visible(q, k, **mask[1]))


def assert_spans(mask: Mask, positions: Tensor, expected: Tensor) -> None:
    """Check the dense mask and the intervals of self-attention against the expected mask."""
    index = torch.arange(positions.shape[1])
    assert torch.equal(real_rows(dense_mask(mask, positions, positions, index), positions, positions), expected)
    first, last = key_intervals(mask, positions)
    assert first.dtype == last.dtype == torch.int32
    assert first.shape == last.shape == positions.shape
    inside = (first[:, :, None] <= index) & (index <= last[:, :, None])  # (B, T, S); empty on padding
    assert torch.equal(inside, expected)


@given(mask=masks(), n=lengths, more=st.integers(0, 3))
def test_own_tokens_as_intervals(mask: tuple[Mask, dict[str, Any]], n: list[int], more: int) -> None:
    positions = ragged(*n, width=max(n) + more)
    at = positions.tolist()
    assert_spans(mask[0], positions, visible(at, at, **mask[1]))


@given(mask=masks(), rows=in_documents)
def test_documents_of_a_packed_row_do_not_see_each_other(
    mask: tuple[Mask, dict[str, Any]], rows: list[list[int]]
) -> None:
    positions = packed(*rows)
    at = positions.tolist()
    expected = visible(at, at, **mask[1], documents=True)
    assert_spans(document_mask(mask[0]), positions, expected)
    for b, row in enumerate(rows):  # and each is what it would be alone
        ends = torch.tensor(row).cumsum(0).tolist()
        for start, end in zip([0, *ends], ends, strict=False):
            assert not expected[b, start:end, :start].any()
            assert not expected[b, start:end, end:].any()


def test_packed_rows_cannot_be_read_through_a_cache() -> None:
    with pytest.raises(AssertionError, match="cache"):
        dense_mask(document_mask(CAUSAL), torch.tensor([[1]]), torch.tensor([[0, 1]]))


# ---- by hand ---------------------------------------------------------------------------------------------------------


def drawn(mask: Mask, positions: Tensor) -> list[str]:
    """Return the mask of the first row as text, with an x where the query sees the key."""
    allowed = dense_mask(mask, positions, positions, torch.arange(positions.shape[1]))
    return ["".join("x" if seen else "." for seen in row) for row in allowed[0, 0].tolist()]


FIVE = torch.arange(5)[None]
PICTURES = [
    ("causal", CAUSAL, FIVE, ["x....", "xx...", "xxx..", "xxxx.", "xxxxx"]),
    ("window of two", with_window(CAUSAL, 2), FIVE, ["x....", "xx...", ".xx..", "..xx.", "...xx"]),
    ("window of one", with_window(CAUSAL, 1), FIVE, ["x....", ".x...", "..x..", "...x.", "....x"]),
    ("two-sided window of two", with_window(FULL, 2), FIVE, ["xx...", "xxx..", ".xxx.", "..xxx", "...xx"]),
    ("prefix of three", prefix(3), FIVE, ["xxx..", "xxx..", "xxx..", "xxxx.", "xxxxx"]),
    ("two documents", document_mask(CAUSAL), packed([2, 3]), ["x....", "xx...", "..x..", "..xx.", "..xxx"]),
    ("documents in an encoder", document_mask(FULL), packed([2, 3]), ["xx...", "xx...", "..xxx", "..xxx", "..xxx"]),
    ("prefix in documents", document_mask(prefix(2)), packed([3, 2]), ["xx...", "xx...", "xxx..", "...xx", "...xx"]),
]


@pytest.mark.parametrize(("mask", "positions", "picture"), [p[1:] for p in PICTURES], ids=[p[0] for p in PICTURES])
def test_masks_by_hand(mask: Mask, positions: Tensor, picture: list[str]) -> None:
    assert drawn(mask, positions) == picture


def test_a_window_of_nothing_is_no_window() -> None:
    for mask in (FULL, CAUSAL):
        assert with_window(mask, 0) is mask


@pytest.mark.parametrize(
    ("mask", "causal", "triangle"),
    [
        (FULL, False, False),
        (CAUSAL, True, True),
        (with_window(CAUSAL, 3), True, False),
        (document_mask(CAUSAL), True, False),
        (prefix(2), False, False),
        (prefix(torch.tensor([[2], [0]])), False, False),
        (with_window(FULL, 3), False, False),
        (with_window(FULL, 1), True, False),
    ],
)
def test_which_masks_are_causal_and_which_are_the_triangle(mask: Mask, causal: bool, triangle: bool) -> None:
    assert mask.causal is causal
    assert mask.triangle is triangle


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (FULL, "every key"),
        (CAUSAL, "earlier keys"),
        (with_window(CAUSAL, 4), "earlier keys, 3 back"),
        (with_window(FULL, 4), "3 keys ahead, 3 back"),
        (prefix(2), "earlier keys, the prefix"),
        (document_mask(CAUSAL), "earlier keys, own document"),
    ],
)
def test_masks_say_what_they_are(mask: Mask, words: str) -> None:
    assert str(mask) == words
