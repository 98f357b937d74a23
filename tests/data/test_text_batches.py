"""Windows of a stream, packed documents, and damaged text: what is asked, how often, and that it can be put back."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import BERT_TEMPLATE, EOS, MASK, SOS

from regard.data.batches import Batches, Cursor
from regard.data.noise import corrupt_spans, denoise, mask_tokens
from regard.data.text_batches import (
    Corruption,
    DenoisingBatches,
    MaskedBatches,
    PackedBatches,
    StatefulBatches,
    StreamBatches,
    window_spans,
)
from regard.data.token_cache import TokenStore
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS, EOS_TEMPLATE, PAD, SpecialTokenTemplate

FIRST = 100  # token i of the stream is FIRST + i, so that every token says where it stood


def store_of(lengths: list[int]) -> TokenStore:
    return TokenStore(np.arange(FIRST, FIRST + sum(lengths), dtype=np.uint16), np.cumsum([0, *lengths]))


LENGTHS = st.lists(st.integers(1, 25), min_size=1, max_size=12)
SIZES = {"width": st.integers(1, 12), "tokens": st.integers(1, 60), "seed": st.integers(0, 9)}


@given(st.integers(1, 60), st.integers(2, 9), st.integers(0, 12), st.integers(0, 1))
def test_windows_cover_the_text_and_overlap_as_asked(n: int, length: int, shift: int, overlap: int) -> None:
    shift = min(shift, n - 1)
    spans = window_spans(n, length, shift, overlap).tolist()
    assert spans[0][0] == shift
    assert spans[-1][1] == n
    assert all(b - a == length for a, b in spans[:-1])
    assert all(second[0] == first[1] - overlap for first, second in itertools.pairwise(spans))
    assert len(spans) == 1 or spans[-1][1] - spans[-1][0] > overlap  # the last one brings something new


# ---- streams ---------------------------------------------------------------------------------------------------------


@given(n=st.integers(2, 80), epoch=st.integers(0, 3), shifting=st.booleans(), **SIZES)
def test_every_token_is_asked_once_an_epoch_after_those_before_it(
    n: int, epoch: int, shifting: bool, width: int, tokens: int, seed: int
) -> None:
    batches = StreamBatches(store_of([n]), width, tokens, seed, shifting)
    asked: Counter[int] = Counter()
    for i in range(len(batches.plan(epoch))):
        batch = batches.batch(epoch, i)
        ids, labels = (x.numpy() for x in batch.inputs)
        assert ids.shape == labels.shape == (max(1, tokens // batches.width), batches.width)
        scored = labels != PAD
        assert batch.tokens == scored.sum()
        assert (labels[scored] == ids[scored] + 1).all()  # the token after
        for row, known in zip(ids, scored, strict=True):
            assert (np.diff(row[known]) == 1).all()  # and read without a gap
        asked.update(labels[scored].tolist())
    assert set(asked.values()) == {1}
    missing = set(range(FIRST, FIRST + n)) - set(asked)
    assert missing == set(range(FIRST, FIRST + len(missing)))  # the first of all, and what a shift leaves out
    assert len(missing) <= (min(width, n) if shifting else 1)


def test_windows_begin_elsewhere_in_each_epoch() -> None:
    batches = StreamBatches(store_of([200]), 16, 64, seed=0)
    firsts = [min(batch[1].min() for batch in batches.plan(epoch)) for epoch in range(8)]
    assert len(set(firsts)) > 3
    assert max(firsts) < 16


def test_what_fills_a_short_batch_is_read_but_not_asked() -> None:
    (batch,) = StreamBatches(store_of([7]), 3, 12, seed=0, shifting=False).iterate_once()
    ids, labels = batch.inputs
    assert ids.shape == (4, 3)
    assert (ids[2:] == ids[0]).all()
    assert (labels[2:] == PAD).all()
    assert batch.tokens == 6


# ---- streams that are carried on -------------------------------------------------------------------------------------


def followed(batches: StatefulBatches, epoch: int) -> list[list[list[int]]]:
    """What each stream reads, cut where it is fresh."""
    read: list[list[list[int]]] = [[] for _ in range(batches.streams)]
    for i in range(len(batches.plan(epoch))):
        ids, fresh, labels = (x.numpy() for x in batches.batch(epoch, i).inputs)
        assert ids.shape == labels.shape == (batches.streams, batches.width)
        assert fresh.shape == (batches.streams,)
        for stream, row, begins in zip(read, ids, fresh, strict=True):
            tokens = row[row != PAD].tolist()
            assert (row[: len(tokens)] != PAD).all()  # padding comes after
            if begins:
                stream.append([])
            stream[-1] += tokens
    return [[part for part in stream if part] for stream in read]


CARRIED = {
    "n": st.integers(2, 80),
    "streams": st.integers(1, 7),
    "width": st.integers(1, 12),
    "seed": st.integers(0, 9),
}


@given(epoch=st.integers(0, 3), shifting=st.booleans(), lead=st.integers(0, 3), **CARRIED)
def test_carried_streams_ask_every_token_once_an_epoch(
    n: int, streams: int, epoch: int, shifting: bool, lead: int, width: int, seed: int
) -> None:
    batches = StatefulBatches(store_of([n]), width, streams, seed, shifting, lead)
    asked: Counter[int] = Counter()
    for i in range(len(batches.plan(epoch))):
        batch = batches.batch(epoch, i)
        ids, _, labels = (x.numpy() for x in batch.inputs)
        scored = labels != PAD
        assert batch.tokens == scored.sum()
        assert (labels[scored] == ids[scored] + 1).all()
        asked.update(labels[scored].tolist())
    assert set(asked.values()) == {1}
    missing = set(range(FIRST, FIRST + n)) - set(asked)
    assert missing == set(range(FIRST, FIRST + len(missing)))  # the first of all, and what a shift leaves out
    assert len(missing) <= (min(width, n) if shifting else 1)


@given(epoch=st.integers(0, 3), shifting=st.booleans(), **CARRIED)
def test_a_stream_reads_on_where_it_was(
    n: int, streams: int, epoch: int, shifting: bool, width: int, seed: int
) -> None:
    """Begun once, without a gap; one after the other the streams are the text."""
    read = followed(StatefulBatches(store_of([n]), width, streams, seed, shifting), epoch)
    assert all(len(stream) <= 1 for stream in read)
    text = [token for stream in read for part in stream for token in part]
    assert text == list(range(text[0], FIRST + n - 1))


@given(lead=st.integers(1, 4), **CARRIED)
def test_a_lead_is_what_stands_before_a_streams_own_part(
    n: int, streams: int, lead: int, width: int, seed: int
) -> None:
    batches = StatefulBatches(store_of([n]), width, streams, seed, shifting=False, lead=lead)
    width, share = batches.width, -(-(n - 1) // streams)
    for i, stream in enumerate(followed(batches, 0)):
        start = i * share
        if start < n - 1:
            led = min(lead, start // width) * width  # whole batches only
            (read,) = stream
            assert read == list(range(FIRST + start - led, FIRST + min(start + share, n - 1)))


def test_streams_begin_elsewhere_in_each_epoch() -> None:
    batches = StatefulBatches(store_of([200]), 16, 3, seed=0)
    assert len({batches.batch(epoch, 0).inputs[0][0, 0].item() for epoch in range(8)}) > 3


# ---- packed documents ------------------------------------------------------------------------------------------------


def documents_of(ids: np.ndarray, positions: np.ndarray, labels: np.ndarray) -> list[list[int]]:
    """A packed row cut where positions begin again: what is read, and the last answer."""
    starts = [*np.flatnonzero(positions == 0), int((positions >= 0).sum())]
    return [[*ids[a:b].tolist(), int(labels[b - 1])] for a, b in itertools.pairwise(starts)]


@given(lengths=st.lists(st.integers(2, 25), min_size=1, max_size=12), **SIZES)
def test_packed_rows_hold_whole_documents_and_nothing_is_asked_across(
    lengths: list[int], width: int, tokens: int, seed: int
) -> None:
    store = store_of(lengths)
    asked: Counter[int] = Counter()
    for batch in PackedBatches(store, width, tokens, seed).iterate_once():
        assert batch.tokens == (batch.labels != PAD).sum()
        for row in zip(*(x.numpy() for x in batch.inputs), strict=True):
            ids, positions, labels = row
            n = int((positions >= 0).sum())
            assert (positions[n:] == -1).all()
            assert (ids[n:] == PAD).all()
            assert (labels[n:] == PAD).all()
            for piece in documents_of(ids, positions, labels):
                assert piece == list(range(piece[0], piece[-1] + 1))
                asked.update(piece[1:])
    ends = np.cumsum(lengths)
    firsts = {FIRST + int(end - n) for end, n in zip(ends, lengths, strict=True)}
    assert set(asked) == set(range(FIRST, FIRST + sum(lengths))) - firsts
    assert set(asked.values()) == {1}


@given(lengths=st.lists(st.integers(2, 9), min_size=1, max_size=12), seed=st.integers(0, 9))
def test_a_document_that_fits_is_not_cut(lengths: list[int], seed: int) -> None:
    found = []
    for batch in PackedBatches(store_of(lengths), 8, 24, seed).iterate_once():
        for row in zip(*(x.numpy() for x in batch.inputs), strict=True):
            found += documents_of(*row)
    ends = FIRST + np.cumsum(lengths)
    assert sorted(found) == [list(range(end - n, end)) for end, n in zip(ends, lengths, strict=True)]


def test_rows_are_filled_as_far_as_documents_go() -> None:
    (batch,) = PackedBatches(store_of([5, 5, 5, 5]), 8, 16, seed=0).iterate_once()  # 4 places each: two to a row
    assert batch.inputs[1].tolist() == [[0, 1, 2, 3, 0, 1, 2, 3]] * 2


# ---- damaged text ----------------------------------------------------------------------------------------------------

VOCAB = 2000
SENTINELS = list(range(1000, 1100))
MASKING = partial(mask_tokens, vocab_size=VOCAB, special=DEFAULT_SPECIAL_TOKENS, rate=0.3)
SPANS = partial(corrupt_spans, sentinels=SENTINELS, rate=0.3)
MENDING = partial(denoise, mask=MASK, rate=0.3)


@given(lengths=LENGTHS, packing=st.sampled_from(["stream", "documents"]), **SIZES)
def test_blanks_are_asked_where_they_are(lengths: list[int], packing: str, width: int, tokens: int, seed: int) -> None:
    batches = MaskedBatches(store_of(lengths), packing, width, tokens, seed, MASKING, BERT_TEMPLATE)
    read: list[int] = []
    for batch in batches.iterate_once():
        ids, labels = (x.numpy() for x in batch.inputs)
        assert batch.tokens == (labels != PAD).sum() > 0
        for row, blanks in zip(ids, labels, strict=True):
            n = int((row != PAD).sum())
            assert (row[0], row[n - 1]) == (SOS, EOS)
            assert (blanks[[0, n - 1]] == PAD).all()
            assert (blanks[n:] == PAD).all()
            if (blanks != PAD).any():  # else it fills up a short batch
                restored = np.where(blanks != PAD, blanks, row)[1 : n - 1]
                assert (np.diff(restored) == 1).all()  # put back, the text is as it stood
                read += restored.tolist()
    assert sorted(read) == list(range(min(read), FIRST + sum(lengths)))  # each token in one row that is asked
    assert packing == "stream" or min(read) == FIRST


def put_back(source: list[int], said: list[int]) -> list[int]:
    """The text of T5's task: each sentinel of the source replaced by what the target says after it."""
    spans: dict[int, list[int]] = {}
    for token in said:
        if token in SENTINELS:
            spans[token] = []
        else:
            spans[list(spans)[-1]].append(token)
    return [token for place in source for token in spans.get(place, [place])]


