"""The server process: Uvicorn with limits on slow and large requests, TLS, and a graceful end.

After SIGTERM the server accepts connections for a moment longer, tells every client to open its next connection elsewhere,
and answers 503 to the readiness check, so that a load balancer takes it out. Then it closes its port and finishes the
requests that it has accepted, for `--drain` seconds at most.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import socket
import ssl
import struct
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from regard.errors import RegardError
from regard.serve.app import make_app
from regard.serve.middleware import configure_logs
from regard.serve.settings import ServeSettings

if TYPE_CHECKING:
    from fastapi import FastAPI

    from regard.serve.model_store import ModelStore

log = logging.getLogger("regard.serve")
M_ARENA_MAX = -8  # of mallopt
SWITCH_INTERVAL = 1e-3  # seconds; the event loop waits so long at most for each thread that holds the interpreter


class TimedProtocol(H11Protocol):
    """HTTP/1.1 that closes connections whose request headers do not arrive in time (slow loris)."""

    header_timeout: float = 10.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin to wait for the headers of the first request."""
        super().connection_made(transport)
        self._wait_for_headers()

    def data_received(self, data: bytes) -> None:
        """Read data; wait for the rest of the headers, if they are not complete."""
        super().data_received(data)
        if self.transport.is_closing() or self.conn.their_state is not h11.IDLE:
            self._stop_waiting()
        elif self._timer is None:
            self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the timer."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_headers(self) -> None:
        self._timer = self.loop.call_later(self.header_timeout, self._close)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _close(self) -> None:
        self._timer = None
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            self.transport.close()


class DrainingServer(uvicorn.Server):
    """A server that accepts requests for a moment longer after it was told to end."""

    def __init__(self, config: uvicorn.Config, app: FastAPI, delay: float) -> None:
        super().__init__(config)
        self._app, self._delay = app, delay
        self._told: float | None = None
        self._is_closing = False

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server ends now: some time after it was told to, unless it was told twice."""
        ends = await super().on_tick(counter)
        if not self.should_exit or self.force_exit:
            return ends
        if self._told is None:
            self._told = time.monotonic()
            self._app.state.service.is_draining = True
            log.info("stopping: no new connections soon")
        if time.monotonic() - self._told < self._delay:
            return False
        if not self._is_closing:
            self._is_closing = True
            for each in (each for server in self.servers for each in server.sockets):
                drop_new_connections(each.fileno())
            return False  # connections that the kernel has accepted are taken until the next tick
        return True


def drop_new_connections(descriptor: int) -> None:
    """Let the kernel (Linux) ignore attempts to connect to a server socket, and keep those that have succeeded.

    Connections that wait to be accepted when a socket is closed would be reset, after their clients have sent requests. A
    client that is ignored tries again after a second, and is refused or reaches another server. The filter is a program of
    the Berkeley packet filter: it drops TCP segments that have the flag SYN, but not ACK."""
    program = [(0x30, 0, 0, 13), (0x54, 0, 0, 0x12), (0x15, 0, 1, 0x02), (0x06, 0, 0, 0), (0x06, 0, 0, 0xFFFFFFFF)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    filter = struct.pack("HL", len(program), ctypes.addressof(code))
    attach = getattr(socket, "SO_ATTACH_FILTER", 26)
    if not sys.platform.startswith("linux"):
        return
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as server_socket:
        server_socket.setsockopt(socket.SOL_SOCKET, attach, filter)


def make_server(settings: ServeSettings, store: ModelStore) -> DrainingServer:
    """Return the server of the models of a store; its method `run` serves until a signal ends it."""
    app = make_app(settings, store)
    protocol = type("Protocol", (TimedProtocol,), {"header_timeout": settings.header_timeout})
    config = uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        http=protocol,
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=round(settings.keep_alive),
        timeout_graceful_shutdown=round(settings.drain),
        h11_max_incomplete_event_size=settings.max_header_bytes,
        ssl_certfile=str(settings.tls_cert) if settings.tls_cert else None,
        ssl_keyfile=str(settings.tls_key) if settings.tls_key else None,
    )
    return DrainingServer(config, app, settings.drain_delay)


def limit_arenas() -> None:
    """Let all threads share two heaps, where the C library is glibc: one a thread would keep what each once needed."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 2)


def serve(settings: ServeSettings, store: ModelStore) -> None:
    """Serve until SIGTERM or Ctrl-C."""
    configure_logs()
    limit_arenas()
    sys.setswitchinterval(SWITCH_INTERVAL)
    make_server(settings, store).run()


def check_settings(settings: ServeSettings) -> None:
    """Refuse settings with which the server could not start: TLS files, the key file, the port."""
    from regard.serve.api_keys import KeyRing

    if settings.keys:
        KeyRing(settings.keys)
    if settings.tls_cert and settings.tls_key:
        try:
            ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(settings.tls_cert, settings.tls_key)
        except (OSError, ssl.SSLError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise RegardError(f"--tls-cert {settings.tls_cert}, --tls-key {settings.tls_key}: {reason}") from None
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            raise RegardError(
                f"{settings.host}:{settings.port} cannot be used: {error.strerror}; give another --port"
            ) from None


def check_models(store: ModelStore, names: Iterable[str]) -> list[tuple[str, float]]:
    """Run one forward pass of each model, and return their names and the seconds it took."""
    return [(name, store.check(name)) for name in names]


def is_local(host: str) -> bool:
    """Return whether only this machine can reach an address."""
    return host in ("localhost", "::1") or host.startswith("127.")
