"""Batches of plain text: windows or parallel streams of one long text, packed documents, masked and corrupted texts.

`ids` are all documents end to end. A row is a span (first, last) of them: a window of fixed length, whose start shifts from
epoch to epoch, or a document; long documents are cut into several spans.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from regard.data.batches import Batch, Batches, Rows, batch_size, bucket_widths, make_batch, plan_buckets
from regard.data.token_cache import TokenStore
from regard.text.special_tokens import EOS_TEMPLATE, PAD, SpecialTokenTemplate

Spans = np.ndarray  # (N, 2): first, and last + 1
Corruption = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]  # ids to inputs and labels


def window_spans(n: int, length: int, shift: int, overlap: int = 0) -> Spans:
    """Return spans of `length` that cover tokens shift .. n; each repeats the last `overlap` tokens of the one before."""
    starts = np.arange(shift, max(n - overlap, shift + 1), length - overlap)
    return np.stack([starts, np.minimum(starts + length, n)], 1)


def document_spans(store: TokenStore, length: int, overlap: int = 0) -> Spans:
    """Return the spans of the documents; those longer than `length` are cut into several."""
    ends = np.cumsum(store.lengths, dtype=np.int64)
    starts = ends - store.lengths
    if store.lengths.max() <= length:
        return np.stack([starts, ends], 1)
    parts = [
        window_spans(n, length, 0, overlap) + start for start, n in zip(starts, store.lengths.tolist(), strict=True)
    ]
    return np.concatenate(parts)


class StreamBatches(Batches):
    """Batches of (ids, labels), (B, W) each: windows of a text, and the token after each token."""

    def __init__(self, store: TokenStore, width: int, batch_tokens: int, seed: int, shifting: bool = True) -> None:
        super().__init__(seed)
        self.ids, self.batch_tokens = store.ids, batch_tokens
        self.width, self.shifting = min(width, max(1, len(store.ids) - 1)), shifting

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        room = min(self.width, len(self.ids) - 1 - self.width)
        shift = int(rng.integers(room)) if self.shifting and room > 0 else 0
        spans = window_spans(len(self.ids), self.width + 1, shift, overlap=1)
        return split_into_batches(rng.permutation(spans), batch_size(self.batch_tokens, self.width), self.width)

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        padded = np.full((batch_size(self.batch_tokens, width), width + 1), PAD, np.int64)
        for i, (first, last) in enumerate(rows):
            padded[i, : last - first] = self.ids[first:last]
        padded[len(rows) :] = padded[0]  # a short batch is filled up with rows that are not scored
        labels = padded[:, 1:].copy()
        labels[len(rows) :] = PAD
        return make_batch(padded[:, :-1].copy(), labels)


class StatefulBatches(Batches):
    """Batches of (ids, fresh, labels), (B, W), (B,) and (B, W), for truncated BPTT: a text as B parallel streams.

    Each row continues the same row of the batch before; `fresh` marks the rows that start from a zero state. For evaluation,
    a stream first reads the last `lead` batches before its own part, without being scored, so that its predictions hardly
    depend on where the text was cut.
    """

    def __init__(
        self, store: TokenStore, width: int, streams: int, seed: int, shifting: bool = True, lead: int = 0
    ) -> None:
        super().__init__(seed)
        self.ids, self.streams, self.lead = store.ids, streams, lead
        self.width, self.shifting = min(width, max(1, len(store.ids) - 1)), shifting

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        """Return batches whose rows are (first, last, whether it is fresh, whether it is scored)."""
        n, width = len(self.ids) - 1, self.width  # the last token is predicted, never read
        room = min(width, n - width)
        shift = int(rng.integers(room)) if self.shifting and room > 0 else 0
        share = -(-(n - shift) // self.streams)
        starts = np.minimum(shift + share * np.arange(self.streams), n)
        plan: list[Rows] = []
        for k in range(-self.lead, -(-share // width)):
            first = starts + k * width
            last = np.minimum(first + width, np.minimum(starts + share, n))
            fresh = (k == -self.lead) | (first < width)  # at the start, or with less than a batch before it
            there = (first >= 0) & (last > first)
            plan.append((width, np.stack([first, np.where(there, last, first), fresh, there & (k >= 0)], 1)))
        return plan

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        ids, labels = (np.full((len(rows), width), PAD, np.int64) for _ in range(2))
        for i, (first, last, _, scored) in enumerate(rows):
            n = last - first
            ids[i, :n] = self.ids[first:last]
            labels[i, : n * scored] = self.ids[first + 1 : first + 1 + n * scored]
        return make_batch(ids, rows[:, 2].astype(bool), labels)


def split_into_batches(rows: np.ndarray, size: int, width: int) -> list[Rows]:
    """Return batches of `size` rows in order; the last one may be short."""
    return [(width, rows[i : i + size]) for i in range(0, len(rows), size)]


class PackedBatches(Batches):
    """Batches of (ids, positions, labels), rows packed with several documents; positions start again with each."""

    def __init__(self, store: TokenStore, width: int, batch_tokens: int, seed: int) -> None:
        super().__init__(seed)
        self.ids, self.width, self.batch_tokens = store.ids, width, batch_tokens
        self.spans = document_spans(store, width + 1, overlap=1)

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        rows = pack_spans(rng.permutation(self.spans), self.width)
        held = np.empty(len(rows), object)
        held[:] = rows
        return split_into_batches(held, batch_size(self.batch_tokens, self.width), self.width)

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        shape = (batch_size(self.batch_tokens, width), width)
        ids, labels = (np.full(shape, PAD, np.int64) for _ in range(2))
        positions = np.full(shape, -1, np.int64)
        for i, row in enumerate(rows):
            at = 0
            for first, last in row:
                n = last - first - 1  # the last token of a document is predicted, never read
                ids[i, at : at + n], labels[i, at : at + n] = self.ids[first : last - 1], self.ids[first + 1 : last]
                positions[i, at : at + n] = np.arange(n)
                at += n
        return make_batch(ids, positions, labels)


def pack_spans(spans: Spans, width: int) -> list[Spans]:
    """Pack spans in their order into rows of at most `width`; a span of n tokens takes n - 1 places."""
    rows, row, used = [], list[tuple[int, int]](), 0
    for first, last in spans:
        n = last - first - 1
        if row and used + n > width:
            rows.append(np.array(row))
            row, used = [], 0
        row.append((first, last))
        used += n
    return [*rows, np.array(row)] if row else rows


class CorruptedBatches(Batches):
    """Batches of randomly corrupted texts, of similar length; each epoch corrupts them anew."""

    def __init__(
        self,
        store: TokenStore,
        packing: str,
        length: int,
        batch_tokens: int,
        seed: int,
        corrupt: Corruption,
        token_template: SpecialTokenTemplate = EOS_TEMPLATE,
    ) -> None:
        super().__init__(seed)
        self.ids, self.length, self.batch_tokens = store.ids, length, batch_tokens
        self.corrupt, self.token_template = corrupt, token_template
        self.documents = document_spans(store, length) if packing == "documents" else None

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        spans = self.documents
        if spans is None:
            room = min(self.length, len(self.ids) - self.length)
            spans = window_spans(len(self.ids), self.length, int(rng.integers(room)) if room > 0 else 0)
        widths = bucket_widths(spans[:, 1] - spans[:, 0])
        return [(width, spans[rows]) for width, rows in plan_buckets(widths, self.batch_tokens, rng)]

    def corrupt_rows(self, width: int, rows: Spans, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
        """Corrupt the spans of a batch; a short batch is filled up with rows that are not scored."""
        found = [self.corrupt(self.ids[a:b].astype(np.int64), rng) for a, b in rows]
        missing = batch_size(self.batch_tokens, width) - len(found)
        return found + [(found[0][0], found[0][1][:0])] * missing


class MaskedBatches(CorruptedBatches):
    """Batches of (ids, labels) for masked language modelling: masked texts, and the masked tokens, PAD elsewhere."""

    def collate(self, width: int, rows: Spans, rng: np.random.Generator) -> Batch:
        pairs, token_template = self.corrupt_rows(width, rows, rng), self.token_template
        width += len(token_template.before) + len(token_template.after)
        ids = pad_sequences([token_template.wrap(text.tolist()) for text, _ in pairs], width)
        return make_batch(
            ids, pad_sequences([[*(PAD for _ in token_template.before), *blanks] for _, blanks in pairs], width)
        )


class DenoisingBatches(CorruptedBatches):
    """Batches of (source, target, labels) for an encoder-decoder: corrupted texts, and what it is to predict."""

    def collate(self, width: int, rows: Spans, rng: np.random.Generator) -> Batch:
        pairs, token_template = self.corrupt_rows(width, rows, rng), self.token_template
        # Masks for empty spans make a text longer, perhaps longer than the model reads: cut it.
        source = [token_template.wrap(text[: self.length].tolist()) for text, _ in pairs]
        target = [[*token_template.start, *original] for _, original in pairs]
        labels = [[*token_template.start[1:], *original, *token_template.end] for _, original in pairs[: len(rows)]]
        labels += [[]] * (len(pairs) - len(rows))
        widths = [int(bucket_widths(np.array(max(map(len, side))))) for side in (source, target)]
        inputs = pad_sequences(source, widths[0]), pad_sequences(target, widths[1])
        return make_batch(*inputs, pad_sequences(labels, widths[1]))


def pad_sequences(rows: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    """Return sequences as (rows, width), padded on the right with PAD."""
    padded = np.full((len(rows), width), PAD, np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
