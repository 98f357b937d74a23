"""One scheduler feeds the workers of one model with the sequences of all requests.

- The queue is bounded: a request whose tokens do not fit is refused at once (`Overloaded`), which a client can act on.
- It is fair: the client that has had the fewest tokens decoded comes next, so one with a thousand sentences does not delay
  one with a single sentence for long.
- A request that is cancelled or past its deadline leaves the queue and the workers.
- A worker that dies is replaced; the requests that it decoded fail with `WorkerLost`, all others go on.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from regard.config import DecodeConfig
from regard.decode.batch_decoding import check_decoding, check_lengths
from regard.decode.constraints import Hypothesis, check_options
from regard.decode.generation import GenerationRequest
from regard.decode.sampling import sample_seeds
from regard.errors import RegardError
from regard.serve.batch_runner import DecodeEvent, DecodeTask
from regard.serve.decoding_workers import DecodingWorker, Lost, Report
from regard.serve.request_context import (
    Cancelled,
    Draining,
    Overloaded,
    RequestContext,
    ServeError,
    WorkerLost,
    current_request,
)
from regard.text.special_tokens import SpecialTokenTemplate

RESTARTS = 5  # a worker that dies so often without having done anything is not replaced any more


@dataclass
class Ticket:
    """The tasks of one call, and the events that have arrived for them."""

    context: RequestContext
    left: set[int]  # numbers of tasks that are not done
    events: queue.SimpleQueue[DecodeEvent | ServeError] = field(default_factory=queue.SimpleQueue)


@dataclass
class QueuedTask:
    """A task with its ticket, and what it costs."""

    task: DecodeTask
    ticket: Ticket
    tokens: int  # that are read and written at most, for the queue
    rows: int  # hypotheses, for the workers


@dataclass(frozen=True)
class WorkerLimits:
    """What a worker decodes at a time: hypotheses, and tokens of sources or prompts with their padding."""

    rows: int = 64
    tokens: int = 1 << 30


@dataclass
class WorkerPlace:
    """A worker and the tasks that it decodes."""

    worker: DecodingWorker | None
    tasks: dict[int, QueuedTask] = field(default_factory=dict)
    rows: int = 0  # hypotheses of its tasks
    lengths: Counter[int] = field(default_factory=Counter)  # how many sources or prompts have each length
    failures: int = 0  # deaths since it last finished a task

    def add(self, one: QueuedTask) -> None:
        self.tasks[one.task.number] = one
        self.rows += one.rows
        self.lengths[len(one.task.ids)] += 1

    def has_room(self, one: QueuedTask, limits: WorkerLimits) -> bool:
        """Return whether a task fits into a worker; one without tasks takes any."""
        if not self.tasks:
            return True
        padded = max(len(one.task.ids), self.longest) * (len(self.tasks) + 1)
        return self.rows + one.rows <= limits.rows and padded <= limits.tokens

    def padding_with(self, one: QueuedTask) -> tuple[int, int]:
        """Return the tokens, with padding, that a task would add to the batch, and the rows that are there.

        All rows of a batch are as long as the longest: where there is a choice, long sequences go to one worker and short
        ones to another."""
        longest, length = self.longest, len(one.task.ids)
        return max(length, longest) * (len(self.tasks) + 1) - longest * len(self.tasks), self.rows

    @property
    def longest(self) -> int:
        """The length of the longest source or prompt."""
        return max(self.lengths, default=0)

    def remove(self, number: int) -> bool:
        """Forget a task, and return whether it was there."""
        one = self.tasks.pop(number, None)
        if one is None:
            return False
        self.rows -= one.rows
        length = len(one.task.ids)
        self.lengths[length] -= 1
        if not self.lengths[length]:
            del self.lengths[length]
        return True

    def clear(self) -> list[QueuedTask]:
        """Forget all tasks, and return them."""
        tasks, self.tasks, self.rows = [*self.tasks.values()], {}, 0
        self.lengths.clear()
        return tasks


MakeWorker = Callable[[Report, Lost], DecodingWorker]


class Scheduler:
    """Decodes the sequences of many requests with the workers of one model."""

    def __init__(
        self, make_worker: MakeWorker, workers: int, queue_tokens: int, limits: WorkerLimits | None = None
    ) -> None:
        self.make_worker, self.queue_tokens, self.limits = make_worker, queue_tokens, limits or WorkerLimits()
        self.lock = threading.Condition()
        self.numbers = itertools.count()
        self.waiting: dict[str, deque[QueuedTask]] = {}  # by client
        self.served: dict[str, float] = {}  # tokens decoded for each client that has tasks
        self.queued_tokens = 0
        self.is_closed = False
        self.lost_workers = 0
        self.done_tasks = 0
        self.places = [WorkerPlace(None) for _ in range(workers)]
        for place in self.places:
            self._start_worker(place)

    # ---- what inference calls ------------------------------------------------------------------------------------------

    def decode(
        self,
        model: Any,
        sources: Sequence[Sequence[int]],
        options: DecodeConfig,
        max_len: int,
        device: torch.device,
        progress: Callable[[int], None],
        template: SpecialTokenTemplate,
        seeds: Sequence[int] | None = None,
    ) -> list[list[Hypothesis]]:
        """Return the translations of each source, best first, as `regard.decode.batch_decoding.decode` does."""
        check_options(options)
        check_decoding(model, options)
        check_lengths(sources, max_len, template, model)
        samples = options.nbest if options.temperature > 0 else 1
        own = seeds if seeds is not None else range(options.seed, options.seed + len(sources))
        tasks = [
            DecodeTask(
                next(self.numbers),
                tuple(template.wrap(ids)),
                options,
                template.start,
                tuple(sample_seeds(seed, samples)),
            )
            for ids, seed in zip(sources, own, strict=True)
        ]
        found: dict[int, list[Hypothesis]] = {}
        for event in self._run(tasks):
            found[event.number] = list(event.hypotheses)
            progress(1)
        return [found[task.number] for task in tasks]

    def generation_steps(
        self, model: Any, rows: list[GenerationRequest], options: DecodeConfig
    ) -> Iterator[list[GenerationRequest]]:
        """Add tokens to rows until all have ended, as `regard.decode.generation.generation_steps` does."""
        tasks = {
            next(self.numbers): DecodeTask(0, tuple(row.prompt), options, (), (row.seed,), row.limit) for row in rows
        }
        numbered = [replace(task, number=number) for number, task in tasks.items()]
        of = dict(zip(tasks, rows, strict=True))
        for event in self._run(numbered, stops=lambda number: bool(of[number].end)):
            row = of[event.number]
            for token, log_prob in event.tokens:
                if not row.end:
                    row.add(token, log_prob)
            yield [row]

    def _run(
        self, tasks: Sequence[DecodeTask], stops: Callable[[int], bool] = lambda number: False
    ) -> Iterator[DecodeEvent]:
        """Yield the events of tasks until all are done; a task of which `stops` is true after an event is given up."""
        if not tasks:
            return
        context = current_request.get() or RequestContext("", "")
        context.check()
        ticket = Ticket(context, {task.number for task in tasks})
        context.cancelled.call(lambda: ticket.events.put(Cancelled("the client has closed the connection")))
        self._submit([self._cost(task, ticket) for task in tasks])
        try:
            while ticket.left:
                event = self._wait(ticket)
                yield event
                if event.done:
                    ticket.left.discard(event.number)
                elif stops(event.number):
                    ticket.left.discard(event.number)
                    self._cancel({event.number})
        finally:
            if ticket.left:
                self._cancel(set(ticket.left))

    def _wait(self, ticket: Ticket) -> DecodeEvent:
        while True:
            ticket.context.check()
            try:
                left = ticket.context.deadline - time.monotonic()
                event = ticket.events.get(timeout=max(0.0, left) if left < threading.TIMEOUT_MAX else None)
            except queue.Empty:
                continue  # `check` raises the error
            if isinstance(event, ServeError):
                raise event
            if event.number not in ticket.left:
                continue  # given up, but it had got a token before that was known
            if event.error:
                raise RegardError(f"decoding failed: {event.error}")
            return event

    def _cost(self, task: DecodeTask, ticket: Ticket) -> QueuedTask:
        samples = len(task.seeds)
        rows = samples if not task.start or task.options.temperature > 0 else max(samples, task.options.beam)
        return QueuedTask(task, ticket, len(task.ids) + (task.limit or len(task.ids)), rows)

    # ---- the queue -----------------------------------------------------------------------------------------------------

    def _submit(self, tasks: list[QueuedTask]) -> None:
        tokens, client = sum(one.tokens for one in tasks), tasks[0].ticket.context.client
        with self.lock:
            if self.is_closed:
                raise Draining("the server is stopping")
            if self.queued_tokens + tokens > self.queue_tokens:
                wanted = self.queued_tokens + tokens
                raise Overloaded("tokens in the queue (--queue-tokens)", self.queue_tokens, wanted)
            if client not in self.waiting:
                # A client that comes back has no claim for the time it was away, and none to pay for.
                active = [self.served[other] for other in self.waiting if other in self.served]
                self.served[client] = max(self.served.get(client, 0.0), min(active, default=0.0))
            self.waiting.setdefault(client, deque()).extend(tasks)
            self.queued_tokens += tokens
            self._dispatch()

    def _dispatch(self) -> None:
        """Give waiting tasks to workers that have room for them; the caller holds the lock."""
        chosen: dict[int, list[DecodeTask]] = {}
        while self.waiting:
            alive = [i for i, place in enumerate(self.places) if place.worker is not None]
            if not alive:
                break
            client = min(self.waiting, key=lambda name: self.served[name])
            one = self.waiting[client][0]
            free = [i for i in alive if self.places[i].has_room(one, self.limits)]
            if not free:
                break
            which = min(free, key=lambda i: self.places[i].padding_with(one)) if len(free) > 1 else free[0]
            place = self.places[which]
            self.waiting[client].popleft()
            if not self.waiting[client]:
                del self.waiting[client]
            self.served[client] += one.tokens
            self.queued_tokens -= one.tokens
            place.add(one)
            chosen.setdefault(which, []).append(one.task)
        if not self.waiting and not any(place.tasks for place in self.places):
            self.served.clear()
        for which, tasks in chosen.items():
            worker = self.places[which].worker
            assert worker is not None
            worker.send(tasks)

    def _cancel(self, numbers: set[int]) -> None:
        """Remove tasks from the queue and from the workers."""
        with self.lock:
            for client in [*self.waiting]:
                kept = deque(one for one in self.waiting[client] if one.task.number not in numbers)
                gone = [one for one in self.waiting[client] if one.task.number in numbers]
                self.queued_tokens -= sum(one.tokens for one in gone)
                self.waiting[client] = kept
                if not kept:
                    del self.waiting[client]
            for place in self.places:
                own = [number for number in numbers if place.remove(number)]
                if own and place.worker is not None:
                    place.worker.send([], own)
            self._dispatch()
            self.lock.notify_all()

    # ---- workers -------------------------------------------------------------------------------------------------------

    def _start_worker(self, place: WorkerPlace) -> None:
        place.worker = self.make_worker(lambda events: self._on_events(place, events), lambda: self._on_lost(place))

    def _on_events(self, place: WorkerPlace, events: list[DecodeEvent]) -> None:
        with self.lock:
            for event in events:
                one = place.tasks.get(event.number)
                if one is None:
                    continue  # cancelled
                if event.done:
                    place.remove(event.number)
                    place.failures = 0
                    self.done_tasks += 1
                one.ticket.events.put(event)
            self._dispatch()
            self.lock.notify_all()

    def _on_lost(self, place: WorkerPlace) -> None:
        with self.lock:
            if self.is_closed:
                return
            self.lost_workers += 1
            place.failures += 1
            place.worker = None
            for one in place.clear():
                one.ticket.events.put(WorkerLost("the process that decoded this request has died; try again"))
        if place.failures <= RESTARTS:
            try:
                self._start_worker(place)
            except (RegardError, OSError):
                place.worker = None
        with self.lock:
            if all(other.worker is None for other in self.places):
                for tasks in self.waiting.values():
                    for one in tasks:
                        one.ticket.events.put(WorkerLost("no process is left to decode this request"))
            self._dispatch()

    # ---- operation -----------------------------------------------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Return numbers for metrics: what waits, what is decoded, and how many workers there are and were lost."""
        with self.lock:
            return {
                "queued_tokens": self.queued_tokens,
                "queued_sequences": sum(map(len, self.waiting.values())),
                "running_sequences": sum(len(place.tasks) for place in self.places),
                "workers": sum(place.worker is not None for place in self.places),
                "lost_workers": self.lost_workers,
                "done_sequences": self.done_tasks,
            }

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until nothing is decoded any more; return whether that is so."""
        end = time.monotonic() + seconds
        with self.lock:
            while self.waiting or any(place.tasks for place in self.places):
                if time.monotonic() >= end:
                    return False
                self.lock.wait(min(0.1, max(0.001, end - time.monotonic())))
        return True

    def close(self) -> None:
        """End the workers; requests that still wait are answered with an error."""
        with self.lock:
            self.is_closed = True
            pending = [one for tasks in self.waiting.values() for one in tasks]
            pending += [one for place in self.places for one in place.tasks.values()]
            for one in pending:
                one.ticket.events.put(Draining("the server is stopping"))
        for place in self.places:
            if place.worker is not None:
                place.worker.close()
