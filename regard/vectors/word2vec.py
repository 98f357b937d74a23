"""Training of word2vec: the text is a memory-mapped file of word ids, which threads read in blocks, without locks (Hogwild).

Every thread has its own random numbers; all share both matrices. On one thread the same seed gives the same vectors,
bit for bit. On a GPU, word2vec_gpu.py takes the place of the threads.
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
from regard.data.token_cache import ANY_LENGTH, Filters, TokenStore, cache_folder, prepare_store
from regard.device import cpu_cores
from regard.errors import RegardError
from regard.terminal import progress_bar
from regard.vectors.huffman import HuffmanTree, huffman_tree
from regard.vectors.word_counts import TextFiles, Vocabulary, alias_table
from regard.vectors.word_vectors import WordVectors

BLOCK = 10_000  # words at one learning rate, as in the original program; fewer for short texts
LOSSES = ("negative", "hierarchical", "softmax")


@dataclass(frozen=True)
class TrainingResult:
    """Word vectors and how their training went."""

    vocabulary: Vocabulary
    inputs: np.ndarray  # (V, D) float32: the vectors of the words
    outputs: np.ndarray  # (V, D) float32: output vectors of the words, or (V - 1, D) of the inner nodes of the tree
    config: VectorsConfig
    loss: float  # mean over the predictions of the last epoch
    words: int  # read in all epochs
    seconds: float

    def word_vectors(self) -> WordVectors:
        """Return the vectors with their words, counts and settings."""
        about = {"settings": asdict(self.config), "loss": self.loss}
        return WordVectors(self.vocabulary.words, self.inputs, self.vocabulary.counts, self.outputs, about)

    def describe(self) -> str:
        """Return one line about the vectors, the speed and the loss."""
        size = f"{len(self.vocabulary):,} words, {self.inputs.shape[1]} numbers each"
        return f"{size}; {self.words / self.seconds:,.0f} words/s, mean loss {self.loss:.4f} in the last epoch"


def train(files: list[Path], config: VectorsConfig, quiet: bool = False) -> TrainingResult:
    """Train word vectors on text files, which may be larger than memory."""
    check_config(config)
    texts = TextFiles(tuple(files), config.lowercase)
    with progress_bar("counting words, lines", quiet=quiet) as advance:
        vocabulary = Vocabulary.count(texts.rows(), config.min_count, config.max_vocab, advance)
    with progress_bar("numbering words, lines", quiet=quiet) as advance:
        store = prepare_store(texts, (vocabulary,), Filters(ANY_LENGTH), cache_folder(), advance)
    return train_ids(store.source, vocabulary, config, quiet)


def check_config(config: VectorsConfig) -> None:
    """Raise an error if negative sampling has no negatives."""
    if config.loss == "negative" and not config.negatives:
        raise RegardError(
            "negatives is 0, so that nothing would be learned: give at least 1, or loss = hierarchical or softmax"
        )


def train_ids(text: TokenStore, vocabulary: Vocabulary, config: VectorsConfig, quiet: bool = True) -> TrainingResult:
    """Train word vectors on a text of word ids."""
    check_config(config)
    state = initial_state(text, vocabulary, config)
    begun = time.perf_counter()
    with training_progress(state, quiet):
        if config.device in ("auto", "cpu"):
            run_threads(state)
        else:
            from regard.vectors.word2vec_gpu import run_gpu

            run_gpu(state)
    loss, taken = state.loss(config.epochs - 1), time.perf_counter() - begun
    return TrainingResult(vocabulary, state.inputs, state.outputs, config, loss, state.done, taken)


@dataclass
class TrainingState:
    """The state of a training run, shared by all threads."""

    text: TokenStore
    offsets: np.ndarray  # (sentences + 1,)
    config: VectorsConfig
    inputs: np.ndarray  # (V, D)
    outputs: np.ndarray  # (V, D), or (V - 1, D) for hierarchical softmax
    keep: np.ndarray  # (V,) float32, probability that subsampling keeps a word
    noise: tuple[np.ndarray, np.ndarray]  # alias table of the noise distribution
    tree: HuffmanTree
    totals: np.ndarray  # (epochs, threads, 3): losses, predictions, words kept
    done: int = 0  # words read, of `total`
    stopped: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def total(self) -> int:
        """The words to read in all epochs."""
        return int(self.offsets[-1]) * self.config.epochs

    @property
    def lr(self) -> float:
        """The current learning rate, which decreases linearly with the words read."""
        return learning_rate(self.config, self.done / self.total)

    def advance(self, words: int) -> None:
        """Add to the words read."""
        with self.lock:
            self.done += words

    def loss(self, epoch: int) -> float:
        """Return the exact mean loss of an epoch so far; each loss is computed before its own update."""
        losses, predictions, _ = self.totals[epoch].sum(0)
        return float(losses / max(predictions, 1))

    def progress(self) -> str:
        """Return the epoch and its loss so far, for the progress bar."""
        epoch = min(self.config.epochs - 1, int(self.config.epochs * self.done / self.total))
        return f"epoch {epoch + 1}, loss {self.loss(epoch):.4f}"


def learning_rate(config: VectorsConfig, share: float) -> float:
    """Return the learning rate after a share of all words."""
    first = config.lr or (0.05 if config.model == "cbow" else 0.025)
    return first * max(1 - share, config.min_lr_share)


def initial_state(text: TokenStore, vocabulary: Vocabulary, config: VectorsConfig) -> TrainingState:
    """Return the initial state: input vectors from U(-spread, spread) / dim, output vectors of zeros."""
    size, dim = len(vocabulary), config.dim
    generator = np.random.default_rng(config.seed)
    inputs = (2 * generator.random((size, dim), np.float32) - 1) * np.float32(config.spread / dim)
    hierarchical = config.loss == "hierarchical"
    return TrainingState(
        text=text,
        offsets=np.concatenate([[0], np.cumsum(text.lengths, dtype=np.int64)]),
        config=config,
        inputs=inputs,
        outputs=np.zeros((max(size - hierarchical, 1), dim), np.float32),
        keep=vocabulary.keep_probability(config.subsample, config.subsample_rule).astype(np.float32),
        noise=alias_table(vocabulary.noise(config.noise_power)),
        tree=huffman_tree(vocabulary.counts if hierarchical else vocabulary.counts[:1]),
        totals=np.zeros((config.epochs, config.threads or cpu_cores(), 3)),
    )


def blocks(offsets: np.ndarray, first: int, last: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of the sentences first to last (exclusive) with about `size` words each."""
    while first < last:
        end = int(np.searchsorted(offsets, offsets[first] + size, side="right")) - 1
        end = min(max(end, first + 1), last)
        yield first, end
        first = end


