"""A real server in a thread, for tests that speak to it through a socket."""

from __future__ import annotations

import threading
import time
from typing import Any

from regard.serve.server import make_server
from regard.serve.settings import ServeSettings


class LiveServer:
    """A real server in a thread."""

    def __init__(self, settings: ServeSettings, store: Any) -> None:
        self.server = make_server(settings, store)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        until = time.monotonic() + 20
        while not self.server.started and time.monotonic() < until:
            time.sleep(0.01)
        self.port: int = self.server.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stop(self) -> None:
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
