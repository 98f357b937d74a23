"""Names and codes of languages."""

from __future__ import annotations

import pytest

from regard.text.language_identification import identified_languages
from regard.text.language_names import find_language, language_name, read_table, suggest_language

KNOWN = ["en", "de", "fr", "zh", "zh-Hant"]


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("de", "de DE german German Deutsch deu ger de-AT de_CH.UTF-8 Allemand 德语"),
        ("en", "en en_US en-GB ENG english Englisch"),
        ("fr", "fr fra fre français Francais FRENCH fr-CA Französisch"),
        ("zh", "zh zh-CN zh_CN zh-Hans zh-Hans-CN zh-SG zho chinese mandarin 中文 cmn"),
        ("zh-Hant", "zh-Hant zh-hant ZH-HANT zh-TW zh_TW zh-HK zh-MO zh-Hant-HK zh-tw 繁體中文"),
    ],
)
def test_usual_names_and_codes(code: str, names: str) -> None:
    assert {name: find_language(name, KNOWN) for name in names.split()} == dict.fromkeys(names.split(), code)


@pytest.mark.parametrize("name", ["traditional chinese", "Chinese (Traditional)", "Traditional  Chinese"])
def test_names_of_several_words(name: str) -> None:
    assert find_language(name, KNOWN) == "zh-Hant"
    assert find_language("Simplified Chinese", KNOWN) == "zh"


@pytest.mark.parametrize("name", ["", "xx", "es", "Spanish", "klingon", "d", "-"])
def test_what_is_not_known_is_none(name: str) -> None:
    assert find_language(name, KNOWN) is None


def test_the_code_is_that_of_the_model() -> None:
    assert find_language("german", ["eng", "deu"]) == "deu"
    assert find_language("pt", ["pt-BR"]) == "pt-BR"
    assert find_language("norwegian", ["no", "en"]) == "no"
    assert find_language("chinese", ["zh-Hant"]) == "zh-Hant"
    assert find_language("zh-TW", ["zh"]) is None
    assert find_language("Tok Pisin", ["Tok Pisin"]) == "Tok Pisin"


def test_a_name_in_plain_words() -> None:
    assert [language_name(code) for code in ("es", "zh-Hant", "nob", "xx")] == [
        "Spanish", "traditional Chinese", "Norwegian", "xx",
    ]  # fmt: skip


def test_the_nearest_name_is_suggested() -> None:
    assert suggest_language("germn", KNOWN) == "de"
    assert suggest_language("Frensh", KNOWN) == "fr"
    assert suggest_language("qqqq", KNOWN) is None


def test_every_language_that_is_identified_has_a_name() -> None:
    names, codes = read_table()
    assert identified_languages() <= set(names)
    assert len(identified_languages()) >= 100
    assert all(codes[code.lower()] == code for code in names)
