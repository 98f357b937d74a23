"""Operation: health, readiness, metrics, the OpenAPI document, the page and its headers, settings and the command line."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_store import FakeStore
from starlette.testclient import TestClient
from typer.testing import CliRunner

from regard.cli.serve_commands import model_paths, serve_app
from regard.errors import RegardError
from regard.serve.middleware import JsonLines
from regard.serve.server import check_settings
from regard.serve.settings import ServeSettings

HELLO = {"q": "Hello.", "source": "en", "target": "de"}


def test_liveness_and_readiness(client: TestClient, store: FakeStore) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    assert client.head("/health/live").status_code == 200
    for _ in range(5):
        assert client.get("/health/ready").json()["ready"] is True
    assert store.checks == 1  # one forward pass counts for a moment


def test_readiness_proves_a_forward_pass(client: TestClient, store: FakeStore) -> None:
    store.works = False
    found = client.get("/v2/health/ready")
    assert (found.status_code, found.json()["error"]) == (503, "a forward pass failed")
    assert "Retry-After" in found.headers
    assert client.get("/health").status_code == 200
    store.works = True
    assert client.get("/health/ready").status_code == 200


def test_a_draining_server_is_not_ready_but_answers(client: TestClient) -> None:
    client.app.state.service.is_draining = True  # type: ignore[attr-defined]
    assert client.get("/health/ready").status_code == 503
    found = client.post("/translate", json=HELLO)
    assert (found.status_code, found.headers["Connection"]) == (200, "close")


def test_the_store_is_drained_and_closed_at_the_end(make_client: Any, store: FakeStore) -> None:
    from regard.serve.app import make_app

    with TestClient(make_app(ServeSettings(), store)) as client:  # type: ignore[arg-type]
        client.get("/health")
    assert store.is_draining
    assert store.is_closed


def test_metrics_have_closed_labels(client: TestClient) -> None:
    client.post("/translate", json=HELLO)
    client.get("/there/is/nothing?here=1")
    client.request("BREW", "/coffee")
    text = client.get("/metrics").text
    assert 'regard_requests_total{method="POST",route="/translate",status="200"} 1.0' in text
    assert "regard_store_queued_tokens 3.0" in text
    assert 'regard_model_queued_tokens{model="rule"} 3.0' in text
    routes = set(re.findall(r'route="([^"]*)"', text))
    assert routes == {"/translate", "(no route)"}
    assert set(re.findall(r'method="([^"]*)"', text)) <= {"GET", "POST", "other"}
    assert "BREW" not in text


def test_the_openapi_document_describes_every_route_and_body(client: TestClient) -> None:
    found = client.get("/openapi.json").json()
    text = json.dumps(found)
    names = set(re.findall(r"#/components/schemas/([\w.]+)", text))
    assert names <= set(found["components"]["schemas"])
    bodies = [m["post"]["requestBody"]["content"] for m in found["paths"].values() if "post" in m]
    assert len(bodies) > 15
    assert "application/x-www-form-urlencoded" in found["paths"]["/translate"]["post"]["requestBody"]["content"]
    ids = re.findall(r'"operationId": "([^"]*)"', text)
    assert len(ids) == len(set(ids))
    listing = client.get("/docs").text
    assert all(path in listing for path in found["paths"])


# ---- the page --------------------------------------------------------------------------------------------------------


def test_the_page_and_its_files_are_served_with_tags(client: TestClient) -> None:
    page = client.get("/")
    assert page.headers["content-type"].startswith("text/html")
    for name in re.findall(r'(?:src|href)="(/static/[^"]+)"', page.text):
        if client.get(name).status_code != 200:
            continue  # a file that the page does not have yet
        again = client.get(name, headers={"If-None-Match": client.get(name).headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
    script = client.get("/static/look/10-dom.js")
    assert script.headers["content-type"].startswith("text/javascript")
    assert script.headers["Cache-Control"] == "no-cache"
    for wrong in (
        "/static/../settings.py",
        "/static/%2e%2e/settings.py",
        "/static/look/../x",
        "/static/",
        "/static/x.py",
    ):
        assert client.get(wrong).status_code == 404, wrong


def test_there_may_be_no_page(make_client: Any) -> None:
    client = make_client(page=False)
    assert client.get("/").status_code == 405  # only the POST of Hugging Face's clients
    assert client.get("/static/style.css").status_code == 404


@pytest.mark.parametrize("place", ["/", "/health", "/nothing", "/v1/models"])
def test_every_answer_has_security_headers(client: TestClient, place: str) -> None:
    headers = client.get(place).headers
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy["script-src"] == "'self'"
    assert policy["default-src"] == "'self'"
    assert policy["frame-ancestors"] == "'self'"
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] in ("no-store", "no-cache")
    assert "server" not in headers


def test_unknown_paths_and_methods_have_the_shape_of_their_api(client: TestClient) -> None:
    assert client.get("/v1/nothing").json()["error"]["type"] == "not_found_error"
    assert client.get("/regard/nothing").json()["error"]["status"] == 404
    assert client.get("/nothing").json() == {"error": "there is nothing at this path"}
    found = client.get("/translate")
    assert (found.status_code, found.headers["Allow"]) == (405, "POST")


# ---- settings and logs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"tls_cert": Path("x")},
        {"port": 99999},
        {"max_body": 0},
        {"timeout": -1},
        {"rate_per_key": -1},
        {"allow_origins": ("example.org",)},
    ],
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(RegardError):
        ServeSettings(**wrong)


def test_files_and_ports_are_checked_before_anything_is_loaded(tmp_path: Path) -> None:
    import socket

    with pytest.raises(RegardError, match="tls-cert"):
        check_settings(ServeSettings(tls_cert=tmp_path / "a", tls_key=tmp_path / "b"))
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RegardError, match="another --port"):
        check_settings(ServeSettings(port=taken.getsockname()[1]))


def test_log_lines_are_json_without_control_characters() -> None:
    record = logging.LogRecord("regard.x", logging.INFO, "", 0, "a\nb\x1b[31m", (), None)
    record.fields = {"id": "1"}
    line = JsonLines().format(record)
    assert "\n" not in line
    assert "\x1b" not in line
    assert json.loads(line)["message"] == "a\nb\x1b[31m"
    assert json.loads(line)["id"] == "1"


# ---- the command line ------------------------------------------------------------------------------------------------


def test_models_have_the_names_of_their_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_paths(["runs/a", "runs/b/model", "c=runs/a", "./d/"]) == {
        "a": Path("runs/a"), "b": Path("runs/b/model"), "c": Path("runs/a"), "d": Path("d"),
    }  # fmt: skip
    assert list(model_paths([])) == ["en-de-fr-zh"]
    with pytest.raises(RegardError, match="name one of them"):
        model_paths(["x/a", "y/a"])


def test_a_key_is_printed_once_and_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    found = CliRunner().invoke(serve_app, ["key", "alice", "--keys", str(path)])
    assert found.exit_code == 0
    key = found.stdout.splitlines()[0]
    assert key.startswith("regard-")
    assert key not in path.read_text()


def test_check_runs_every_model_and_ends(tmp_path: Path, store: FakeStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.cli.serve_commands.make_store", lambda models, settings: store)
    found = CliRunner().invoke(serve_app, ["--check", "--port", "0"])
    assert found.exit_code == 0, found.output
    assert [line.split("\t")[0] for line in found.stdout.splitlines()] == list(store.entries)
    assert store.is_closed


def test_help_needs_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys; from regard.cli.serve_commands import serve_app; from typer.testing import CliRunner; "
        "found = CliRunner().invoke(serve_app, ['--help']); assert '--max-characters' in found.output, found.output; "
        "assert not {'torch', 'fastapi', 'uvicorn'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env={"COLUMNS": "120", "PATH": ""})


def test_a_missing_package_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = CliRunner().invoke(serve_app, [])
    assert isinstance(found.exception, RegardError)
    assert "pip install 'regard[serve]'" in str(found.exception)