def run_threads(state: TrainingState) -> None:
    """Train on CPU threads, which take the blocks of all epochs in the order of the text.

    So all threads are at about the same place. (With a fixed part of the text for each thread, a text of two different
    halves gave worse vectors than training on one thread.)
    """
    n = state.totals.shape[1]
    size = min(BLOCK, max(100, state.total // 200))
    blocks_left = (
        (e, *ab) for e in range(state.config.epochs) for ab in blocks(state.offsets, 0, len(state.offsets) - 1, size)
    )
    with ThreadPoolExecutor(n) as pool:
        futures = [pool.submit(run_thread, state, i, blocks_left) for i in range(n)]
        try:
            for future in futures:
                future.result()
        finally:
            state.stopped = True


def run_thread(state: TrainingState, thread: int, blocks_left: Iterator[tuple[int, int, int]]) -> None:
    """Train on blocks (epoch, first sentence, last sentence) until there are none left."""
    random_state = np.random.SeedSequence([state.config.seed, thread]).generate_state(1, np.uint64) | np.uint64(1)
    while not state.stopped:
        with state.lock:
            block = next(blocks_left, None)
        if block is None:
            return
        epoch, a, b = block
        run_block(state, a, b, random_state, state.totals[epoch, thread])
        state.advance(int(state.offsets[b] - state.offsets[a]))


def run_block(state: TrainingState, a: int, b: int, random_state: np.ndarray, totals: np.ndarray) -> None:
    """Train on the sentences a to b (exclusive) at one learning rate."""
    from regard.vectors.word2vec_numba import train_block

    config, tree = state.config, state.tree
    begin, end = state.offsets[a], state.offsets[b]
    train_block(
        state.text.ids[begin:end].astype(np.int32),
        state.offsets[a : b + 1] - begin,
        state.inputs,
        state.outputs,
        config.model == "cbow",
        LOSSES.index(config.loss),
        config.window,
        config.shrink_windows,
        config.negatives,
        state.keep,
        state.noise,
        (tree.start, tree.nodes, tree.bits),
        np.float32(state.lr),
        config.cbow_gradient == "divided",
        random_state,
        totals,
    )


@contextmanager
def training_progress(state: TrainingState, quiet: bool) -> Iterator[None]:
    """Show a progress bar with words/s and the loss while the body runs, updated by a thread of its own."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    from regard.terminal import stderr_console

    console, begun, ended = stderr_console(), time.perf_counter(), threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[speed]}"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task("training", total=state.total, speed="")

        def show() -> None:
            while not ended.wait(0.5):
                speed = f"{state.done / (time.perf_counter() - begun):,.0f} words/s"
                bar.update(task, completed=state.done, description=state.progress(), speed=speed)

        updater = threading.Thread(target=show, daemon=True)
        updater.start()
        try:
            yield
        finally:
            ended.set()
            updater.join()
