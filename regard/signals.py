"""Ctrl-C and SIGTERM as a request to stop: finish the training step, save, and say how to resume."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType


class Interrupted(Exception):
    """The exception that ends training after a signal, when everything is saved."""

    def __init__(self, signum: int, run: Path, step: int, steps: int) -> None:
        name, resume = signal.Signals(signum).name, f"regard resume {shlex.quote(str(run))}"
        super().__init__(
            f"stopped by {name} at step {step:,} of {steps:,}, all is saved: continue with `{resume}`"
            + (f", or end it here with `{resume} --train.steps {step}`" if 0 < step < steps else "")
        )
        self.exit_code = 128 + signum


REPEAT_SECONDS = 1.0


class StopRequest:
    """A context in which the first SIGINT or SIGTERM only sets `signum`; a later one has its usual effect.

    Schedulers and wrappers often send the same signal twice at once, which must not interrupt a save: a second signal
    counts only after REPEAT_SECONDS. Python lets only the main thread handle signals; in others this does nothing.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._received_at = 0.0
        self._handlers: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        is_main_thread = threading.current_thread() is threading.main_thread()
        for signum in (signal.SIGINT, signal.SIGTERM) if is_main_thread else ():
            self._handlers[signum] = signal.signal(signum, self._receive)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._received_at = signum, now
        elif now - self._received_at > REPEAT_SECONDS:
            self._restore()
            signal.raise_signal(signum)

    def _restore(self) -> None:
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self.signum is not None
