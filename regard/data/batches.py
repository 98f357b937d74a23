"""Padded batches of token sequences: bucketed by length, seeded, resumable to the exact batch, and prefetched.

Rows of similar length share a bucket, and every batch of a bucket has the same shape, so a compiled step meets few shapes.
The order of an epoch is a pure function of (seed, epoch), and random changes of a batch are one of (seed, epoch, batch).
So a position in the data is just the two numbers of a `Cursor`.
"""

from __future__ import annotations

import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from regard.data.token_cache import ANY_LENGTH, Joined, Store
from regard.errors import RegardError
from regard.text.bpe_dropout import BPEDropout
from regard.text.special_tokens import EOS_TEMPLATE, PAD, SpecialTokenTemplate

SMALLEST_WIDTH = 4
Rows = tuple[int, np.ndarray]  # the plan of a batch: its width, and the rows it holds


@dataclass(frozen=True)
class Batch:
    """One batch: the tensors that the objective takes, labels last, and the number of labels that are scored."""

    inputs: tuple[Tensor, ...]
    tokens: int  # labels that are scored

    @property
    def labels(self) -> Tensor:
        return self.inputs[-1]

    def to(self, device: torch.device) -> Batch:
        return Batch(tuple(x.to(device, non_blocking=True) for x in self.inputs), self.tokens)

    def pin(self) -> Batch:
        return Batch(tuple(x.pin_memory() for x in self.inputs), self.tokens)


@dataclass(frozen=True)
class Cursor:
    """The data position (the state of a sampler or dataloader): the next batch to train on."""

    epoch: int = 0
    batch: int = 0


class Batches(ABC):
    """The batches of a data set, epoch after epoch; subclasses plan an epoch and collate a batch."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._plans: dict[int, list[Rows]] = {}

    @abstractmethod
    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        """Return the rows of each batch of an epoch, in order."""

    @abstractmethod
    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        """Make the batch of some rows; `rng` is for random changes of them."""

    def plan(self, epoch: int) -> list[Rows]:
        """Return the plan of an epoch; the last one is cached."""
        if epoch not in self._plans:
            self._plans = {epoch: self.make_plan(np.random.default_rng([self.seed, epoch]))}
        return self._plans[epoch]

    def batch(self, epoch: int, i: int) -> Batch:
        return self.collate(*self.plan(epoch)[i], np.random.default_rng([self.seed, epoch, i]))

    def iterate_from(self, cursor: Cursor) -> Iterator[tuple[Batch, Cursor]]:
        """Yield batches from `cursor` on, endlessly, each with the cursor of the next one."""
        while True:
            n = len(self.plan(cursor.epoch))
            if cursor.batch >= max(n, 1):
                raise RegardError(
                    f"a checkpoint continues at batch {cursor.batch:,} of an epoch that has {n:,}: it is not of this data; "
                    f"remove it, and the one before is used"
                )
            for i in range(cursor.batch, n):
                after = Cursor(cursor.epoch, i + 1) if i + 1 < n else Cursor(cursor.epoch + 1)
                yield self.batch(cursor.epoch, i), after
            cursor = Cursor(cursor.epoch + 1)

    def iterate_once(self) -> Iterator[Batch]:
        """Iterate over the batches of one epoch, for validation."""
        return (self.batch(0, i) for i in range(len(self.plan(0))))


# ---- buckets of similar length ----------------------------------------------------------------------------------------


def bucket_widths(lengths: np.ndarray) -> np.ndarray:
    """Round lengths up to one of four widths per power of two: 4, 8, ..., 32, 40, ..., 64, 80, ..."""
    octave = np.floor(np.log2(np.maximum(lengths - 1, 1))).astype(np.int64)
    step = np.maximum(SMALLEST_WIDTH, 1 << np.maximum(octave - 2, 0))
    return -(-lengths // step) * step


def batch_size(batch_tokens: int, width: int) -> int:
    """Return how many rows of a width make a batch of at most `batch_tokens` tokens, but at least one."""
    return max(1, batch_tokens // width)


def draw_rows(rows_of_specs: Sequence[int], weights: Sequence[float], rng: np.random.Generator) -> np.ndarray:
    """Return the rows of an epoch in which a corpus of weight w is read w times.

    All rows of a corpus occur as often as the whole part of its weight says. The fraction is the share of its rows that
    occur once more, and which ones is drawn anew in every epoch.
    """
    found, first = [], 0
    for n, weight in zip(rows_of_specs, weights, strict=True):
        whole, rows = int(weight), np.arange(first, first + n)
        found += [rows] * whole + [rng.permutation(rows)[: round((weight - whole) * n)]]
        first += n
    return np.concatenate(found)


def plan_buckets(
    widths: np.ndarray, batch_tokens: int, rng: np.random.Generator, rows: np.ndarray | None = None
) -> list[Rows]:
    """Return batches of rows of one width, in random order: of all rows, or of those given, which may repeat.

    Rows that do not fill a batch move to the next wider bucket, so only the very last batch may be short.
    """
    shuffled = rng.permutation(len(widths) if rows is None else rows)
    batches, left = [], shuffled[:0]
    for width in np.unique(widths):
        rows = np.concatenate([left, shuffled[widths[shuffled] == width]])
        size = batch_size(batch_tokens, int(width))
        full = len(rows) // size * size
        batches += [(int(width), part) for part in rows[:full].reshape(-1, size)]
        left = rows[full:]
    if len(left):
        batches.append((int(width), left))
    return [batches[i] for i in rng.permutation(len(batches))]


class BucketedBatches(Batches):
    """Batches of rows of similar length; a short batch is filled up with repeated rows, which are not scored.

    `draw` returns the rows of an epoch; without it an epoch has every row once.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        batch_tokens: int,
        seed: int,
        draw: Callable[[np.random.Generator], np.ndarray] | None = None,
    ) -> None:
        super().__init__(seed)
        self.widths, self.batch_tokens, self.draw = bucket_widths(lengths), batch_tokens, draw

    def make_plan(self, rng: np.random.Generator) -> list[Rows]:
        return plan_buckets(self.widths, self.batch_tokens, rng, self.draw(rng) if self.draw else None)

    def fill_up(self, width: int, rows: np.ndarray) -> np.ndarray:
        """Repeat rows until there are as many as in every batch of this width."""
        return np.resize(rows, batch_size(self.batch_tokens, width))


