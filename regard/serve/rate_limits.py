"""Rate limits by token buckets: a client may send a burst of requests, and then as many a minute as the limit says."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

from regard.serve.api_errors import ApiError

MAX_CLIENTS = 10_000  # whose buckets are kept; that of the client that was away longest is forgotten


class RateLimit:
    """A limit of requests a minute for each client, by API key or by address."""

    def __init__(self, per_minute: float, what: str, option: str, clock: Callable[[], float] = time.monotonic) -> None:
        """Take the limit (0: none), what it is for, and the option that sets it. A burst is a minute's worth."""
        self.per_minute, self.what, self.option, self._clock = per_minute, what, option, clock
        self.burst = max(1.0, per_minute)
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and when

    def take(self, client: str) -> None:
        """Count a request, or raise a 429 that says when the next is allowed."""
        if not self.per_minute:
            return
        now = self._clock()
        left, then = self._buckets.pop(client, (self.burst, now))
        left = min(self.burst, left + (now - then) * self.per_minute / 60)
        allowed = left >= 1
        self._buckets[client] = (left - 1 if allowed else left, now)
        if len(self._buckets) > MAX_CLIENTS:
            self._buckets.popitem(last=False)
        if not allowed:
            wait = (1 - left) * 60 / self.per_minute
            message = (
                f"too many requests of this {self.what}: the limit is {self.per_minute:g} a minute ({self.option})"
            )
            raise ApiError(
                429,
                message,
                code="rate_limit_exceeded",
                limit=self.per_minute,
                value=self.per_minute + 1,
                retry_after=wait,
            )
