"""Blocking inference beside the event loop: in threads, with a deadline, and cancelled as soon as the client is gone.

The event loop only reads and writes, so health is answered however busy the models are. A call that is in progress occupies
one of a limited number of threads; where none is free, a request is refused with 429 at once instead of waiting where nobody
sees it. A web framework by itself would run a handler to its end although nobody waits for the answer: here a task waits
for the disconnect of the client while the thread works, and sets `cancelled` of the request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from starlette.requests import Request
from starlette.responses import Response

from regard.serve.api_errors import ApiError, as_api_error
from regard.serve.request_context import Cancelled, DeadlineExceeded, Overloaded, RequestContext, current_request

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
KEEP_ALIVE_SECONDS = 15.0  # after so long without an event a comment is sent, so that no proxy closes the connection


class BlockingCalls:
    """The threads that blocking calls run in."""

    def __init__(self, limit: int, on_cancel: Callable[[], None] = lambda: None) -> None:
        """Take the number of calls that may be in progress, and what to call when one is cancelled."""
        self.limit, self.running, self._on_cancel = limit, 0, on_cancel
        # A new thread would otherwise begin with the number of torch's threads that was set last, which decoding sets to 1.
        begin = torch.set_num_threads, (torch.get_num_threads(),)
        self._threads = ThreadPoolExecutor(limit, "regard-request", *begin)

    def close(self) -> None:
        """Stop the threads that are idle; calls in progress end by their deadlines."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def run(self, request: Request, function: Callable[[], T]) -> T:
        """Return what a function returns that runs in a thread with the request as `current_request`."""
        context: RequestContext = request.state.context
        done = self._submit(context, function)
        await self._wait(context, done, request.receive)
        return done.result()

    async def stream(
        self,
        request: Request,
        events: Callable[[], Iterator[bytes]],
        on_error: Callable[[ApiError], bytes],
        on_first: Callable[[float], None] = lambda seconds: None,
    ) -> EventStream:
        """Return a response that sends what an iterator yields, which runs in a thread.

        The first event is awaited before anything is sent: an error until then becomes an ordinary error response. A later
        one is sent as the event that `on_error` makes of it.
        """
        context: RequestContext = request.state.context
        loop, waiting = asyncio.get_running_loop(), EventQueue()
        begun = time.monotonic()

        def work() -> None:
            found = events()
            try:
                for event in found:
                    loop.call_soon_threadsafe(waiting.put, event)
                    context.check()
            finally:
                found.close()  # type: ignore[attr-defined]

        done = self._submit(context, work)
        done.add_done_callback(lambda task: waiting.finish(task.exception()))
        first: asyncio.Task[bytes | None] = asyncio.ensure_future(waiting.get())
        await self._wait(context, first, request.receive)
        event = first.result()
        on_first(time.monotonic() - begun)
        return EventStream(context, event, waiting, on_error, self._on_cancel)

    def _submit(self, context: RequestContext, function: Callable[[], T]) -> asyncio.Future[T]:
        if self.running >= self.limit:
            raise Overloaded("requests in progress (--max-requests)", self.limit, self.running + 1)
        context.check()
        loop = asyncio.get_running_loop()

        def work() -> T:
            token = current_request.set(context)
            try:
                context.check()
                return function()
            except StopIteration as error:  # a future cannot hold it
                raise RuntimeError("StopIteration in a request") from error
            except Exception:
                raise
            except BaseException as error:  # a panic inside the tokenizers library is no Exception
                raise RuntimeError(f"{type(error).__name__} in a request") from None
            finally:
                current_request.reset(token)

        def count(task: Any) -> None:
            self.running -= 1

        self.running += 1
        done = asyncio.wrap_future(self._threads.submit(work), loop=loop)
        done.add_done_callback(count)
        done.add_done_callback(
            lambda task: task.cancelled() or task.exception()
        )  # an error that nobody awaits is no news
        return done

    async def _wait(self, context: RequestContext, done: asyncio.Future[Any], receive: Receive) -> None:
        """Wait until a call is done; cancel it when its client is gone or its time is over."""
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            left = max(0.0, context.deadline - time.monotonic())
            await asyncio.wait({done, gone}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if done.done():
                return
            is_gone = gone.done()
            context.cancelled.set()
            if is_gone:
                self._on_cancel()
                raise Cancelled("the client has closed the connection")
            raise DeadlineExceeded("the request took longer than it may (--timeout)")
        except asyncio.CancelledError:
            context.cancelled.set()
            raise
        finally:
            gone.cancel()


async def disconnected(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventQueue:
    """Events on their way from a thread to the event loop. Their number is bounded by what a request may generate."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

    def put(self, event: bytes) -> None:
        self._events.put_nowait(event)

    def finish(self, error: BaseException | None) -> None:
        self._events.put_nowait(error)

    async def get(self) -> bytes | None:
        """Return the next event, or None after the last; raise the error that ended them."""
        found = await self._events.get()
        if isinstance(found, BaseException):
            raise found
        return found


class EventStream(Response):
    """A response of server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        context: RequestContext,
        first: bytes | None,
        events: EventQueue,
        on_error: Callable[[ApiError], bytes],
        on_cancel: Callable[[], None],
    ) -> None:
        super().__init__(None, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._context, self._first, self._events = context, first, events
        self._on_error, self._on_cancel = on_error, on_cancel

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Send all events, until the last or until the client is gone."""
        sending = asyncio.ensure_future(self._send_all(scope, send))
        gone = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not sending.done():
                scope["state"]["outcome"] = "cancelled"
                self._on_cancel()
        finally:
            self._context.cancelled.set()
            for task in (sending, gone):
                task.cancel()
        if sending.done() and not sending.cancelled():
            sending.result()

    async def _send_all(self, scope: MutableMapping[str, Any], send: Send) -> None:
        async def write(body: bytes, more: bool = True) -> None:
            message = {"type": "http.response.body", "body": body, "more_body": more}
            # A client that does not read holds no thread, but a connection; not longer than a request may take.
            await asyncio.wait_for(send(message), max(1.0, self._context.deadline - time.monotonic()))

        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        event = self._first
        try:
            while event is not None:
                await write(event)
                event = await self._next(write)
        except TimeoutError:
            scope["state"]["outcome"] = "timeout"
            return
        except Exception as error:
            found = as_api_error(error)
            scope["state"]["outcome"] = found.code
            scope["state"]["error"] = error
            await write(self._on_error(found))
        await write(b"", more=False)

    async def _next(self, write: Callable[[bytes], Awaitable[None]]) -> bytes | None:
        """Return the next event; comments are sent while it takes long."""
        following = asyncio.ensure_future(self._events.get())
        try:
            while True:
                left = self._context.deadline - time.monotonic()
                done, _ = await asyncio.wait({following}, timeout=max(0.0, min(KEEP_ALIVE_SECONDS, left)))
                if done:
                    return following.result()
                if left <= KEEP_ALIVE_SECONDS:
                    raise DeadlineExceeded("the request took longer than it may (--timeout)")
                await write(b": waiting\n\n")
        finally:
            following.cancel()
