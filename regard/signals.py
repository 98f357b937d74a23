"""Ctrl-C and SIGTERM as a polite request: finish the step, save, say how to go on."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class Interrupted(Exception):
    """Training was asked to stop; everything is saved."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.exit_code = 128 + signum


class StopRequest:
    """While active, the first signal only sets `signum`; a second one acts as it always does."""

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._before[signum] = signal.signal(signum, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._restore()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        self._restore()

    def _restore(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)  # type: ignore[arg-type]

    def __bool__(self) -> bool:
        return self.signum is not None
