"""Batches: every pair once an epoch, few shapes, within budget, and the same stream from any cursor."""

import threading
import time
from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokens import EOS, SOS

from regard.data.batches import Batch, Batches, Cursor, PairBatches, bucket_widths, prefetch, wrap_and_pad
from regard.data.token_cache import FilterReport, Filters, Store, TokenStore
from regard.text.special_tokens import PAD

Lengths = list[tuple[int, int]]
some_lengths = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=60)
some_tokens = st.integers(1, 400)


def tokens(sequences: list[list[int]]) -> TokenStore:
    offsets = np.cumsum([0, *map(len, sequences)])
    return TokenStore(np.array([x for ids in sequences for x in ids], dtype=np.uint16), offsets)


def pairs(sources: list[list[int]], targets: list[list[int]]) -> Store:
    return Store((tokens(sources), tokens(targets)), FilterReport(Filters(), kept=len(sources)))


def numbered(lengths: Lengths) -> Store:
    """Pair i is the token 10 + i, as often as its lengths say."""
    return pairs([[10 + i] * s for i, (s, _) in enumerate(lengths)], [[10 + i] * t for i, (_, t) in enumerate(lengths)])


def rows_of(batch: Batch) -> list[int]:
    """Which numbered pairs a batch scores."""
    scored = (batch.labels != PAD).any(1)
    return (batch.inputs[0][scored, 0] - 10).tolist()


def epoch_of(batches: Batches, epoch: int) -> list[Batch]:
    return [batch for batch, _ in islice(batches.iterate_from(Cursor(epoch)), len(batches.plan(epoch)))]


def same(a: Batch, b: Batch) -> bool:
    tensors = all(torch.equal(x, y) for x, y in zip(a.inputs, b.inputs, strict=True))
    return tensors and a.tokens == b.tokens


# ---- widths ----------------------------------------------------------------------------------------------------------


