"""A real server: clients that vanish, that are slow or send too much, health under load, TLS, and a graceful end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_store import STARTED, STOPPED, FakeStore

HELLO = {"q": "Hello.", "source": "en", "target": "de"}


def post(port: int, path: str, body: Any, timeout: float = 20) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    with contextlib.closing(connection):
        connection.connect()
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        found = connection.getresponse()
        return found.status, found.read().decode()


def raw(port: int, content: bytes) -> socket.socket:
    one = socket.create_connection(("127.0.0.1", port), timeout=10)
    one.sendall(content)
    return one


def request_bytes(path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/translate", {**HELLO, "q": "A slow word."}),
        ("/regard/translate", {"text": "A slow word.", "to": "de", "source": "en", "stream": True}),
        (  # it vanishes after the first events
            "/regard/translate",
            {"text": "Hello. How are you? The man is slow.", "to": "de", "source": "en", "stream": True},
        ),
    ],
)
def test_a_client_that_vanishes_is_noticed_and_its_request_cancelled(
    serve_live: Callable[..., Any], store: FakeStore, path: str, body: dict[str, Any]
) -> None:
    live = serve_live()
    client = raw(live.port, request_bytes(path, body))
    assert STARTED.wait(10)
    assert store.users == 1
    client.close()
    assert STOPPED.wait(5)
    until = time.monotonic() + 5
    while store.users and time.monotonic() < until:
        time.sleep(0.01)
    assert store.users == 0
    service = live.server._app.state.service
    while service.calls.running and time.monotonic() < until:
        time.sleep(0.01)
    assert service.calls.running == 0
    metrics = urllib.request.urlopen(f"{live.url}/metrics").read().decode()
    assert "regard_cancelled_total 1.0" in metrics


def test_an_error_after_the_first_event_is_an_event(serve_live: Callable[..., Any]) -> None:
    live = serve_live()
    body = {"text": "Hello. How are you? The man was lost.", "to": "de", "source": "en", "stream": True}
    status, text = post(live.port, "/regard/translate", body)
    assert status == 200
    *_, last = text.strip().split("\n\n")
    assert last.startswith("event: error")
    assert json.loads(last.split("data: ")[1])["error"]["retry_after"] == 1


def test_health_answers_while_all_threads_are_busy(serve_live: Callable[..., Any]) -> None:
    live = serve_live(max_requests=8, timeout=1.5)
    threads = [
        threading.Thread(target=post, args=(live.port, "/translate", {**HELLO, "q": "A slow word."})) for _ in range(30)
    ]
    for thread in threads:
        thread.start()
    assert STARTED.wait(10)
    times = []
    for _ in range(20):
        begun = time.monotonic()
        assert urllib.request.urlopen(f"{live.url}/health").status == 200
        times.append(time.monotonic() - begun)
    assert sorted(times)[10] < 0.5  # a busy machine is no reason to fail
    for thread in threads:
        thread.join()


def test_a_slow_loris_is_disconnected(serve_live: Callable[..., Any]) -> None:
    live = serve_live(header_timeout=0.5, body_timeout=0.5)
    silent = raw(live.port, b"")
    headers = raw(live.port, b"GET /health HTTP/1.1\r\nHost: a\r\n")
    for _ in range(3):
        time.sleep(0.1)
        headers.sendall(b"X-A: b\r\n")
    body = raw(live.port, b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\nx")
    assert silent.recv(100) == b""
    assert headers.recv(100) == b""
    assert b" 408 " in body.recv(1000)
    for each in (silent, headers, body):
        each.close()


def test_a_connection_that_is_reused_slowly_is_disconnected(serve_live: Callable[..., Any]) -> None:
    live = serve_live(header_timeout=0.5)
    one = raw(live.port, b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
    assert b"200 OK" in one.recv(4000)
    one.sendall(b"GET /hea")
    begun = time.monotonic()
    while one.recv(4000):
        pass
    assert time.monotonic() - begun < 5
    one.close()


def test_huge_headers_and_bodies_are_refused(serve_live: Callable[..., Any]) -> None:
    live = serve_live()
    with contextlib.suppress(OSError):
        one = raw(live.port, b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * (5 << 20) + b"\r\n\r\n")
        assert b" 400 " in one.recv(1000) or one.recv(1000) == b""
        one.close()
    large = raw(live.port, b"POST /translate HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n")
    assert b" 413 " in large.recv(1000)
    large.close()
    chunked = raw(live.port, b"POST /translate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
    found = b""
    with contextlib.suppress(OSError):
        for _ in range(100):
            chunked.sendall(b"10000\r\n" + b"x" * 65536 + b"\r\n")
        found = chunked.recv(1000)
    assert b" 413 " in found or found == b""
    chunked.close()
    assert post(live.port, "/translate", HELLO)[0] == 200


def test_bytes_that_are_no_http_get_an_answer_and_hurt_nobody(serve_live: Callable[..., Any]) -> None:
    live = serve_live()
    for content in (
        b"\x16\x03\x01\x00\xa5",
        b"hello\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /translate HTTP/1.1\r\n\r\n",
    ):
        one = raw(live.port, content)
        one.settimeout(1)
        with contextlib.suppress(OSError):
            one.recv(1000)
        one.close()
    assert post(live.port, "/translate", HELLO)[0] == 200


def test_requests_that_were_accepted_are_answered_after_the_server_is_told_to_end(
    serve_live: Callable[..., Any],
) -> None:
    live = serve_live(drain_delay=0.3)
    found: list[int] = []

    def ask() -> None:
        for _ in range(100):
            try:
                found.append(post(live.port, "/translate", HELLO)[0])
            except ConnectionRefusedError:
                return

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.2)
    live.server.should_exit = True
    for thread in threads:
        thread.join()
    assert len(found) > 4
    assert set(found) == {200}


@pytest.fixture
def certificate(tmp_path: Path) -> tuple[Path, Path]:
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-out", str(cert)]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("openssl is needed to make a certificate")
    return cert, key


def test_tls_by_files(serve_live: Callable[..., Any], certificate: tuple[Path, Path]) -> None:
    cert, key = certificate
    live = serve_live(tls_cert=cert, tls_key=key)
    context = ssl.create_default_context(cafile=str(cert))
    found = urllib.request.urlopen(f"https://127.0.0.1:{live.port}/health", context=context)
    assert json.loads(found.read()) == {"status": "ok"}
    assert found.headers["Strict-Transport-Security"]


MAIN = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
import conftest
from fake_store import make_store
from regard.cli import serve_commands
serve_commands.make_store = lambda models, settings: make_store(Path(sys.argv[3]), "rule")
serve_commands.serve_app(["run", "--port", sys.argv[4], "--drain", "10", "--timeout", "4"])
"""


@pytest.mark.slow
def test_sigterm_under_load_loses_nothing_that_was_accepted(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    here = Path(__file__).parent
    command = [sys.executable, "-c", MAIN, str(here), str(here.parent), str(tmp_path), str(port)]
    with (tmp_path / "log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", port)).close()
                break
            time.sleep(0.1)
        found: list[int] = []

        def ask(text: str) -> None:
            with contextlib.suppress(ConnectionRefusedError):
                while True:
                    found.append(post(port, "/translate", {**HELLO, "q": text})[0])

        threads = [threading.Thread(target=ask, args=(text,)) for text in ["Hello."] * 4 + ["A slow word."]]
        for thread in threads:
            thread.start()
        time.sleep(1)
        os.kill(process.pid, signal.SIGTERM)
        for thread in threads:
            thread.join()
        process.wait(20)
    assert process.returncode == -signal.SIGTERM
    assert set(found) == {200, 504}  # the slow one ended by its own deadline
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    assert {line["route"] for line in lines if line["logger"] == "regard.access"} == {"/translate"}
    assert sum(line["logger"] == "regard.access" for line in lines) == len(found)
