"""Random requests to every route: each is answered, and never with an error of the server.

A few examples of each route run with all tests; `make slow` runs 500 of each."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from fake_store import FakeStore, make_store
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from starlette.testclient import TestClient

from regard.serve.app import make_app
from regard.serve.settings import ServeSettings

WORDS = st.sampled_from(
    ["rule", "tiny", "writer", "en", "de", "auto", "html", "text", "zero", "decoder.0.cross", "user"]
)
TEXT = st.one_of(
    WORDS,
    st.text(max_size=40),
    st.sampled_from(["Hello there.", "Der Mann ging.", "\0", "<p>a <b>b</b></p>", "\u202e"]),
)
SCALAR = st.one_of(TEXT, st.none(), st.booleans(), st.integers(), st.integers(-2, 20), st.floats(), st.just(1e300))
VALUE = st.recursive(
    SCALAR, lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(TEXT, inner, max_size=4)), max_leaves=8
)
LIMITS = ServeSettings(
    max_new_tokens=16, max_samples=2, max_alternatives=3, max_beam=3, max_characters=500, timeout=20.0
)

# The fields of each route, with values that are nearly right more often than not.
FIELDS: dict[str, dict[str, Any]] = {
    "/translate": {
        "q": TEXT | st.lists(TEXT, max_size=3),
        "source": WORDS,
        "target": WORDS,
        "format": WORDS,
        "alternatives": st.integers(-1, 4),
    },
    "/detect": {"q": TEXT},
    "/translate_file": {"file": TEXT, "source": WORDS, "target": WORDS},
    "/v1/completions": {
        "prompt": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.integers(0, 320), max_size=5),
        "max_tokens": st.integers(0, 17),
        "temperature": st.floats(0, 3),
        "top_p": st.floats(0, 1),
        "n": st.integers(0, 3),
        "stop": TEXT,
        "stream": st.booleans(),
        "seed": st.integers(),
        "echo": st.booleans(),
        "top_k": st.integers(-1, 9),
    },
    "/v1/chat/completions": {
        "messages": st.lists(
            st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": TEXT}),
            max_size=3,
        ),
        "max_tokens": st.integers(0, 17),
        "stream": st.booleans(),
        "temperature": st.floats(0, 3),
    },
    "/v1/embeddings": {
        "input": TEXT | st.lists(TEXT, max_size=3) | st.lists(st.lists(st.integers(0, 320), max_size=3), max_size=3),
        "encoding_format": st.sampled_from(["float", "base64"]),
    },
    "/v1/score": {
        "input": TEXT | st.lists(TEXT, max_size=3),
        "text_1": TEXT,
        "text_2": TEXT | st.lists(TEXT, max_size=2),
    },
    "/v1/classify": {"input": TEXT | st.lists(TEXT | st.lists(TEXT, min_size=2, max_size=2), max_size=3)},
    "/v2/models/rule/infer": {
        "inputs": st.lists(
            st.fixed_dictionaries(
                {
                    "name": TEXT,
                    "shape": st.lists(st.integers(-1, 3), max_size=2),
                    "datatype": st.sampled_from(["BYTES", "FP32"]),
                    "data": st.lists(TEXT, max_size=3),
                }
            ),
            max_size=2,
        ),
        "parameters": st.dictionaries(WORDS, VALUE, max_size=2),
    },
    "/": {
        "inputs": TEXT | st.lists(TEXT, max_size=3),
        "parameters": st.fixed_dictionaries({"src_lang": WORDS, "tgt_lang": WORDS}),
    },
    "/models/writer": {
        "inputs": TEXT | st.lists(TEXT, max_size=3),
        "parameters": st.dictionaries(
            st.sampled_from(["max_new_tokens", "temperature", "do_sample", "n", "seed"]), VALUE, max_size=3
        ),
    },
    "/regard/translate": {
        "text": TEXT,
        "to": WORDS,
        "source": WORDS,
        "glossary": st.dictionaries(TEXT, TEXT, max_size=2),
        "beam": st.integers(0, 4),
        "stream": st.booleans(),
    },
    "/regard/alternatives": {"text": TEXT, "prefix": TEXT, "to": WORDS, "n": st.integers(0, 4)},
    "/regard/look": {"text": TEXT, "to": st.sampled_from(["de", "en"]), "beam": st.integers(0, 4)},
    "/regard/change": {
        "text": TEXT,
        "to": st.sampled_from(["de", "en"]),
        "changes": st.lists(
            st.fixed_dictionaries(
                {
                    "kind": st.sampled_from(["zero", "uniform", "force", "forbid", "pin", "replace", "positions", "x"]),
                    "value": st.sampled_from(
                        ["decoder.0.cross", "decoder.*:9", "0>0", "source:0=a", "none", "alibi", "a>b"]
                    )
                    | TEXT,
                }
            ),
            max_size=2,
        ),
    },
    "/regard/generate": {
        "prompt": TEXT,
        "max_tokens": st.integers(0, 17),
        "top": st.integers(-1, 5),
        "temperature": st.floats(0, 3),
    },
    "/regard/classify": {"text": TEXT, "pair": TEXT},
    "/regard/neighbours": {"word": st.sampled_from(["king", "apple"]) | TEXT, "n": st.integers(0, 9)},
}
MODELS = {
    "/regard/look": ("tiny", "writer", "encoder"),
    "/regard/change": ("tiny", "writer"),
    "/regard/alternatives": ("tiny",),
    "/translate": ("rule", "tiny"),
    "/regard/translate": ("rule", "tiny"),
}


@pytest.fixture(scope="module")
def fuzzed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store: FakeStore = make_store(tmp_path_factory.mktemp("fuzzed"))
    rule = store.entries["rule"]  # which has no folder of its own to look into
    store.entries["rule"] = replace(rule, path=rule.path.with_name("tiny"))
    with TestClient(make_app(LIMITS, store), raise_server_exceptions=False) as client:  # type: ignore[arg-type]
        yield client


def bodies(place: str) -> st.SearchStrategy[Any]:
    """Bodies of a route: its fields, some of them missing and some of any value; or any value."""
    known = {name: value | VALUE if i % 2 else value for i, (name, value) in enumerate(FIELDS[place].items())}
    first = next(iter(known))
    needed = {first: known[first]}
    if place in MODELS:
        needed["model"] = st.sampled_from([*MODELS[place], "nobody"])
    right = st.fixed_dictionaries(needed, optional={k: v for k, v in known.items() if k != first})
    return st.one_of(right, right, right, VALUE)


def check(client: TestClient, place: str, body: Any, way: str) -> None:
    if way == "json":
        found = client.post(place, content=json.dumps(body).encode(), headers={"Content-Type": "application/json"})
    elif way == "form":
        fields = body if isinstance(body, dict) else {"q": body}
        plain = {
            str(k).encode("utf-8", "replace").decode(): str(v).encode("utf-8", "replace").decode()
            for k, v in fields.items()
        }
        found = client.post(place, data=plain)
    else:
        found = client.post(place, content=repr(body).encode("utf-8", "replace"))
    assert found.status_code < 500, (found.status_code, body, found.text)
    if found.status_code >= 400:
        assert found.json().keys() == {"error"}
    if "event-stream" in found.headers["content-type"]:
        assert '"error"' not in found.text or 'status":5' not in found.text


def fuzz(client: TestClient, place: str, count: int) -> None:
    @settings(max_examples=count, suppress_health_check=list(HealthCheck))
    @given(bodies(place), st.sampled_from(["json", "json", "json", "form", "raw"]))
    @example({}, "json")
    @example([], "json")
    def run(body: Any, way: str) -> None:
        check(client, place, body, way)

    run()


@pytest.mark.parametrize("place", FIELDS)
def test_random_requests_give_no_error_of_the_server(fuzzed: TestClient, place: str) -> None:
    fuzz(fuzzed, place, 8)


@pytest.mark.slow
@pytest.mark.parametrize("place", FIELDS)
def test_500_random_requests_give_no_error_of_the_server(fuzzed: TestClient, place: str) -> None:
    fuzz(fuzzed, place, 500)


@settings(max_examples=30)
@given(st.text(max_size=30), st.sampled_from(["GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "PATCH", "TRACE"]))
def test_random_paths_and_methods(fuzzed: TestClient, path: str, method: str) -> None:
    from urllib.parse import quote

    found = fuzzed.request(method, "/" + quote(path.encode("utf-8", "replace")), follow_redirects=False)
    assert found.status_code < 500


def test_every_post_route_is_fuzzed(fuzzed: TestClient) -> None:
    paths = [path for path, methods in fuzzed.get("/openapi.json").json()["paths"].items() if "post" in methods]
    covered = {
        place.replace("/models/writer", "/models/{name}").replace("/models/rule", "/models/{name}") for place in FIELDS
    }
    assert {path for path in paths if "{version}" not in path} == covered
