"""Tokenised once, memory-mapped ever after: token ids of a corpus, plain or parallel, in a cache keyed by content.

A cached store is one folder: for each side of a row (one, or source and target) `*.ids` (all sequences end to end) and
`*.offsets` (where each begins, and the end), and `meta.json` with counts, data types and file sizes. It is written under
another name, synced and renamed, so a folder under its final name is complete or, after a mishap, recognised as damaged by
its sizes and rebuilt.
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
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from regard.errors import RegardError
from regard.files import read_json, sync

FORMAT = 2  # raise it whenever the layout or the meaning of the files changes
CHUNK, CHARACTERS = 4096, 1 << 22  # rows tokenised at a time, and characters: the memory `prepare` needs
STALE = 24 * 3600  # seconds without a write after which an unfinished folder is taken to be abandoned
ANY_LENGTH = 1 << 62
Row = tuple[str, ...]
Joined = tuple[np.ndarray, np.ndarray]  # sequences end to end, and their lengths
OFFSET = np.dtype("<i8")


class Source(Protocol):
    """What `prepare` needs of a corpus."""

    @property
    def specs(self) -> tuple[str, ...]: ...

    def rows(self) -> Iterator[Row]: ...

    def fingerprint(self) -> str: ...


class Encoder(Protocol):
    """What `prepare` needs of a tokenizer."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Filters:
    """Rows to keep: at most `max_len` tokens a side, the longer at most `max_ratio` times the shorter (0: any)."""

    max_len: int = 256
    max_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.max_len < 1:
            raise RegardError(f"max_len is {self.max_len}; it must be at least 1 token")
        if not (self.max_ratio == 0 or self.max_ratio >= 1):
            raise RegardError(f"max_ratio is {self.max_ratio}; it must be at least 1, or 0 to keep every ratio")

    def verdict(self, row: Row, lengths: tuple[int, ...]) -> str:
        """The first count of `FilterReport` that the row falls under."""
        shorter, longer = min(lengths), max(lengths)
        if not shorter or not all(text.strip() for text in row):
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

    def describe(self, rows: str = "pairs") -> str:
        total = self.kept + self.empty + self.too_long + self.bad_ratio
        line = f"{total:,} {rows}: kept {self.kept:,}, empty {self.empty:,}"
        if self.filters.max_len < ANY_LENGTH:
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

    def together(self, rows: np.ndarray) -> Joined:
        """Some sequences end to end, and their lengths."""
        lengths = self.lengths[rows].astype(np.int64)
        first = np.cumsum(lengths) - lengths
        places = np.arange(lengths.sum()) + np.repeat(self._offsets[rows] - first, lengths)
        return self._ids[places].astype(np.int64), lengths

    @property
    def ids(self) -> np.ndarray:
        """All sequences end to end."""
        return self._ids

    @cached_property
    def lengths(self) -> np.ndarray:
        return np.diff(self._offsets).astype(np.int32)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type on disk: uint16 where the vocabulary fits, else uint32."""
        return self._ids.dtype


@dataclass(frozen=True)
class Store:
    sides: tuple[TokenStore, ...]
    report: FilterReport
    key: str = ""  # of its content: the same key, the same tokens

    @property
    def source(self) -> TokenStore:
        return self.sides[0]

    @property
    def target(self) -> TokenStore:
        return self.sides[1]

    def __len__(self) -> int:
        return len(self.sides[0])


def cache_folder() -> Path:
    """Where prepared corpora live: $REGARD_CACHE, else $XDG_CACHE_HOME/regard, else ~/.cache/regard."""
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard"


def prepare(
    corpus: Source,
    tokenizers: tuple[Encoder, ...],
    filters: Filters,
    cache: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> Store:
    """The corpus as token ids, a tokenizer for each side, from the cache if it has the same content; `progress` hears how
    many more rows are done.

    Processes that prepare the same thing at once each do the work, and the first to finish keeps the name. A store is
    mapped before it is renamed, so nothing another process does to the names can take its data away.
    """
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
    corpus: Source,
    tokenizers: tuple[Encoder, ...],
    filters: Filters,
    progress: Callable[[int], None],
) -> None:
    writers = [_Writer(folder, f"side-{i}", len(tokenizer)) for i, tokenizer in enumerate(tokenizers)]
    counts: Counter[str] = Counter()
    for rows in _chunks(corpus.rows()):
        encoded = [tokenizer.encode_batch([row[i] for row in rows]) for i, tokenizer in enumerate(tokenizers)]
        lengths = zip(*(map(len, ids) for ids in encoded), strict=True)
        verdicts = [filters.verdict(row, n) for row, n in zip(rows, lengths, strict=True)]
        counts.update(verdicts)
        for writer, sequences in zip(writers, encoded, strict=True):
            writer.add([ids for ids, verdict in zip(sequences, verdicts, strict=True) if verdict == "kept"])
        progress(len(rows))
    report = FilterReport(filters, **counts)
    if not report.kept:
        what = f"nothing of {', '.join(corpus.specs)} is left to use ({report.describe('rows')})"
        raise RegardError(f"{what}; check the files or loosen the filters")
    sides = [writer.meta() for writer in writers]
    (folder / "meta.json").write_text(json.dumps({"report": asdict(report), "sides": sides}, indent=2) + "\n")
    for path in (*folder.iterdir(), folder):
        sync(path)


def _chunks(rows: Iterator[Row]) -> Iterator[list[Row]]:
    held: list[Row] = []
    size = 0
    for row in rows:
        held.append(row)
        size += sum(map(len, row))
        if len(held) == CHUNK or size >= CHARACTERS:
            yield held
            held, size = [], 0
    if held:
        yield held


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


def _load(folder: Path) -> Store | None:
    """The store in a folder, or None where there is none or it is not what its meta.json says."""
    try:
        meta = read_json(folder / "meta.json")
        report = FilterReport(**{**meta["report"], "filters": Filters(**meta["report"]["filters"])})
        sides = tuple(_load_side(folder, f"side-{i}", report.kept, side) for i, side in enumerate(meta["sides"]))
    except (OSError, ValueError, KeyError, TypeError, RegardError):
        return None
    return Store(sides, report)


def _load_side(folder: Path, side: str, n: int, meta: dict[str, Any]) -> TokenStore:
    ids = _map(folder / f"{side}.ids", np.dtype(meta["dtype"]), meta["tokens"])
    return TokenStore(ids, _map(folder / f"{side}.offsets", OFFSET, n + 1))


def _map(path: Path, dtype: np.dtype[Any], n: int) -> np.ndarray:
    """A file of exactly n numbers as an array; an empty file cannot be mapped."""
    if path.stat().st_size != n * dtype.itemsize:
        raise ValueError(f"{path} has the wrong size")
    return np.memmap(path, dtype, mode="r").view(np.ndarray) if n else np.empty(0, dtype)
