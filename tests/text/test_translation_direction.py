"""The translation directions that are detected for texts."""

from __future__ import annotations

import pytest

from regard.errors import RegardError
from regard.text.language_identification import DirectionDetector, LanguageCounts, learn_profile

TEXTS = {
    "en": "the man who went to the home of his friend said that he would not come with them hello how are you",
    "de": "der Mann ging in das Haus und sagte nicht, dass sie sich mit ihm auf der Straße treffen wie geht es",
    "fr": "le garçon est allé à la maison de son ami et il a dit que nous ne sommes pas là pour vous bonjour",
    "es": "el hombre que fue a la casa de su amigo dijo que no quería venir con nosotros, ¿cómo estás hoy?",
}
DIRECTIONS = tuple(d for lang in ("de", "fr", "zh", "zh-Hant") for d in (f"en>{lang}", f"{lang}>en"))
DETECTOR = DirectionDetector(DIRECTIONS, {})


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


@pytest.mark.parametrize(("to", "source"), [("DE", "EN"), ("german", "English"), ("Deutsch", "en_US"), ("deu", "eng")])
def test_languages_have_many_names(to: str, source: str) -> None:
    assert pairs(["12", "the man"], to, source) == [("en", "de")] * 2


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


# ---- languages that the model does not have --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"), [(TEXTS["es"], "Spanish"), ("Привет, мир", "Russian"), ("私は学生です。", "Japanese")]
)
@pytest.mark.parametrize("around", [[], [TEXTS["en"]], [TEXTS["en"]] * 9])
def test_a_language_that_the_model_lacks_is_left(text: str, name: str, around: list[str]) -> None:
    *routes, route = DETECTOR.detect([*around, text], None, None)
    assert [each.pair for each in routes] == [("en", "de")] * len(around)
    assert route.pair == ("", "")
    assert route.note == f"left as it is: in {name}, which this model does not know (--from LANG translates it anyway)"
    assert DETECTOR.detect([text], None, "en")[0].pair == ("en", "de")  # the language was given


def test_short_texts_in_a_foreign_text_are_left_too() -> None:
    routes = DETECTOR.detect(["Introducción", TEXTS["es"], "El perro"], "de", None)
    assert [route.source for route in routes] == ["", "", ""]


@pytest.mark.parametrize("text", ["gato", "Linux", "OK", "qqxz"])
def test_a_short_text_alone_is_never_refused(text: str) -> None:
    assert DETECTOR.detect([text], None, None)[0].source in ("en", "de", "fr")


def test_an_unknown_script_is_left() -> None:
    (route,) = DETECTOR.detect(["ᎠᎢᏍᎩ ᎠᏟᎶᏍᏗ ᏥᏄᏍᏛᎩ"], None, None)
    assert (route.source, route.note[:26]) == ("", "left as it is: in none of ")


def test_a_model_that_reads_no_chinese_leaves_it() -> None:
    detector = DirectionDetector(("en>de", "de>en"), {})
    assert detector.detect(["我们说汉语。"], None, None)[0].note.startswith("left as it is: in Chinese")


def test_one_script_of_chinese_serves_both() -> None:
    assert DirectionDetector(("en>zh", "zh>en"), {}).detect(["我們說漢語。"], None, None)[0].source == "zh"
    assert (
        DirectionDetector(("en>zh-Hant", "zh-Hant>en"), {}).detect(["我们说汉语。"], None, None)[0].source == "zh-Hant"
    )


def test_a_text_in_the_target_language_is_left() -> None:
    english, german = DETECTOR.detect([TEXTS["en"], TEXTS["de"]], "de", None)
    assert english.pair == ("en", "de")
    assert german.pair == ("", "de")
    assert german.note.startswith("left as it is: already in German")


def test_related_languages_are_taken_for_those_of_the_model() -> None:
    detector = DirectionDetector(("en>sr", "sr>en", "no>en", "ms>en"), {})
    texts = ["Ne znam gdje je moja knjiga, možda je ostala kod kuće.", "Jeg vet ikke hvor boken min er blitt av."]
    texts.append("Saya tidak tahu di mana buku saya berada sekarang.")
    assert [route.source for route in detector.detect(texts, None, None)] == ["sr", "no", "ms"]


# ---- pivoting --------------------------------------------------------------------------------------------------------


