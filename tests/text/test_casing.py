"""Sentences in sentence case with a full stop, and translations with the casing and the end of their source."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.casing import (
    add_final_punctuation,
    is_question,
    is_upper_case,
    match_final_punctuation,
    to_sentence_case,
    to_upper_case,
)
from regard.text.placeholders import PROTECTED


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("how are you", "en", "How are you"),
        ("i think i'm late, am i?", "en", "I think I'm late, am I?"),
        ("WHERE AM I?", "en", "Where am I?"),
        ("i.e. this", "en", "I.e. this"),
        ("wo bist du?", "de", "Wo bist du?"),
        ("ÜBER DIE BRÜCKE", "de", "Über die brücke"),
        ("“hello,” he said", "en", "“Hello,” he said"),
        ("NATO", "en", "NATO"),
        ("The EU and NATO agree.", "en", "The EU and NATO agree."),
        ("iPhone and i", "en", "iPhone and I"),
        ("www.example.org is down", "en", "www.example.org is down"),
        ("LOOK AT https://Example.org/A NOW", "en", "Look at https://Example.org/A now"),
        ("你好 TOM", "zh", "你好 TOM"),
        ("3 apples", "en", "3 apples"),
        ("", "en", ""),
    ],
)
def test_sentence_case(text: str, language: str, expected: str) -> None:
    assert to_sentence_case(text, language) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I LOVE YOU", True),
        ("HELP", False),  # may be a name
        ("EU UN US", False),
        ("HOW ARE YOU?", True),
        ("I LOVE you", False),
        ("CALL 112 NOW!", True),
        ("我爱你", False),
        ("NOW: https://example.org/abc", False),
    ],
)
def test_upper_case(text: str, expected: bool) -> None:
    assert is_upper_case(text) is expected


def test_protected_text_is_not_put_into_upper_case() -> None:
    assert to_upper_case("Siehe https://example.org/a, bitte: `code` straße") == (
        "SIEHE https://example.org/a, BITTE: `code` STRASSE"
    )


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("how are you", "en", True),
        ("Where is the station", "en", True),
        ("what time is it", "en", True),
        ("do you speak German", "en", True),
        ("How to install", "en", False),
        ("What you need", "en", False),
        ("However it is", "en", False),
        ("Is", "en", False),
        ("wo ist der Bahnhof", "de", True),
        ("Wie man beginnt", "de", False),
        ("comment allez-vous", "fr", True),
        ("où est la gare", "fr", True),
        ("Comment installer", "fr", False),
        ("how are you", "zh", False),
    ],
)
def test_questions_are_told_by_their_word_order(text: str, language: str, expected: bool) -> None:
    assert is_question(text, language) is expected
    if language != "zh":
        assert add_final_punctuation(text, language) == text + ("?" if expected else ".")
    if expected:
        assert match_final_punctuation(text, "Ça va ?", language) == "Ça va"


def test_a_full_stop_ends_words_alone() -> None:
    assert add_final_punctuation("Annual report", "en") == "Annual report."
    assert add_final_punctuation("车站", "zh-Hant") == "车站。"
    assert add_final_punctuation("Visit ⟦1⟧", "en") == "Visit ⟦1⟧."
    assert add_final_punctuation("Visit: ⟦1⟧ ⟦2⟧", "en") == "Visit: ⟦1⟧ ⟦2⟧."
    for text in ("How?", "one,", "⟦1⟧", "", "⟦1⟧Hello.⟦2⟧"):
        assert add_final_punctuation(text, "en") == text


@pytest.mark.parametrize(
    ("source", "said", "expected"),
    [
        ("the tree", "der Baum.", "der Baum"),
        ("房子", "The house.", "The house"),
        ("the tree", "树。", "树"),
        ("Watch out", "Attention !", "Attention"),
        ("Visit ⟦1⟧", "Besuchen Sie ⟦1⟧!", "Besuchen Sie ⟦1⟧"),
        ("one,", "eins.", "eins,"),
        ("one,", "eins,", "eins,"),
        ("why", "warum...", "warum..."),
        ("why", "warum?", "warum?"),
        ("why?", "warum.", "warum."),
        ("the man.", "der Mann.", "der Mann."),
        ("", ".", "."),
    ],
)
def test_an_end_that_was_not_there_is_taken_off(source: str, said: str, expected: str) -> None:
    assert match_final_punctuation(source, said) == expected


@given(st.text(), st.sampled_from(["en", "de", "fr", "zh"]))
def test_sentence_case_changes_case_alone(text: str, language: str) -> None:
    done = to_sentence_case(text, language)
    assert done.casefold() == text.lower().casefold() or done.casefold() == text.casefold()
    assert PROTECTED.findall(done) == PROTECTED.findall(text)
