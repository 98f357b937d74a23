"""Regard's own API: translation by sentences with places in UTF-16, alternatives, traces, changes, tokens, classes."""

from __future__ import annotations

import base64
import json
import threading
import zlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_store import FakeStore
from starlette.testclient import TestClient

from regard.config import DecodeConfig, TokenizerConfig
from regard.decode.generation import token_log_probs
from regard.inference.translator import Translator
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.serve.regard_api import AlternativesRequest, find_alternatives, with_prefix
from regard.text.chat_template import DEFAULT_CHAT_TEMPLATE, Turn
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS
from regard.text.tokenizer import Tokenizer, Tokenizers

TEXT = "Hello 😀 there. How are you?\n\nThe man went to the house."


def events(text: str) -> list[tuple[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def units(text: str, place: dict[str, int]) -> str:
    """The part of a text between two places in UTF-16 code units."""
    return text.encode("utf-16-le")[2 * place["begin"] : 2 * place["end"]].decode("utf-16-le")


def test_models_are_described_without_being_loaded(client: TestClient) -> None:
    found = client.get("/regard/models").json()
    tiny = next(each for each in found["models"] if each["name"] == "tiny")
    assert found["default"] == "rule"
    assert tiny["directions"] == ["en>de", "de>en"]
    assert tiny["languages"] == [{"code": "en", "name": "English"}, {"code": "de", "name": "German"}]
    assert tiny["beam"] == 2
    assert next(each for each in found["models"] if each["name"] == "classes")["labels"] == ["bad", "fair", "good"]
    assert next(each for each in found["models"] if each["name"] == "writer")["chat"] is True
    assert found["limits"]["max_characters"] == 50_000


def test_sentences_have_their_places_in_text_and_translation(client: TestClient) -> None:
    found = client.post("/regard/translate", json={"text": TEXT, "to": "de", "source": "en"}).json()
    assert found["text"] == TEXT.upper()
    assert (found["source"], found["target"]) == ("en", "de")
    parts = ["Hello 😀 there.", "How are you?", "The man went to the house."]
    assert [units(TEXT, each["source"]) for each in found["sentences"]] == parts
    assert [units(found["text"], each["target"]) for each in found["sentences"]] == [part.upper() for part in parts]
    assert found["detected"].keys() == {"language", "probability", "certain"}


@pytest.mark.parametrize("to", ["de", "zh"])
def test_a_stream_has_the_sentences_of_the_whole_answer(client: TestClient, to: str) -> None:
    text = TEXT + "\n- The man went to the house of his friend.\n" + "He said that I would not come. " * 40 + "\n"
    asked = {"text": text, "to": to, "source": "en"}
    whole = client.post("/regard/translate", json=asked).json()
    first, *middle, last = events(client.post("/regard/translate", json={**asked, "stream": True}).text)
    assert first[0] == "begin"
    assert first[1]["count"] == len(middle) == len(whole["sentences"])
    assert {name for name, _ in middle} == {"sentence"}
    assert last == ("end", {name: value for name, value in whole.items() if name != "sentences"})
    assert [{k: v for k, v in each.items() if k != "before"} for _, each in middle] == whole["sentences"]
    joined = "".join(each["before"] + each["text"] for _, each in middle)
    assert whole["text"].startswith(joined)
    assert whole["text"][len(joined) :].strip() == ""


def test_links_lie_inside_their_sentences(client: TestClient) -> None:
    found = client.post("/regard/translate", json={"text": TEXT, "to": "de", "model": "tiny"}).json()
    assert any(each["alignment"] for each in found["sentences"])
    for each in found["sentences"]:
        for a, b, c, d in each["alignment"]:
            assert each["source"]["begin"] <= a < b <= each["source"]["end"]
            assert each["target"]["begin"] <= c < d <= each["target"]["end"]


def test_a_text_without_words_stays_as_it_is(client: TestClient) -> None:
    for text in ("", "   \n", "123 456", "😀"):
        found = client.post("/regard/translate", json={"text": text, "to": "de"}).json()
        assert found["text"] == text


@pytest.mark.parametrize(
    "change",
    [
        {"text": None},
        {"to": "xx"},
        {"source": "xx"},
        {"formality": "rude"},
        {"formality": "formal"},  # this model has no forms of address
        {"beam": 0},
        {"beam": 17},
        {"glossary": {"": "x"}},
        {"glossary": ["x"]},
        {"model": "writer"},
        {"text": "x" * 50_001},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_translations_that_are_refused(client: TestClient, change: dict[str, Any], stream: bool) -> None:
    found = client.post("/regard/translate", json={"text": "Hello.", "to": "de", "stream": stream, **change})
    assert found.status_code == 400
    assert {"message", "type", "code", "status"} <= found.json()["error"].keys()


# ---- alternatives ----------------------------------------------------------------------------------------------------


def test_alternatives_begin_with_the_prefix_and_differ_in_their_next_word(client: TestClient) -> None:
    asked = {"text": "The man went to the house.", "prefix": "Der Mann", "to": "de", "model": "tiny", "n": 4}
    found = client.post("/regard/alternatives", json=asked).json()["alternatives"]
    assert 2 <= len(found) <= 4
    assert len({each["next"] for each in found}) == len(found)
    for each in found:
        assert each["text"].startswith("Der Mann")
        assert each["text"].removeprefix("Der Mann").lstrip().startswith(each["next"])
        for a, b, c, d in each["alignment"]:
            assert 0 <= a < b <= len(asked["text"])
            assert 0 <= c < d <= len(each["text"])
    values = [each["probability"] for each in found]
    assert values == sorted(values, reverse=True)
    assert 0 < sum(values) <= 1
    assert client.post("/regard/alternatives", json={**asked, "n": 11}).status_code == 400
    assert (
        client.post("/regard/alternatives", json={**asked, "text": "The man went to the house. " * 9}).status_code
        == 400
    )


def test_unknown_words_are_replaced_in_alternatives_as_in_translations() -> None:
    """A model that would write unknown words; the source has one word that is not in the vocabulary."""
    lines = ["the man sees the dog.", "der Mann sieht den Hund."]
    tokens = Tokenizer.train(lines, TokenizerConfig("word", 100))
    sizes = {"source_vocab": len(tokens), "target_vocab": len(tokens), "d_model": 8, "recurrent.d_hidden": 8}
    model: Any = make_model(
        preset("rnnsearch-small", **sizes, **DEFAULT_SPECIAL_TOKENS.model_settings(), head_bias=True)
    )
    with torch.no_grad():
        model.head.bias[DEFAULT_SPECIAL_TOKENS.unk] = 30.0
    options = DecodeConfig(max_len_a=0.0, max_len_b=5, replace_unknown="copy")
    package = ModelPackage(model.eval(), Tokenizers(tokens, tokens), "translation", options, source="en", target="de")
    translator = Translator(package)
    asked = AlternativesRequest(text="Zorbl sees the man", prefix="der", n=2)
    first = find_alternatives(translator, asked)[0]
    assert (first["next"], first["text"]) == ("Zorbl", "der Zorbl Zorbl Zorbl Zorbl")
    # A word of the prefix that the vocabulary lacks stays as it was given.
    for each in find_alternatives(translator, asked.model_copy(update={"prefix": "der Krax"})):
        assert each["text"].startswith("der Krax")
    assert with_prefix("Krax", "", "der Mann", True) == "Krax der Mann"
    assert with_prefix("Krax", "", ", der", True) == "Krax, der"
    assert with_prefix("", "", "der", True) == "der"
    assert with_prefix("我", "", "们", False) == "我们"
    without = Translator(replace(package, decode=replace(options, replace_unknown="none")))
    assert all("Zorbl" not in each["text"] for each in find_alternatives(without, asked))


# ---- looking into models ---------------------------------------------------------------------------------------------


def test_look_returns_the_document_of_the_page(client: TestClient) -> None:
    found = client.post("/regard/look", json={"text": "The man went.", "to": "de", "model": "tiny"}).json()
    (view,) = found["document"]["views"]
    assert view["kind"] == "translation"
    layer = view["attention"][0]
    numbers = zlib.decompress(base64.b64decode(found["blobs"][layer["weights"]["id"]]))
    assert len(numbers) == 4 * int(__import__("math").prod(layer["weights"]["shape"]))


@pytest.mark.parametrize(
    ("model", "text"), [("writer", "The man"), ("classes", "the cat"), ("encoder", "I was eating")]
)
def test_look_into_other_kinds_of_models(client: TestClient, model: str, text: str) -> None:
    found = client.post("/regard/look", json={"text": text, "model": model})
    assert found.status_code == 200
    assert found.json()["document"]["views"][0]["attention"]


def test_a_model_that_cannot_be_loaded_is_an_error_of_the_server_without_its_path(
    client: TestClient, store: FakeStore
) -> None:
    found = client.post("/regard/look", json={"text": "Hello.", "model": "rule"})  # there is no folder of this name
    assert (found.status_code, found.json()["error"]["code"]) == (503, "model_not_loaded")
    assert str(store.entries["rule"].path) not in found.text


def test_a_path_is_never_opened_as_a_picture(client: TestClient, tmp_path: Any) -> None:
    found = client.post("/regard/look", json={"text": str(tmp_path), "model": "pictures"})
    assert found.status_code == 400
    assert "data URL" in found.json()["error"]["message"]


def test_a_change_compares_two_views_and_leaves_the_model_as_it_is(client: TestClient, store: FakeStore) -> None:
    asked = {"text": "The man went.", "to": "de", "model": "tiny"}
    before = client.post("/regard/translate", json=asked).json()["text"]
    change = {**asked, "changes": [{"kind": "zero", "value": "decoder.*.cross"}]}
    found = client.post("/regard/change", json=change).json()
    assert len(found["document"]["views"]) == 2
    assert found["document"]["views"][1]["changes"] == ["zero decoder.*.cross"]
    assert found["seconds"] < 20
    assert client.post("/regard/translate", json=asked).json()["text"] == before


def test_changes_at_the_same_time_do_not_mix(client: TestClient) -> None:
    asked = {"text": "The man went.", "to": "de", "model": "tiny"}
    kinds = [("zero", "decoder.0.cross"), ("uniform", "encoder.0.self"), ("positions", "none")]

    def change(kind: str, value: str) -> Any:
        found = client.post("/regard/change", json={**asked, "changes": [{"kind": kind, "value": value}]}).json()
        return found["before"], found["after"], found["document"]["views"][1]["predictions"]

    alone = [change(*each) for each in kinds]
    together: list[Any] = [None] * 3

    def work(i: int) -> None:
        together[i] = change(*kinds[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert together == alone


@pytest.mark.parametrize(
    "change",
    [
        {"changes": []},
        {"changes": [{"kind": "explode", "value": "x"}]},
        {"changes": [{"kind": "zero", "value": "nowhere.9.cross"}]},
        {"changes": [{"kind": "forbid", "value": "Apfel"}]},
        {"text": ""},
        {"text": "x" * 1001},
        {"to": "xx"},
        {"model": "words"},
    ],
)
def test_changes_that_are_refused(client: TestClient, change: dict[str, Any]) -> None:
    asked = {"text": "The man.", "to": "de", "model": "tiny", "changes": [{"kind": "zero", "value": "decoder.0.cross"}]}
    assert client.post("/regard/change", json={**asked, **change}).status_code == 400


# ---- tokens, classes and words ---------------------------------------------------------------------------------------


def test_tokens_have_the_probabilities_of_the_model(client: TestClient, store: FakeStore) -> None:
    writer = store.models["writer"]
    found = events(client.post("/regard/generate", json={"prompt": "The man", "max_tokens": 6, "top": 3}).text)
    tokens, (last, end) = [value for name, value in found if name == "token"], found[-1]
    made = writer.generate("The man", max_new_tokens=6)
    assert last == "end"
    assert "".join(each["text"] for each in tokens) + end["text"] == made.text
    assert [each["token"] for each in tokens] == list(made.tokens)
    assert end["reason"] == "length"
    ids = [
        *writer.framed("The man"),
        *[writer.tokenizer.pieces(range(len(writer.tokenizer))).index(t) for t in made.tokens],
    ]
    (log_probs,) = token_log_probs(writer.model, [ids], writer.options)
    import math

    expected = [math.exp(x) for x in log_probs[-6:]]
    assert [each["probability"] for each in tokens] == pytest.approx(expected, abs=1e-4)
    for each in tokens:
        assert len(each["top"]) == 3
        assert each["top"][0]["probability"] == pytest.approx(each["probability"], abs=1e-5)  # greedy: the likeliest


def test_conversations_and_wrong_requests_for_tokens(client: TestClient) -> None:
    found = client.post("/regard/generate", json={"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
    assert events(found.text)[-1][0] == "end"
    for wrong in ({}, {"prompt": "a", "messages": []}, {"prompt": "a", "top": 99}, {"prompt": "a " * 300}):
        assert client.post("/regard/generate", json=wrong).status_code == 400


def test_an_answer_goes_on_from_the_words_that_were_chosen_for_it(client: TestClient) -> None:
    """A click on another word of an answer: the conversation is continued behind that word."""

    def tokens(**asked: Any) -> list[Any]:
        return events(client.post("/regard/generate", json={"max_tokens": 4, **asked}).text)

    rendered = DEFAULT_CHAT_TEMPLATE.render([Turn("user", "Hi")], "")
    stop = list(DEFAULT_CHAT_TEMPLATE.stop)
    given = {"messages": [{"role": "user", "content": "Hi"}]}
    assert tokens(**given, prefix=" The man") == tokens(prompt=f"{rendered} The man", stop=stop)
    assert tokens(**given, prefix=" The man") != tokens(**given)


def test_classes_and_neighbours(client: TestClient, store: FakeStore) -> None:
    found = client.post("/regard/classify", json={"text": "the cat", "model": "classes"}).json()
    assert found["label"] == found["classes"][0]["label"] == store.models["classes"].classify("the cat").label
    found = client.post("/regard/neighbours", json={"word": "king", "n": 2}).json()["neighbours"]
    assert [each["word"] for each in found] == ["queen", "man"]
    found = client.post("/regard/neighbours", json={"analogy": ["man", "king", "woman"], "n": 1}).json()["neighbours"]
    assert found[0]["word"] == "queen"
    assert client.post("/regard/neighbours", json={"word": "pear"}).status_code == 400
    assert client.post("/regard/neighbours", json={}).status_code == 400
