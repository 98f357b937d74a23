"""Jobs in several processes at once. A job that fails, or takes its process down with it, fails alone.

The result of a job is a file of its own, written when it is done: a study that was stopped goes on where it was.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

from regard.files import read_json, remove, write_text
from regard.training.metrics_log import print_message


@dataclass(frozen=True)
class Outcome:
    name: str
    seconds: float
    error: str | None = None  # a traceback, or what became of the process

    @property
    def reason(self) -> str:
        return (self.error or "").strip().rsplit("\n", 1)[-1]


class Worker:
    """A process that does one job after the other; after an error it ends, because a GPU's state may be lost with it."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()  # so that its death is the end of the pipe

    def begin(self, name: str, job: Any) -> None:
        self.name, self.begun = name, time.perf_counter()
        self.pipe.send(job)

    def outcome(self) -> Outcome:
        try:
            error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            error = f"its process ended with code {self.process.exitcode}"
        return Outcome(self.name, time.perf_counter() - self.begun, error)


def serve(pipe: Connection, work: Callable[[Any], None]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who ends this process
    error = None
    with contextlib.suppress(EOFError, OSError):  # the parent is gone
        while error is None:
            error = attempt(work, pipe.recv())
            pipe.send(error)


def attempt(work: Callable[[Any], None], job: Any) -> str | None:
    """The traceback, if it fails."""
    try:
        work(job)
    except Exception:
        return traceback.format_exc()
    return None


def run_all(
    work: Callable[[Any], None], jobs: Mapping[str, Any], at_once: int, started: Callable[[str], None]
) -> Iterator[Outcome]:
    """The outcome of `work(job)` for each job, as it ends; `started` hears the name of each that begins."""
    waiting, idle, busy = list(jobs.items()), list[Worker](), list[Worker]()
    try:
        while waiting or busy:
            while waiting and len(busy) < at_once:
                name, job = waiting.pop(0)
                busy.append(idle.pop() if idle else Worker(work))
                busy[-1].begin(name, job)
                started(name)
            ready = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in ready]:
                busy.remove(worker)
                outcome = worker.outcome()
                if outcome.error is None:
                    idle.append(worker)
                yield outcome
    finally:
        for worker in (*idle, *busy):
            worker.process.terminate()
            worker.process.join()


class Job(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def result(self) -> Path: ...  # a JSON file, whose "of" is the job's identity

    def identity(self) -> dict[str, Any]: ...


def run_missing(work: Callable[[Any], None], todo: Sequence[Job], at_once: int) -> list[Outcome]:
    """Do the jobs whose results are not there yet; those that failed are returned."""
    done = [job.name for job in todo if result_of(job)]
    if done:
        print_message(f"done before, with the same settings: {', '.join(done)}")
    missing = {job.name: job for job in todo if job.name not in done}
    failures = []
    outcomes = run_all(work, missing, at_once, lambda name: print_message(f"{name}: started"))
    for number, outcome in enumerate(outcomes, len(done) + 1):
        ended = f"failed ({outcome.reason})" if outcome.error else "done"
        print_message(f"{outcome.name}: {ended} after {outcome.seconds:.0f} s, {number} of {len(todo)}")
        trace = missing[outcome.name].result.with_suffix(".error")
        remove(trace)
        if outcome.error:
            write_text(trace, outcome.error)
            failures.append(outcome)
    return failures


def result_of(job: Job) -> dict[str, Any] | None:
    """What an earlier run of exactly this job found."""
    try:
        result = read_json(job.result)
        return result if result["of"] == job.identity() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
