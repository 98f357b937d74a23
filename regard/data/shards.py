"""Tokenised once, memory-mapped ever after: token ids of a parallel corpus in a cache keyed by content.

A cached store is one folder: for each side `*.ids` (all sequences end to end) and `*.offsets` (where each begins, and
the end), and `meta.json` with counts, data types and file sizes. It is written under another name, synced and renamed,
so a folder under its final name is complete or, after a mishap, recognised as damaged by its sizes and rebuilt.
"""

import errno
import hashlib
import json
import os
import secrets
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from regard.data.corpus import Corpus, Pair
from regard.errors import RegardError
from regard.files import sync

FORMAT = 1  # raise it whenever the layout or the meaning of the files changes
CHUNK = 4096  # pairs tokenised at a time: the memory `prepare` needs
STALE = 24 * 3600  # seconds without a write after which an unfinished folder is taken to be abandoned
SIDES = ("source", "target")
OFFSET = np.dtype("<i8")


class Encoder(Protocol):
    """What `prepare` needs of a tokenizer."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Filters:
    """Pairs to keep: at most `max_len` tokens a side, the longer at most `max_ratio` times the shorter (0: any)."""

    max_len: int = 256
    max_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.max_len < 1:
            raise RegardError(f"max_len is {self.max_len}; it must be at least 1 token")
        if not (self.max_ratio == 0 or self.max_ratio >= 1):
            raise RegardError(f"max_ratio is {self.max_ratio}; it must be at least 1, or 0 to keep every ratio")

    def verdict(self, pair: Pair, n_source: int, n_target: int) -> str:
        """The first count of `FilterReport` that the pair falls under."""
        shorter, longer = sorted((n_source, n_target))
        if not (shorter and pair[0].strip() and pair[1].strip()):
            return "empty"
        if longer > self.max_len:
            return "too_long"
        return "bad_ratio" if self.max_ratio and longer > self.max_ratio * shorter else "kept"


@dataclass(frozen=True)
class FilterReport:
    filters: Filters
    kept: int = 0
    empty: int = 0
    too_long: int = 0
    bad_ratio: int = 0

    def describe(self) -> str:
        total = self.kept + self.empty + self.too_long + self.bad_ratio
        line = f"{total:,} pairs: kept {self.kept:,}, empty {self.empty:,}"
        line += f", longer than {self.filters.max_len} tokens {self.too_long:,}"
        return f"{line}, ratio over {self.filters.max_ratio:g} {self.bad_ratio:,}" if self.filters.max_ratio else line


class TokenStore:
    """Sequences of token ids, without specials: sequence i is `ids[offsets[i]:offsets[i + 1]]`."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        self._ids = ids
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        i = range(len(self))[i]  # negative indices count from the end, others raise IndexError
        return self._ids[self._offsets[i] : self._offsets[i + 1]].astype(np.int64)

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self._offsets).astype(np.int32)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type on disk: uint16 where the vocabulary fits, else uint32."""
        return self._ids.dtype


@dataclass(frozen=True)
class PairStore:
    source: TokenStore
    target: TokenStore
    report: FilterReport
    key: str = ""  # of its content: the same key, the same tokens

    def __len__(self) -> int:
        return len(self.source)


def cache_folder() -> Path:
    """Where prepared corpora live: $REGARD_CACHE, else $XDG_CACHE_HOME/regard, else ~/.cache/regard."""
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard"


def prepare(
    corpus: Corpus,
    source_tokenizer: Encoder,
    target_tokenizer: Encoder,
    filters: Filters,
    cache: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> PairStore:
    """The corpus as token ids, from the cache if it has the same content; `progress` hears how many more pairs are done.

    Processes that prepare the same thing at once each do the work, and the first to finish keeps the name. A store is
    mapped before it is renamed, so nothing another process does to the names can take its data away.
    """
    tokenizers = (source_tokenizer, target_tokenizer)
    content = [FORMAT, corpus.fingerprint(), *(t.fingerprint() for t in tokenizers), asdict(filters)]
    folder = cache / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    if store := _load(folder):
        return replace(store, key=folder.name)
    partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        with _disk_errors(cache):
            _remove_abandoned(cache)
            shutil.rmtree(folder, ignore_errors=True)  # there, but damaged
            partial.mkdir(parents=True)
            _write(partial, corpus, tokenizers, filters, progress)
            store = _load(partial)
            with suppress(OSError):  # the name is taken: another process was first
                partial.rename(folder)
                sync(cache)
        store = _load(folder) or store
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    if store is None:
        raise RegardError(f"what was written to {cache} cannot be read back; check the disk or set REGARD_CACHE")
    return replace(store, key=folder.name)


# ---- writing -----------------------------------------------------------------------------------------------------


class _Writer:
    """Appends sequences to the two files of one side."""

    def __init__(self, folder: Path, side: str, vocab_size: int) -> None:
        self._dtype = np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")
        self._ids, self._offsets = folder / f"{side}.ids", folder / f"{side}.offsets"
        self._n_tokens = 0
        _append(self._offsets, np.zeros(1, OFFSET))

    def add(self, sequences: list[list[int]]) -> None:
        ends = np.cumsum([self._n_tokens, *map(len, sequences)], dtype=OFFSET)[1:]
        ids = np.fromiter(chain.from_iterable(sequences), self._dtype)
        _append(self._ids, ids)
        _append(self._offsets, ends)
        self._n_tokens += len(ids)

    def meta(self) -> dict[str, Any]:
        return {"dtype": self._dtype.str, "tokens": self._n_tokens}


def _append(path: Path, array: np.ndarray) -> None:
    with path.open("ab") as file:
        file.write(array.tobytes())  # not array.tofile, whose errors do not say that the disk is full


def _write(
    folder: Path,
    corpus: Corpus,
    tokenizers: tuple[Encoder, Encoder],
    filters: Filters,
    progress: Callable[[int], None],
) -> None:
    writers = [_Writer(folder, side, len(tokenizer)) for side, tokenizer in zip(SIDES, tokenizers, strict=True)]
    counts: Counter[str] = Counter()
    for pairs in _chunks(corpus.pairs()):
        encoded = [tokenizer.encode_batch([pair[side] for pair in pairs]) for side, tokenizer in enumerate(tokenizers)]
        verdicts = [filters.verdict(pair, len(a), len(b)) for pair, a, b in zip(pairs, *encoded, strict=True)]
        counts.update(verdicts)
        for writer, sequences in zip(writers, encoded, strict=True):
            writer.add([ids for ids, verdict in zip(sequences, verdicts, strict=True) if verdict == "kept"])
        progress(len(pairs))
    report = FilterReport(filters, **counts)
    if not report.kept:
        what = f"no pair of {', '.join(corpus.specs)} is left to use ({report.describe()})"
        raise RegardError(f"{what}; check the files or loosen the filters")
    sides = {side: writer.meta() for side, writer in zip(SIDES, writers, strict=True)}
    (folder / "meta.json").write_text(json.dumps({"report": asdict(report), "sides": sides}, indent=2) + "\n")
    for path in (*folder.iterdir(), folder):
        sync(path)


def _chunks(pairs: Iterator[Pair]) -> Iterator[list[Pair]]:
    return iter(lambda: list(islice(pairs, CHUNK)), [])


@contextmanager
def _disk_errors(cache: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"the disk is full: cannot write prepared data to {cache}; free some space"
        else:
            what = f"cannot write prepared data to {cache} ({error.strerror or error}); mend that"
        raise RegardError(f"{what} or set REGARD_CACHE to another folder") from error


def _remove_abandoned(cache: Path) -> None:
    """Take back the space of processes that were killed; one still at work has written a moment ago."""
    for folder in cache.glob("*.partial-*"):
        with suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > STALE:
                shutil.rmtree(folder, ignore_errors=True)


# ---- reading -----------------------------------------------------------------------------------------------------


def _load(folder: Path) -> PairStore | None:
    """The store in a folder, or None where there is none or it is not what its meta.json says."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        report = FilterReport(**{**meta["report"], "filters": Filters(**meta["report"]["filters"])})
        source, target = (_load_side(folder, side, report.kept, meta["sides"][side]) for side in SIDES)
    except (OSError, ValueError, KeyError, TypeError, RegardError):
        return None
    return PairStore(source, target, report)


def _load_side(folder: Path, side: str, n: int, meta: dict[str, Any]) -> TokenStore:
    ids = _map(folder / f"{side}.ids", np.dtype(meta["dtype"]), meta["tokens"])
    return TokenStore(ids, _map(folder / f"{side}.offsets", OFFSET, n + 1))


def _map(path: Path, dtype: np.dtype[Any], n: int) -> np.ndarray:
    """A file of exactly n numbers as an array; an empty file cannot be mapped."""
    if path.stat().st_size != n * dtype.itemsize:
        raise ValueError(f"{path} has the wrong size")
    return np.memmap(path, dtype, mode="r").view(np.ndarray) if n else np.empty(0, dtype)
