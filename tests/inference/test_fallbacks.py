"""Degenerate output is decoded again, then by clauses, then left in the source language; what counts as degenerate."""

from __future__ import annotations

from typing import Any

import pytest
from fake_translator import Fake

from regard.inference.confidence import (
    COPY,
    CUT,
    EMPTY,
    LONG,
    LOOP,
    SCRIPT,
    SHORT,
    coverage_factor,
    find_fault,
    longest_loop,
    plausibility,
    token_probability,
)
from regard.inference.translator import Translation
from regard.text.alignment import Link

TEXT = "The man went to the horse, and he said nothing."


class Misbehaving(Fake):
    """A translator whose output is `bad` where `is_bad` says so of the sentence and the options."""

    def __init__(self, bad: str, is_bad: Any, ended: bool = True) -> None:
        super().__init__(max_len=200, max_sentence_tokens=150)
        self.bad, self.is_bad, self.is_ended = bad, is_bad, ended

    def translate_sentences(self, sentences: Any, **how: Any) -> list[Translation]:  # type: ignore[override]
        found = super().translate_sentences(sentences, **how)
        return [
            Translation(self.bad, -1.0, -2.0, (), ended=self.is_ended) if self.is_bad(text, how) else each
            for text, each in zip(sentences, found, strict=True)
        ]


LOOPING = "DER MANN DER MANN DER MANN DER MANN DER MANN"


@pytest.mark.parametrize(
    ("bad", "ended"),
    [(LOOPING, True), ("", True), ("ER", True), ("ER " + "WAR SO ALT " * 3 * 6, True), ("DER MANN", False)],
)
def test_a_fault_is_decoded_again_with_other_settings(bad: str, ended: bool) -> None:
    fake = Misbehaving(bad, lambda text, how: not how.get("no_repeat_ngram_size"), ended)
    found = fake.translate(TEXT, source="en")
    assert found.text == TEXT.upper()
    assert found.notes == ()
    assert len(fake.asked) == 2
    assert fake.settings[1]["beam"] == 8
    assert fake.settings[1]["no_repeat_ngram_size"] == 3
    own = fake.options.length_penalty
    assert (fake.settings[1]["length_penalty"] > own) == (bad in ("", "ER"))


def test_what_fails_again_is_translated_clause_by_clause() -> None:
    fake = Misbehaving(LOOPING, lambda text, how: len(text) > 30)
    found = fake.translate(f"Hello. {TEXT}", source="en")
    assert found.text == f"HELLO. {TEXT.upper()}"
    assert found.notes == ("a sentence is translated clause by clause: its translation as a whole repeats itself",)
    assert fake.said()[-2:] == ["The man went to the horse,", "and he said nothing."]


def test_what_fails_even_so_is_left_in_the_source_language_with_a_note() -> None:
    fake = Misbehaving(LOOPING, lambda text, how: "nothing" in text)
    first, second = fake.translate(["the horse", f"Hello. {TEXT} The end."], source="en")
    assert first.notes == ()
    assert second.text == f"HELLO. {TEXT} THE END."
    assert second.notes == ("a sentence is left in the source language: its translation repeats itself",)
    assert second.confidence < first.confidence
    assert fake.translate(TEXT, source="en").confidence == 0.0


def test_samples_are_returned_as_they_are() -> None:
    fake = Misbehaving(LOOPING, lambda text, how: True)
    assert fake.translate(TEXT, source="en", temperature=1.0).text == LOOPING
    assert len(fake.asked) == 1


def test_placeholders_survive_every_way() -> None:
    text = "see https://a.b/c for the man, or the horse of 1992."
    for limit in (10, 20, 100):
        fake = Misbehaving(LOOPING, lambda text, how, n=limit: len(text) > n)  # type: ignore[misc]
        made = fake.translate(text, source="en").text
        assert "https://a.b/c" in made
        assert "1992" in made


