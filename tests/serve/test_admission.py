"""Who is admitted: API keys on every route, rate limits, limits of bodies and headers, foreign pages, and what logs say."""

from __future__ import annotations

import base64
import gzip
import json
import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest
from fake_store import FakeStore
from starlette.testclient import TestClient

from regard.errors import RegardError
from regard.serve.api_errors import ApiError
from regard.serve.api_keys import KeyRing, create_key, hash_key, key_in_headers, read_keys
from regard.serve.rate_limits import RateLimit
from regard.serve.request_bodies import parse_json

HELLO = {"q": "Hello.", "source": "en", "target": "de"}
OPEN = {"/health", "/health/live", "/health/ready", "/v2/health/live", "/v2/health/ready"}


@pytest.fixture
def keys(tmp_path: Path) -> tuple[Path, str]:
    path = tmp_path / "keys.txt"
    return path, create_key(path, "alice")


def all_routes(client: TestClient) -> list[tuple[str, str]]:
    """The method and an example path of every route of an application."""
    found, waiting = [], list(client.app.routes)  # type: ignore[attr-defined]
    while waiting:
        route = waiting.pop()
        inner = getattr(route, "routes", None) or getattr(getattr(route, "original_router", None), "routes", None)
        if inner:
            waiting += inner
            continue
        for method in route.methods:
            path = route.path
            for name in ("{name:path}", "{name}", "{version}"):
                path = path.replace(name, "1" if name == "{version}" else "rule")
            found.append((method, path))
    return sorted(set(found))


# ---- keys ------------------------------------------------------------------------------------------------------------


def test_a_key_file_has_hashes_that_only_its_owner_can_read(tmp_path: Path) -> None:
    path = tmp_path / "keys.txt"
    key = create_key(path, "alice")
    assert key not in path.read_text()
    assert read_keys(path) == {"alice": hash_key(key)}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    other = create_key(path, "bob")
    ring = KeyRing(path)
    assert (ring.name_of(key), ring.name_of(other), ring.name_of(key.upper())) == ("alice", "bob", None)
    for wrong in ("alice", "a b", ""):
        with pytest.raises(RegardError):
            create_key(path, wrong)


@pytest.mark.parametrize("line", ["alice", "alice xyz", "alice " + "0" * 63, "a b " + "0" * 64])
def test_a_wrong_line_of_a_key_file_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "keys.txt"
    path.write_text(f"# keys\n{line}\n")
    with pytest.raises(RegardError, match=r"keys\.txt:2"):
        read_keys(path)
    path.write_text("# none\n")
    with pytest.raises(RegardError, match="has no key"):
        KeyRing(path)


