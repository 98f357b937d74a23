"""Inference that several processes share: `torchrun --nproc-per-node 8 -m regard translate -i FILE -o OUT`.

The work is divided into numbered parts by what it consists of alone, never by the number of processes (ranks). Rank r of n
computes the parts r, r + n, r + 2n, ... and writes each to the folder `OUT.parts`, where a file appears under its name when
it is complete. Rank 0 reads all parts in order and writes the output. The ranks meet once, before the first part; after that
none waits for another, except rank 0 for the parts that it joins. A group that was killed and is started again, with any
number of ranks, computes only the parts that are missing. The folder has a plan that says of what the parts are, so that
those of another input, model or setting are never used.

The parts are what one process computes at a time, so the output is the same: chunks of a file that is translated
(document_translation.py), batches of a test set (decode/batch_decoding.py) and of texts that are embedded (embedder.py).
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import torch

from regard.config import DecodeConfig
from regard.decode.batch_decoding import check_decoding, check_lengths, decode, decode_batches, plan_batches
from regard.decode.constraints import DecodableModel, Hypothesis, check_options, uses_cuda_graphs
from regard.decode.generation import length_batches
from regard.errors import RegardError
from regard.files import disk_errors, parse_json, remove_drafts, sync, temporary_path, write_text
from regard.inference.document_translation import (
    CHUNK_SEGMENTS,
    OutputStyle,
    Piece,
    Result,
    TextFile,
    atomic_file,
    divide,
    translate_chunk,
)
from regard.inference.embedder import BATCH_TOKENS, Embedder, normalize_rows
from regard.inference.streaming import ChunkTranslator
from regard.inference.translator import Translation
from regard.kernels.cpu_threads import divide_threads, undivided_threads
from regard.process_rank import Rank
from regard.text.special_tokens import EOS_TEMPLATE, SpecialTokenTemplate

MOST_PARTS = 4096  # files in a folder; a part of a larger work has more chunks or batches
WAIT_SECONDS, REPORT_SECONDS = 0.05, 0.5  # between two looks for a part, and between two counts of all parts

Advance = Callable[[int], None]
Meet = Callable[[bytes], list[bytes]] | None  # a function like `meet_ranks`, which None stands for


# ---- this process among the others -----------------------------------------------------------------------------------


def set_up_rank(device: str, rank: Rank) -> str:
    """Return the device of a rank, after leaving it its share of the cores: with `auto` and `cuda`, each rank has a GPU.

    Where OMP_NUM_THREADS is set, it is the number of threads of each rank. Where there are more ranks than GPUs, some share.
    """
    if rank.is_alone:
        return device
    if not os.environ.get("OMP_NUM_THREADS"):
        divide_threads(rank.local_count)
    if device in ("auto", "cuda") and torch.cuda.is_available():
        return f"cuda:{rank.local_index % torch.cuda.device_count()}"
    return device


def meet_ranks(digest: bytes) -> list[bytes]:
    """Wait until all ranks have called this, over the address that torchrun gives them; return the bytes that each gave.

    All ranks give the same number of bytes.
    """
    from torch import distributed

    try:
        distributed.init_process_group("gloo")
        given = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
        found = [torch.empty_like(given) for _ in range(distributed.get_world_size())]
        distributed.all_gather(found, given)
        distributed.barrier()
    except (ValueError, RuntimeError) as error:
        raise RegardError(
            f"the ranks cannot reach each other ({str(error).splitlines()[0]}): start them with torchrun"
        ) from error
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
    return [bytes(each.tolist()) for each in found]


class ShareFinished(Exception):
    """The exception that ends the work of a rank other than 0 when its parts are done: only rank 0 has all results."""


# ---- parts -----------------------------------------------------------------------------------------------------------


class SharedParts:
    """The parts of a work in a folder: written by all ranks, read in order by rank 0, which removes them in the end.

    Attributes:
        folder: The folder, in which files of other names are neither read nor removed.
        count: The number of parts.
        rank: The rank of this process.
        own_missing: The parts that this rank has to compute: its own without those that are there.
    """

    KIND, PLAN, NAME = "regard shared work", "plan.json", re.compile(r"part-(\d{6})")

    def __init__(self, folder: Path, identity: dict[str, str], count: int, rank: Rank, meet: Meet = None) -> None:
        """Begin the work in `folder`, or continue the one that is there.

        `identity` must change with everything that has an effect on the results: where it is not that of the parts in the
        folder, they are refused. All ranks give the same.
        """
        self.folder, self.count, self.rank = folder, count, rank
        self._identity = {"kind": self.KIND, **identity, "parts": str(count)}
        self._lock: BinaryIO | None = None
        self._seen: set[int] = set()  # parts that `new_parts` has returned
        self._looked_at = -REPORT_SECONDS
        if rank.is_first:
            self._begin()
        # Rank 0 removes the folder when all parts are there: a rank that has none to write must not look at it any more.
        own = set(range(rank.index, count, rank.count))
        self.own_missing = sorted(own - self._written()) if folder.exists() else sorted(own)
        if not rank.is_alone:
            try:
                self._meet_others(meet or meet_ranks)
            except BaseException as error:
                self.__exit__(type(error), error, None)
                raise

    @classmethod
    def is_begun(cls, folder: Path) -> bool:
        """Return whether parts of a work that is not finished are in a folder."""
        try:
            return parse_json((folder / cls.PLAN).read_text(encoding="utf-8"))["kind"] == cls.KIND
        except (OSError, ValueError, TypeError, KeyError):
            return False

    # ---- the plan ----

    def _begin(self) -> None:
        """Write the plan, or compare the one that is there, and lock it against other groups."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        if not os.path.lexists(self.folder / self.PLAN):
            if self._written():
                raise RegardError(f"{self.folder} has parts but no plan: move the folder, or choose another output")
            write_text(self.folder / self.PLAN, json.dumps(self._identity, indent=1))
        self._lock = self._open_plan()
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a forked process does not inherit this kind
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                self._lock.close()
                raise RegardError(
                    f"another process uses {self.folder}: wait for it, or choose another output"
                ) from None
            # Otherwise the file system has no locks.
        try:
            self._check(self._lock)
        except RegardError:
            self._lock.close()
            raise

    def _open_plan(self) -> BinaryIO:
        with disk_errors(self.folder / self.PLAN):
            return (self.folder / self.PLAN).open("r+b")

    def _check(self, plan: BinaryIO) -> None:
        """Raise a RegardError if the plan is not that of this work."""
        try:
            found = parse_json(plan.read().decode())
        except ValueError:
            found = None
        if not isinstance(found, dict) or found.get("kind") != self.KIND:
            raise RegardError(
                f"{self.folder / self.PLAN} is in the way of the plan, and is none: move it, or choose another output"
            )
        if changed := [name for name in self._identity if found.get(name) != self._identity[name]]:
            raise RegardError(
                f"{self.folder} is what is left of other work (not the same {', '.join(changed)}): give the command that "
                f"began it to finish that, or remove the folder to start anew"
            )

    def _meet_others(self, meet: Callable[[bytes], list[bytes]]) -> None:
        """Wait for the other ranks; one whose input, model or settings are not those of rank 0 is an error on all ranks."""
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).digest()
        found = meet(digest)
        if wrong := [str(index) for index, each in enumerate(found) if each != found[0]]:
            raise RegardError(
                f"rank {', '.join(wrong)} has another input, model or version of Regard than rank 0: give all ranks the same"
            )

    # ---- computing ----

    def write(self, number: int, data: bytes) -> None:
        """Write a part, which appears under its name when it is complete."""
        path = self._path(number)
        draft = temporary_path(path)
        with disk_errors(path):
            try:
                draft.write_bytes(data)
                sync(draft)
                draft.rename(path)
            finally:
                draft.unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return self.folder / f"part-{number:06d}"

    def _written(self) -> set[int]:
        with disk_errors(self.folder):
            names = map(self.NAME.fullmatch, os.listdir(self.folder))
        return {int(found[1]) for found in names if found and int(found[1]) < self.count}

    # ---- joining ----

    def new_parts(self, pause: float = REPORT_SECONDS) -> set[int]:
        """Return the parts, of any rank, that were written since the last call; within `pause` seconds after it, none."""
        if time.monotonic() - self._looked_at < pause:
            return set()
        new = self._written() - self._seen
        self._seen |= new
        self._looked_at = time.monotonic()
        return new

    def read(self, number: int, while_waiting: Callable[[], None] = lambda: None) -> bytes:
        """Return a part as soon as it is there; `while_waiting` is called again and again until then.

        A rank that fails is no reason to wait for ever: torchrun then ends all of them.
        """
        path = self._path(number)
        while not path.exists():
            while_waiting()
            time.sleep(WAIT_SECONDS)
        return path.read_bytes()

    def damage(self, number: int) -> RegardError:
        """Return the error of a part that cannot be read."""
        return RegardError(f"{self._path(number)} is damaged: remove it and run the same command again")

    def remove(self) -> None:
        """Remove the parts and the plan, and the folder if nothing else is in it; only rank 0 may, when all is joined."""
        for number in range(self.count):
            self._path(number).unlink(missing_ok=True)
        remove_drafts(self.folder, "part-[0-9][0-9][0-9][0-9][0-9][0-9]")  # left by ranks that were killed
        (self.folder / self.PLAN).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder has files of others
            self.folder.rmdir()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> SharedParts:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Let go of the folder after an error on rank 0; one without parts is removed. Otherwise `remove` does both."""
        if error is None or self._lock is None or self._lock.closed:
            return
        if self._written():
            self._lock.close()
        else:
            self.remove()


def parts_folder(target: Path) -> Path:
    """Return the folder of the parts of an output file."""
    return target.with_name(f"{target.name}.parts")


def group_parts(items: int, least: int = 1) -> list[range]:
    """Return the items of each part: at least `least` of them, and more where there would be more than MOST_PARTS parts."""
    size = max(least, -(-items // MOST_PARTS))
    return [range(begin, min(begin + size, items)) for begin in range(0, items, size)]


# ---- translating a file ----------------------------------------------------------------------------------------------


def translate_shared(
    file: TextFile,
    target: Path,
    translator: ChunkTranslator,
    style: OutputStyle,
    identity: dict[str, str],
    rank: Rank,
    *,
    sizes: Sequence[int],
    observe: Callable[[int, str, Translation], None] = lambda line, text, translation: None,
    advance: Advance = lambda done: None,
    meet: Meet = None,
) -> None:
    """Translate this rank's share of a file; rank 0 then writes `target`, with the bytes that one process would write.

    A rank reads the whole file: the languages of the texts that others translate have an effect on those after them. `sizes`
    are the segments of each chunk (`TextFile.chunk_sizes`). On rank 0, `observe` is called with the line, the text and the
    translation of segments that have notes or were cut off, and `advance` with the segments that any rank has translated.
    """
    groups = group_parts(len(sizes))
    done = 0

    def report(pause: float = REPORT_SECONDS) -> None:
        nonlocal done
        if rank.is_first and (new := sum(sizes[i] for part in parts.new_parts(pause) for i in groups[part])):
            done += new
            advance(new)

    with SharedParts(parts_folder(target), identity, len(groups), rank, meet) as parts:
        try:
            report()
            missing = iter([*(groups[part] for part in parts.own_missing), range(0)])
            own, kept = next(missing), []
            for number, (piece, chunk) in enumerate(iterate_chunks(file)):
                if not own:
                    break
                if number not in own:
                    translator.skip(piece.texts[chunk])
                    continue
                found = translate_chunk(piece, chunk, translator, style)
                kept.append({"results": style.keep_all(piece.texts[chunk], found), "notes": list_notes(found)})
                if number == own[-1]:
                    parts.write(number // len(groups[0]), json.dumps(kept, ensure_ascii=False).encode())
                    own, kept = next(missing), []
                report()
            if rank.is_first:
                join_translations(file, target, style, parts, observe, report)
                parts.remove()
        except KeyboardInterrupt:
            report(pause=0.0)
            if not done:
                raise
            raise KeyboardInterrupt(
                f"stopped after {done:,} of {sum(sizes):,} segments, which are kept in {parts.folder}: "
                f"the same command continues"
            ) from None


def iterate_chunks(file: TextFile) -> Iterator[tuple[Piece, slice]]:
    """Yield the chunks of a file, each with its piece."""
    for piece in file.pieces():
        for chunk in divide(piece.texts):
            yield piece, chunk


def list_notes(found: Sequence[Translation]) -> list[list[Any]]:
    """Return the number, notes, end and languages of each translation that has notes or was cut off."""
    return [
        [i, list(each.notes), each.ended, each.source, each.target, each.via]
        for i, each in enumerate(found)
        if each.notes or not each.ended
    ]


def join_translations(
    file: TextFile,
    target: Path,
    style: OutputStyle,
    parts: SharedParts,
    observe: Callable[[int, str, Translation], None],
    report: Callable[[], None],
) -> None:
    """Write the translation of a file from its parts, each as soon as it is there."""
    chunks = read_chunks(parts, report)
    with atomic_file(target) as write:
        write("" if style.as_json or style.has_nbest else file.begin)
        for piece in file.pieces():
            results: list[Result] = []
            for chunk in divide(piece.texts):
                kept = next(chunks)
                results += kept["results"]
                for i, notes, ended, source, to, via in kept["notes"]:
                    at = chunk.start + i
                    translation = Translation(results[at]["text"], 0.0, 0.0, (), ended, (), source, to, tuple(notes))
                    observe(piece.lines[at], piece.texts[at], replace(translation, via=via))
            write(style.render(piece, results))
            report()


def read_chunks(parts: SharedParts, report: Callable[[], None]) -> Iterator[dict[str, Any]]:
    """Yield what is kept of each chunk, in the order of the file."""
    for part in range(parts.count):
        try:
            chunks = parse_json(parts.read(part, report).decode())
        except ValueError:
            raise parts.damage(part) from None
        yield from chunks


# ---- decoding a test set ---------------------------------------------------------------------------------------------


class SharedDecoding:
    """A function like `regard.decode.batch_decoding.decode` whose sentences are shared among ranks.

    On rank 0 it returns the translations of all sentences; on the others it raises ShareFinished. On a CPU the parts are
    batches of one process, so translations are the same to the last bit; on a GPU they are ranges of sentences.
    """

    def __init__(self, folder: Path, identity: dict[str, str], rank: Rank, meet: Meet = None) -> None:
        self.folder, self.identity, self.rank, self.meet = folder, identity, rank, meet
        self.parts: SharedParts | None = None

    def __call__(
        self,
        model: DecodableModel,
        sources: Sequence[Sequence[int]],
        options: DecodeConfig,
        max_len: int,
        device: torch.device,
        progress: Advance = lambda done: None,
        token_template: SpecialTokenTemplate = EOS_TEMPLATE,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        check_options(options)
        check_lengths(sources, max_len, token_template, model)
        check_decoding(model, options)
        of_all = seeds if seeds is not None else range(options.seed, options.seed + len(sources))
        has_ranges = uses_cuda_graphs(model, options.beam, options)
        if has_ranges:
            batches = [list(rows) for rows in group_parts(len(sources), CHUNK_SEGMENTS)]
            groups = [range(i, i + 1) for i in range(len(batches))]
        else:
            batches = plan_batches(model, sources, options, device)
            groups = group_parts(len(batches), undivided_threads() if device.type == "cpu" else 1)

        def compute(part: range) -> dict[int, list[Hypothesis]]:
            template: Any = {"token_template": token_template}
            if not has_ranges:
                own = batches[part.start : part.stop]
                return decode_batches(model, sources, own, options, max_len, device, **template, seeds=of_all)
            rows = batches[part.start]
            given, seeds_of_rows = [sources[i] for i in rows], [of_all[i] for i in rows]
            found = decode(model, given, options, max_len, device, **template, seeds=seeds_of_rows)
            return dict(zip(rows, found, strict=True))

        def report() -> None:
            progress(sum(len(batches[i]) for part in parts.new_parts() for i in groups[part]))

        with SharedParts(self.folder, self.identity, len(groups), self.rank, self.meet) as parts:
            for part in parts.own_missing:
                found = compute(groups[part])
                rows = [[row, [astuple(each) for each in ranked]] for row, ranked in found.items()]
                parts.write(part, json.dumps(rows).encode())
                report()
            if not self.rank.is_first:
                raise ShareFinished
            results: dict[int, list[Hypothesis]] = {}
            for part in range(parts.count):
                try:
                    rows = parse_json(parts.read(part, report).decode())
                    results |= {row: [Hypothesis(*each) for each in ranked] for row, ranked in rows}
                except (ValueError, TypeError):
                    raise parts.damage(part) from None
        self.parts = parts
        return [results[i] for i in range(len(sources))]

    def finish(self) -> None:
        """Remove the parts, when what was made of them is saved."""
        if self.parts is not None:
            self.parts.remove()


# ---- embedding texts -------------------------------------------------------------------------------------------------


def embed_shared(
    embedder: Embedder,
    texts: list[str],
    pooling: str | None,
    normalize: bool,
    truncate: bool,
    folder: Path,
    identity: dict[str, str],
    rank: Rank,
    *,
    progress: Advance = lambda done: None,
    meet: Meet = None,
) -> tuple[np.ndarray, SharedParts]:
    """Return the vectors that `Embedder.embed` returns, and the parts, to be removed when the vectors are saved.

    The arguments are those of `embed`, the folder of the parts, and what they must agree with. Ranks other than 0 raise
    ShareFinished.
    """
    pooling = embedder.choose_pooling(pooling)
    rows = embedder.encode_rows(texts, truncate)
    batches = list(length_batches([len(row) for row in rows], BATCH_TOKENS))
    groups = group_parts(len(batches))

    def report() -> None:
        progress(sum(len(batches[i]) for part in parts.new_parts() for i in groups[part]))

    with SharedParts(folder, identity, len(groups), rank, meet) as parts:
        for part in parts.own_missing:
            found = [embedder.embed_rows([rows[row] for row in batches[i]], pooling) for i in groups[part]]
            data = io.BytesIO()
            np.save(data, np.concatenate(found), allow_pickle=False)
            parts.write(part, data.getvalue())
            report()
        if not rank.is_first:
            raise ShareFinished
        vectors = np.zeros((len(rows), embedder.model.width), np.float32)
        for part in range(parts.count):
            try:
                own = [row for i in groups[part] for row in batches[i]]
                vectors[own] = np.load(io.BytesIO(parts.read(part, report)), allow_pickle=False)
            except ValueError:
                raise parts.damage(part) from None
    return normalize_rows(vectors) if normalize else vectors, parts
