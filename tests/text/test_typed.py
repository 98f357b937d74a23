"""Sentences as they are usually written, and what is put back afterwards."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.casing import careful, loud, same_end, shouted, stopped
from regard.text.placeholders import KEPT


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
def test_careful(text: str, language: str, expected: str) -> None:
    assert careful(text, language) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("I LOVE YOU", True),
        ("HELP", False),  # may be a name
        ("EU UN US", False),
        ("I LOVE you", False),
        ("CALL 112 NOW!", True),
        ("我爱你", False),
        ("NOW: https://example.org/abc", False),
    ],
)
def test_loud(text: str, expected: bool) -> None:
    assert loud(text) is expected


def test_what_is_kept_is_not_shouted() -> None:
    assert shouted("Siehe https://example.org/a, bitte: `code` straße") == (
        "SIEHE https://example.org/a, BITTE: `code` STRASSE"
    )


def test_a_full_stop_ends_words_alone() -> None:
    assert stopped("Annual report", "en") == "Annual report."
    assert stopped("车站", "zh-Hant") == "车站。"
    assert stopped("Visit ⟦1⟧", "en") == "Visit ⟦1⟧."
    assert stopped("Visit: ⟦1⟧ ⟦2⟧", "en") == "Visit: ⟦1⟧ ⟦2⟧."
    for text in ("How?", "one,", "⟦1⟧", "", "⟦1⟧Hello.⟦2⟧"):
        assert stopped(text, "en") == text


@pytest.mark.parametrize(
    ("source", "said", "expected"),
    [
        ("the house", "das Haus.", "das Haus"),
        ("房子", "The house.", "The house"),
        ("the house", "房子。", "房子"),
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
    assert same_end(source, said) == expected


@given(st.text(), st.sampled_from(["en", "de", "fr", "zh"]))
def test_writing_with_care_changes_case_alone(text: str, language: str) -> None:
    done = careful(text, language)
    assert done.casefold() == text.lower().casefold() or done.casefold() == text.casefold()
    assert KEPT.findall(done) == KEPT.findall(text)
