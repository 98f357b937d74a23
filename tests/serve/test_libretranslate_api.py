"""The API of LibreTranslate: every encoding of fields, its answers and its errors."""

from __future__ import annotations

from typing import Any

import pytest
from fake_store import FakeStore
from starlette.testclient import TestClient

HELLO = {"q": "Hello, how are you?", "source": "en", "target": "de"}


@pytest.mark.parametrize("way", ["json", "data", "params"])
def test_fields_may_be_json_a_form_or_the_query_string(client: TestClient, way: str) -> None:
    found = client.post("/translate", **{way: HELLO})  # type: ignore[arg-type]
    assert (found.status_code, found.json()) == (200, {"translatedText": "HELLO, HOW ARE YOU?"})


def test_a_list_of_texts_gives_a_list(client: TestClient) -> None:
    found = client.post("/translate", json={**HELLO, "q": ["Hello.", "", "How are you?"]})
    assert found.json() == {"translatedText": ["HELLO.", "", "HOW ARE YOU?"]}


def test_the_detected_language_is_told_only_where_it_was_asked_for(client: TestClient) -> None:
    asked = {**HELLO, "q": "The man who went to the house of his friend.", "source": "auto"}
    found = client.post("/translate", json=asked).json()
    assert found["detectedLanguage"]["language"] == "en"
    assert 50 < found["detectedLanguage"]["confidence"] <= 100
    both = client.post("/translate", json={**asked, "q": [asked["q"], "Der Mann ging nicht in das Haus."]}).json()
    assert [each["language"] for each in both["detectedLanguage"]] == ["en", "de"]
    assert client.post("/translate", json=HELLO).json().keys() == {"translatedText"}


def test_alternatives_are_the_other_hypotheses(make_client: Any, store: FakeStore) -> None:
    store.models["rule"].spoil = lambda text: text + "x"
    try:
        found = make_client().post("/translate", json={**HELLO, "q": "Hello.", "alternatives": 2}).json()
    finally:
        store.models["rule"].spoil = str
    assert found["translatedText"] == "HELLO.X"
    assert found["alternatives"] == ["HELLO.XX", "HELLO.XXX"]


def test_html_keeps_its_markup(client: TestClient) -> None:
    asked = {**HELLO, "q": "<p>Hello, <br>how are you?</p>", "format": "html"}
    found = client.post("/translate", json=asked).json()["translatedText"]
    assert found.startswith("<p>HELLO")
    assert "<br>" in found
    assert found.endswith("</p>")


def test_a_null_key_and_null_fields_are_ignored(client: TestClient) -> None:
    found = client.post("/translate", json={**HELLO, "api_key": None, "format": None, "alternatives": None})
    assert found.status_code == 200


def test_form_line_breaks_are_those_of_the_text(client: TestClient) -> None:
    found = client.post("/translate", data={**HELLO, "q": "Hello.\r\nBye."})
    assert found.json()["translatedText"] == "HELLO.\nBYE."


def test_a_text_in_the_target_language_stays(client: TestClient) -> None:
    assert client.post("/translate", json={**HELLO, "target": "en"}).json() == {"translatedText": HELLO["q"]}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q": None}, "q"),
        ({"target": "zz"}, "zz is not supported"),
        ({"source": "zz"}, "zz is not supported"),
        ({"format": "rtf"}, "format is text or html"),
        ({"alternatives": 11}, "alternatives: 11, and the limit is 10 (--max-alternatives)"),
        ({"alternatives": -1}, "alternatives"),
        ({"q": "x" * 50_001}, "characters of a text: 50,001, and the limit is 50,000 (--max-characters)"),
        ({"q": ["x"] * 257}, "texts: 257, and the limit is 256 (--max-texts)"),
        ({"q": 5}, "q"),
        ({"q": {"a": 1}}, "q"),
    ],
)
def test_errors_are_one_string_that_says_what_is_wrong(
    client: TestClient, change: dict[str, Any], message: str
) -> None:
    found = client.post("/translate", json={**HELLO, **change})
    assert found.status_code == 400
    assert found.json().keys() == {"error"}
    assert message in found.json()["error"]


def test_a_missing_field_has_the_message_of_libretranslate(client: TestClient) -> None:
    found = client.post("/translate", json={"source": "en", "target": "de"})
    assert (found.status_code, found.json()) == (400, {"error": "Invalid request: missing q parameter"})


def test_detect_lists_languages_best_first(client: TestClient) -> None:
    found = client.post("/detect", data={"q": "Wo ist der nächste Bahnhof, bitte?"}).json()
    assert found[0]["language"] == "de"
    assert found[0]["confidence"] > 90
    assert [each["confidence"] for each in found] == sorted((each["confidence"] for each in found), reverse=True)
    assert client.post("/detect", data={"q": "123"}).json() == [{"confidence": 0.0, "language": "en"}]
    assert client.get("/detect").status_code == 405


def test_languages_with_their_targets_also_by_way_of_a_third(client: TestClient) -> None:
    found = {each["code"]: each for each in client.request("GET", "/languages", data={"ignored": "body"}).json()}
    assert set(found) == {"en", "de", "fr", "zh", "zh-Hant"}
    assert found["fr"]["name"] == "French"
    assert "de" in found["fr"]["targets"]


def test_settings_for_front_ends(client: TestClient) -> None:
    found = client.get("/frontend/settings").json()
    assert found["charLimit"] == 50_000
    assert found["keyRequired"] is False
    assert ".srt" in found["supportedFilesFormat"]
    assert found["language"]["source"] == {"code": "en", "name": "English"}


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_is_translated_and_fetched(client: TestClient) -> None:
    text = b"1\n00:00:01,000 --> 00:00:02,000\nHello there.\n"
    found = client.post(
        "/translate_file", data={"source": "en", "target": "de"}, files={"file": ("../my film.srt", text)}
    )
    url = found.json()["translatedFileUrl"]
    assert url.startswith("http://testserver/download_file/")
    assert url.endswith(".my_film_de.srt")
    file = client.get(url)
    assert file.text == "1\n00:00:01,000 --> 00:00:02,000\nHELLO THERE.\n"
    assert file.headers["content-disposition"] == "attachment; filename*=UTF-8''my_film_de.srt"
    assert client.get("/download_file/other.txt").status_code == 404


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.docx", b"text", "file format not supported"),
        ("a.txt", b"\xff\xfe", "not UTF-8"),
        ("a.txt", b"a\0b", "NUL"),
    ],
)
def test_files_that_are_refused(client: TestClient, name: str, content: bytes, message: str) -> None:
    found = client.post("/translate_file", data={"source": "en", "target": "de"}, files={"file": (name, content)})
    assert found.status_code == 400
    assert message in found.json()["error"]
    found = client.post("/translate_file", data={"source": "en", "target": "de", "file": "text"})
    assert found.status_code == 400