def test_the_width_is_the_narrowest_that_holds_the_row() -> None:
    widths = list(range(4, 33, 4))
    for octave in (32, 64, 128, 256, 512, 1024, 2048):
        widths += [octave + octave // 4 * i for i in (1, 2, 3, 4)]
    lengths = range(1, 4097)
    slow = [min(width for width in widths if width >= n) for n in lengths]
    assert bucket_widths(np.array(lengths)).tolist() == slow


@given(n=st.integers(1, 10**6))
def test_a_width_wastes_at_most_three_places_or_a_fifth(n: int) -> None:
    width = int(bucket_widths(np.array([n]))[0])
    assert 0 <= width - n <= max(3, width // 5)


# ---- the plan of an epoch --------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(lengths=some_lengths, batch_tokens=some_tokens, seed=st.integers(0, 5), epoch=st.integers(0, 3))
def test_an_epoch_has_every_pair_exactly_once_within_budget(
    lengths: Lengths, batch_tokens: int, seed: int, epoch: int
) -> None:
    batches = PairBatches(numbered(lengths), batch_tokens, seed)
    seen, short, shapes = [], 0, {}
    for batch in epoch_of(batches, epoch):
        rows, (size, width) = rows_of(batch), batch.inputs[0].shape
        seen += rows
        short += len(rows) < size
        assert batch.inputs[1].shape == batch.labels.shape == (size, width)
        assert shapes.setdefault(width, size) == size  # one shape a width
        assert size * width <= batch_tokens or size == 1
        assert (size + 1) * width > batch_tokens  # and the budget is used
        assert width <= max(map(max, lengths)) * 1.25 + 4
        for row in rows:
            s, t = lengths[row]
            assert (batch.inputs[0] == 10 + row).sum() >= s  # not cut
            assert (batch.labels == 10 + row).sum() == t
    assert sorted(seen) == list(range(len(lengths)))
    assert short <= 1


@settings(max_examples=20)
@given(lengths=some_lengths, batch_tokens=some_tokens)
def test_the_count_of_tokens_is_the_count_of_scored_labels(lengths: Lengths, batch_tokens: int) -> None:
    batches = epoch_of(PairBatches(numbered(lengths), batch_tokens, 0), 0)
    for batch in batches:
        assert batch.tokens == (batch.labels != PAD).sum()
    assert sum(batch.tokens for batch in batches) == sum(t + 1 for _, t in lengths)


def test_pairs_stay_with_pairs_of_their_length() -> None:
    rng = np.random.default_rng(0)
    lengths = [(int(n), int(n)) for n in rng.integers(1, 60, 2000)]
    batches = epoch_of(PairBatches(numbered(lengths), 512, 0), 0)
    places = sum(batch.inputs[0].numel() for batch in batches)
    real = sum(n + 1 for n, _ in lengths)
    assert real / places > 0.85


def test_the_order_is_decided_by_seed_and_epoch_alone() -> None:
    lengths = [(n % 37 + 1, n % 29 + 1) for n in range(300)]
    store = numbered(lengths)

    def order(seed: int, epoch: int) -> list[list[int]]:
        return [rows_of(batch) for batch in epoch_of(PairBatches(store, 256, seed), epoch)]

    assert order(3, 2) == order(3, 2)
    assert order(3, 2) != order(3, 1)
    assert order(3, 2) != order(4, 2)
    walked = PairBatches(store, 256, 3)
    walked.plan(0), walked.plan(1)
    assert [rows_of(batch) for batch in epoch_of(walked, 2)] == order(3, 2)  # whatever came before


def test_widths_come_in_random_order() -> None:
    widths = [width for width, _ in PairBatches(numbered([(n % 60 + 1, 1) for n in range(600)]), 128, 0).plan(0)]
    assert widths != sorted(widths)
    assert widths != sorted(widths, reverse=True)


# ---- cursors ---------------------------------------------------------------------------------------------------------


@settings(max_examples=15)
@given(lengths=some_lengths, batch_tokens=st.integers(50, 400), seed=st.integers(0, 3))
def test_from_any_cursor_the_stream_is_the_rest_of_the_stream(lengths: Lengths, batch_tokens: int, seed: int) -> None:
    store = numbered(lengths)
    n = 2 * len(PairBatches(store, batch_tokens, seed).plan(0)) + 2  # past two ends of an epoch
    whole = list(islice(PairBatches(store, batch_tokens, seed).iterate_from(Cursor()), n))
    for i, (_, cursor) in enumerate(whole[:-1]):
        batch, after = next(PairBatches(store, batch_tokens, seed).iterate_from(cursor))
        assert same(batch, whole[i + 1][0])
        assert after == whole[i + 1][1]
    middle = whole[n // 2][1]
    rest = islice(PairBatches(store, batch_tokens, seed).iterate_from(middle), n - n // 2 - 1)
    for (a, after_a), (b, after_b) in zip(rest, whole[n // 2 + 1 :], strict=True):
        assert same(a, b)
        assert after_a == after_b


def test_the_cursor_turns_over_at_the_end_of_an_epoch() -> None:
    batches = PairBatches(numbered([(3, 3)] * 5), 8, 0)  # width 4, two rows a batch
    cursors = [cursor for _, cursor in islice(batches.iterate_from(Cursor()), 4)]
    assert cursors == [Cursor(0, 1), Cursor(0, 2), Cursor(1, 0), Cursor(1, 1)]


# ---- contents --------------------------------------------------------------------------------------------------------


def test_a_batch_by_hand() -> None:
    batches = PairBatches(pairs([[5, 6], [7]], [[8], [9, 10, 11]]), batch_tokens=15, seed=0)
    batch = batches.collate(4, np.array([0, 1]), np.random.default_rng(0))
    assert (PAD, SOS, EOS) == (-1, 1, 2)
    assert batch.inputs[0].tolist() == [[5, 6, 2, -1], [7, 2, -1, -1], [5, 6, 2, -1]]
    assert batch.inputs[1].tolist() == [[1, 8, -1, -1], [1, 9, 10, 11], [1, 8, -1, -1]]
    assert batch.labels.tolist() == [
        [8, 2, -1, -1],
        [9, 10, 11, 2],
        [-1, -1, -1, -1],
    ]  # the filled-up row is not scored
    assert batch.tokens == 6
    assert batch.inputs[0].dtype == batch.inputs[1].dtype == batch.labels.dtype == torch.int64


def test_padding_between_special_tokens() -> None:
    store = tokens([[5, 6], []])
    rows = np.array([1, 0])
    assert wrap_and_pad(store.gather(rows), 4).tolist() == [[-1, -1, -1, -1], [5, 6, -1, -1]]
    assert wrap_and_pad(store.gather(rows), 4, (SOS,), (EOS,)).tolist() == [[1, 2, -1, -1], [1, 5, 6, 2]]


def test_moving_a_batch_keeps_it() -> None:
    batch = PairBatches(numbered([(3, 4)]), 8, 0).collate(8, np.array([0]), np.random.default_rng(0))
    assert same(batch.to(torch.device("cpu")), batch)


# ---- ahead -----------------------------------------------------------------------------------------------------------

EMPTY = Batch((torch.zeros(1, 1),) * 3, 0)


def cursors(n: int) -> Iterator[tuple[Batch, Cursor]]:
    for i in range(n):
        yield EMPTY, Cursor(0, i)


def threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "batches"}


def all_ended(started: set[threading.Thread]) -> bool:
    for thread in started:
        thread.join(5)
    return not any(thread.is_alive() for thread in started)


def test_ahead_yields_the_same_items_in_order() -> None:
    batches = PairBatches(numbered([(n % 9 + 1, 3) for n in range(50)]), 40, 0)
    stream = prefetch(batches.iterate_from(Cursor()), depth=3)
    for (a, after_a), (b, after_b) in islice(zip(stream, batches.iterate_from(Cursor()), strict=False), 40):
        assert same(a, b)
        assert after_a == after_b
    stream.close()  # type: ignore[attr-defined]


@pytest.mark.timeout(20)
@pytest.mark.parametrize("n", [0, 1, 5])
def test_ahead_ends_where_its_source_ends(n: int) -> None:
    before = threads()
    stream = prefetch(cursors(n), depth=2)
    assert [cursor.batch for _, cursor in stream] == list(range(n))
    assert all_ended(threads() - before)


@pytest.mark.timeout(20)
def test_ahead_hands_on_an_error_after_the_items_before_it() -> None:
    def broken() -> Iterator[tuple[Batch, Cursor]]:
        yield from cursors(3)
        raise OSError("the disk is gone")

    stream = prefetch(broken(), depth=2)
    assert [cursor.batch for _, cursor in islice(stream, 3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(stream)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("taken", [1, 3])
def test_aheads_thread_ends_with_the_stream(taken: int) -> None:
    before = threads()
    stream = prefetch(((EMPTY, Cursor(0, i)) for i in count()), depth=2)
    assert len(list(islice(stream, taken))) == taken
    started = threads() - before
    assert len(started) == 1
    stream.close()  # type: ignore[attr-defined]
    assert all_ended(started)


@pytest.mark.timeout(20)
def test_aheads_thread_ends_even_with_an_error_nobody_waits_for() -> None:
    before, waiting = threads(), threading.Event()

    def broken() -> Iterator[tuple[Batch, Cursor]]:
        yield from cursors(3)  # one is taken, two fill the queue
        waiting.set()
        raise OSError("the disk is gone")

    stream = prefetch(broken(), depth=2)
    next(stream)
    started = threads() - before
    assert waiting.wait(5)
    stream.close()  # type: ignore[attr-defined]
    assert all_ended(started)


def test_ahead_stays_within_its_depth() -> None:
    made = []

    def noted() -> Iterator[tuple[Batch, Cursor]]:
        for item in cursors(100):
            made.append(item)
            yield item

    stream = prefetch(noted(), depth=4)
    next(stream)
    time.sleep(0.3)  # long enough for a thread that does not wait to make them all
    assert len(made) <= 1 + 4 + 1  # taken, waiting, in the hand
    stream.close()  # type: ignore[attr-defined]
