"""Programs that exist, unmodified: libretranslatepy, deep-translator, openai, huggingface_hub, and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_store import FakeStore

from regard.serve.api_keys import create_key


@pytest.fixture
def live(serve_live: Callable[..., Any], tmp_path: Path) -> Iterator[Any]:
    """A server that wants a key."""
    path = tmp_path / "keys.txt"
    key = create_key(path, "alice")
    found = serve_live(keys=path)
    found.key = key
    return found


def test_libretranslatepy(live: Any) -> None:
    api = pytest.importorskip("libretranslatepy").LibreTranslateAPI(f"{live.url}/", live.key)
    assert api.translate("Hello, how are you?", "en", "de") == "HELLO, HOW ARE YOU?"
    assert api.detect("Wo ist der nächste Bahnhof, bitte?")[0]["language"] == "de"


def test_libretranslatepy_without_keys(serve_live: Callable[..., Any]) -> None:
    api = pytest.importorskip("libretranslatepy").LibreTranslateAPI(f"{serve_live().url}/")
    assert {each["code"] for each in api.languages()} >= {"en", "de"}  # a GET with a body
    assert api.translate("Hello.", "en", "de") == "HELLO."


def test_deep_translator(live: Any) -> None:
    deep = pytest.importorskip("deep_translator")
    from deep_translator.exceptions import AuthorizationException

    known = {"source": "English", "target": "German", "custom_url": f"{live.url}/"}
    assert deep.LibreTranslator(**known, api_key=live.key).translate("Hello, how are you?") == "HELLO, HOW ARE YOU?"
    with pytest.raises(AuthorizationException):
        deep.LibreTranslator(**known, api_key="wrong").translate("Hello.")


def test_openai_completions_chat_and_embeddings(live: Any, store: FakeStore) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.key)
    assert [each.id for each in client.models.list()] == list(store.entries)
    assert client.models.retrieve("writer").id == "writer"

    found = client.completions.create(model="writer", prompt="The man", max_tokens=6)
    expected = store.models["writer"].generate("The man", max_new_tokens=6)
    assert found.choices[0].text == expected.text
    assert found.usage.completion_tokens == 6

    asked = {"model": "writer", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    whole = client.chat.completions.create(**asked).choices[0]
    stream = client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole.message.content
    assert chunks[-1].usage.completion_tokens > 0
    assert chunks[-2].choices[0].finish_reason == whole.finish_reason
    with client.chat.completions.stream(**asked) as helper:
        pieces = [event.delta for event in helper if event.type == "content.delta"]
    assert "".join(pieces) == whole.message.content

    vectors = client.embeddings.create(model="encoder", input=["a book", "soup"]).data  # asks for base64 by itself
    np.testing.assert_allclose(
        [each.embedding for each in vectors], store.models["encoder"].embed(["a book", "soup"]), atol=1e-6
    )


def test_openai_errors(live: Any) -> None:
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.key, max_retries=0)
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="org/none", prompt="a")
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model="writer", prompt="a " * 300)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="wrong").models.list()


def test_an_error_in_the_middle_of_a_stream_is_raised(live: Any, store: FakeStore) -> None:
    openai = pytest.importorskip("openai")
    from regard.decode.generation import generation_steps
    from regard.serve.request_context import WorkerLost

    def broken(*args: Any) -> Iterator[Any]:
        for i, rows in enumerate(generation_steps(*args)):
            if i == 3:
                raise WorkerLost("the process that decoded this has died; try again")
            yield rows

    writer = store.models["writer"]
    writer.steps = broken
    try:
        client = openai.OpenAI(base_url=f"{live.url}/v1", api_key=live.key, max_retries=0)
        with pytest.raises(openai.APIError, match="has died"):
            list(client.completions.create(model="writer", prompt="The man", max_tokens=9, stream=True))
    finally:
        writer.steps = generation_steps


def test_huggingface_hub(live: Any, store: FakeStore) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def client(name: str) -> Any:
        return hub.InferenceClient(base_url=f"{live.url}/models/{name}", token=live.key)

    found = client("rule").translation("Hello, how are you?", src_lang="en", tgt_lang="de")
    assert found.translation_text == "HELLO, HOW ARE YOU?"
    root = hub.InferenceClient(base_url=live.url, token=live.key)
    assert root.translation("Hello.", src_lang="en", tgt_lang="de").translation_text == "HELLO."
    assert client("classes").text_classification("the cat")[0].label in ("bad", "fair", "good")
    np.testing.assert_allclose(
        client("encoder").feature_extraction("a book"), [store.models["encoder"].embed("a book")], atol=1e-6
    )
    text = store.models["writer"].generate("Hello", max_new_tokens=4).text
    assert client("writer").text_generation("Hello", max_new_tokens=4) == text


CURL = """
curl -s URL/health
curl -s URL/translate -H 'Authorization: Bearer KEY' -d q='Hello.' -d source=en -d target=de
curl -s URL/translate -H 'Content-Type: application/json' -d '{"q": "Hello.", "target": "de", "api_key": "KEY"}'
curl -s URL/detect -d q='Wo ist der Bahnhof?' -d api_key=KEY
curl -s URL/translate_file -F file=@FILE -F source=en -F target=de -F api_key=KEY
curl -s URL/v1/models -H 'Authorization: Bearer KEY'
curl -s URL/v1/completions -H 'Authorization: Bearer KEY' -d '{"model": "writer", "prompt": "The man", "max_tokens": 4}'
curl -s URL/v2/health/ready
curl -s URL/regard/translate -H 'Authorization: Bearer KEY' -d '{"text": "Hello.", "to": "de"}'
curl -s -u :KEY URL/regard/models
""".strip().splitlines()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(live: Any, tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Hello\n\nHow are you?\n")
    for line in CURL:
        command = line.replace("URL", live.url).replace("KEY", live.key).replace("FILE", str(tmp_path / "a.md"))
        said = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=30).stdout
        found = json.loads(said)
        assert "error" not in found, (line, found)
