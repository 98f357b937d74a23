"""Workers that decode, in processes of their own: one for each core over the same weights, or one for a GPU.

On a CPU each process decodes in one thread, since the threads of a small matrix product mostly wait for each other. On a GPU
the process launches CUDA graphs without waiting for the threads of the server. All are forked from a process that has loaded
the model (`python -m regard.serve.decoding_workers`), so they share its weights, and a worker that dies is replaced without
loading the model again; a worker of a GPU loads it there itself. The process that forks has a single thread and does not
use the GPU: forking the server, which has many threads, would not be safe. Messages are JSON, with their length in front.

A worker takes `DecodeTask`s and returns `DecodeEvent`s. When it has died, its function `lost` is called.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol

from regard.config import DecodeConfig
from regard.decode.constraints import Hypothesis
from regard.errors import RegardError
from regard.serve.batch_runner import BatchRunner, DecodeEvent, DecodeTask

Report = Callable[[list[DecodeEvent]], None]  # called with events, in a thread of the worker
Lost = Callable[[], None]  # called when the worker has died
NICENESS = 5  # of workers: the process that reads and answers requests comes first, so health is answered at once
MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # of mallopt
START_SECONDS = 120.0  # within which a model must be loaded


class DecodingWorker(Protocol):
    """A place where sequences are decoded together."""

    def send(self, tasks: Sequence[DecodeTask], removed: Sequence[int] = ()) -> None:
        """Begin to decode tasks, and stop to decode others; a worker that has died takes no notice."""

    def close(self) -> None:
        """End the worker."""


# ---- messages --------------------------------------------------------------------------------------------------------


def encode_message(value: Any) -> bytes:
    """Return a value as JSON, with its length in front."""
    data = json.dumps(value, separators=(",", ":")).encode()
    return len(data).to_bytes(4, "little") + data


def write_message(stream: socket.socket, value: Any) -> None:
    """Send a value, and wait until the socket has taken it."""
    stream.sendall(encode_message(value))


class MessageReader:
    """Reads the messages of a socket, waiting for them or not."""

    def __init__(self, stream: socket.socket) -> None:
        self.stream, self.buffer = stream, bytearray()

    def read(self, wait: bool = True) -> list[Any] | None:
        """Return all messages that have arrived, at least one if `wait`; None when the other side has closed the socket."""
        while True:
            found = self._complete()
            if found or not (wait or self._has_data()):
                return found
            try:
                data = self.stream.recv(1 << 16)
            except OSError:
                return None
            if not data:
                return None
            self.buffer += data

    def _has_data(self) -> bool:
        try:
            return bool(self.stream.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)) or True
        except (BlockingIOError, InterruptedError):
            return False
        except OSError:
            return True

    def _complete(self) -> list[Any]:
        found, start = [], 0
        while len(self.buffer) - start >= 4:
            end = start + 4 + int.from_bytes(self.buffer[start : start + 4], "little")
            if len(self.buffer) < end:
                break
            found.append(json.loads(self.buffer[start + 4 : end]))
            start = end
        del self.buffer[:start]
        return found


def task_message(task: DecodeTask) -> list[Any]:
    """Return a task as JSON."""
    return [task.number, task.ids, options_text(task.options), task.start, task.seeds, task.limit]


def read_task(message: list[Any]) -> DecodeTask:
    """Return the task of a message."""
    number, ids, options, start, seeds, limit = message
    return DecodeTask(number, tuple(ids), read_options(options), tuple(start), tuple(seeds), limit)


@lru_cache(64)
def options_text(options: DecodeConfig) -> str:
    """Return decode settings as JSON; most tasks have the same."""
    return json.dumps(asdict(options), separators=(",", ":"))


@lru_cache(64)
def read_options(text: str) -> DecodeConfig:
    """Return decode settings from JSON."""
    found: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in json.loads(text).items()}
    return DecodeConfig(**found)


def event_message(event: DecodeEvent) -> list[Any]:
    """Return an event as JSON."""
    hypotheses = [(each.tokens, each.score, each.log_prob, each.ended) for each in event.hypotheses]
    return [event.number, event.tokens, hypotheses, event.done, event.error]


def read_event(message: list[Any]) -> DecodeEvent:
    """Return the event of a message."""
    number, tokens, hypotheses, done, error = message
    made = tuple(Hypothesis(*each) for each in hypotheses)
    return DecodeEvent(number, tuple((token, log_prob) for token, log_prob in tokens), made, done, error)


# ---- processes -------------------------------------------------------------------------------------------------------


class WorkerProcesses:
    """The process that has loaded a model and forks workers."""

    def __init__(self, path: Path, weights: str, device: str = "cpu") -> None:
        self.path, self.weights, self.device = path, weights, device
        self.lock = threading.Lock()
        self.process: subprocess.Popen[bytes] | None = None
        self.control: socket.socket | None = None

    def _start(self) -> socket.socket:
        control, theirs = socket.socketpair()
        command = [
            sys.executable,
            "-m",
            "regard.serve.decoding_workers",
            str(theirs.fileno()),
            str(self.path),
            self.weights,
            self.device,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL)
        theirs.close()
        control.settimeout(START_SECONDS)
        if control.recv(1) != b"+":
            raise RegardError(f"the process that loads {self.path.name} for decoding ended: see its error above")
        self.control = control
        return control

    def make_worker(self, report: Report, lost: Lost) -> ProcessWorker:
        """Fork a worker; the process is started where it is not there or has died."""
        with self.lock:
            for _ in range(2):
                control = self.control or self._start()
                ours, theirs = socket.socketpair()
                try:
                    socket.send_fds(control, [b"f"], [theirs.fileno()])
                    pid = int.from_bytes(control.recv(4), "little")
                except OSError:
                    pid = 0
                theirs.close()
                if pid:
                    return ProcessWorker(ours, pid, report, lost)
                ours.close()
                self._stop()
        raise RegardError(f"no process could be started to decode {self.path.name}")

    def _stop(self) -> None:
        if self.control is not None:
            self.control.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.control = self.process = None

    def close(self) -> None:
        """End the process; workers end when their sockets are closed."""
        with self.lock:
            self._stop()


class ProcessWorker:
    """The server's end of a worker process.

    What a socket does not take at once is sent by a thread. The process reads only between two steps, so a caller that
    waited until it has read could wait for ever, while it waits for its events to be read."""

    def __init__(self, stream: socket.socket, pid: int, report: Report, lost: Lost) -> None:
        self.stream, self.pid, self.report, self.lost = stream, pid, report, lost
        self.unsent: deque[bytes] = deque()
        self.is_over = False
        self.change = threading.Condition()  # of these two
        for target, name in ((self._receive, "worker"), (self._send, "to-worker")):
            threading.Thread(target=target, name=f"{name}-{pid}", daemon=True).start()

    def send(self, tasks: Sequence[DecodeTask], removed: Sequence[int] = ()) -> None:
        data = encode_message([[task_message(task) for task in tasks], list(removed)])
        with self.change, contextlib.suppress(OSError):  # its death is noticed by `_receive`
            if not self.unsent:
                with contextlib.suppress(BlockingIOError):
                    data = data[self.stream.send(data, socket.MSG_DONTWAIT) :]
            if data:
                self.unsent.append(data)
                self.change.notify()

    def _send(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                with self.change:
                    self.change.wait_for(lambda: self.unsent or self.is_over)
                    if self.is_over:
                        return
                    data = self.unsent[0]
                self.stream.sendall(data)
                with self.change:
                    self.unsent.popleft()

    def _receive(self) -> None:
        reader = MessageReader(self.stream)
        while (messages := reader.read()) is not None:
            self.report([read_event(event) for events in messages for event in events])
        with self.change:
            self.is_over = True
            self.change.notify()
        self.lost()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.stream.shutdown(socket.SHUT_RDWR)
        self.stream.close()


def run_worker(stream: socket.socket, model: Any) -> None:
    """Decode what arrives on a socket until it is closed."""
    reader, runner = MessageReader(stream), BatchRunner(model)
    while (messages := reader.read(wait=not runner.size)) is not None:
        for tasks, removed in messages:
            for task in tasks:
                runner.add(read_task(task))
            if removed:
                runner.remove(set(removed))
        events = runner.step() if runner.size else []
        if events:
            write_message(stream, [event_message(event) for event in events])


def fork_workers(control: socket.socket, path: Path, weights: str, device: str) -> None:
    """Load a model, and fork a worker for each socket that is received."""
    import torch

    from regard.inference.load import load
    from regard.kernels.row_attention_numba import row_attention
    from regard.layers.mixers.attention import make_batch_invariant

    torch.set_num_threads(1)
    model: Any = None
    if device == "cpu":
        model = load(path, "cpu", weights).model  # type: ignore[union-attr]
        make_batch_invariant(model)
        one = torch.zeros(1, 1, 1, 8)
        row_attention(one, one, one, None, 1.0)  # compiled once, not in each worker
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # workers that have died are not waited for
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server is interrupted too, and ends its workers in order
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # a collection would write to, and so copy, every page of the model's objects
    control.sendall(b"+")
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        stream = socket.socket(fileno=descriptors[0])
        child = os.fork()
        if child:
            stream.close()
            control.sendall(child.to_bytes(4, "little"))
            continue
        control.close()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            if model is not None:
                os.nice(NICENESS)
                keep_memory()
            else:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # Triton compiles in processes, and waits for them
                model = load(path, device, weights).model  # type: ignore[union-attr]
            run_worker(stream, model)
        os._exit(0)


def keep_memory() -> None:
    """Let the C library (glibc) keep freed memory for the next batch: the memory of a worker is then as flat as its load."""
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL(None)
        libc.mallopt(MMAP_THRESHOLD, 32 << 20)
        libc.mallopt(TRIM_THRESHOLD, 1 << 30)


if __name__ == "__main__":
    fork_workers(socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2]), sys.argv[3], sys.argv[4])
