"""The API of OpenAI: completions, chat, embeddings, scores and classes; whole and streamed; and its errors."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import pytest
from fake_store import FakeStore
from starlette.testclient import TestClient

from regard.inference.generator import Generator

Json = dict[str, Any]


def events(text: str) -> list[Any]:
    """The data of server-sent events; the last one is [DONE]."""
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def writer(store: FakeStore) -> Generator:
    return store.models["writer"]


# ---- models ----------------------------------------------------------------------------------------------------------


def test_models_are_listed_and_described(client: TestClient, store: FakeStore) -> None:
    found = client.get("/v1/models").json()
    assert found["object"] == "list"
    assert [each["id"] for each in found["data"]] == list(store.entries)
    assert client.get("/v1/models/writer").json()["object"] == "model"
    missing = client.get("/v1/models/org%2Fmodel")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    assert "'org/model'" in missing.json()["error"]["message"]


# ---- completions -----------------------------------------------------------------------------------------------------


def test_a_completion_is_what_the_generator_writes(client: TestClient, store: FakeStore) -> None:
    found = client.post("/v1/completions", json={"model": "writer", "prompt": "The man", "max_tokens": 6}).json()
    made = writer(store).generate("The man", max_new_tokens=6)
    assert found["object"] == "text_completion"
    assert found["choices"] == [{"index": 0, "text": made.text, "logprobs": None, "finish_reason": "length"}]
    read = len(writer(store).framed("The man"))
    assert found["usage"] == {"prompt_tokens": read, "completion_tokens": 6, "total_tokens": read + 6}


def test_prompts_may_be_texts_or_tokens_one_or_several(client: TestClient, store: FakeStore) -> None:
    ids = writer(store).tokenizer.encode("The man")
    one = client.post("/v1/completions", json={"prompt": "The man"}).json()["choices"][0]["text"]
    for prompt in (["The man", "Der Mann"], [ids, writer(store).tokenizer.encode("Der Mann")]):
        found = client.post("/v1/completions", json={"prompt": prompt}).json()["choices"]
        assert [each["index"] for each in found] == [0, 1]
        assert found[0]["text"] == one
    assert client.post("/v1/completions", json={"prompt": ids}).json()["choices"][0]["text"] == one


@pytest.mark.parametrize("extra", [{}, {"temperature": 1.0, "seed": 5}, {"temperature": 0.7, "n": 3, "seed": -2}])
def test_a_stream_has_the_text_of_the_whole_answer(client: TestClient, extra: Json) -> None:
    asked = {"prompt": ["The man", "Hello"], "max_tokens": 9, **extra}
    whole = client.post("/v1/completions", json=asked).json()
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    found = events(client.post("/v1/completions", json=asked).text)
    texts, reasons = {}, {}
    for each in found[:-1]:
        (choice,) = each["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        reasons[choice["index"]] = choice["finish_reason"]
        assert each["usage"] is None
    assert texts == {each["index"]: each["text"] for each in whole["choices"]}
    assert reasons == {each["index"]: each["finish_reason"] for each in whole["choices"]}
    assert found[-1]["choices"] == []
    assert found[-1]["usage"] == whole["usage"]
    assert {each["id"] for each in found} == {found[0]["id"]}


def test_a_text_ends_before_a_stop_string(client: TestClient, store: FakeStore) -> None:
    text = writer(store).generate("The man", max_new_tokens=12).text
    stop = text[3:5]
    found = client.post("/v1/completions", json={"prompt": "The man", "max_tokens": 12, "stop": stop}).json()
    assert found["choices"][0]["text"] == text[: text.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"


def test_echo_repeats_the_prompt(client: TestClient) -> None:
    plain = client.post("/v1/completions", json={"prompt": "The man"}).json()["choices"][0]["text"]
    asked = {"prompt": "The man", "echo": True}
    assert client.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "The man" + plain
    found = events(client.post("/v1/completions", json={**asked, "stream": True}).text)
    assert "".join(each["choices"][0]["text"] for each in found) == "The man" + plain


@pytest.mark.parametrize(
    ("asked", "status", "code"),
    [
        ({}, 400, None),
        ({"prompt": []}, 400, "invalid_value"),
        ({"prompt": "a", "model": "nobody"}, 404, "model_not_found"),
        ({"prompt": "a", "model": "rule"}, 400, "model_not_supported"),
        ({"prompt": "a", "max_tokens": 0}, 400, "invalid_value"),
        ({"prompt": "a", "max_tokens": 5000}, 400, "limit_exceeded"),
        ({"prompt": "a", "n": 1000, "temperature": 1}, 400, "limit_exceeded"),
        ({"prompt": "a", "n": 2}, 400, "invalid_value"),  # samples at temperature 0 are all the same
        ({"prompt": "a", "temperature": -1}, 400, "invalid_value"),
        ({"prompt": "a", "stop": ["x"] * 9}, 400, "limit_exceeded"),
        ({"prompt": "a", "stop": ""}, 200, None),
        ({"prompt": "a", "stop": [""]}, 400, None),
        ({"prompt": "a", "logprobs": 3}, 400, "unsupported"),
        ({"prompt": "a", "frequency_penalty": 1}, 400, "unsupported"),
        ({"prompt": [999999]}, 400, "invalid_value"),
        ({"prompt": "word " * 500}, 400, "context_length_exceeded"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_errors_have_openais_shape_and_come_before_the_first_byte(
    client: TestClient, asked: Json, status: int, code: str | None, stream: bool
) -> None:
    found = client.post("/v1/completions", json={**asked, "stream": stream})
    assert found.status_code == status
    if status == 200:
        return
    error = found.json()["error"]
    assert {"message", "type", "param", "code"} <= error.keys()
    assert error["code"] == code or code is None


def test_a_context_that_is_too_long_names_limit_and_value(client: TestClient) -> None:
    error = client.post("/v1/completions", json={"prompt": "a " * 300}).json()["error"]
    assert error["limit"] == 95
    assert error["value"] > 95
    assert str(error["value"]) in error["message"]


# ---- chat ------------------------------------------------------------------------------------------------------------

CHAT = {
    "model": "writer",
    "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}],
}


def test_a_chat_is_the_continuation_of_its_template(client: TestClient, store: FakeStore) -> None:
    found = client.post("/v1/chat/completions", json={**CHAT, "max_tokens": 8}).json()
    made = writer(store).generate("Be brief.\n\nUser: Hello\nAssistant:", max_new_tokens=8, stop="User:")
    message = found["choices"][0]["message"]
    assert found["object"] == "chat.completion"
    assert (message["role"], message["content"]) == ("assistant", made.text.strip())


def test_a_streamed_chat_begins_with_the_role_and_has_the_same_text(client: TestClient) -> None:
    whole = client.post("/v1/chat/completions", json={**CHAT, "max_completion_tokens": 8}).json()["choices"][0]
    asked = {**CHAT, "max_completion_tokens": 8, "stream": True}
    found = events(client.post("/v1/chat/completions", json=asked).text)
    choices = [each["choices"][0] for each in found]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(each["delta"].get("content", "") for each in choices) == whole["message"]["content"]
    assert choices[-1]["finish_reason"] == whole["finish_reason"]
    assert {each["object"] for each in found} == {"chat.completion.chunk"}


def test_contents_may_be_parts_of_text(client: TestClient) -> None:
    plain = client.post("/v1/chat/completions", json=CHAT).json()["choices"][0]["message"]
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    asked = {"messages": [CHAT["messages"][0], {"role": "user", "content": parts}]}
    assert client.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"] == plain


@pytest.mark.parametrize(
    "change",
    [
        {"messages": []},
        {"messages": [{"role": "assistant", "content": "Hello"}]},
        {"messages": [{"role": "tool", "content": "Hello"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"model": "rule"},
    ],
)
def test_chats_that_are_refused(client: TestClient, change: Json) -> None:
    found = client.post("/v1/chat/completions", json={**CHAT, **change})
    assert found.status_code == 400
    assert found.json()["error"]["message"]


# ---- embeddings, scores and classes ----------------------------------------------------------------------------------


def test_embeddings_as_numbers_and_as_base64(client: TestClient, store: FakeStore) -> None:
    texts = ["I was eating soup.", "a book"]
    expected = store.models["encoder"].embed(texts)
    found = client.post("/v1/embeddings", json={"model": "encoder", "input": texts}).json()
    np.testing.assert_allclose([each["embedding"] for each in found["data"]], expected, atol=1e-6)
    assert [each["index"] for each in found["data"]] == [0, 1]
    assert found["usage"]["total_tokens"] > 0
    packed = client.post(
        "/v1/embeddings", json={"model": "encoder", "input": texts, "encoding_format": "base64"}
    ).json()
    vectors = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed["data"]]
    np.testing.assert_allclose(vectors, expected, atol=1e-6)


def test_translators_and_language_models_embed_too(client: TestClient) -> None:
    for name in ("tiny", "writer"):
        found = client.post("/v1/embeddings", json={"model": name, "input": "Hello"}).json()["data"]
        assert np.linalg.norm(found[0]["embedding"]) == pytest.approx(1, abs=1e-4)
    assert client.post("/v1/embeddings", json={"input": "Hello"}).json()["model"] == "encoder"


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"input": []},
        {"input": "a", "encoding_format": "hex"},
        {"input": "a", "dimensions": 7},
        {"input": "word " * 99},
    ],
)
def test_embeddings_that_are_refused(client: TestClient, asked: Json) -> None:
    found = client.post("/v1/embeddings", json=asked)
    assert found.status_code == 400
    assert "message" in found.json()["error"]


def test_scores_are_those_of_the_generator(client: TestClient, store: FakeStore) -> None:
    found = client.post("/v1/score", json={"model": "writer", "input": ["The man", "Hello"]}).json()["data"]
    expected = writer(store).score(["The man", "Hello"])
    assert [each["score"] for each in found] == pytest.approx([each.total for each in expected])
    assert found[0]["tokens"] == list(expected[0].tokens)


def test_two_texts_are_compared_by_cosine(client: TestClient, store: FakeStore) -> None:
    found = client.post("/v1/score", json={"model": "encoder", "text_1": "a book", "text_2": ["a book", "soup"]})
    a, b = store.models["encoder"].embed(["a book", "soup"])
    assert [each["score"] for each in found.json()["data"]] == pytest.approx([1.0, float(a @ b)], abs=1e-5)


def test_classes_are_those_of_the_classifier(client: TestClient, store: FakeStore) -> None:
    found = client.post("/v1/classify", json={"model": "classes", "input": ["the cat", ["the cat", "a dog"]]}).json()
    expected = store.models["classes"].classify(["the cat", ("the cat", "a dog")])
    for each, other in zip(found["data"], expected, strict=True):
        assert each["label"] == other.label
        assert each["probs"] == pytest.approx(list(other.probabilities.values()))
        assert each["num_classes"] == 3


def test_images_are_data_urls_and_never_paths(client: TestClient, tmp_path: Any) -> None:
    from PIL import Image

    path = tmp_path / "picture.png"
    Image.new("L", (8, 8), 100).save(path)
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    found = client.post("/v1/classify", json={"model": "pictures", "input": url})
    assert found.json()["data"][0]["label"] in ("bad", "fair", "good")
    for wrong in (str(path), "http://127.0.0.1/a.png", "data:image/png;base64,xx", "data:image/png;base64,AAAA"):
        found = client.post("/v1/classify", json={"model": "pictures", "input": wrong})
        assert found.status_code == 400


def test_an_image_of_too_many_pixels_is_refused_by_its_header(client: TestClient, tmp_path: Any) -> None:
    from PIL import Image

    path = tmp_path / "large.png"
    Image.new("1", (8192, 4096)).save(path)
    url = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    found = client.post("/v1/classify", json={"model": "pictures", "input": url})
    assert found.status_code == 400
    assert found.json()["error"]["limit"] == 1 << 24
