"""Token sequences to padded batches: few distinct shapes, seeded, and resumable to the exact batch.

A pair goes into the bucket of its longer side; every batch of a bucket has the same shape, so a compiled step meets a
handful of shapes and no more. The order of an epoch is a pure function of (seed, epoch), so a position in the data is just
the two numbers in `Cursor`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.data.shards import PairStore, TokenStore
from regard.text.tokenizer import EOS, PAD, SOS

SMALLEST_WIDTH = 4


@dataclass(frozen=True)
class Batch:
    source: Tensor  # (B, W), ends on EOS
    target: Tensor  # (B, W), what the decoder reads: SOS y1 ... yn
    labels: Tensor  # (B, W), what it should say: y1 ... yn EOS; PAD = not scored
    tokens: int  # labels that are scored

    def to(self, device: torch.device) -> Batch:
        source, target, labels = (x.to(device, non_blocking=True) for x in (self.source, self.target, self.labels))
        return Batch(source, target, labels, self.tokens)

    def pin(self) -> Batch:
        return Batch(self.source.pin_memory(), self.target.pin_memory(), self.labels.pin_memory(), self.tokens)


@dataclass(frozen=True)
class Cursor:
    """The next batch to train on."""

    epoch: int = 0
    batch: int = 0


def bucket_widths(lengths: np.ndarray) -> np.ndarray:
    """Each length rounded up to one of four widths per power of two: 4, 8, ..., 32, 40, ..., 64, 80, ..."""
    octave = np.floor(np.log2(np.maximum(lengths - 1, 1))).astype(np.int64)
    step = np.maximum(SMALLEST_WIDTH, 1 << np.maximum(octave - 2, 0))
    return -(-lengths // step) * step


class Batches:
    """The batches of a store of pairs, epoch after epoch."""

    def __init__(self, store: PairStore, batch_tokens: int, seed: int) -> None:
        self.store, self.batch_tokens, self.seed = store, batch_tokens, seed
        longest = np.maximum(store.source.lengths, store.target.lengths).astype(np.int64) + 1  # with EOS
        self.widths = bucket_widths(longest)
        self._plans: dict[int, list[tuple[int, np.ndarray]]] = {}

    def plan(self, epoch: int) -> list[tuple[int, np.ndarray]]:
        """(width, rows) of each batch of an epoch, in order."""
        if epoch not in self._plans:
            self._plans = {epoch: self._make_plan(np.random.default_rng([self.seed, epoch]))}
        return self._plans[epoch]

    def _make_plan(self, rng: np.random.Generator) -> list[tuple[int, np.ndarray]]:
        shuffled = rng.permutation(len(self.store))
        batches, left = [], shuffled[:0]
        for width in np.unique(self.widths):
            # What does not fill a batch moves on to the next wider bucket, so only the very last batch may be short.
            rows = np.concatenate([left, shuffled[self.widths[shuffled] == width]])
            size = self.batch_size(int(width))
            full = len(rows) // size * size
            batches += [(int(width), part) for part in rows[:full].reshape(-1, size)]
            left = rows[full:]
        if len(left):
            batches.append((int(width), left))
        return [batches[i] for i in rng.permutation(len(batches))]

    def batch_size(self, width: int) -> int:
        return max(1, self.batch_tokens // width)

    def follow(self, cursor: Cursor) -> Iterator[tuple[Batch, Cursor]]:
        """Batches from `cursor` on, for ever, each with the cursor after it."""
        while True:
            plan = self.plan(cursor.epoch)
            for i in range(cursor.batch, len(plan)):
                after = Cursor(cursor.epoch, i + 1) if i + 1 < len(plan) else Cursor(cursor.epoch + 1)
                yield self.collate(*plan[i]), after
            cursor = Cursor(cursor.epoch + 1)

    def collate(self, width: int, rows: np.ndarray) -> Batch:
        """Short batches are filled up with repeated rows that are not scored, so that the shape stays."""
        size = self.batch_size(width)
        filled = np.resize(rows, size)
        source = pad_rows(self.store.source, filled, width, last=EOS)
        target = pad_rows(self.store.target, filled, width, first=SOS)
        labels = pad_rows(self.store.target, filled, width, last=EOS)
        labels[len(rows) :] = PAD
        scored = int((self.store.target.lengths[rows].astype(np.int64) + 1).sum())
        return Batch(torch.from_numpy(source), torch.from_numpy(target), torch.from_numpy(labels), scored)


def pad_rows(
    store: TokenStore, rows: np.ndarray, width: int, first: int | None = None, last: int | None = None
) -> np.ndarray:
    """(len(rows), width) ids, padded on the right, between the special tokens asked for."""
    padded = np.full((len(rows), width), PAD, dtype=np.int64)
    start = 0 if first is None else 1
    for i, row in enumerate(rows):
        ids = store[int(row)]
        padded[i, start : start + len(ids)] = ids
        if last is not None:
            padded[i, start + len(ids)] = last
    if first is not None:
        padded[:, 0] = first
    return padded


def ahead(
    batches: Iterator[tuple[Batch, Cursor]], *, depth: int = 8, pin: bool = False
) -> Iterator[tuple[Batch, Cursor]]:
    """The same iterator, worked off by a thread `depth` batches ahead, so that the device never waits for the host."""
    waiting: queue.Queue[tuple[Batch, Cursor] | BaseException | None] = queue.Queue(depth)  # None: the end
    closed = threading.Event()

    def hand_over(item: tuple[Batch, Cursor] | BaseException | None) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                return waiting.put(item, timeout=0.1)

    def work() -> None:
        try:
            for batch, cursor in batches:
                hand_over((batch.pin() if pin else batch, cursor))
                if closed.is_set():
                    return
            hand_over(None)
        except BaseException as error:  # handed to the consumer, who raises it
            hand_over(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
