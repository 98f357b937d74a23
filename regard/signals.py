"""Ctrl-C and SIGTERM as a polite request: finish the step, save, say how to go on."""

from __future__ import annotations

import shlex
import signal
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType


class Interrupted(Exception):
    """Training was asked to stop; everything is saved."""

    def __init__(self, signum: int, run: Path) -> None:
        name = signal.Signals(signum).name
        super().__init__(f"stopped by {name}, all is saved: go on with `regard resume {shlex.quote(str(run))}`")
        self.exit_code = 128 + signum


PATIENCE = 1.0  # seconds


class StopRequest:
    """While active, the first signal only sets `signum`; one that insists, a second later, acts as it always does.

    Schedulers and wrappers often send the same signal twice at once; that must not cut a save short.

    Python lets only the main thread handle signals; elsewhere this does nothing, and the program's own habits stay.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._noted = 0.0
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        ours = threading.current_thread() is threading.main_thread()
        for signum in (signal.SIGINT, signal.SIGTERM) if ours else ():
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _note(self, signum: int, token_template: FrameType | None) -> None:
        now = time.monotonic()
        if self.signum is None:
            self.signum, self._noted = signum, now
        elif now - self._noted > PATIENCE:
            self._restore()
            signal.raise_signal(signum)

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self.signum is not None
