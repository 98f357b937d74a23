"""Continuous batching of the sequences that a scheduler sends: they join a running batch between two steps.

Sequences with the same decode settings are one batch. All batches take turns, one step each. New sequences join a batch
when they are a quarter of it, or after a few steps: all others wait while their sources are read, so they join several at
a time. On a GPU the batches are the slots of CUDA graphs (decode/graphs/).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from regard.config import DecodeConfig
from regard.decode.beam_search import BeamSearch
from regard.decode.constraints import Hypothesis, length_limits, pad_rows, uses_cuda_graphs, why_not_captured
from regard.decode.generation import GenerationBatch, GenerationRequest
from regard.decode.graphs.engine import return_engine
from regard.decode.sampling import Sampling
from regard.models.model import LanguageModel

SHORTEST = 128  # tokens of the shortest slots; longer ones have four times as many, as few steps for all as possible
JOIN_SHARE = 4  # new sequences join when they are one of so many
JOIN_STEPS = 4  # ... or after so many steps
FEW_SLOTS, MANY_SLOTS = 256, 1024  # sequences in the slots of a CUDA graph, if memory allows: few decode faster
MANY, FEW = 512, 128  # sequences from which on there are many slots, and up to which there are few again
JOIN_TOKENS = 1024  # of the sources that are read together: a core gains nothing from more


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

    def __init__(self, model: Any, options: DecodeConfig, start: tuple[int, ...], width: int, slots: int) -> None:
        from regard.decode.graphs.decoding import OpenTranslation

        self.job = OpenTranslation(model, options, start, width, slots)
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

    def __init__(self, model: LanguageModel, options: DecodeConfig, columns: int, slots: int) -> None:
        from regard.decode.graphs.decoding import OpenGeneration

        self.model, self.rows, self.reported = model, {}, {}
        self.job = OpenGeneration(model, options, columns, slots)
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


def slot_length(tokens: int) -> int:
    """Return the length of the slots for a sequence: few different ones, since the batches of all lengths take turns."""
    length = SHORTEST
    while length < tokens:
        length *= 4
    return length


@dataclass
class TaskGroup:
    """The tasks with the same settings: a batch, and those that wait to join it."""

    options: DecodeConfig
    start: tuple[int, ...]
    length: int  # of slots on a GPU, 0 without
    waiting: list[DecodeTask] = field(default_factory=list)
    numbers: set[int] = field(default_factory=set)  # of all tasks that are not done
    batch: DecodeBatch | None = None
    steps_since_join: int = JOIN_STEPS
    slots: int = FEW_SLOTS  # of the batch, on a GPU
    older: DecodeBatch | None = None  # a batch with another number of slots, which is finished

    def step(self, model: Any) -> list[DecodeEvent]:
        """Let waiting tasks join, and run one step of the batch."""
        batch, events = self._choose_batch(model), []
        are_many = len(self.waiting) * JOIN_SHARE >= batch.size or self.steps_since_join >= JOIN_STEPS
        if self.waiting and (self.length or are_many):  # the slots of a GPU have a rule of their own
            events += batch.add(self._take_waiting())
            self.steps_since_join = 0
        self.steps_since_join += 1
        if batch.size:
            events += batch.step()
        if self.older is not None:
            events += self.older.step()
            if not self.older.size:
                self.older.close()
                self.older = None
        return events

    def _take_waiting(self) -> list[DecodeTask]:
        """Return the tasks that join now: on a GPU all, on a CPU the shortest, whose sources are read together."""
        self.waiting.sort(key=lambda one: len(one.ids))
        most = 1
        while most < len(self.waiting) and (self.length or (most + 1) * len(self.waiting[most].ids) <= JOIN_TOKENS):
            most += 1
        chosen, self.waiting = self.waiting[:most], self.waiting[most:]
        return chosen

    def _choose_batch(self, model: Any) -> DecodeBatch:
        """Return the batch that tasks join; on a GPU a new one where another number of slots suits the load."""
        tasks = len(self.numbers)
        slots = MANY_SLOTS if tasks >= MANY else FEW_SLOTS if tasks <= FEW else self.slots
        if self.batch is None:
            self.slots = slots
            self.batch = self._make_batch(model)
        elif self.length and slots != self.slots and self.older is None:
            self.slots, self.older = slots, self.batch
            self.batch = self._make_batch(model)
        return self.batch

    def _make_batch(self, model: Any) -> DecodeBatch:
        options, start = self.options, self.start
        if self.length:
            return (
                SlotTranslations(model, options, start, self.length, self.slots)
                if start
                else SlotContinuations(model, options, self.length, self.slots)
            )
        if not start:
            return Continuations(model, options)
        make = BeamTranslations if options.temperature == 0 and options.beam > 1 else SampledTranslations
        return make(model, options, start)

    def remove(self, numbers: set[int]) -> None:
        """Remove tasks that nobody waits for."""
        self.numbers -= numbers
        self.waiting = [one for one in self.waiting if one.number not in numbers]
        for batch in (self.batch, self.older):
            if batch is not None:
                batch.remove(numbers)

    def fail(self, error: Exception) -> list[DecodeEvent]:
        """Give up all tasks: a batch that fails takes only its own tasks with it."""
        self.batch, self.older, self.waiting = None, None, []
        text = f"{type(error).__name__}: {error}"
        return [DecodeEvent(number, done=True, error=text) for number in self.numbers]

    def close(self) -> None:
        for batch in (self.batch, self.older):
            if batch is not None:
                batch.close()


class BatchRunner:
    """Runs the batches of one model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.groups: dict[Any, TaskGroup] = {}  # by the settings of their tasks
        self.uses_graphs: dict[int, bool] = {}  # by the size of the beam
        self.steps = 0

    @property
    def size(self) -> int:
        """The number of sequences that are decoded or wait to join."""
        return sum(len(group.numbers) for group in self.groups.values())

    def add(self, task: DecodeTask) -> None:
        """Let a sequence wait to join the batch of its settings."""
        group = self._group_of(task)
        group.numbers.add(task.number)
        group.waiting.append(task)

    def remove(self, numbers: set[int]) -> None:
        """Remove sequences that nobody waits for."""
        for group in self.groups.values():
            if own := group.numbers & numbers:
                group.remove(own)
        self._forget_empty()

    def step(self) -> list[DecodeEvent]:
        """Let waiting sequences join, and run one step of every batch."""
        events = []
        for group in self.groups.values():
            try:
                found = group.step(self.model)
            except Exception as error:
                found = group.fail(error)
            group.numbers -= {event.number for event in found if event.done}
            events += found
        self.steps += 1
        self._forget_empty()
        return events

    def _group_of(self, task: DecodeTask) -> TaskGroup:
        """Return the group of tasks with the same settings; on a GPU also of the same size, that of the slots."""
        options = replace(task.options, seed=0, stop_strings=(), max_new_tokens=1)  # what each task has its own of
        beam = options.beam if task.start else 1
        if beam not in self.uses_graphs:
            self.uses_graphs[beam] = uses_cuda_graphs(self.model, beam)
        in_slots = self.uses_graphs[beam]
        if in_slots and why_not_captured(self.model, options):
            in_slots = uses_cuda_graphs(self.model, beam, options)  # which says why not
        length = slot_length(len(task.ids) + task.limit) if in_slots else 0
        key = options, task.start, length
        if key not in self.groups:
            self.groups[key] = TaskGroup(*key)
        return self.groups[key]

    def _forget_empty(self) -> None:
        for key in [key for key, group in self.groups.items() if not group.numbers]:
            self.groups.pop(key).close()
