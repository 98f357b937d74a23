"""What every part of the server knows of a request: who asked, until when an answer is wanted, and whether anybody waits.

Inference runs in a thread that has its request in `current_request`. So a `Translator` need not know that it is served: the
scheduler, which its decoding ends up in, reads the client, the deadline and the cancellation from there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

from regard.errors import RegardError


class ServeError(RegardError):
    """An error that ends a request, with the seconds after which it may be tried again (None: it should not)."""

    retry_after: float | None = None


class Overloaded(ServeError):
    """A limit of the server is reached; the request was not begun and may be tried again later."""

    def __init__(self, what: str, limit: float, value: float, retry_after: float = 1.0) -> None:
        super().__init__(f"{what}: {value:g}, and the limit is {limit:g}; try again in {retry_after:g} s")
        self.limit, self.value, self.retry_after = limit, value, retry_after


class DeadlineExceeded(ServeError):
    """The time that a request may take is over."""


class Cancelled(ServeError):
    """The client is gone, so nobody waits for the answer."""


class WorkerLost(ServeError):
    """The process that decoded a sequence of the request has died; the request may be tried again at once."""

    retry_after = 1.0


class Draining(ServeError):
    """The server is stopping and begins no new request."""

    retry_after = 5.0


class Cancellation:
    """A flag that calls functions when it is set, so that nobody has to look at it again and again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_set = False
        self._functions: list[Callable[[], None]] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the flag, and call the functions in this thread."""
        with self._lock:
            functions, self._functions, self._is_set = self._functions, [], True
        for function in functions:
            function()

    def call(self, function: Callable[[], None]) -> None:
        """Call a function when the flag is set, which may be now."""
        with self._lock:
            if not self._is_set:
                self._functions.append(function)
                return
        function()


@dataclass
class RequestContext:
    """One request of a client."""

    id: str
    client: str  # requests of different clients are decoded in turns
    deadline: float = float("inf")  # of time.monotonic()
    cancelled: Cancellation = field(default_factory=Cancellation)  # set when the client is gone

    def check(self) -> None:
        """Raise an error if nobody waits for the answer any more."""
        if self.cancelled.is_set():
            raise Cancelled("the client has closed the connection")
        if time.monotonic() > self.deadline:
            raise DeadlineExceeded("the request took longer than it may (--timeout)")


current_request: ContextVar[RequestContext | None] = ContextVar("current_request", default=None)
