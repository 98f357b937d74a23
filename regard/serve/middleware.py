"""What happens to every request before and after its handler, as ASGI middleware.

`Observation` is outside: it gives a request its id, adds the security headers, and writes the access log and the metrics.
`Admission` is inside: it limits headers and bodies, checks API keys and rates, reads the body, and turns errors into answers
in the shape of their API. It decides by `scope["path"]`, which no header has an effect on.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse

from regard.serve.api_errors import ApiError, as_api_error, error_body, status_for
from regard.serve.api_keys import KeyRing, key_in_headers
from regard.serve.blocking_calls import Message, Receive, Send
from regard.serve.rate_limits import RateLimit
from regard.serve.request_bodies import RequestBody, parse_form
from regard.serve.request_context import Overloaded, RequestContext
from regard.serve.server_metrics import METHODS, Metrics
from regard.serve.settings import ServeSettings

Scope = dict[str, Any]
App = Callable[[Any, Receive, Send], Awaitable[None]]
access_log = logging.getLogger("regard.access")
log = logging.getLogger("regard.serve")

OPEN_PATHS = ("/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready")  # need no key
BODY_KEY_PATHS = ("/translate", "/detect", "/translate_file")  # LibreTranslate has the key among the fields
FILE_PATHS = ("/translate_file",)
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
POLICY = "; ".join(
    (
        "default-src 'self'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "frame-src 'self' blob:",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'self'",
        "frame-ancestors 'self'",
    )
)
SECURITY_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}


class Observation:
    """Middleware that observes every request: its id, security headers, the access log and metrics."""

    def __init__(
        self, app: App, settings: ServeSettings, metrics: Metrics, is_draining: Callable[[], bool] = lambda: False
    ) -> None:
        self.app, self.settings, self.metrics, self.is_draining = app, settings, metrics, is_draining
        self.headers = dict(SECURITY_HEADERS)
        if not settings.allow_origins:
            self.headers["Cross-Origin-Resource-Policy"] = "same-origin"
        if settings.tls_cert:
            self.headers["Strict-Transport-Security"] = "max-age=31536000"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun = time.monotonic()
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        state: dict[str, Any] = scope.setdefault("state", {})
        seconds = self.settings.file_timeout if scope["path"] in FILE_PATHS else self.settings.timeout
        state["context"] = RequestContext(request_id, address_of(scope), begun + seconds)
        status, size = 0, 0

        async def observed(message: Message) -> None:
            nonlocal status, size
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                for name, value in {**self.headers, "X-Request-Id": request_id}.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
                if self.is_draining():
                    headers["Connection"] = "close"  # the client shall open its next connection elsewhere
            size += len(message.get("body", b""))
            await send(message)

        self.metrics.in_flight.inc()
        try:
            await self.app(scope, receive, observed)
        finally:
            self.metrics.in_flight.dec()
            self._write(scope, status, size, time.monotonic() - begun)

    def _write(self, scope: Scope, status: int, size: int, seconds: float) -> None:
        """Write the access log and the metrics of a request that has been answered."""
        route = getattr(scope.get("route"), "path", "(no route)")
        method = scope["method"] if scope["method"] in METHODS else "other"
        state = scope["state"]
        self.metrics.requests.labels(route, method, str(status or 499)).inc()
        self.metrics.seconds.labels(route).observe(seconds)
        line = {"id": state["context"].id, "client": state.get("client", state["context"].client), "method": method}
        line |= {"route": route, "status": status or 499, "seconds": round(seconds, 4), "bytes": size}
        if "outcome" in state:
            line["outcome"] = state["outcome"]
        access_log.info("request", extra={"fields": line})


class Admission:
    """Middleware that admits a request to its handler, or refuses it."""

    def __init__(self, app: App, settings: ServeSettings, metrics: Metrics, keys: KeyRing | None) -> None:
        self.app, self.settings, self.metrics, self.keys = app, settings, metrics, keys
        self.buffered = 0  # bytes of the bodies of requests in progress
        self.by_key = RateLimit(settings.rate_per_key, "API key", "--rate-per-key")
        self.by_address = RateLimit(settings.rate_per_address, "address", "--rate-per-address")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        begun = False

        async def noting(message: Message) -> None:
            nonlocal begun
            begun = True
            await send(message)

        try:
            body = await self._admit(scope, receive)
            await self.app(scope, replay(body.content, receive) if body else receive, noting)
        except Exception as error:
            found = as_api_error(error)
            scope["state"].setdefault("outcome", found.code)
            log_error(scope, error, found)
            if begun:
                raise
            await error_response(scope["path"], found)(scope, receive, noting)
        finally:
            self.buffered -= scope["state"].pop("buffered", 0)
            late = scope["state"].pop("error", None)  # of a stream that had begun
            if late is not None:
                log_error(scope, late, as_api_error(late))

    async def _admit(self, scope: Scope, receive: Receive) -> RequestBody | None:
        """Return the body of a request that may be answered, if it has one."""
        try:
            return await self._check(scope, receive)
        except (ApiError, Overloaded) as error:
            self.metrics.refused.labels(as_api_error(error).code or "invalid").inc()
            raise

    async def _check(self, scope: Scope, receive: Receive) -> RequestBody | None:
        path, headers = scope["path"], Headers(scope=scope)
        if path in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return None
        self._check_headers(scope, headers)
        self.by_address.take(address_of(scope))
        is_foreign = (
            headers.get("sec-fetch-site") == "cross-site" and headers.get("origin") not in self.settings.allow_origins
        )
        if is_foreign and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            raise ApiError(403, "this page of another origin may not use the server (--allow-origin)", code="origin")
        has_body = scope["method"] not in ("GET", "HEAD", "OPTIONS", "DELETE")
        key = None
        if self.keys:
            key = key_in_headers(dict(headers)) or parse_form(scope["query_string"]).get("api_key")
            # Without a key anywhere else, a client is known only after its body was read.
            if not key and not (has_body and path in BODY_KEY_PATHS):
                raise missing_key()
            if key:
                self._know(scope, key)
        body = None
        if has_body:
            content = await self._read(scope, headers, receive)
            body = RequestBody(content, headers, scope["query_string"], self.settings.max_json_depth)
            scope["state"]["body"] = body
            if self.keys and not key:
                given = (await body.fields()).get("api_key")
                if not isinstance(given, str) or not given:
                    raise missing_key()
                self._know(scope, given)
        return body

    def _know(self, scope: Scope, key: str) -> None:
        """Check a key and count a request of it."""
        assert self.keys is not None
        name = self.keys.name_of(key)
        if name is None:
            raise ApiError(401, "Invalid API key", code="invalid_api_key")
        scope["state"]["client"] = name
        scope["state"]["context"].client = f"key {name}"
        self.by_key.take(name)

    def _check_headers(self, scope: Scope, headers: Headers) -> None:
        count, size = len(scope["headers"]), sum(len(name) + len(value) for name, value in scope["headers"])
        for what, value, limit, option in (
            ("headers", count, self.settings.max_headers, "--max-headers"),
            ("bytes of headers", size, self.settings.max_header_bytes, "--max-header-bytes"),
        ):
            if value > limit:
                message = f"too many {what}: {value}, and the limit is {limit} ({option})"
                raise ApiError(431, message, code="limit_exceeded", limit=limit, value=value)
        if (encoding := headers.get("content-encoding", "identity").strip().lower()) not in ("identity", ""):
            message = "Content-Encoding is not supported: send the body as it is"
            raise ApiError(415, message, code="unsupported_encoding") from ValueError(encoding)

    async def _read(self, scope: Scope, headers: Headers, receive: Receive) -> bytes:
        """Return the body; one that is too large or too slow is refused before it is complete."""
        is_file = scope["path"] in FILE_PATHS
        limit = self.settings.max_file if is_file else self.settings.max_body
        option = "--max-file" if is_file else "--max-body"

        def check_size(size: int) -> None:
            if size > limit:
                message = f"the body has {size:,} bytes or more, and the limit is {limit:,} ({option})"
                raise ApiError(413, message, code="limit_exceeded", limit=limit, value=size)

        length = headers.get("content-length", "")
        check_size(int(length) if length.isascii() and length.isdigit() else 0)
        parts: list[bytes] = []
        size, more = 0, True
        until = time.monotonic() + self.settings.body_timeout
        while more:
            try:
                message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
            except TimeoutError:
                message_text = f"the body took longer than {self.settings.body_timeout:g} s (--body-timeout)"
                raise ApiError(408, message_text, code="timeout", limit=self.settings.body_timeout) from None
            if message["type"] == "http.disconnect":
                raise ApiError(499, "the client has closed the connection", code="cancelled")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            check_size(size)
            self.buffered += len(parts[-1])
            scope["state"]["buffered"] = size
            if self.buffered > self.settings.max_buffered:
                what = "bytes of requests in progress (--max-buffered)"
                raise Overloaded(what, self.settings.max_buffered, self.buffered)
            more = message.get("more_body", False)
        return b"".join(parts)


def missing_key() -> ApiError:
    """Return the error for a request without an API key."""
    return ApiError(401, "an API key is needed: send it as Authorization: Bearer KEY", code="missing_api_key")


def replay(content: bytes, receive: Receive) -> Receive:
    """Return a function that receives a body that was read already, and then what the server receives."""
    waiting: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def receive_again() -> Message:
        return waiting.pop() if waiting else await receive()

    return receive_again


def address_of(scope: Scope) -> str:
    """Return the address of the client."""
    return str((scope.get("client") or ("unknown",))[0])


def error_response(path: str, error: ApiError) -> JSONResponse:
    """Return an error as the answer to a request for this path."""
    return JSONResponse(error_body(path, error), status_for(path, error), error.headers(path))


# ---- logs ------------------------------------------------------------------------------------------------------------


def log_error(scope: Scope, error: BaseException, found: ApiError) -> None:
    """Log an error of the server itself: its type and where it was raised, not its message, which may quote a text."""
    if found.status == 500:
        frames = traceback.extract_tb(error.__traceback__)[-8:]
        where = [f"{frame.filename.rpartition('/regard/')[2]}:{frame.lineno} {frame.name}" for frame in frames]
        fields = {"id": scope["state"]["context"].id, "error": type(error).__name__, "where": where}
        log.error("a request failed", extra={"fields": fields})


class JsonLines(logging.Formatter):
    """A formatter of log records as lines of JSON, which escapes control characters."""

    def format(self, record: logging.LogRecord) -> str:
        """Return a record as one line."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, Any] = {"time": when, "level": record.levelname.lower(), "logger": record.name}
        line["message"] = record.getMessage()
        line |= getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
        return json.dumps(line)


def configure_logs(level: str = "info") -> None:
    """Write all logs of the server to stderr, a JSON object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    for name in ("regard", "uvicorn"):
        logger = logging.getLogger(name)
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(level.upper())
    logging.getLogger("uvicorn.access").disabled = True