class PairBatches(BucketedBatches):
    """Batches of (source, target, labels), (B, W) each, for teacher forcing.

    The decoder reads the target, start y1 ... yn, and is to predict the labels, y1 ... yn end; PAD is not scored.
    """

    def __init__(
        self,
        store: Store,
        batch_tokens: int,
        seed: int,
        token_template: SpecialTokenTemplate = EOS_TEMPLATE,
        bpe_dropout: tuple[BPEDropout, BPEDropout] | None = None,  # for source and target
        max_len: int = ANY_LENGTH,  # of the model, which BPE dropout must not exceed
        weights: Sequence[float] = (),  # how often an epoch reads each corpus of the store; none = all of them once
    ) -> None:
        self.store, self.token_template, self.max_len = store, token_template, max_len
        self.bpe_dropout = bpe_dropout
        self.around = len(token_template.before) + len(token_template.after)
        longest = np.maximum(store.source.lengths + self.around, store.target.lengths + len(token_template.start))
        if bpe_dropout:  # room for the additional pieces
            longest = longest + np.ceil(bpe_dropout[0].probability * longest)
        is_weighted = any(weight != 1 for weight in weights)
        draw = partial(draw_rows, store.rows_of_specs, weights) if is_weighted else None
        super().__init__(longest.astype(np.int64), batch_tokens, seed, draw)

    def collate(self, width: int, rows: np.ndarray, rng: np.random.Generator) -> Batch:
        filled, token_template = self.fill_up(width, rows), self.token_template
        room = min(width, self.max_len)
        sources, targets = self.store.source.gather(filled), self.store.target.gather(filled)
        if self.bpe_dropout:
            sources = self.bpe_dropout[0](*sources, room - self.around, rng)
            targets = self.bpe_dropout[1](*targets, room - len(token_template.start), rng)
        source = wrap_and_pad(sources, width, token_template.before, token_template.after)
        target = wrap_and_pad(targets, width, token_template.start)
        labels = wrap_and_pad(targets, width, token_template.start[1:], token_template.end)
        labels[len(rows) :] = PAD
        return make_batch(source, target, labels)


def make_batch(*inputs: np.ndarray) -> Batch:
    """Make a batch of arrays, labels last; PAD is not scored."""
    return Batch(tuple(torch.from_numpy(x) for x in inputs), int((inputs[-1] != PAD).sum()))


def wrap_and_pad(rows: Joined, width: int, before: tuple[int, ...] = (), after: tuple[int, ...] = ()) -> np.ndarray:
    """Return ids (rows, width), padded on the right, with special tokens before and after each row."""
    ids, lengths = rows
    made = np.full((len(lengths), width), PAD, dtype=np.int64)
    made[:, : len(before)] = before
    first = np.cumsum(lengths) - lengths
    places = np.arange(len(ids)) - np.repeat(first, lengths) + len(before)
    made[np.repeat(np.arange(len(lengths)), lengths), places] = ids
    for i, token in enumerate(after):
        made[np.arange(len(lengths)), len(before) + lengths + i] = token
    return made


def prefetch(
    batches: Iterator[tuple[Batch, Cursor]], *, depth: int = 8, pin: bool = False
) -> Iterator[tuple[Batch, Cursor]]:
    """Iterate in a background thread, up to `depth` batches ahead, so that the device does not wait for the host."""
    waiting: queue.Queue[tuple[Batch, Cursor] | BaseException | None] = queue.Queue(depth)  # None: the end
    closed = threading.Event()

    def put(item: tuple[Batch, Cursor] | BaseException | None) -> None:
        while not closed.is_set():
            with suppress(queue.Full):
                return waiting.put(item, timeout=0.1)

    def work() -> None:
        try:
            for batch, cursor in batches:
                put((batch.pin() if pin else batch, cursor))
                if closed.is_set():
                    return
            put(None)
        except BaseException as error:  # raised again in the consumer
            put(error)

    thread = threading.Thread(target=work, name="batches", daemon=True)
    thread.start()
    try:
        while (item := waiting.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            yield item
    finally:
        closed.set()
        thread.join()  # a thread that still runs when the process ends would abort it
