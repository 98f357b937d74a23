"""Training word vectors: the text as numbers in a memory-mapped file, read in blocks by threads that never wait.

Every thread has its own random numbers; both matrices are everyone's (Hogwild). On one thread the same seed gives
the same vectors, to the bit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from regard.config import VectorsConfig
from regard.data.shards import ANY_LENGTH, Filters, TokenStore, cache_folder, prepare_store
from regard.device import cpu_cores
from regard.errors import RegardError
from regard.terminal import progress_bar
from regard.vectors.huffman import Tree, huffman
from regard.vectors.word_counts import Texts, Vocabulary, alias_table, configured
from regard.vectors.word_vectors import WordVectors

BLOCK = 10_000  # words between two learning rates, as in the original program; fewer where there is little text
LOSSES = ("negative", "hierarchical", "softmax")


@dataclass(frozen=True)
class Trained:
    vocabulary: Vocabulary
    inputs: np.ndarray  # (V, D) float32: the vectors of the words
    outputs: np.ndarray  # (V, D), or (V - 1, D) of the tree's nodes
    config: VectorsConfig
    loss: float  # mean of one prediction, over the last epoch
    words: int  # read, in all epochs
    seconds: float

    def word_vectors(self) -> WordVectors:
        about = {"settings": asdict(self.config), "loss": self.loss}
        return WordVectors(self.vocabulary.words, self.inputs, self.vocabulary.counts, self.outputs, about)

    def describe(self) -> str:
        size = f"{len(self.vocabulary):,} words, {self.inputs.shape[1]} numbers each"
        return f"{size}; {self.words / self.seconds:,.0f} words/s, mean loss {self.loss:.4f} in the last epoch"


def train(files: list[Path], config: VectorsConfig, quiet: bool = False) -> Trained:
    """Vectors of the words of some files, which may be larger than memory."""
    check(config)
    texts = Texts(tuple(files), config.lowercase)
    with progress_bar("counting words, lines", quiet=quiet) as advance:
        vocabulary = configured(texts, config, advance)
    with progress_bar("numbering words, lines", quiet=quiet) as advance:
        store = prepare_store(texts, (vocabulary,), Filters(ANY_LENGTH), cache_folder(), advance)
    return train_ids(store.source, vocabulary, config, quiet)


def check(config: VectorsConfig) -> None:
    if config.loss == "negative" and not config.negatives:
        raise RegardError(
            "negatives is 0, so that nothing would be learned: give at least 1, or loss = hierarchical or softmax"
        )


def train_ids(text: TokenStore, vocabulary: Vocabulary, config: VectorsConfig, quiet: bool = True) -> Trained:
    """The same from a text whose words are numbers already."""
    check(config)
    work = begin(text, vocabulary, config)
    begun = time.perf_counter()
    with watched(work, quiet):
        if config.device in ("auto", "cpu"):
            run_threads(work)
        else:
            from regard.vectors.word2vec_gpu import run_gpu

            run_gpu(work)
    loss, taken = work.loss(config.epochs - 1), time.perf_counter() - begun
    return Trained(vocabulary, work.inputs, work.outputs, config, loss, work.done, taken)


@dataclass
class Work:
    """A training under way."""

    text: TokenStore
    offsets: np.ndarray  # (sentences + 1,)
    config: VectorsConfig
    inputs: np.ndarray  # (V, D)
    outputs: np.ndarray
    keep: np.ndarray  # (V,) float32
    noise: tuple[np.ndarray, np.ndarray]  # as `alias_table` makes it
    tree: Tree
    totals: np.ndarray  # (epochs, threads, 3): losses, predictions, words kept
    done: int = 0
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        return int(self.offsets[-1]) * self.config.epochs

    @property
    def lr(self) -> float:
        """Falls in a line with the words read of all epochs."""
        return learning_rate(self.config, self.done / self.total)

    def advance(self, words: int) -> None:
        with self.lock:
            self.done += words

    def loss(self, epoch: int) -> float:
        """Exact mean over the predictions of an epoch so far; every loss is that before its own step."""
        losses, predictions, _ = self.totals[epoch].sum(0)
        return float(losses / max(predictions, 1))

    def now(self) -> str:
        epoch = min(self.config.epochs - 1, int(self.config.epochs * self.done / self.total))
        return f"epoch {epoch + 1}, loss {self.loss(epoch):.4f}"


def learning_rate(config: VectorsConfig, share: float) -> float:
    """After some share of all words."""
    first = config.lr or (0.05 if config.model == "cbow" else 0.025)
    return first * max(1 - share, config.min_lr_share)


def begin(text: TokenStore, vocabulary: Vocabulary, config: VectorsConfig) -> Work:
    """Inputs drawn from U(-spread, spread) / dim, outputs zero."""
    size, dim = len(vocabulary), config.dim
    generator = np.random.default_rng(config.seed)
    inputs = (2 * generator.random((size, dim), np.float32) - 1) * np.float32(config.spread / dim)
    hierarchical = config.loss == "hierarchical"
    return Work(
        text=text,
        offsets=np.concatenate([[0], np.cumsum(text.lengths, dtype=np.int64)]),
        config=config,
        inputs=inputs,
        outputs=np.zeros((max(size - hierarchical, 1), dim), np.float32),
        keep=vocabulary.keep_probability(config.subsample, config.subsample_rule).astype(np.float32),
        noise=alias_table(vocabulary.noise(config.noise_power)),
        tree=huffman(vocabulary.counts if hierarchical else vocabulary.counts[:1]),
        totals=np.zeros((config.epochs, config.threads or cpu_cores(), 3)),
    )


def blocks(offsets: np.ndarray, first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """Sentences first to last, in runs of about `size` words."""
    while first < last:
        end = int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield first, end
        first = end


def run_threads(work: Work) -> None:
    """Threads take the blocks of all epochs in the order of the text, so that all are at about the same place of it.

    (Where each had a part of its own, a text of two kinds gave worse vectors than on one thread.)
    """
    n = work.totals.shape[1]
    size = min(BLOCK, max(100, work.total // 200))
    turns = ((e, *ab) for e in range(work.config.epochs) for ab in blocks(work.offsets, 0, len(work.offsets) - 1, size))
    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(run_thread, work, i, turns) for i in range(n)]
        try:
            for future in futures:
                future.result()
        finally:
            work.stopped = True


def run_thread(work: Work, thread: int, turns: Iterator[tuple[int, int, int]]) -> None:
    state = np.random.SeedSequence([work.config.seed, thread]).generate_state(1, np.uint64) | np.uint64(1)
    while not work.stopped:
        with work.lock:
            turn = next(turns, None)
        if turn is None:
            return
        epoch, a, b = turn
        run_block(work, a, b, state, work.totals[epoch, thread])
        work.advance(int(work.offsets[b] - work.offsets[a]))


def run_block(work: Work, a: int, b: int, state: np.ndarray, totals: np.ndarray) -> None:
    """Sentences a to b, at one learning rate."""
    from regard.vectors.word2vec_numba import train_block

    config, tree = work.config, work.tree
    begin, end = work.offsets[a], work.offsets[b]
    train_block(
        work.text.ids[begin:end].astype(np.int32),
        work.offsets[a : b + 1] - begin,
        work.inputs,
        work.outputs,
        config.model == "cbow",
        LOSSES.index(config.loss),
        config.window,
        config.shrink_windows,
        config.negatives,
        work.keep,
        work.noise,
        (tree.start, tree.nodes, tree.bits),
        np.float32(work.lr),
        config.cbow_gradient == "divided",
        state,
        totals,
    )


@contextmanager
def watched(work: Work, quiet: bool) -> Iterator[None]:
    """A bar with words/s and the loss, drawn by a thread of its own."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from regard.terminal import stderr_console

    console, begun, ended = stderr_console(), time.perf_counter(), threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("training", total=work.total, speed="")

        def show() -> None:
            while not ended.wait(0.5):
                speed = f"{work.done / (time.perf_counter() - begun):,.0f} words/s"
                bar.update(task, completed=work.done, description=work.now(), speed=speed)

        watcher = threading.Thread(target=show, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