@given(lengths=LENGTHS, packing=st.sampled_from(["stream", "documents"]), **SIZES)
def test_spans_put_back_make_the_text(lengths: list[int], packing: str, width: int, tokens: int, seed: int) -> None:
    batches = DenoisingBatches(store_of(lengths), packing, width, tokens, seed, SPANS)
    for source, target, labels in rows_of(batches):
        assert target == [SOS, *labels[:-1]]
        assert (source[-1], labels[-1]) == (EOS, EOS)
        text = put_back(source[:-1], labels[:-1])
        assert text == list(range(text[0], text[-1] + 1))


@given(lengths=LENGTHS, **SIZES)
def test_a_denoised_text_is_the_whole_one(lengths: list[int], width: int, tokens: int, seed: int) -> None:
    token_template = SpecialTokenTemplate(
        before=(SOS,), start=(EOS, SOS)
    )  # BART's: a decoder begins with two tokens, and says the second
    batches = DenoisingBatches(store_of(lengths), "documents", width, tokens, seed, MENDING, token_template)
    for source, target, labels in rows_of(batches):
        assert target[:2] == [EOS, SOS]
        assert labels == [*target[1:], EOS]
        text = target[2:]
        assert text == list(range(text[0], text[-1] + 1))
        left = [token for token in source[1:-1] if token != MASK]
        assert set(left) < set(text)
        if len(source) - 2 < width:  # else it may be cut
            assert len(text) - len(left) == max(1, round(0.3 * len(text)))


