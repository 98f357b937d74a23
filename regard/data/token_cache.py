"""The cache of tokenized corpora: token ids of plain or parallel text, memory-mapped and keyed by content.

A cached store is one folder: for each side of a row (one, or source and target) `*.ids` (all sequences end to end) and
`*.offsets` (where each begins, and the end), `meta.json` with counts and data types, and `manifest.json` with the SHA-256 of
every other file. It is written atomically: under another name, sealed and renamed. The checksums are verified when a process
first uses a store; a damaged one is named on stderr and made again.
"""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import sys
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
from regard.files import MANIFEST, find_damage, read_checksums, read_json, sync, write_manifest

FORMAT = 4  # raise it whenever the layout or the meaning of the files changes
CHUNK, CHARACTERS = 4096, 1 << 22  # rows tokenized at a time, and characters: they bound the memory
STALE = 24 * 3600  # seconds without a write after which an unfinished folder is taken to be abandoned
SETTLED = 2  # seconds: a file written longer ago than this cannot change and keep its time stamp
META = "meta.json"
ANY_LENGTH = 1 << 62
Row = tuple[str, ...]
Joined = tuple[np.ndarray, np.ndarray]  # sequences end to end, and their lengths
OFFSET = np.dtype("<i8")


class Corpus(Protocol):
    """The interface of a corpus for `prepare_store`."""

    @property
    def specs(self) -> tuple[str, ...]: ...

    def rows_by_spec(self) -> Iterator[Iterator[Row]]: ...

    def fingerprint(self) -> str: ...


class Encoder(Protocol):
    """The interface of a tokenizer for `prepare_store`."""

    def encode_batch(self, texts: list[str]) -> list[list[int]]: ...

    def fingerprint(self) -> str: ...

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Filters:
    """The rows to keep: at most `max_len` tokens a side, the longer at most `max_ratio` times the shorter (0: any)."""

    max_len: int = 256
    max_ratio: float = 0.0

    def __post_init__(self) -> None:
        if self.max_len < 1:
            raise RegardError(f"max_len is {self.max_len}; it must be at least 1 token")
        if not (self.max_ratio == 0 or self.max_ratio >= 1):
            raise RegardError(f"max_ratio is {self.max_ratio}; it must be at least 1, or 0 to keep every ratio")

    def verdict(self, row: Row, lengths: tuple[int, ...]) -> str:
        """Return the field of `FilterReport` that counts this row."""
        shorter, longer = min(lengths), max(lengths)
        if not shorter or not all(text.strip() for text in row):
            return "empty"
        if longer > self.max_len:
            return "too_long"
        return "bad_ratio" if self.max_ratio and longer > self.max_ratio * shorter else "kept"


@dataclass(frozen=True)
class FilterReport:
    """The number of rows that were kept, and of those that were dropped, by reason."""

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
    """Sequences of token ids: sequence i is `ids[offsets[i]:offsets[i + 1]]`."""

    def __init__(self, ids: np.ndarray, offsets: np.ndarray) -> None:
        self._ids = ids
        self._offsets = offsets

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def __getitem__(self, i: int) -> np.ndarray:
        i = range(len(self))[i]  # negative indices count from the end, others raise IndexError
        return self._ids[self._offsets[i] : self._offsets[i + 1]].astype(np.int64)

    def gather(self, rows: np.ndarray) -> Joined:
        """Return the ids of some sequences end to end, and their lengths."""
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
    """A tokenized corpus: one side for plain text, source and target for parallel text."""

    sides: tuple[TokenStore, ...]
    report: FilterReport
    key: str = ""  # of its content: equal keys mean equal tokens
    rows_of_specs: tuple[int, ...] = ()  # how many of the rows are from each spec of the corpus, in order

    @property
    def source(self) -> TokenStore:
        return self.sides[0]

    @property
    def target(self) -> TokenStore:
        return self.sides[1]

    def __len__(self) -> int:
        return len(self.sides[0])


