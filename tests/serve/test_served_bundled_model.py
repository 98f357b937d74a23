"""The bundled model behind a real server and its workers: properties that hold whatever the model says."""

from __future__ import annotations

import json
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer

from regard.pretrained import DEFAULT
from regard.serve.model_store import ModelStore
from regard.serve.settings import ServeSettings

pytestmark = pytest.mark.slow
TEXTS = [
    "The weather is nice.",
    "He read a book about the sea.",
    "Where is the station?",
    "I would like some coffee.",
] * 4


@pytest.fixture(scope="module")
def live() -> Any:
    store: Any = ModelStore({DEFAULT: Path(DEFAULT)}, device="cpu", workers=2)
    found = LiveServer(ServeSettings(port=0, drain_delay=0.0), store)
    yield found
    found.stop()


def post(live: LiveServer, path: str, body: Any) -> Any:
    asked = urllib.request.Request(f"{live.url}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as found:
        return json.loads(found.read())


def test_requests_at_the_same_time_have_the_answers_of_each_alone(live: LiveServer) -> None:
    def translate(text: str) -> str:
        return post(live, "/translate", {"q": text, "source": "en", "target": "de"})["translatedText"]

    alone = [translate(text) for text in TEXTS]
    with ThreadPoolExecutor(16) as threads:
        assert list(threads.map(translate, TEXTS)) == alone
    assert post(live, "/translate", {"q": TEXTS, "source": "en", "target": "de"})["translatedText"] == alone


def without_probabilities(answer: Any) -> Any:
    """Leave out what may differ in its last digits, since torch may add in several threads or in one."""
    if isinstance(answer, dict):
        names = ("confidence", "probability", "detected")
        return {name: without_probabilities(value) for name, value in answer.items() if name not in names}
    return [without_probabilities(each) for each in answer] if isinstance(answer, list) else answer


def test_links_between_words_and_alternatives_are_those_of_each_alone(live: LiveServer) -> None:
    """They come from attention weights, for which all requests ask the same layers."""
    texts = ["I ate an *apple* with my friends.", "*No*, I will not come.", "The man went to the *old* house."]
    asked = [("/regard/translate", {"text": text, "to": "de"}) for text in texts]
    asked += [("/regard/alternatives", {"text": text, "to": "de", "n": 3}) for text in texts]
    asked *= 3
    alone = [without_probabilities(post(live, *one)) for one in asked]
    with ThreadPoolExecutor(6) as threads:
        found = threads.map(lambda one: without_probabilities(post(live, *one)), asked)
        assert list(found) == alone


def test_a_stream_and_a_whole_answer_are_the_same(live: LiveServer) -> None:
    body = {"text": " ".join(TEXTS), "to": "fr"}
    whole = post(live, "/regard/translate", body)
    request = urllib.request.Request(f"{live.url}/regard/translate", json.dumps({**body, "stream": True}).encode())
    with urllib.request.urlopen(request, timeout=120) as found:
        *_, last = found.read().decode().strip().split("\n\n")
    assert json.loads(last.split("data: ")[1])["text"] == whole["text"]
    assert len(whole["sentences"]) == len(TEXTS)


def test_readiness_alternatives_and_changes(live: LiveServer) -> None:
    assert json.loads(urllib.request.urlopen(f"{live.url}/health/ready", timeout=60).read())["ready"] is True
    found = post(live, "/regard/alternatives", {"text": TEXTS[0], "prefix": "", "to": "de"})["alternatives"]
    assert len({each["next"] for each in found}) == len(found) > 1
    change = {"kind": "zero", "value": "decoder.0.cross:0"}
    found = post(live, "/regard/change", {"text": TEXTS[0], "to": "de", "changes": [change]})
    assert len(found["document"]["views"]) == 2