@given(lengths=LENGTHS, **SIZES)
def test_a_text_with_blanks_put_in_grows_no_longer_than_is_read(
    lengths: list[int], width: int, tokens: int, seed: int
) -> None:
    many = partial(denoise, mask=MASK, rate=0.3, mean_span=0.2)
    for source, _, _ in rows_of(DenoisingBatches(store_of(lengths), "stream", width, tokens, seed, many)):
        assert len(source) <= width + 1
        assert source[-1] == EOS


def rows_of(batches: DenoisingBatches) -> list[tuple[list[int], list[int], list[int]]]:
    """(source, target, labels) of all rows that are asked for something, without padding."""
    found = []
    for batch in batches.iterate_once():
        assert batch.tokens == (batch.labels != PAD).sum()
        for source, target, labels in zip(*(x.numpy() for x in batch.inputs), strict=True):
            if (labels != PAD).any():
                found.append(tuple(x[x != PAD].tolist() for x in (source, target, labels)))
    return found


@given(lengths=LENGTHS, **SIZES)
def test_every_document_is_damaged_once_an_epoch(lengths: list[int], width: int, tokens: int, seed: int) -> None:
    batches = DenoisingBatches(store_of(lengths), "documents", width, tokens, seed, MENDING)
    texts = [token for _, target, _ in rows_of(batches) for token in target[1:]]
    assert sorted(texts) == list(range(FIRST, FIRST + sum(lengths)))


