"""Continuous batching of the sequences that a scheduler sends: they join a running batch between two steps.

Sequences with the same decode settings are one batch. All batches take turns, one step each. New sequences join a batch
when they are a quarter of it, or after a few steps: joining copies the decoding state of all, so they join several at a
time. On a GPU the batches are the slots of CUDA graphs (decode/graphs/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from regard.config import DecodeConfig
from regard.decode.beam_search import BeamSearch
from regard.decode.constraints import Hypothesis, length_limits, pad_rows, uses_cuda_graphs
from regard.decode.generation import GenerationBatch, GenerationRequest
from regard.decode.graphs.engine import return_engine
from regard.decode.sampling import Sampling
from regard.models.model import LanguageModel

SHORTEST = 32  # tokens of the shortest slots
JOIN_SHARE = 4  # new sequences join when they are one of so many
JOIN_STEPS = 4  # ... or after so many steps
SLOTS = 256  # sequences in the slots of a CUDA graph, if memory allows
ROWS = 64  # hypotheses that read their sources together: a core gains nothing from more


@dataclass(frozen=True)
class DecodeTask:
    """A sequence to decode: a source to translate or a prompt to continue."""

    number: int
    ids: tuple[int, ...]  # with all special tokens
    options: DecodeConfig
    start: tuple[int, ...] = ()  # the tokens that a translation begins with
    seeds: tuple[int, ...] = (0,)  # of its samples
    limit: int = 0  # of a continuation: at most this many tokens


@dataclass(frozen=True)
class DecodeEvent:
    """What happened to a sequence: it got tokens, or it is done, or it failed."""

    number: int
    tokens: tuple[tuple[int, float], ...] = ()  # of a continuation: new tokens with their log-probabilities
    hypotheses: tuple[Hypothesis, ...] = ()  # of a translation that is done
    done: bool = False
    error: str = ""


class DecodeBatch(Protocol):
    """Sequences with the same settings, which are decoded together."""

    joins_at_once: bool  # new sequences need not wait for others to join with

    @property
    def size(self) -> int:
        """The number of sequences in the batch."""

    def add(self, tasks: Sequence[DecodeTask]) -> list[DecodeEvent]:
        """Let sequences join the batch."""

    def step(self) -> list[DecodeEvent]:
        """Add a token, or a few, to each sequence."""

    def remove(self, numbers: set[int]) -> None:
        """Remove sequences that nobody waits for."""

    def close(self) -> None:
        """Return what the next batch of this kind can use again."""


class BeamTranslations:
    """Translations by beam search."""

    joins_at_once = False

    def __init__(self, model: Any, options: DecodeConfig, start: tuple[int, ...]) -> None:
        self.model, self.options, self.search = model, options, BeamSearch(model, options, start)

    @property
    def size(self) -> int:
        return self.search.sentences

    def add(self, tasks: Sequence[DecodeTask]) -> list[DecodeEvent]:
        source, limits = read_sources(self.model, tasks)
        self.search.add(source, limits, [one.number for one in tasks])
        return []

    def step(self) -> list[DecodeEvent]:
        found = self.search.step()
        return [DecodeEvent(number, hypotheses=tuple(ranked), done=True) for number, ranked in found.items()]

    def remove(self, numbers: set[int]) -> None:
        self.search.remove(numbers)

    def close(self) -> None:
        pass


class SampledTranslations:
    """Translations by greedy decoding or sampling; a sequence may have several samples."""

    joins_at_once = False

    def __init__(self, model: Any, options: DecodeConfig, start: tuple[int, ...]) -> None:
        self.model, self.options, self.search = model, options, Sampling(model, options, start)
        self.owners: dict[int, int] = {}  # row -> sequence
        self.found: dict[int, list[Hypothesis]] = {}  # sequence -> its samples that are done
        self.next_row = 0

    @property
    def size(self) -> int:
        return len(self.found)

    def add(self, tasks: Sequence[DecodeTask]) -> list[DecodeEvent]:
        copies = [one for one in tasks for _ in one.seeds]
        rows = range(self.next_row, self.next_row + len(copies))
        self.next_row += len(copies)
        self.owners |= {row: one.number for row, one in zip(rows, copies, strict=True)}
        self.found |= {one.number: [] for one in tasks}
        source, limits = read_sources(self.model, copies)
        self.search.add(source, limits, rows, [seed for one in tasks for seed in one.seeds])
        return []

    def step(self) -> list[DecodeEvent]:
        events = []
        for row, hypothesis in self.search.step().items():
            number = self.owners.pop(row)
            self.found[number].append(hypothesis)
            if number not in self.owners.values():
                ranked = sorted(self.found.pop(number), key=lambda one: -one.score)
                events.append(DecodeEvent(number, hypotheses=tuple(ranked), done=True))
        return events

    def remove(self, numbers: set[int]) -> None:
        rows = {row for row, number in self.owners.items() if number in numbers}
        self.search.remove(rows)
        self.owners = {row: number for row, number in self.owners.items() if row not in rows}
        self.found = {number: found for number, found in self.found.items() if number not in numbers}

    def close(self) -> None:
        pass


class Continuations:
    """Continuations of prompts by a language model."""

    joins_at_once = False

    def __init__(self, model: LanguageModel, options: DecodeConfig) -> None:
        self.model, self.batch = model, GenerationBatch(model, options)
        self.rows: dict[int, GenerationRequest] = {}
        self.reported: dict[int, int] = {}  # tokens that were reported already

    @property
    def size(self) -> int:
        return len(self.rows)

    def add(self, tasks: Sequence[DecodeTask]) -> list[DecodeEvent]:
        eos = self.model.config.eos_token_id
        rows = [GenerationRequest(list(one.ids), one.limit, "length", one.seeds[0], eos) for one in tasks]
        self.rows |= {one.number: row for one, row in zip(tasks, rows, strict=True)}
        self._add_rows(rows)
        return self._events()

    def step(self) -> list[DecodeEvent]:
        self._step_rows()
        return self._events()

    def remove(self, numbers: set[int]) -> None:
        self._remove_rows([row for number, row in self.rows.items() if number in numbers])
        self.rows = {number: row for number, row in self.rows.items() if number not in numbers}
        self.reported = {number: n for number, n in self.reported.items() if number not in numbers}

    def close(self) -> None:
        pass

    def _add_rows(self, rows: list[GenerationRequest]) -> None:
        self.batch.add(rows)

    def _step_rows(self) -> None:
        if self.batch.rows:
            self.batch.step()

    def _remove_rows(self, rows: list[GenerationRequest]) -> None:
        self.batch.remove(rows)

    def _events(self) -> list[DecodeEvent]:
        events = []
        for number, row in self.rows.items():
            start = self.reported.get(number, 0)
            ids = [*row.tokens, *([row.eos] if row.end == "end" else [])]
            fresh = tuple(zip(ids[start:], row.log_probs[start:], strict=True))
            self.reported[number] = start + len(fresh)
            if fresh or row.end:
                events.append(DecodeEvent(number, tokens=fresh, done=bool(row.end)))
        for event in events:
            if event.done:
                del self.rows[event.number], self.reported[event.number]
        return events


class SlotTranslations:
    """Translations in the slots of a CUDA graph, of sources up to a length."""

    joins_at_once = True

    def __init__(self, model: Any, options: DecodeConfig, start: tuple[int, ...], width: int) -> None:
        from regard.decode.graphs.decoding import OpenTranslation

        self.job = OpenTranslation(model, options, start, width, SLOTS)
        self.before: Any = None  # the snapshot that is read while the next steps run

    @property
    def size(self) -> int:
        return len(self.job.waiting) + len(self.job.working)

    def add(self, tasks: Sequence[DecodeTask]) -> list[DecodeEvent]:
        for task in tasks:
            self.job.add(task.number, task.ids, task.seeds)
        return []

    def step(self) -> list[DecodeEvent]:
        found, self.before = self.job.advance(self.before)
        return [DecodeEvent(number, hypotheses=tuple(ranked), done=True) for number, ranked in found.items()]

    def remove(self, numbers: set[int]) -> None:
        self.job.drop(numbers)

    def close(self) -> None:
        return_engine(self.job.engine)  # its graph need not be captured again


class SlotContinuations(Continuations):
    """Continuations in the slots of a CUDA graph, of prompts that end before a column."""

    joins_at_once = True

    def __init__(self, model: LanguageModel, options: DecodeConfig, columns: int) -> None:
        from regard.decode.graphs.decoding import OpenGeneration

        self.model, self.rows, self.reported = model, {}, {}
        self.job = OpenGeneration(model, options, columns, SLOTS)
        self.before: Any = None

    def close(self) -> None:
        return_engine(self.job.engine)

    def _add_rows(self, rows: list[GenerationRequest]) -> None:
        self.job.waiting.extend(rows)

    def _step_rows(self) -> None:
        self.before = self.job.advance(self.before)

    def _remove_rows(self, rows: list[GenerationRequest]) -> None:
        self.job.drop(rows)


def read_sources(model: Any, tasks: Sequence[DecodeTask]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sources (B, S) and the length limits (B,) of their translations."""
    device = next(model.parameters()).device
    source = pad_rows([one.ids for one in tasks], device)
    first = tasks[0]
    return source, length_limits((source >= 0).sum(1), first.options, model.config.max_len - len(first.start) + 1)


