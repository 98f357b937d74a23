"""Forked processes for decoding on a CPU: each core decodes other sentences, and all processes share the weights."""

from __future__ import annotations

import gc
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from regard.kernels.cpu_threads import large_matmul

log = logging.getLogger("regard")
T = TypeVar("T")

CAN_FORK = sys.platform == "linux"
MAX_ITEMS = 16384  # item numbers that fit into a pipe
END = (1 << 32) - 1  # written by a process that has no more items, after its results


def idle_cores(load: str = "/proc/loadavg", looks: int = 3, seconds: float = 1e-3) -> int:
    """Return how many cores of the machine are idle: the most of a few measurements, since some processes run briefly.

    Linux reports the number of running threads of the whole machine, this thread included. On other systems all cores but
    one are assumed to be idle."""
    cores, found = os.cpu_count() or 1, 0
    try:
        for _ in range(looks):
            with open(load, encoding="ascii") as file:
                found = max(found, cores - int(file.read().split()[3].split("/")[0]))
            time.sleep(seconds)
    except (OSError, ValueError, IndexError):
        return cores - 1
    return found


def fork_map(work: Callable[[T], Any], items: Sequence[T], processes: int, done: Callable[[int, Any], None]) -> None:
    """Call `done(i, work(items[i]))` for every item, in this process and in `processes - 1` forked copies of it.

    Each process takes the next item when it has finished one, so a process on a busy core takes fewer. Results of `work`
    are sent as JSON. Items of a process that fails or is killed are processed here, where an error is raised as usual.
    """
    for start in range(0, len(items), MAX_ITEMS):
        part = items[start : start + MAX_ITEMS]
        _fork_map(work, part, processes, lambda i, result, first=start: done(first + i, result))  # type: ignore[misc]


def _fork_map(work: Callable[[T], Any], items: Sequence[T], processes: int, done: Callable[[int, Any], None]) -> None:
    tasks, fill = os.pipe()
    os.write(fill, b"".join(i.to_bytes(4, "little") for i in range(len(items))))
    os.close(fill)
    missing = set(range(len(items)))
    found: queue.SimpleQueue[tuple[int, Any] | None] = queue.SimpleQueue()
    children: list[int] = []
    ended = 0

    def finish(i: int, result: Any) -> None:
        missing.discard(i)
        done(i, result)

    try:
        for _ in range(processes - 1):
            child, pipe = _fork(work, items, tasks)
            children.append(child)
            threading.Thread(target=_receive, args=(pipe, found), daemon=True).start()
        for i in _taken(tasks):
            finish(i, work(items[i]))
            while not found.empty():
                pair = found.get()
                ended += pair is None
                if pair is not None:
                    finish(*pair)
        while ended < len(children):
            pair = found.get()
            ended += pair is None
            if pair is not None:
                finish(*pair)
    finally:
        os.close(tasks)
        for child in children:
            if ended < len(children):  # an error was raised above, so their results are not needed
                os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if missing:
        log.warning("a decoding process ended early; its %d batches are decoded again", len(missing))
    for i in sorted(missing):
        done(i, work(items[i]))


def _taken(tasks: int) -> Iterator[int]:
    """Yield the numbers of items that no process has taken; all processes take theirs from the same pipe."""
    while number := os.read(tasks, 4):
        yield int.from_bytes(number, "little")


def _fork(work: Callable[[T], Any], items: Sequence[T], tasks: int) -> tuple[int, int]:
    """Start a process that takes items until none is left; return its id and the pipe that its results are read from."""
    results, pipe = os.pipe()
    with warnings.catch_warnings():
        # Python warns of locks that other threads may hold. The child takes none of them: it only runs the model.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child:
        os.close(pipe)
        return child, results
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and ends this process
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.close(results)
        gc.disable()  # a collection would write to, and so copy, every page of Python's objects
        torch.set_num_threads(1)
        large_matmul.threads = 1
        with os.fdopen(pipe, "wb") as file:
            for i in _taken(tasks):
                result = json.dumps(work(items[i])).encode()
                file.write(i.to_bytes(4, "little") + len(result).to_bytes(8, "little") + result)
                file.flush()
            file.write(END.to_bytes(4, "little"))
    finally:
        os._exit(0)  # without the parent's cleanup handlers and buffers, which would run and be written twice


def _receive(pipe: int, found: queue.SimpleQueue[tuple[int, Any] | None]) -> None:
    """Put the results of a process into the queue, and None when it has ended."""
    try:
        with os.fdopen(pipe, "rb") as file:
            while (number := file.read(4)) and (i := int.from_bytes(number, "little")) != END:
                found.put((i, json.loads(file.read(int.from_bytes(file.read(8), "little")))))
    except ValueError:  # the process was killed while it wrote
        pass
    finally:
        found.put(None)
