"""Marks around words: found, removed, and put around the linked words; none is ever lost."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.text.alignment import Link, word_spans
from regard.text.inline_marks import remove_marks, restore_marks


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("This is *very* good.", "This is very good."),
        ("**Note:** the _old_ man", "Note: the old man"),
        ("<b>the man</b> in [the house](https://a.b/c_(d))", "the man in the house"),
        ('<a href="x">here</a>', "here"),
        ("2*3*4 and a * b * c", "2*3*4 and a * b * c"),
        ("__init__ and snake_case_name", "__init__ and snake_case_name"),
        ("*open and x*", "open and x"),
        ("*open", "*open"),
        ("a<b>c</b>d", "a<b>c</b>d"),  # inside a word
        ("* item", "* item"),
        ("f(*args, **kwargs)", "f(*args, **kwargs)"),
    ],
)
def test_marks_are_removed_where_they_enclose_words(text: str, plain: str) -> None:
    assert remove_marks(text)[0] == plain


def test_marks_move_with_their_words() -> None:
    source, marks = remove_marks("the *red* house")
    target = "la maison rouge"
    links = [Link(0, 3, 0, 2, 1.0), Link(8, 13, 3, 9, 0.9), Link(4, 7, 3, 9, 0.1), Link(4, 7, 10, 15, 0.8)]
    assert restore_marks(source, target, marks, links) == "la maison *rouge*"


def test_several_words_are_marked_as_one_run() -> None:
    source, marks = remove_marks("see [the old house](x) now")
    target = "jetzt siehe das alte Haus da so das"
    links = [Link(4, 7, 12, 15, 1.0), Link(8, 11, 16, 20, 1.0), Link(12, 17, 21, 25, 1.0), Link(4, 7, 32, 35, 0.6)]
    assert restore_marks(source, target, marks, links) == "jetzt siehe [das alte Haus](x) da so das"


def test_a_mark_without_linked_words_is_placed_by_position() -> None:
    source, marks = remove_marks("a b *c* d")
    assert restore_marks(source, "w x y z", marks, []) == "w x *y* z"
    assert restore_marks(source, "", marks, []) == "*c*"


PIECES = st.sampled_from(
    ["a ", "the ", "*very* ", "_good_ ", "**old man**", "<b>x</b>", "[y](z)", " ", "*", "_", ". ", "中"]
)
LINKS = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0.1, 1.0)), max_size=12)


@given(st.lists(PIECES, max_size=10), LINKS, st.text("ab ", min_size=1, max_size=12))
def test_no_mark_is_lost_or_invented_and_no_text_changes(
    pieces: list[str], drawn: list[tuple[int, int, float]], target: str
) -> None:
    source, marks = remove_marks("".join(pieces))
    links = [Link(s, s + 1, t, t + 1, w) for s, t, w in drawn]
    made = restore_marks(source, target, marks, links)
    signs = [sign for mark in marks for sign in (mark.opening, mark.closing)]
    if target.strip():
        assert len(made) == len(target) + sum(map(len, signs))
        assert re.sub(r"</?b>|\]\(z\)|[*_\[]", "", made) == target
    for sign in set(signs):
        assert made.count(sign) >= signs.count(sign)


@given(st.lists(PIECES, max_size=10))
def test_removed_and_restored_in_the_same_text_is_the_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    source, marks = remove_marks(text)
    links = [Link(*span, *span, 1.0) for span in word_spans(source)]
    assert restore_marks(source, source, marks, links) == text