# ---- all of them -----------------------------------------------------------------------------------------------------

STORE = store_of([9, 30, 4, 17, 25, 8])
KINDS = [
    pytest.param(lambda: StreamBatches(STORE, 8, 24, 5), id="stream"),
    pytest.param(lambda: StatefulBatches(STORE, 8, 3, 5), id="carried"),
    pytest.param(lambda: PackedBatches(STORE, 8, 24, 5), id="packed"),
    pytest.param(lambda: MaskedBatches(STORE, "stream", 8, 24, 5, MASKING, BERT_TEMPLATE), id="masked"),
    pytest.param(lambda: DenoisingBatches(STORE, "documents", 8, 24, 5, SPANS, EOS_TEMPLATE), id="spans"),
    pytest.param(lambda: DenoisingBatches(STORE, "stream", 8, 24, 5, MENDING, EOS_TEMPLATE), id="denoising"),
]


def content(batches: Batches, cursor: Cursor, n: int) -> list[list[bytes]]:
    stream = batches.iterate_from(cursor)
    return [[x.numpy().tobytes() for x in next(stream)[0].inputs] for _ in range(n)]


@pytest.mark.parametrize("make", KINDS)
def test_a_cursor_brings_back_the_same_batches_with_the_same_damage(make: Callable[[], Batches]) -> None:
    stream = make().iterate_from(Cursor())
    cursors = [next(stream)[1] for _ in range(20)]
    assert cursors[-1].epoch > 0
    for at in (3, 12):
        assert content(make(), cursors[at], 5) == content(make(), Cursor(), at + 6)[at + 1 :]


@pytest.mark.parametrize("rewrite", [MASKING, SPANS, MENDING], ids=["masked", "spans", "denoising"])
def test_each_epoch_damages_a_text_anew(rewrite: Corruption) -> None:
    """One text alone, so that the order of texts does not matter."""
    batches = DenoisingBatches(store_of([40]), "documents", 40, 40, 5, rewrite)
    sources = {batches.batch(epoch, 0).inputs[0].numpy().tobytes() for epoch in range(4)}
    assert len(sources) == 4