def cache_folder() -> Path:
    """Return the cache folder: $REGARD_CACHE, else $XDG_CACHE_HOME/regard, else ~/.cache/regard."""
    if chosen := os.environ.get("REGARD_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "regard"


def prepare_store(
    corpus: Corpus,
    tokenizers: tuple[Encoder, ...],
    filters: Filters,
    cache: Path,
    progress: Callable[[int], None] = lambda done: None,
) -> Store:
    """Tokenize a corpus, with a tokenizer for each side, or take it from the cache if that has the same content.

    `progress` is called with the number of rows that were tokenized since the last call. Processes that prepare the same
    corpus at once all do the work, and the first to finish keeps the name. A store is memory-mapped before it is renamed, so
    no renaming or removing by another process can take its data away.
    """
    content = [FORMAT, corpus.fingerprint(), *(t.fingerprint() for t in tokenizers), asdict(filters)]
    folder = cache / hashlib.sha256(json.dumps(content).encode()).hexdigest()[:32]
    if store := _cached(folder):
        return replace(store, key=folder.name)
    partial = folder.with_name(f"{folder.name}.partial-{secrets.token_hex(4)}")
    try:
        with _disk_errors(cache):
            _remove_abandoned(cache)
            partial.mkdir(parents=True)
            _write(partial, corpus, tokenizers, filters, progress)
            store = _load(partial)
            with suppress(OSError):  # the name is taken: another process was first
                partial.rename(folder)
                sync(cache)
    except _Unusable as error:
        raise RegardError(
            f"what was written to {cache} cannot be read back ({error}); check the disk or set REGARD_CACHE"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return replace(store, key=folder.name)


def _cached(folder: Path) -> Store | None:
    """Return the store in a folder of the cache if it is intact; a damaged one is named on stderr and removed."""
    if not os.path.lexists(folder):
        return None
    try:
        _verify(folder)
        return _load(folder)
    except _Unusable as error:
        shutil.rmtree(folder, ignore_errors=True)
        message = f"the prepared data in {folder} is damaged ({error}) and is prepared again"
        if os.path.lexists(folder):
            message += (
                "; it cannot be removed, so every run does that: remove it, or set REGARD_CACHE to another folder"
            )
        print(message, file=sys.stderr, flush=True)
    return None


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
    tokenizers: tuple[Encoder, ...],
    filters: Filters,
    progress: Callable[[int], None],
) -> None:
    writers = [_Writer(folder, f"side-{i}", len(tokenizer)) for i, tokenizer in enumerate(tokenizers)]
    counts: Counter[str] = Counter()
    kept_of_specs = []
    for rows_of_spec in corpus.rows_by_spec():
        before = counts["kept"]
        for rows in _chunks(rows_of_spec):
            encoded = [tokenizer.encode_batch([row[i] for row in rows]) for i, tokenizer in enumerate(tokenizers)]
            lengths = zip(*(map(len, ids) for ids in encoded), strict=True)
            verdicts = [filters.verdict(row, n) for row, n in zip(rows, lengths, strict=True)]
            counts.update(verdicts)
            for writer, sequences in zip(writers, encoded, strict=True):
                writer.add([ids for ids, verdict in zip(sequences, verdicts, strict=True) if verdict == "kept"])
            progress(len(rows))
        kept_of_specs.append(counts["kept"] - before)
    report = FilterReport(filters, **counts)
    if not report.kept:
        what = f"nothing of {', '.join(corpus.specs)} is left to use ({report.describe('rows')})"
        raise RegardError(f"{what}; check the files or loosen the filters")
    sides = [writer.meta() for writer in writers]
    (folder / META).write_text(
        json.dumps({"report": asdict(report), "rows": kept_of_specs, "sides": sides}, indent=2) + "\n"
    )
    write_manifest(folder)


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
            what = f"cannot write prepared data to {cache} ({error.strerror or error}); fix that"
        raise RegardError(f"{what} or set REGARD_CACHE to another folder") from error


def _remove_abandoned(cache: Path) -> None:
    """Remove unfinished stores of killed processes; a process still at work has written to its own recently."""
    for folder in cache.glob("*.partial-*"):
        if not re.fullmatch(r"[0-9a-f]{32}\.partial-[0-9a-f]{8}", folder.name):
            continue
        with suppress(OSError):
            if time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir())) > STALE:
                shutil.rmtree(folder, ignore_errors=True)


# ---- reading -----------------------------------------------------------------------------------------------------


class _Unusable(Exception):
    """The reason why a store in the cache cannot be used."""


Stamps = tuple[tuple[int, ...], ...]
_verified: dict[Path, Stamps] = {}  # the stamps of each store when this process verified its checksums


def _verify(folder: Path) -> None:
    """Verify the checksums of a store, once in a process as long as its files stay the same."""
    try:
        stamps = _stamps(folder)
        if _verified.get(folder) == stamps:
            return
        wrong = find_damage(folder)
    except (OSError, RegardError) as error:
        raise _Unusable(str(error)) from error
    if wrong:
        raise _Unusable(wrong)
    # A file written within the resolution of its time stamp can change again without another stamp.
    if time.time() - max(stamp[-1] for stamp in stamps) / 1e9 > SETTLED:
        _verified[folder] = stamps


def _stamps(folder: Path) -> Stamps:
    found = (path.stat() for path in sorted(folder.iterdir()))
    return tuple((s.st_dev, s.st_ino, s.st_size, max(s.st_mtime_ns, s.st_ctime_ns)) for s in found)


def _load(folder: Path) -> Store:
    """Map the files of a store."""
    try:
        meta = read_json(folder / META)
        used = {META, *(f"side-{i}.{kind}" for i in range(len(meta["sides"])) for kind in ("ids", "offsets"))}
        if unnamed := used - (read_checksums(folder) or {}).keys():
            raise _Unusable(f"{MANIFEST} does not name {min(unnamed)}")
        report = FilterReport(**{**meta["report"], "filters": Filters(**meta["report"]["filters"])})
        sides = tuple(_load_side(folder, f"side-{i}", report.kept, side) for i, side in enumerate(meta["sides"]))
    except (OSError, ValueError, KeyError, TypeError, RegardError) as error:
        raise _Unusable(f"{META}: {type(error).__name__}: {error}") from error
    return Store(sides, report, rows_of_specs=tuple(meta["rows"]))


def _load_side(folder: Path, side: str, n: int, meta: dict[str, Any]) -> TokenStore:
    ids = _map(folder / f"{side}.ids", np.dtype(meta["dtype"]), meta["tokens"])
    return TokenStore(ids, _map(folder / f"{side}.offsets", OFFSET, n + 1))


def _map(path: Path, dtype: np.dtype[Any], n: int) -> np.ndarray:
    """Memory-map a file of exactly n numbers; an empty file cannot be mapped."""
    if path.stat().st_size != n * dtype.itemsize:
        raise ValueError(f"{path} has the wrong size")
    return np.memmap(path, dtype, mode="r").view(np.ndarray) if n else np.empty(0, dtype)
