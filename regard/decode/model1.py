"""IBM Model 1: how likely a source piece e is to be translated with a target piece f, learned from sentence pairs.

Every target piece of a pair comes from one of its source pieces, it is not known which. Expectation maximisation counts each
possibility by its share and makes probabilities of the counts:

    c(f, e) = sum over pairs, over places of e and f:  t(f | e) / sum_e' t(f | e')
    t(f | e) = c(f, e) / sum_f' c(f', e)

t is kept for the (e, f) that occur in one pair, sorted by e and f. Places are worked through in chunks, so that memory grows
with the different (e, f) alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from regard.data.shards import Store, TokenStore
from regard.decode.shortlist import Shortlist
from regard.text.special import PAD
from regard.text.tokenizer import Tokenizers

MOST_PAIRS = 1_000_000  # of a larger corpus, that many pairs, evenly spread
CHUNK = 1 << 22  # places of e and f looked at together
KEPT = 1 << 26  # up to so many in all, chunks stay in memory
ITERATIONS = 5

Advance = Callable[[int], None]


@dataclass(frozen=True)
class Chunk:
    """The places of some pairs: for each target place, one after the other, all source places of its pair."""

    keys: np.ndarray  # e * V + f, each once, sorted
    which: np.ndarray  # (places,) index into `keys`
    widths: np.ndarray  # (target places,) source places of its pair
    pairs: int


def learn(store: Store, tokenizers: Tokenizers, n: int, frequent: int, advance: Advance) -> Shortlist:
    """The `frequent` most frequent target pieces, and each source piece with its `n` likeliest ones beside them.

    In a joint vocabulary every piece goes with itself too: names are copied, whether or not they were in the pairs.
    """
    pieces, vocab = len(tokenizers.source), len(tokenizers.target)
    counts = np.bincount(store.target.ids, minlength=vocab)
    often = np.sort(np.argsort(-counts, kind="stable")[:frequent])
    keys, t = model1(store, vocab, ITERATIONS, advance)
    others = ~np.isin(keys % vocab, often)
    lists = best(keys[others], t[others], pieces, vocab, n)
    if tokenizers.source is tokenizers.target:
        lists = np.concatenate([lists, np.arange(pieces)[:, None]], 1)
    return Shortlist(torch.tensor(often, dtype=torch.int32), torch.tensor(lists, dtype=torch.int32))


def model1(store: Store, vocab: int, iterations: int, advance: Advance) -> tuple[np.ndarray, np.ndarray]:
    """e * V + f of all that occur together, sorted, and t(f | e) after so many iterations from equal chances."""
    keys, again = survey(store, vocab, advance)
    sources = keys // vocab
    first = np.flatnonzero(np.diff(sources, prepend=-1))  # where each e begins
    t = np.ones(len(keys))
    for _ in range(iterations):
        counts = np.zeros(len(keys))
        for chunk in again():
            at = np.searchsorted(keys, chunk.keys)
            counts[at] += expected(t[at], chunk)
            advance(chunk.pairs)
        t = counts / np.repeat(np.add.reduceat(counts, first), np.diff(first, append=len(keys)))
    return keys, t


def expected(t: np.ndarray, chunk: Chunk) -> np.ndarray:
    """The share of each key of a chunk in the target places there."""
    share = t[chunk.which]
    begins = np.cumsum(chunk.widths) - chunk.widths
    share /= np.repeat(np.add.reduceat(share, begins), chunk.widths)
    return np.bincount(chunk.which, share, len(t))


def survey(store: Store, vocab: int, advance: Advance) -> tuple[np.ndarray, Callable[[], Iterator[Chunk]]]:
    """All keys, and a way to go through the chunks again."""
    rows = np.arange(len(store))
    if len(rows) > MOST_PAIRS:
        rows = np.linspace(0, len(rows) - 1, MOST_PAIRS).astype(np.int64)
    keys, places = np.empty(0, np.int64), 0
    kept: list[Chunk] = []
    for chunk in chunks(store, rows, vocab):
        both = np.concatenate([keys, chunk.keys])
        both.sort(kind="stable")  # two sorted runs: a merge
        keys = both[np.diff(both, prepend=-1) > 0]
        places += len(chunk.which)
        kept = [*kept, chunk] if places <= KEPT else []
        advance(chunk.pairs)
    return keys, (lambda: iter(kept)) if kept else (lambda: chunks(store, rows, vocab))


def chunks(store: Store, rows: np.ndarray, vocab: int) -> Iterator[Chunk]:
    places = np.cumsum(store.source.lengths[rows].astype(np.int64) * store.target.lengths[rows])
    ends = np.searchsorted(places, np.arange(CHUNK, places[-1] + CHUNK, CHUNK), side="left") + 1
    for part in np.split(rows, np.unique(ends)):
        if len(part):
            yield chunk_of(store, part, vocab)


def chunk_of(store: Store, rows: np.ndarray, vocab: int) -> Chunk:
    source, target = store.source, store.target
    n, m = source.lengths[rows].astype(np.int64), target.lengths[rows].astype(np.int64)
    f = target.ids[ranges(begins(target)[rows], m)]  # (target places,)
    widths = np.repeat(n, m)
    e = source.ids[ranges(np.repeat(begins(source)[rows], m), widths)]  # (places,)
    keys, which = np.unique(e.astype(np.int64) * vocab + np.repeat(f, widths), return_inverse=True)
    return Chunk(keys, which.astype(np.int32), widths, len(rows))


def begins(side: TokenStore) -> np.ndarray:
    """Where each sequence begins among all ids."""
    return np.cumsum(side.lengths, dtype=np.int64) - side.lengths


def ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """first[0], first[0] + 1, ... (count[0] of them), then first[1], ..."""
    return np.arange(count.sum()) + np.repeat(first - (np.cumsum(count) - count), count)


def best(keys: np.ndarray, t: np.ndarray, source_vocab: int, vocab: int, n: int) -> np.ndarray:
    """(source_vocab, n) the n likeliest f of each e, likeliest first; PAD fills up."""
    sources = keys // vocab
    order = np.lexsort((-t, sources))
    count = np.bincount(sources, minlength=source_vocab)
    rank = np.arange(len(keys)) - np.repeat(np.cumsum(count) - count, count)
    near = rank < n
    lists = np.full((source_vocab, n), PAD)
    lists[sources[near], rank[near]] = (keys % vocab)[order][near]
    return lists