def test_a_direction_that_is_missing_goes_via_english() -> None:
    (route,) = DETECTOR.detect([TEXTS["de"]], "fr", None)
    assert (route.pair, route.via, route.note) == (("de", "fr"), "en", "")
    assert DETECTOR.detect(["Haus"], "fr", "de")[0].via == "en"
    assert DETECTOR.detect([TEXTS["en"]], "fr", None)[0].via == ""
    other = DirectionDetector(("de>fr", "fr>it", "it>de"), {})
    assert other.detect(["Haus"], "it", "de")[0].via == "fr"


def test_a_direction_without_any_way_is_refused() -> None:
    detector = DirectionDetector(("en>de", "fr>it"), {})
    with pytest.raises(RegardError, match=r"^line 2: this model does not translate from fr to de: .*'le garçon"):
        detector.detect([TEXTS["en"], TEXTS["fr"]], "de", None)
    with pytest.raises(RegardError, match=r"^this model does not translate from de to de: it knows [^(]*$"):
        DETECTOR.detect(["Haus"], "de", "de")


@pytest.mark.parametrize(
    ("to", "source", "said"),
    [
        ("xx", None, "does not translate to xx: it knows en>de, de>en[^;]*$"),
        (None, "xx", "does not translate from xx: it knows en>de"),
        ("germn", None, r"does not translate to germn: it knows .*; did you mean German \(de\)\?$"),
        ("Spanish", None, "does not translate to Spanish: it knows en>de"),
    ],
)
def test_an_unknown_language_is_refused_with_what_there_is(to: str | None, source: str | None, said: str) -> None:
    with pytest.raises(RegardError, match=said):
        DETECTOR.detect(["12"], to, source)


# ---- streams ---------------------------------------------------------------------------------------------------------

STREAM = [
    "Introduction", TEXTS["en"], "das Haus", "Kapitel", TEXTS["de"], TEXTS["de"], "das Haus", "Linux", TEXTS["es"], "12",
    "El perro", "我们说汉语。", "name", TEXTS["fr"],
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 5, len(STREAM)])
@pytest.mark.parametrize("to", [None, "en"])
def test_a_stream_is_detected_alike_however_it_is_cut(size: int, to: str | None) -> None:
    seen, whole = LanguageCounts(), LanguageCounts()
    chunks = [STREAM[at : at + size] for at in range(0, len(STREAM), size)]
    found = [route for chunk in chunks for route in DETECTOR.detect(chunk, to, None, seen)]
    assert found == DETECTOR.detect(STREAM, to, None, whole)
    assert seen == whole


def test_texts_of_a_stream_follow_those_before_them_alone() -> None:
    seen = LanguageCounts()
    texts = ["das Haus", TEXTS["en"], "das Haus"]
    assert [route.source for route in DETECTOR.detect(texts, None, None, seen)] == ["de", "en", "en"]
    assert seen.certain == {"en": 1}


# ---- languages that have only a profile of the model -----------------------------------------------------------------

INVENTED = ["krampo zulvi dremak oshtu vlaini", "zulvi oshtu krampi dremaka vlainu zulvo", "vlaini dremak zulvi krampo"]


def test_a_language_without_our_profile_is_identified_by_that_of_the_model() -> None:
    profiles = {name: learn_profile([text]) for name, text in TEXTS.items() if name != "es"}
    detector = DirectionDetector(("xq>en", "en>xq", "de>en"), {**profiles, "xq": learn_profile(INVENTED)})
    texts = ["oshtu zulvi krampo dremak vlainu", TEXTS["en"], TEXTS["de"], "私は学生です。"]
    assert [route.source for route in detector.detect(texts, None, None)] == ["xq", "en", "de", ""]


def test_a_language_without_any_profile_must_be_given() -> None:
    detector = DirectionDetector(("xq>en", "en>xq"), {})
    with pytest.raises(RegardError, match=r"cannot identify xq .*languages\.json.*--from"):
        detector.detect(["the man"], None, None)
    assert detector.detect(["12"], None, None)[0].source == ""
    assert detector.detect(["the man"], None, "en")[0].pair == ("en", "xq")


def test_one_source_language_needs_no_identification() -> None:
    detector = DirectionDetector(("fr>es", "fr>it"), {})
    assert [route.pair for route in detector.detect(["le garçon", "12"], None, None)] == [("fr", "es")] * 2
