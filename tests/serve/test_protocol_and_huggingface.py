"""The Open Inference Protocol and the API of Hugging Face's clients."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from fake_store import FakeStore, make_store
from starlette.testclient import TestClient


def tensor(*texts: str) -> dict[str, Any]:
    return {"inputs": [{"name": "text", "shape": [len(texts)], "datatype": "BYTES", "data": list(texts)}]}


def test_the_server_and_its_models_are_described(client: TestClient) -> None:
    assert client.get("/v2").json()["name"] == "regard"
    assert client.get("/v2/health/live").json() == {"live": True}
    assert client.get("/v2/health/ready").status_code == 200
    found = client.get("/v2/models/rule").json()
    assert found["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert client.get("/v2/models/rule/versions/1").json() == found
    assert client.get("/v2/models/rule/ready").json() == {"name": "rule", "ready": True}
    assert client.get("/v2/models/rule/versions/1/ready").status_code == 200
    assert client.get("/v2/models/nobody").status_code == 404
    assert client.get("/v2/models/rule/versions/2").json().keys() == {"error"}


def test_inference_of_every_kind_of_model(client: TestClient, store: FakeStore) -> None:
    def infer(name: str, *texts: str, **more: Any) -> dict[str, Any]:
        found = client.post(f"/v2/models/{name}/infer", json={**tensor(*texts), "id": "7", **more}).json()
        assert (found["model_name"], found["id"]) == (name, "7")
        return {each["name"]: each for each in found["outputs"]}

    assert infer("rule", "Hello.", parameters={"target": "de"})["text"]["data"] == ["HELLO."]
    assert infer("writer", "Hello")["text"]["data"] == [store.models["writer"].generate("Hello").text]
    assert infer("classes", "the cat", "a dog")["probabilities"]["shape"] == [2, 3]
    vectors = infer("encoder", "a book", "soup")["vector"]
    expected = store.models["encoder"].embed(["a book", "soup"])
    np.testing.assert_allclose(np.reshape(vectors["data"], vectors["shape"]), expected, atol=1e-6)
    assert infer("words", "king")["vector"]["data"] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"inputs": []},
        {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": ["a"]}]},
        {"inputs": [{"name": "text", "shape": [1], "datatype": "FP32", "data": [1.0]}]},
        {"inputs": [{"name": "text", "shape": [1], "datatype": "BYTES", "data": [1]}]},
        {"inputs": [{"name": "text", "shape": [99999999, 99999999], "datatype": "BYTES", "data": []}]},
        {**tensor("Hello."), "parameters": {"target": 3}},
        {**tensor("Hello."), "parameters": {"target": "zz"}},
    ],
)
def test_wrong_tensors_are_refused_with_a_string(client: TestClient, body: dict[str, Any]) -> None:
    found = client.post("/v2/models/rule/infer", json=body)
    assert found.status_code == 400
    assert isinstance(found.json()["error"], str)
    binary = client.post("/v2/models/rule/infer", json=tensor("a"), headers={"Inference-Header-Content-Length": "9"})
    assert "binary" in binary.json()["error"]


# ---- Hugging Face ----------------------------------------------------------------------------------------------------


def test_the_task_of_the_model_decides_the_answer(client: TestClient, store: FakeStore) -> None:
    def post(name: str, inputs: Any, **parameters: Any) -> Any:
        return client.post(f"/models/{name}", json={"inputs": inputs, "parameters": parameters}).json()

    assert post("rule", "Hello.", src_lang="en", tgt_lang="de") == [{"translation_text": "HELLO."}]
    text = store.models["writer"].generate("Hello", max_new_tokens=4).text
    assert post("writer", "Hello", max_new_tokens=4) == [{"generated_text": text}]
    assert post("writer", "Hello", max_new_tokens=4, return_full_text=True) == [{"generated_text": "Hello" + text}]
    (classes,) = post("classes", "the cat")
    assert [each["score"] for each in classes] == sorted((each["score"] for each in classes), reverse=True)
    np.testing.assert_allclose(post("encoder", "a book"), [store.models["encoder"].embed("a book")], atol=1e-6)


def test_the_first_model_answers_at_the_root(make_client: Any, model_folders: Any) -> None:
    client = make_client(make_store(model_folders, "pictures"))
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("L", (8, 8), 9).save(buffer, "PNG")
    found = client.post("/", content=buffer.getvalue(), headers={"Content-Type": "image/png"})
    assert {each["label"] for each in found.json()} == {"bad", "fair", "good"}
    assert client.post("/", content=b"no picture", headers={"Content-Type": "image/png"}).status_code == 400


@pytest.mark.parametrize(
    "body", [{}, {"inputs": {"a": 1}}, {"inputs": []}, {"inputs": "a", "parameters": {"tgt_lang": "zz"}}, []]
)
def test_wrong_requests_are_refused_with_a_string(client: TestClient, body: Any) -> None:
    found = client.post("/", json=body)
    assert found.status_code == 400
    assert isinstance(found.json()["error"], str)
    assert client.post("/models/nobody", json={"inputs": "a"}).status_code == 404