class BatchRunner:
    """Runs the batches of one model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.batches: dict[Any, DecodeBatch] = {}
        self.waiting: dict[Any, list[DecodeTask]] = {}
        self.steps_since_join: dict[Any, int] = {}
        self.places: dict[int, Any] = {}  # sequence -> key of its batch
        self.steps = 0

    @property
    def size(self) -> int:
        """The number of sequences that are decoded or wait to join."""
        return len(self.places)

    def add(self, task: DecodeTask) -> None:
        """Let a sequence wait to join the batch of its settings."""
        key = self._key(task)
        self.places[task.number] = key
        self.waiting.setdefault(key, []).append(task)

    def remove(self, numbers: set[int]) -> None:
        """Remove sequences that nobody waits for."""
        keys = {self.places.pop(number) for number in numbers if number in self.places}
        for key in keys:
            self.waiting[key] = [one for one in self.waiting.get(key, []) if one.number not in numbers]
            if key in self.batches:
                self.batches[key].remove(numbers)
        self._forget_empty()

    def step(self) -> list[DecodeEvent]:
        """Let waiting sequences join, and run one step of every batch."""
        events = []
        for key in [*self.waiting]:
            try:
                events += self._step(key)
            except Exception as error:  # a batch that fails takes only its own sequences with it
                lost = [number for number, own in self.places.items() if own == key]
                events += [DecodeEvent(number, done=True, error=f"{type(error).__name__}: {error}") for number in lost]
                self.batches.pop(key, None)
                self.waiting[key] = []
        self.steps += 1
        for event in events:
            if event.done:
                self.places.pop(event.number, None)
        self._forget_empty()
        return events

    def _step(self, key: Any) -> list[DecodeEvent]:
        batch, waiting = self.batches.get(key), self.waiting[key]
        if batch is None:
            batch = self.batches[key] = self._make_batch(key)
        since = self.steps_since_join.get(key, JOIN_STEPS)
        events: list[DecodeEvent] = []
        if batch.joins_at_once:
            chosen, self.waiting[key] = waiting, []
            events += batch.add(chosen)
        elif waiting and (len(waiting) * JOIN_SHARE >= batch.size or since >= JOIN_STEPS):
            waiting.sort(key=lambda one: len(one.ids))
            most = max(1, ROWS // (waiting[0].options.beam if waiting[0].start else 1))
            chosen, self.waiting[key] = waiting[:most], waiting[most:]
            events += batch.add(chosen)
            since = 0
        self.steps_since_join[key] = since + 1
        return events + (batch.step() if batch.size else [])

    def _key(self, task: DecodeTask) -> Any:
        """Return what the tasks of a batch have in common; on a GPU also their size, that of the slots."""
        options = replace(task.options, seed=0, stop_strings=(), max_new_tokens=1)  # what each task has its own of
        if not uses_cuda_graphs(self.model, options.beam if task.start else 1):
            return options, task.start, 0
        return options, task.start, max(SHORTEST, 1 << (len(task.ids) + task.limit - 1).bit_length())  # a power of two

    def _make_batch(self, key: Any) -> DecodeBatch:
        options, start, length = key
        if length:
            return (
                SlotTranslations(self.model, options, start, length)
                if start
                else SlotContinuations(self.model, options, length)
            )
        if not start:
            return Continuations(self.model, options)
        make = BeamTranslations if options.temperature == 0 and options.beam > 1 else SampledTranslations
        return make(self.model, options, start)

    def _forget_empty(self) -> None:
        used = set(self.places.values())
        for key in [key for key in self.waiting if key not in used]:
            del self.waiting[key]
            if key in self.batches:
                self.batches.pop(key).close()
            self.steps_since_join.pop(key, None)
