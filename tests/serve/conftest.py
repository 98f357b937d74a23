"""A store of small models, and applications and servers around it."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("prometheus_client")
sys.path.append(str(Path(__file__).parent))
from fake_store import STARTED, STOPPED, FakeStore, make_store
from live_server import LiveServer
from starlette.testclient import TestClient

from regard.serve.app import make_app
from regard.serve.settings import ServeSettings

MakeClient = Callable[..., TestClient]


@pytest.fixture(scope="session")
def model_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def shared_store(model_folders: Path) -> FakeStore:
    return make_store(model_folders)


@pytest.fixture
def store(shared_store: FakeStore) -> FakeStore:
    """The store of all models, as new."""
    STARTED.clear()
    STOPPED.clear()
    shared_store.works, shared_store.is_draining, shared_store.is_closed, shared_store.checks = True, False, False, 0
    return shared_store


@pytest.fixture
def make_client(store: FakeStore) -> Iterator[MakeClient]:
    """A function that returns a client of an application with these settings."""
    with contextlib.ExitStack() as stack:

        def make(store: FakeStore = store, **settings: Any) -> TestClient:
            app = make_app(ServeSettings(**settings), store)  # type: ignore[arg-type]
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield make


@pytest.fixture
def client(make_client: MakeClient) -> TestClient:
    return make_client()


@pytest.fixture
def serve_live(store: FakeStore) -> Iterator[Callable[..., LiveServer]]:
    """A function that starts a server with these settings on a free port."""
    running: list[LiveServer] = []

    def serve(**settings: Any) -> LiveServer:
        defaults = {"port": 0, "drain": 5.0, "drain_delay": 0.0}
        running.append(LiveServer(ServeSettings(**{**defaults, **settings}), store))
        return running[-1]

    yield serve
    for each in running:
        each.stop()


@pytest.fixture(autouse=True)
def _logs() -> None:
    logging.getLogger("regard.access").setLevel(logging.INFO)