# ---- what is degenerate ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "text", "ended", "target", "fault"),
    [
        ("The man is old.", "Der Mann ist alt.", True, "de", ""),
        ("The man is old.", " ", True, "de", EMPTY),
        ("The man is old.", "Der Mann ist", False, "de", CUT),
        ("The man is old.", "Der Mann Mann Mann Mann Mann Mann", False, "de", LOOP),
        ("No, no, no, no, no, no!", "Nein, nein, nein, nein, nein, nein!", True, "de", ""),
        ("He is very, very, very old.", "Er ist sehr, sehr, sehr alt.", True, "de", ""),
        ("It was a long day in the old town of the king.", "Ja.", True, "de", SHORT),
        ("Yes.", "Es war ein sehr langer Tag in der alten Stadt.", True, "de", LONG),
        ("The children play in their garden.", "The children play in their garden.", True, "de", COPY),
        ("Anna Maria Mozart, Wien", "Anna Maria Mozart, Wien", True, "de", ""),
        ("The children play in their garden.", "Die Kinder spielen im Garten.", True, "zh", SCRIPT),
        ("The children play in their garden.", "孩子们在他们的花园里玩耍。", True, "zh", ""),
        ("The children play in their garden.", "孩子们在他们的花园里玩耍。", True, "de", SCRIPT),
        ("孩子们在花园里。", "The children are in the garden.", True, "en", ""),
        ("See ⟦1⟧.", "Siehe ⟦1⟧", True, "de", ""),
        ("One ⟦1⟧.", "⟦1⟧.", True, "de", EMPTY),
        ("Twelve.", "12.", True, "de", ""),
        ("Microsoft Word", "Microsoft Word", True, "zh", ""),
    ],
)
def test_faults(source: str, text: str, ended: bool, target: str, fault: str) -> None:
    assert find_fault(source, text, ended, target) == fault


@pytest.mark.parametrize(
    ("text", "times"),
    [
        ("a b c d e f", 1),
        ("a b a b", 1),
        ("x a b a b a b a b y", 4),
        ("a b c a b c a b c", 3),
        ("a a a a", 1),
        ("a a a a a a", 6),
        ("哈哈哈哈哈哈哈", 7),
        ("", 1),
    ],
)
def test_loops(text: str, times: int) -> None:
    assert longest_loop(text) == times


# ---- confidence ------------------------------------------------------------------------------------------------------


def test_the_probability_is_the_geometric_mean_over_tokens() -> None:
    """exp(-2 / 4) = 0.6065"""
    assert token_probability(-2.0, 4) == pytest.approx(0.60653, abs=1e-5)
    assert token_probability(0.0, 0) == 1.0


def test_a_translation_is_less_plausible_with_each_fault() -> None:
    """Much shorter; 2 of 8 trigrams repeated; 4 of 11 words copied, one in five of which is usual."""
    source = "The two old children play in their very small garden."
    assert plausibility(source, "Die zwei alten Kinder spielen in ihrem sehr kleinen Garten.") == 1.0
    assert plausibility(source, "Die Kinder.") == pytest.approx((23 / 65) / 0.6)
    repeated = "Die alten Kinder spielen, die alten Kinder spielen im Haus"
    assert plausibility(source, repeated) == pytest.approx(1 - 2 / 8)
    copied = "Die children play in their small Garten, ja so war es."
    assert plausibility(source, copied) == pytest.approx(1 - 4 / 11 + 0.2)


def test_coverage_counts_words_that_are_linked() -> None:
    source = "The man is old."
    links = [Link(0, 3, 0, 3, 1.0), Link(4, 7, 4, 8, 0.5), Link(14, 15, 9, 10, 1.0)]
    assert coverage_factor(source, links) == pytest.approx(0.5 / 0.7)
    assert coverage_factor(source, [*links, Link(8, 10, 0, 3, 0.2)]) == 1.0


def test_the_confidence_of_a_text_is_the_mean_by_length() -> None:
    fake = Fake()
    values = {"The man.": 0.9, "The old horse is here.": 0.3}
    fake.one = lambda text, nbest: Translation(text.upper(), -1.0, -2.0, (), confidence=values[text])  # type: ignore[method-assign]
    found = fake.translate("The man. The old horse is here.", source="en")
    assert found.confidence == pytest.approx((8 * 0.9 + 22 * 0.3) / 30)
