"""Plain text to batches: windows of one long stream, or documents; read on, filled in or put right.

`ids` are all documents end to end. A row is a span of them, (first, last): windows of one length that begin elsewhere in
each epoch, or the documents themselves, long ones in pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from regard.data.batches import Batch, Batches, Rows, batch_size, bucket_widths, buckets, make_batch
from regard.data.shards import TokenStore
from regard.text.special_tokens import EOS_TEMPLATE, PAD, SpecialTokenTemplate

Spans = np.ndarray  # (N, 2)
Corruption = Callable[[np.ndarray, np.random.Generator], tuple[np.ndarray, np.ndarray]]


def windows(n: int, length: int, shift: int, overlap: int = 0) -> Spans:
    """Spans of `length` that cover tokens shift .. n; each begins with the last `overlap` tokens of the one before."""
    starts = np.arange(shift, max(n - overlap, shift + 1), length - overlap)
    return np.stack([starts, np.minimum(starts + length, n)], 1)


def document_spans(store: TokenStore, length: int, overlap: int = 0) -> Spans:
    """The documents, those longer than `length` in pieces."""
    ends = np.cumsum(store.lengths, dtype=np.int64)
    starts = ends - store.lengths
    if store.lengths.max() <= length:
        return np.stack([starts, ends], 1)
    parts = [windows(n, length, 0, overlap) + start for start, n in zip(starts, store.lengths.tolist(), strict=True)]
    return np.concatenate(parts)


class StreamBatches(Batches):
    """(ids, labels), (B, W) each: what is read, and the token after each. Every window is scored in full."""

    def __init__(self, store: TokenStore, width: int, batch_tokens: int, seed: int, shifting: bool = True) -> None:
        super().__init__(seed)
        self.ids, self.batch_tokens = store.ids, batch_tokens
        self.width, self.shifting = min(width, max(1, len(store.ids) - 1)), shifting

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        room = min(self.width, len(self.ids) - 1 - self.width)
        shift = int(rng.integers(room)) if self.shifting and room > 0 else 0
        spans = windows(len(self.ids), self.width + 1, shift, overlap=1)
        return in_batches(rng.permutation(spans), batch_size(self.batch_tokens, self.width), self.width)

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        padded = np.full((batch_size(self.batch_tokens, width), width + 1), PAD, np.int64)
        for i, (first, last) in enumerate(rows):
            padded[i, : last - first] = self.ids[first:last]
        padded[len(rows) :] = padded[0]  # a short batch is filled up; what fills it is not scored
        labels = padded[:, 1:].copy()
        labels[len(rows) :] = PAD
        return make_batch(padded[:, :-1].copy(), labels)


class StatefulBatches(Batches):
    """(ids, fresh, labels), (B, W), (B,) and (B, W): the text as B streams side by side, each of which goes on in a batch
    where it was in the one before; `fresh` says which of them begin.

    Where a text is scored, streams read the last `lead` batches before their own part first, so that what they answer
    there hardly depends on where the text was cut.
    """

    def __init__(
        self, store: TokenStore, width: int, streams: int, seed: int, shifting: bool = True, lead: int = 0
    ) -> None:
        super().__init__(seed)
        self.ids, self.streams, self.lead = store.ids, streams, lead
        self.width, self.shifting = min(width, max(1, len(store.ids) - 1)), shifting

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        """A row is (first, last, whether it is fresh, whether it is scored)."""
        n, width = len(self.ids) - 1, self.width  # the last token is said, never read
        room = min(width, n - width)
        shift = int(rng.integers(room)) if self.shifting and room > 0 else 0
        share = -(-(n - shift) // self.streams)
        starts = np.minimum(shift + share * np.arange(self.streams), n)
        plan: list[Rows] = []
        for k in range(-self.lead, -(-share // width)):
            first = starts + k * width
            last = np.minimum(first + width, np.minimum(starts + share, n))
            fresh = (k == -self.lead) | (first < width)  # nothing, or nothing whole, comes before
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


def in_batches(rows: np.ndarray, size: int, width: int) -> list[Rows]:
    return [(width, rows[i : i + size]) for i in range(0, len(rows), size)]


class PackedBatches(Batches):
    """(ids, positions, labels): rows hold several documents one after the other; positions begin again with each."""

    def __init__(self, store: TokenStore, width: int, batch_tokens: int, seed: int) -> None:
        super().__init__(seed)
        self.ids, self.width, self.batch_tokens = store.ids, width, batch_tokens
        self.spans = document_spans(store, width + 1, overlap=1)

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        rows = pack(rng.permutation(self.spans), self.width)
        held = np.empty(len(rows), object)
        held[:] = rows
        return in_batches(held, batch_size(self.batch_tokens, self.width), self.width)

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        shape = (batch_size(self.batch_tokens, width), width)
        ids, labels = (np.full(shape, PAD, np.int64) for _ in range(2))
        positions = np.full(shape, -1, np.int64)
        for i, row in enumerate(rows):
            at = 0
            for first, last in row:
                n = last - first - 1  # the last token of a document is said, never read
                ids[i, at : at + n], labels[i, at : at + n] = self.ids[first : last - 1], self.ids[first + 1 : last]
                positions[i, at : at + n] = np.arange(n)
                at += n
        return make_batch(ids, positions, labels)


def pack(spans: Spans, width: int) -> list[Spans]:
    """Spans in their order, as many to a row as fit; one of n tokens takes n - 1 places."""
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
    """Rows rewritten by chance, anew in each epoch; those of similar length together."""

    def __init__(
        self,
        store: TokenStore,
        packing: str,
        length: int,
        batch_tokens: int,
        seed: int,
        rewrite: Corruption,
        token_template: SpecialTokenTemplate = EOS_TEMPLATE,
    ) -> None:
        super().__init__(seed)
        self.ids, self.length, self.batch_tokens = store.ids, length, batch_tokens
        self.rewrite, self.token_template = rewrite, token_template
        self.documents = document_spans(store, length) if packing == "documents" else None

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        spans = self.documents
        if spans is None:
            room = min(self.length, len(self.ids) - self.length)
            spans = windows(len(self.ids), self.length, int(rng.integers(room)) if room > 0 else 0)
        widths = bucket_widths(spans[:, 1] - spans[:, 0])
        return [(width, spans[rows]) for width, rows in buckets(widths, self.batch_tokens, rng)]

    def rewritten(self, width: int, rows: Spans, rng: np.random.Generator) -> list[tuple[np.ndarray, np.ndarray]]:
        found = [self.rewrite(self.ids[a:b].astype(np.int64), rng) for a, b in rows]
        return found + [(found[0][0], found[0][1][:0])] * (
            batch_size(self.batch_tokens, width) - len(found)
        )  # not scored


class MaskedBatches(CorruptedBatches):
    """(ids, labels): a text with blanks, and what belongs there; PAD where nothing is asked."""

    def collate(self, width: int, rows: Spans, rng: np.random.Generator) -> Batch:
        pairs, token_template = self.rewritten(width, rows, rng), self.token_template
        width += len(token_template.before) + len(token_template.after)
        ids = stacked([token_template.wrap(text.tolist()) for text, _ in pairs], width)
        return make_batch(
            ids, stacked([[*(PAD for _ in token_template.before), *blanks] for _, blanks in pairs], width)
        )


class DenoisingBatches(CorruptedBatches):
    """(source, target, labels): a damaged text, and what an encoder-decoder should make of it."""

    def collate(self, width: int, rows: Spans, rng: np.random.Generator) -> Batch:
        pairs, token_template = self.rewritten(width, rows, rng), self.token_template
        # spans of no tokens make a text longer, maybe by more than the model reads
        source = [token_template.wrap(text[: self.length].tolist()) for text, _ in pairs]
        target = [[*token_template.start, *mended] for _, mended in pairs]
        labels = [[*token_template.start[1:], *mended, *token_template.end] for _, mended in pairs[: len(rows)]] + [
            []
        ] * (len(pairs) - len(rows))
        widths = [int(bucket_widths(np.array(max(map(len, side))))) for side in (source, target)]
        return make_batch(stacked(source, widths[0]), stacked(target, widths[1]), stacked(labels, widths[1]))


def stacked(rows: Sequence[Sequence[int] | np.ndarray], width: int) -> np.ndarray:
    padded = np.full((len(rows), width), PAD, np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded
