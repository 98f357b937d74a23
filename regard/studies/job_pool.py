"""The jobs of a study in several processes. A job that fails, or whose process dies, does not affect the others.

The result of a job is a file of its own, written when the job is done, together with the job's identity: what its numbers
depend on. A study that was stopped continues with the jobs whose results are missing.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import shlex
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import torch

from regard import __version__
from regard.errors import RegardError
from regard.files import read_json, remove, write_text
from regard.training.metrics_log import print_message


@dataclass(frozen=True)
class Outcome:
    """How a job ended."""

    name: str
    seconds: float
    error: str | None = None  # a traceback, or the exit code of the process

    @property
    def reason(self) -> str:
        return (self.error or "").strip().rsplit("\n", 1)[-1]


class Worker:
    """A process that runs one job after the other. It ends after an error, since the state of its GPU may be corrupt."""

    def __init__(self, work: Callable[[Any], None]) -> None:
        context = multiprocessing.get_context("spawn")  # a forked process cannot use the GPU
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve_jobs, args=(theirs, work), daemon=True)
        self.process.start()
        theirs.close()  # the pipe ends when the process does

    def begin(self, name: str, job: Any) -> None:
        self.name, self.begun = name, time.perf_counter()
        with contextlib.suppress(BrokenPipeError):  # `outcome` finds out that the process has ended
            self.pipe.send(job)

    def outcome(self) -> Outcome:
        try:
            error = self.pipe.recv()
        except (EOFError, OSError):
            self.process.join()
            error = f"its process ended with code {self.process.exitcode}"
        return Outcome(self.name, time.perf_counter() - self.begun, error)


def serve_jobs(pipe: Connection, work: Callable[[Any], None]) -> None:
    """Run the jobs that arrive by `pipe` until one fails, and answer each with its error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and ends this process
    error = None
    with contextlib.suppress(EOFError, OSError):  # the parent has ended
        while error is None:
            error = try_job(work, pipe.recv())
            pipe.send(error)


def try_job(work: Callable[[Any], None], job: Any) -> str | None:
    """Run a job; return the traceback if it fails."""
    try:
        work(job)
    except Exception:
        return traceback.format_exc()
    return None


class JobPool:
    """Processes that stay between several lists of jobs. They end with the `with` block."""

    def __init__(self, work: Callable[[Any], None], at_once: int) -> None:
        self.work, self.at_once = work, at_once
        self.idle, self.busy = list[Worker](), list[Worker]()

    def __enter__(self) -> JobPool:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in (*self.idle, *self.busy):
            worker.process.terminate()
            worker.process.join()

    def run(self, jobs: Mapping[str, Any], started: Callable[[str], None]) -> Iterator[Outcome]:
        """Yield the outcome of each job as it ends; `started` is called with the name of each that starts."""
        waiting = list(jobs.items())
        while waiting or self.busy:
            while waiting and len(self.busy) < self.at_once:
                name, job = waiting.pop(0)
                self.idle = [worker for worker in self.idle if worker.process.is_alive()]
                self.busy.append(self.idle.pop() if self.idle else Worker(self.work))
                self.busy[-1].begin(name, job)
                started(name)
            ready = wait([worker.pipe for worker in self.busy])
            for worker in [worker for worker in self.busy if worker.pipe in ready]:
                self.busy.remove(worker)
                outcome = worker.outcome()
                if outcome.error is None:
                    self.idle.append(worker)
                yield outcome


def run_jobs(
    work: Callable[[Any], None], jobs: Mapping[str, Any], at_once: int, started: Callable[[str], None]
) -> Iterator[Outcome]:
    """Yield the outcome of `work(job)` for each job as it ends; `started` is called with the name of each that starts."""
    with JobPool(work, at_once) as pool:
        yield from pool.run(jobs, started)


class StudyJob(Protocol):
    """A job whose result is kept in a file."""

    @property
    def name(self) -> str: ...

    @property
    def result(self) -> Path: ...  # a JSON file whose "of" is the job's identity

    def identity(self) -> dict[str, Any]: ...


def run_missing(work: Callable[[Any], None], todo: Sequence[StudyJob], at_once: int) -> list[Outcome]:
    """Run the jobs whose results are not there yet, and return the failures."""
    done = [job.name for job in todo if load_result(job)]
    if done:
        print_message(f"done before, with the same settings: {', '.join(done)}")
    missing = {job.name: job for job in todo if job.name not in done}
    failures = []
    outcomes = run_jobs(work, missing, at_once, lambda name: print_message(f"{name}: started"))
    for number, outcome in enumerate(outcomes, len(done) + 1):
        ended = f"failed ({outcome.reason})" if outcome.error else "done"
        print_message(f"{outcome.name}: {ended} after {outcome.seconds:.0f} s, {number} of {len(todo)}")
        trace = missing[outcome.name].result.with_suffix(".error")
        remove(trace)
        if outcome.error:
            write_text(trace, outcome.error)
            failures.append(outcome)
    return failures


def load_result(job: StudyJob) -> dict[str, Any] | None:
    """Return the result of an earlier run with the same identity, or None."""
    try:
        result = read_json(job.result)
        return result if result["of"] == job.identity() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def choose(kind: str, names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Return what a study compares, such as systems or tasks; default: all that are known."""
    for name in names or ():
        if name not in known:
            raise RegardError(f"unknown {kind} '{name}': choose among {', '.join(known)}")
    return list(dict.fromkeys(names or known))


def describe_machine(device: str) -> dict[str, str]:
    """Return the device and the versions of torch and Regard."""
    name = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    return {"device": name, "torch": torch.__version__, "regard": __version__}


def describe_setting(device: str, quick: bool) -> dict[str, Any]:
    """Return the date, the command and the machine, for the results of a study."""
    date, command = datetime.now(UTC).isoformat(timespec="seconds"), shlex.join(["regard", *sys.argv[1:]])
    return {"date": date, "command": command, "quick": quick, **describe_machine(device)}