def test_a_revoked_key_is_refused_without_a_restart(keys: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    path, key = keys
    other = create_key(path, "bob")
    ring = KeyRing(path)
    monkeypatch.setattr("regard.serve.api_keys.RELOAD_SECONDS", 0.0)
    assert ring.name_of(key) == "alice"
    path.write_text("".join(line for line in path.read_text().splitlines(True) if "alice" not in line))
    os.utime(path, ns=(1, 1))
    assert ring.name_of(key) is None
    assert ring.name_of(other) == "bob"
    path.write_text("broken")
    assert ring.name_of(other) == "bob"


def test_every_route_but_health_needs_a_key(make_client: Any, keys: tuple[Path, str]) -> None:
    path, key = keys
    client = make_client(keys=path)
    routes = all_routes(client)
    assert len(routes) > 35
    assert {place for _, place in routes} >= {"/", "/metrics", "/docs", "/openapi.json", "/static/rule", *OPEN}
    for method, place in routes:
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-API-Key": ""}, {"Host": "x/health?a="}):
            found = client.request(method, place, headers=headers)
            if place in OPEN:
                assert found.status_code == 200, place
            else:
                assert found.status_code in (401, 403), (method, place, headers)
        if place not in OPEN:
            good = client.request(method, place, headers={"Authorization": f"Bearer {key}"})
            assert good.status_code not in (401, 403), (method, place)


def test_paths_that_do_not_exist_need_a_key_too(make_client: Any, keys: tuple[Path, str]) -> None:
    client = make_client(keys=keys[0])
    for place in ("/nothing", "/health/../metrics", "/health%2F..%2Fmetrics", "//metrics", "/health/", "/HEALTH"):
        assert client.get(place, follow_redirects=False).status_code == 401, place
    assert client.post("/health").status_code == 401


def test_a_key_may_be_in_a_header_the_query_or_the_fields_of_libretranslate(
    make_client: Any, keys: tuple[Path, str]
) -> None:
    path, key = keys
    client = make_client(keys=path)
    basic = base64.b64encode(f"anyone:{key}".encode()).decode()
    for headers in ({"Authorization": f"bearer {key}"}, {"X-API-Key": key}, {"Authorization": f"Basic {basic}"}):
        assert client.post("/translate", json=HELLO, headers=headers).status_code == 200
    assert client.post("/translate", json={**HELLO, "api_key": key}).status_code == 200
    assert client.post("/translate", data={**HELLO, "api_key": key}).status_code == 200
    assert client.post("/translate", params={**HELLO, "api_key": key}).status_code == 200
    assert client.get("/languages", params={"api_key": key}).status_code == 200
    form = {"source": "en", "target": "de", "api_key": key}
    assert client.post("/translate_file", data=form, files={"file": ("a.txt", b"Hello.")}).status_code == 200
    assert client.post("/regard/translate", json={"text": "a", "api_key": key}).status_code == 401
    for wrong in ("x", None, 5, [key]):
        found = client.post("/translate", json={**HELLO, "api_key": wrong})
        assert (found.status_code, set(found.json())) == (403, {"error"})


def test_a_missing_key_is_refused_in_the_shape_of_each_api(make_client: Any, keys: tuple[Path, str]) -> None:
    client = make_client(keys=keys[0])
    openai = client.post("/v1/completions", json={"prompt": "a"})
    assert (openai.status_code, openai.json()["error"]["code"]) == (401, "missing_api_key")
    assert openai.json()["error"]["type"] == "authentication_error"
    assert openai.headers["WWW-Authenticate"] == "Bearer"
    assert client.get("/").headers["WWW-Authenticate"].startswith("Basic")
    assert client.post("/translate", json=HELLO).status_code == 403
    assert isinstance(client.post("/v2/models/rule/infer", json={}).json()["error"], str)


def test_odd_authorization_headers_are_no_keys() -> None:
    assert key_in_headers({}) is None
    assert key_in_headers({"authorization": "Basic !!!"}) == ""
    assert key_in_headers({"authorization": "Digest x"}) is None


def test_a_file_is_for_the_key_that_sent_it(make_client: Any, keys: tuple[Path, str]) -> None:
    path, key = keys
    other = create_key(path, "bob")
    client = make_client(keys=path)
    form = {"source": "en", "target": "de", "api_key": key}
    url = client.post("/translate_file", data=form, files={"file": ("a.txt", b"Hello.")}).json()["translatedFileUrl"]
    assert client.get(url, headers={"X-API-Key": other}).status_code == 404
    assert client.get(url, headers={"X-API-Key": key}).text == "HELLO."


# ---- rates -----------------------------------------------------------------------------------------------------------


def test_a_bucket_refills_over_time() -> None:
    now = [0.0]
    limit = RateLimit(60, "address", "--rate-per-address", lambda: now[0])
    for _ in range(60):
        limit.take("a")
    with pytest.raises(ApiError) as refused:
        limit.take("a")
    assert (refused.value.status, refused.value.retry_after) == (429, pytest.approx(1.0))
    limit.take("b")  # another client has its own
    now[0] = 1.0  # one request a second
    limit.take("a")
    with pytest.raises(ApiError):
        limit.take("a")


def test_limits_by_key_and_by_address(make_client: Any, keys: tuple[Path, str]) -> None:
    path, key = keys
    client = make_client(keys=path, rate_per_key=3)
    found = [client.post("/translate", json={**HELLO, "api_key": key}) for _ in range(4)]
    assert [each.status_code for each in found] == [200, 200, 200, 429]
    assert 1 <= int(found[-1].headers["Retry-After"]) <= 20
    assert "3 a minute (--rate-per-key)" in found[-1].json()["error"]
    client = make_client(rate_per_address=2)
    assert [client.get("/v1/models").status_code for _ in range(3)] == [200, 200, 429]
    assert client.get("/health").status_code == 200


# ---- sizes and forms of requests -------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["/translate", "/v1/completions", "/regard/translate", "/", "/v2/models/rule/infer"])
def test_bodies_that_are_refused_on_every_api(make_client: Any, place: str) -> None:
    client = make_client(max_body=2000, max_json_depth=8)
    kind = {"Content-Type": "application/json"}

    def status(content: bytes, **headers: str) -> int:
        found = client.post(place, content=content, headers={**kind, **headers})
        assert "error" in found.json()
        return found.status_code

    assert status(b"[" * 1500) == 400
    assert status(b'{"a":' * 9 + b"1" + b"}" * 9) == 400
    assert status(b'{"q": "\xff"}') == 400
    assert status(b'{"q": "\\ud800", "text": "\\ud800", "inputs": "\\ud800", "prompt": "\\ud800"}') == 400
    assert status(b'{"q": NaN}') == 400
    assert status(b"not json") == 400
    assert status(b"[1, 2]") == 400
    assert status(b"") == 400
    assert status(b'{"q": ' + b"9" * 1900 + b"}") == 400
    assert status(b"x" * 2001) == 413
    assert status(gzip.compress(b'{"q": "' + b"x" * 100_000 + b'"}'), **{"Content-Encoding": "gzip"}) == 415


def test_the_limit_of_a_body_is_named(make_client: Any) -> None:
    found = make_client(max_body=100).post("/v1/completions", content=b"x" * 101)
    assert found.status_code == 413
    assert found.json()["error"]["limit"] == 100
    assert found.json()["error"]["value"] == 101
    assert "--max-body" in found.json()["error"]["message"]
    assert found.headers["Connection"] == "close"


def test_a_body_without_a_length_is_counted_as_it_arrives(make_client: Any) -> None:
    def parts() -> Any:
        for _ in range(100):
            yield b"x" * 100

    assert make_client(max_body=1000).post("/v1/completions", content=parts()).status_code == 413


def test_the_bodies_of_all_requests_have_a_limit(make_client: Any) -> None:
    client = make_client(max_buffered=1000)
    assert client.post("/translate", json={**HELLO, "q": "Hello. " * 200}).status_code == 429
    for _ in range(30):  # what was read is given back
        assert client.post("/translate", json=HELLO).status_code == 200


def test_files_have_their_own_limit(make_client: Any) -> None:
    client = make_client(max_body=100, max_file=5000)
    form = {"source": "en", "target": "de"}
    assert client.post("/translate_file", data=form, files={"file": ("a.txt", b"Hello. " * 100)}).status_code == 200
    found = client.post("/translate_file", data=form, files={"file": ("a.txt", b"x" * 6000)})
    assert (found.status_code, "--max-file" in found.json()["error"]) == (413, True)


def test_too_many_or_too_large_headers(make_client: Any) -> None:
    client = make_client(max_headers=20, max_header_bytes=4000)
    assert client.get("/v1/models", headers={f"x-{i}": "a" for i in range(30)}).status_code == 431
    assert client.get("/v1/models", headers={"x": "a" * 5000}).status_code == 431


def test_forms_that_are_refused(client: TestClient) -> None:
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    assert client.post("/translate", content=b"q=%ff&target=de", headers=kind).status_code == 400
    assert client.post("/translate", content=b"&".join([b"a=b"] * 100), headers=kind).status_code == 400
    assert client.post("/translate?q=%ff&source=en&target=de").status_code == 400
    for content, boundary in ((b"--x\r\nbroken", "x"), (b"", ""), (b"--x--", "y")):
        kind = {"Content-Type": f"multipart/form-data; boundary={boundary}"}
        assert client.post("/translate_file", content=content, headers=kind).status_code == 400


def test_json_of_the_greatest_depth_is_read() -> None:
    assert parse_json(b"[" * 32 + b"]" * 32, 32) is not None
    assert parse_json(b'"' + b"[" * 100 + b'\\""', 4) == "[" * 100 + '"'


# ---- pages of other origins ------------------------------------------------------------------------------------------


def test_pages_of_other_origins_are_refused_unless_they_are_named(make_client: Any) -> None:
    foreign = {"Origin": "https://other.example", "Sec-Fetch-Site": "cross-site"}
    client = make_client()
    assert client.post("/translate", data=HELLO, headers=foreign).status_code == 403
    assert "access-control-allow-origin" not in client.get("/v1/models", headers=foreign).headers
    assert client.post("/translate", data=HELLO, headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200
    client = make_client(allow_origins=("https://other.example",))
    found = client.post("/translate", data=HELLO, headers=foreign)
    assert (found.status_code, found.headers["access-control-allow-origin"]) == (200, "https://other.example")
    asked = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    assert client.options("/translate", headers=asked).status_code == 200
    assert client.options("/translate", headers={**asked, "Origin": "https://third.example"}).status_code == 400


# ---- what others can read --------------------------------------------------------------------------------------------


def test_no_text_key_or_message_of_an_error_is_in_logs_or_metrics(
    make_client: Any, keys: tuple[Path, str], caplog: pytest.LogCaptureFixture
) -> None:
    path, key = keys
    client = make_client(keys=path)
    with caplog.at_level(logging.DEBUG):
        headers = {"Authorization": f"Bearer {key}"}
        client.post("/translate", json={**HELLO, "q": "Secret words."}, headers=headers)
        client.post("/translate", params={**HELLO, "q": "Secret words.", "api_key": key})
        failed = client.post("/translate", json={**HELLO, "q": "Secret words crash."}, headers=headers)
        client.get("/secret/words", headers={"X-API-Key": "secret-words"})
    assert failed.status_code == 500
    assert "ecret" not in failed.text
    own = [record for record in caplog.records if not record.name.startswith("http")]  # not those of the client
    lines = [json.dumps({**vars(record), "args": str(record.args)}, default=str) for record in own]
    said = "\n".join(lines) + client.get("/metrics", headers=headers).text
    assert "ecret" not in said
    assert key not in said
    failures = [record for record in caplog.records if record.name == "regard.serve"]
    assert failures[0].fields["error"] == "RuntimeError"  # type: ignore[attr-defined]
    assert any("fake_store.py" in each for each in failures[0].fields["where"])  # type: ignore[attr-defined]


def test_an_access_line_has_closed_fields(client: TestClient, caplog: pytest.LogCaptureFixture) -> None:
    found = client.get("/v1/models/writer?x=1", headers={"X-Request-Id": "abc-1"})
    assert found.headers["X-Request-Id"] == "abc-1"
    (record,) = [record for record in caplog.records if record.name == "regard.access"]
    fields = record.fields  # type: ignore[attr-defined]
    assert {name: fields[name] for name in ("id", "method", "route", "status")} == {
        "id": "abc-1", "method": "GET", "route": "/v1/models/{name:path}", "status": 200,
    }  # fmt: skip
    other = client.get("/v1/models", headers={"X-Request-Id": "a b\tc"}).headers["X-Request-Id"]
    assert len(other) == 32


def test_errors_of_the_engine_have_their_status_and_can_be_retried(client: TestClient, store: FakeStore) -> None:
    for word, status, wait in (("lost", 503, "1"), ("busy", 429, "2")):
        for place, body in (
            ("/translate", {**HELLO, "q": f"A {word} word."}),
            ("/regard/translate", {"text": f"A {word} word.", "to": "de", "source": "en", "stream": True}),
        ):
            found = client.post(place, json=body)
            assert (found.status_code, found.headers["Retry-After"]) == (status, wait)
    assert "200, and the limit is 100" in found.json()["error"]["message"]
    assert found.json()["error"]["limit"] == 100
    assert store.users == 0


def test_a_request_has_a_deadline(make_client: Any, store: FakeStore) -> None:
    client = make_client(timeout=0.3)
    for place, body in (
        ("/translate", {**HELLO, "q": "A slow word."}),
        ("/regard/translate", {"text": "A slow word."}),
    ):
        found = client.post(place, json={**body, "to": "de", "source": "en"})
        assert found.status_code == 504
    assert "timeout" in found.text


def test_more_requests_than_threads_are_refused_at_once(make_client: Any) -> None:
    import threading

    from fake_store import STARTED

    client = make_client(max_requests=1, timeout=1.0)
    thread = threading.Thread(target=lambda: client.post("/translate", json={**HELLO, "q": "A slow word."}))
    thread.start()
    assert STARTED.wait(5)
    found = client.post("/translate", json=HELLO)
    assert found.status_code == 429
    assert "--max-requests" in found.json()["error"]
    assert client.get("/health").status_code == 200
    thread.join()
