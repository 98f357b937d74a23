"""Spans move with their words and atoms stay: worked by hand."""

from __future__ import annotations

import pytest

from regard.documents import (
    Segment,
    Span,
    finish_segment,
    move_spans,
    parse_document,
    restore_atoms,
    translate_document,
)
from regard.text.alignment import Link

A, B = "\ue000", "\ue001"


def links(source: str, target: str, pairs: str) -> list[Link]:
    """Return links of weight 1 between words, given as "0-1 2-0": the numbers of words that are apart by spaces."""

    def words(text: str) -> list[tuple[int, int]]:
        at, found = 0, []
        for word in text.split(" "):
            found.append((at, at + len(word)))
            at += len(word) + 1
        return found

    numbers = [tuple(map(int, pair.split("-"))) for pair in pairs.split()]
    return [Link(*words(source)[i], *words(target)[j], 1.0) for i, j in numbers]


def marked(segment: Segment) -> str:
    """Return the text with brackets around spans, with their indices."""
    text = ""
    for i in range(len(segment.text) + 1):
        text += "".join("]" for span in segment.spans if span.end == i)
        text += "".join(f"{span.index}[" for span in segment.spans if span.begin == i)
        text += segment.text[i : i + 1]
    return text


def move(source: str, spans: list[tuple[int, int]], target: str, pairs: str) -> str:
    segment = Segment(source, tuple(Span(*each, i) for i, each in enumerate(spans)))
    return marked(move_spans(segment, target, links(source, target, pairs)))


def test_emphasis_is_on_the_third_word_with_a_monotone_alignment() -> None:
    source = "This is *very* good."
    document = parse_document(source, "markdown")
    assert document.segments[0].text == "This is very good."
    done = translate_document(
        document,
        lambda texts: ["Das ist sehr gut."],
        lambda sources, targets: [links("This is very good.", "Das ist sehr gut.", "0-0 1-1 2-2 3-3")],
    )
    assert done == "Das ist *sehr* gut."


def test_a_span_follows_its_words_to_another_place() -> None:
    assert move("the red house", [(4, 7)], "la maison rouge", "0-0 1-2 2-1") == "la maison 0[rouge]"


def test_a_span_covers_a_verb_with_its_particle() -> None:
    assert move("He switched it off", [(3, 18)], "Er schaltete es aus", "0-0 1-1 2-2 3-3") == "Er 0[schaltete es aus]"
    assert (
        move("please switch off now", [(7, 17)], "schalte jetzt bitte aus", "0-2 1-0 2-3 3-1")
        == "0[schalte jetzt bitte aus]"
    )


def test_an_outlier_far_away_is_left_out() -> None:
    source, target = "a b c d e f g h i j", "k l m n o p q r s t"
    pairs = " ".join(f"{i}-{i}" for i in range(9)) + " 1-9"
    assert move(source, [(2, 3)], target, pairs) == "k 0[l] m n o p q r s t"


def test_spans_keep_their_nesting_and_do_not_cross() -> None:
    moved = move("one two three four", [(0, 13), (4, 7), (14, 18)], "vier drei zwei eins", "0-3 1-2 2-1 3-0")
    assert moved == "2[vier] 0[drei 1[zwei] eins]"


def test_a_span_of_the_whole_text_stays_whole_with_its_punctuation() -> None:
    assert move("Stop here!", [(0, 10)], "Bitte hier anhalten!", "0-2") == "0[Bitte hier anhalten!]"
    assert move("Note: read", [(0, 5)], "Hinweis: lesen", "0-0 1-1") == "0[Hinweis:] lesen"
    assert move("Go home.", [(0, 7)], "Geh nach Hause.", "0-0 1-2") == "0[Geh nach Hause]."


def test_without_an_alignment_spans_are_placed_in_proportion() -> None:
    assert move("one two three four", [(4, 7)], "eins zwei drei vier", "") == "eins 0[zwei] drei vier"


def test_each_chinese_character_is_a_word() -> None:
    segment = Segment("This is very good.", (Span(8, 12, 0),))
    moved = move_spans(segment, "这非常好。", [Link(0, 4, 0, 1, 1.0), Link(8, 12, 1, 3, 1.0), Link(13, 17, 3, 4, 1.0)])
    assert marked(moved) == "这0[非常]好。"


def test_too_few_words_for_the_spans_keep_the_source() -> None:
    segment = Segment("one two", (Span(0, 3, 0), Span(4, 7, 1)))
    assert move_spans(segment, "eins", []) is segment
    assert finish_segment(segment, " … ", []) is segment


def test_an_atom_stays_in_its_span() -> None:
    segment = Segment(f"see {A} there now", (Span(4, 11, 0),))
    assert marked(
        move_spans(segment, f"jetzt dort sehen {A}", links("see x there now", "jetzt dort sehen x", "0-2 2-1 3-0"))
    ) in (
        f"jetzt 0[dort {A}] sehen",
        f"jetzt 0[dort sehen {A}]",
    )
    outside = Segment(f"see there {A}", (Span(0, 3, 0),))
    moved = move_spans(outside, f"sehen {A} dort", [Link(0, 3, 0, 14, 1.0)])
    assert moved.text.count(A) == 1
    assert moved.spans[0].begin <= 0 < moved.spans[0].end
    assert not moved.spans[0].begin <= moved.text.index(A) < moved.spans[0].end


@pytest.mark.parametrize(
    ("translated", "restored"),
    [
        (f"Drücken Sie {A} und {B}.", f"Drücken Sie {A} und {B}."),
        (f"Drücken Sie {B} und {A}.", f"Drücken Sie {B} und {A}."),  # another order is meant
        (f"Drücken Sie {A} und {B} und {A}.", f"Drücken Sie {A} und {B} und ."),
        (f"Drücken Sie {A} \uf000 und {B}.", f"Drücken Sie {A} und {B}."),
        (f"Drücken Sie {A} und.", f"Drücken Sie {A} und {B}."),
        (f"Drücken Sie und {B}.", f"Drücken {A} Sie und {B}."),  # 6 of 11 characters between the neighbours
        (f"Drücken\nSie  {A}\tund \x00{B}.", f"Drücken Sie {A} und {B}."),
    ],
)
def test_atoms_are_restored(translated: str, restored: str) -> None:
    assert restore_atoms(f"Press {A} and {B}.", translated)[0] == restored


def test_offsets_follow_restored_atoms() -> None:
    text, offsets = restore_atoms(f"{A} is *good*", "ist gut")
    assert text == f"{A} ist gut"
    assert text[offsets[4] : offsets[7]] == "gut"
