"""The translation directions that are detected for texts."""

from __future__ import annotations

import pytest

from regard.errors import RegardError
from regard.text.language_identification import DirectionDetector, learn_profile

TEXTS = {
    "en": "the man who went to the home of his friend said that he would not come with them hello how are you",
    "de": "der Mann ging in das Haus und sagte nicht, dass sie sich mit ihm auf der Straße treffen wie geht es",
    "fr": "le garçon est allé à la maison de son ami et il a dit que nous ne sommes pas là pour vous bonjour",
}
DIRECTIONS = tuple(d for lang in ("de", "fr", "zh", "zh-Hant") for d in (f"en>{lang}", f"{lang}>en"))
DETECTOR = DirectionDetector(DIRECTIONS, {name: learn_profile([text]) for name, text in TEXTS.items()})


def pairs(texts: list[str], to: str | None = None, source: str | None = None) -> list[tuple[str, str]]:
    return [route.pair for route in DETECTOR.detect(texts, to, source)]


@pytest.mark.parametrize(
    ("text", "to", "expected"),
    [
        ("the man said that", None, ("en", "de")),
        ("der Mann und das Haus", None, ("de", "en")),
        ("nous sommes à la maison", None, ("fr", "en")),
        ("我们说汉语。", None, ("zh", "en")),
        ("我們說漢語。", None, ("zh-Hant", "en")),
        ("the man said that", "zh-hant", ("en", "zh-Hant")),
        ("the man https://der.die/das-haus-und-die-strasse-nicht", None, ("en", "de")),
        ("12", "fr", ("", "fr")),
        ("", None, ("", "")),
        ("https://der.die/das", None, ("", "")),
    ],
)
def test_the_language_of_one_text(text: str, to: str | None, expected: tuple[str, str]) -> None:
    assert pairs([text], to) == [expected]
    assert DETECTOR.detect([text], to, None)[0].note == ""


def test_language_codes_may_be_in_upper_or_lower_case() -> None:
    assert pairs(["12", "the man"], "DE", "EN") == [("en", "de")] * 2
    assert pairs(["the man"], None, "ZH-hant") == [("zh-Hant", "en")]


def test_texts_that_are_clear_go_where_each_belongs() -> None:
    texts = ["the man who went to the home", "der Mann ging in das Haus", "我们说汉语。", "the friend of his home"]
    assert [target for _, target in pairs(texts)] == ["de", "en", "en", "de"]


def test_what_says_little_is_in_the_language_of_the_rest() -> None:
    assert pairs(["das Haus"]) == [("de", "en")]
    assert pairs(["das Haus", "the man who went to the home"]) == [("en", "de")] * 2
    assert pairs(["the man", "我们说汉语。", "我们说汉语。"])[0] == ("en", "de")  # not in Chinese


def test_where_several_languages_are_common_each_text_speaks_for_itself() -> None:
    rest = [TEXTS["en"], TEXTS["de"]]
    assert pairs(["das Haus", "the man", *rest])[:2] == [("de", "en"), ("en", "de")]
    assert pairs(["das Haus", *rest, TEXTS["en"], TEXTS["en"], TEXTS["en"]])[0] == ("en", "de")


def test_what_says_little_is_in_a_language_that_is_translated_as_asked() -> None:
    assert pairs(["das Haus"], "de") == [("en", "de")]
    assert pairs(["the man"], "en")[0][0] in ("de", "fr")
    with pytest.raises(RegardError, match=r"^this model does not translate from de to de: it knows .*--from LANG"):
        pairs([TEXTS["de"]], "de")


def test_a_line_that_cannot_be_translated_is_named() -> None:
    with pytest.raises(RegardError, match=r"^line 2: this model does not translate from de to fr: .*'der Mann ging"):
        pairs([TEXTS["en"] * 2, TEXTS["de"]], "fr")


@pytest.mark.parametrize("text", ["Привет, мир", "私は学生です。", "qqxz"])
def test_what_cannot_be_read_is_left(text: str) -> None:
    routes = DETECTOR.detect([TEXTS["en"], text], None, None)
    assert [route.pair for route in routes] == [("en", "de"), ("", "")]
    assert routes[0].note == ""
    assert routes[1].note == "left as it is, being in none of en, de, fr, zh, zh-Hant"
    assert DETECTOR.detect([text], None, "en")[0].note == ""  # the language was given


def test_a_model_that_reads_no_chinese_leaves_it() -> None:
    detector = DirectionDetector(("en>de", "de>en"), DETECTOR.profiles)
    assert detector.detect(["我们说汉语。"], None, None)[0].note.startswith("left as it is")


def test_a_language_that_only_looks_like_one_is_noted() -> None:
    profiles = {name: own | {"~~~": -12.0} for name, own in DETECTOR.profiles.items()}  # what is not there is rare
    detector = DirectionDetector(DIRECTIONS, profiles)
    (route,) = detector.detect(["Nie wiem, co zrobić z tym wielkim problemem w domu"], None, None)
    assert route.source
    assert route.note == f"taken for {route.source}, but probably in none of en, de, fr, zh, zh-Hant"
    assert detector.detect([TEXTS["en"]], None, None)[0].note == ""
    assert detector.detect([TEXTS["en"] + " Привет, мир, как дела сегодня вечером " * 3], None, None)[0].note == ""


@pytest.mark.parametrize(
    ("texts", "to", "source", "said"),
    [
        (["12"], "xx", None, "does not translate to xx: it knows en>de, de>en"),
        (["the man"], None, "xx", "does not translate from xx: it knows en>de"),
        (["the man"], "fr", "de", "^this model does not translate from de to fr: it knows [^(]*$"),
    ],
)
def test_what_there_is_not_is_refused(texts: list[str], to: str | None, source: str | None, said: str) -> None:
    with pytest.raises(RegardError, match=said):
        pairs(texts, to, source)


def test_without_profiles_the_language_must_be_given() -> None:
    detector = DirectionDetector(DIRECTIONS, {})
    with pytest.raises(RegardError, match=r"no languages\.json.*--from"):
        detector.detect(["the man"], None, None)
    assert detector.detect(["12"], None, None)[0].source == ""
    assert detector.detect(["the man"], None, "en")[0].pair == ("en", "de")


def test_one_direction_needs_no_profiles() -> None:
    detector = DirectionDetector(("fr>es", "fr>it"), {})
    assert [route.pair for route in detector.detect(["le garçon", "12"], None, None)] == [("fr", "es")] * 2
