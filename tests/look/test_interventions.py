"""Parsing interventions, and resolving the words in them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import RegardError
from regard.look.interventions import (
    CROSS,
    Forbid,
    Force,
    InputAndOutput,
    Intervention,
    Pin,
    Places,
    Replace,
    ReplacePositions,
    Uniform,
    Zero,
    forced_prefix,
    parse,
    replace_in_source,
    resolve_words,
)

NAMES = ["encoder.0.self", "encoder.1.self", "decoder.0.self", "decoder.0.cross", "decoder.1.self", "decoder.1.cross"]
TEXTS = InputAndOutput(
    source=[("the", [0]), ("apple", [1, 2]), ("the", [3]), ("2016", [4]), ("<eos>", [5])],
    target=[("<sos>", [0]), ("der", [1]), ("Apfel", [2, 3]), (">", [4]), ("<eos>", [5])],
)

EXAMPLES: list[tuple[str, str, Intervention]] = [
    ("zero", "decoder.2.cross:3", Zero("decoder.2.cross", (3,))),
    ("zero", "decoder.*.cross", Zero("decoder.*.cross")),
    ("uniform", "encoder.0.self:0,11", Uniform("encoder.0.self", (0, 11))),
    ("force", "decoder.2.cross:3@4>1", Force("decoder.2.cross", (3,), 4, 1)),
    ("forbid", "Apfel>apple", Forbid(CROSS, None, "Apfel", "apple")),
    ("forbid", "*.self@4,5>1,2", Forbid("*.self", None, (4, 5), (1, 2))),
    ("forbid", "me@home>you@work", Forbid(CROSS, None, "me@home", "you@work")),
    ("pin", "Apfel><eos>", Pin("Apfel", "<eos>")),
    ("pin", "<sos>>0", Pin("<sos>", 0)),
    ("pin", '"2016">"a>b"', Pin("2016", "a>b")),
    ("pin", '">">1', Pin(">", 1)),
    ("replace", "source:3=dog", Replace("source", 3, "dog")),
    ("replace", "target:Apfel=eine Birne = gut", Replace("target", "Apfel", "eine Birne = gut")),
    ("replace", "source:0=", Replace("source", 0, "")),
    ("positions", "none", ReplacePositions("none")),
]


@pytest.mark.parametrize(("kind", "text", "change"), EXAMPLES)
def test_every_change_can_be_written_on_the_command_line(kind: str, text: str, change: Intervention) -> None:
    assert parse(kind, text) == change
    again_kind, _, again = str(change).partition(" ")
    assert (again_kind, parse(again_kind, again)) == (kind, change)


HEADS = st.none() | st.lists(st.integers(0, 99), min_size=1, max_size=4).map(tuple)
LAYERS = st.sampled_from(["decoder.2.cross", "*", "encoder.*.self", "*cross", "decoder.[01].self"])
WORD = st.text(st.characters(exclude_characters='"', exclude_categories=["Cs", "Cc"]), min_size=1)
PLACES = st.integers(0, 999) | st.lists(st.integers(0, 999), min_size=2, max_size=4).map(tuple) | WORD


@given(LAYERS, HEADS, PLACES, PLACES, st.text(st.characters(exclude_categories=["Cs"])))
def test_what_a_change_says_of_itself_is_how_it_is_written(
    layers: str, heads: tuple[int, ...] | None, query: Places, key: Places, text: str
) -> None:
    changes: list[Intervention] = [
        Zero(layers, heads),
        Uniform(layers, heads),
        Pin(query, key),
        Replace("source", query, text),
    ]
    for change in [*changes, Force(layers, heads, query, key), Forbid(layers, heads, query, key)]:
        kind, _, rest = str(change).partition(" ")
        assert parse(kind, rest) == change


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("zero", "decoder.2.cross:x"),
        ("zero", ""),
        ("force", "4"),
        ("forbid", "decoder.2.cross@4"),
        ("pin", ">3"),
        ("replace", "middle:3=dog"),
        ("replace", "source:3"),
        ("positions", " "),
    ],
)
def test_what_is_not_understood_is_refused_with_its_form(kind: str, text: str) -> None:
    with pytest.raises(RegardError, match=f"--{kind} '.*' is not understood: write "):
        parse(kind, text)


def test_there_are_only_so_many_kinds() -> None:
    with pytest.raises(RegardError, match="no change 'cut': choose one of zero, uniform, force, forbid"):
        parse("cut", "1")


# ---- words to positions ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (Pin("Apfel", "apple"), Pin((1, 2), (1, 2))),  # rows 1 and 2 wrote the tokens that are read at 2 and 3
        (Pin("der", "2016"), Pin(0, 4)),
        (Pin("apfel", "APPLE"), Pin((1, 2), (1, 2))),
        (Pin("<eos>", "<eos>"), Pin(4, 5)),
        (Forbid("decoder.*.cross", (1,), ">", 0), Forbid("decoder.*.cross", (1,), 3, 0)),
        (
            Force("decoder.*.self", None, "Apfel", "der"),
            Force("decoder.*.self", None, (2, 3), 1),
        ),  # where they are read
        (Forbid("encoder.1.self", None, "2016", "apple"), Forbid("encoder.1.self", None, 4, (1, 2))),
        (Forbid("*", None, 0, 1), Forbid("*", None, 0, 1)),
        (Replace("source", "apple", "pear"), Replace("source", (1, 2), "pear")),
        (Replace("target", "der", "die"), Replace("target", 1, "die")),
        (Zero("decoder.0.self"), Zero("decoder.0.self")),
        (ReplacePositions("rope"), ReplacePositions("rope")),
    ],
)
def test_words_become_the_places_of_their_pieces(change: Intervention, expected: Intervention) -> None:
    assert resolve_words([change], TEXTS, NAMES) == [expected]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Pin("der", "the"), "'the' stands more than once in the input: name a place, 0 and 3"),
        (Pin("Birne", 0), "'Birne' is no word of the output, which is: der Apfel > <eos>"),
        (Pin("<sos>", 0), "'<sos>' is no word of the output"),  # nothing wrote it
        (Pin(0, 6), "the input has no place 6: its places are 0 to 5"),
        (Pin(5, 0), "the output has no place 5: its places are 0 to 4"),
        (Forbid("*", None, "der", 0), "layers of several kinds .cross, decoder, encoder.: name those of one"),
        (Force("decoder.0.self", None, "der", "Apfel"), "comes later than the query"),
        (Replace("source", "pear", "x"), "'pear' is no word of the source"),
    ],
)
def test_words_that_are_not_there_or_twice_are_refused(change: Intervention, why: str) -> None:
    with pytest.raises(RegardError, match=why):
        resolve_words([change], TEXTS, NAMES)


@pytest.mark.parametrize(
    ("change", "names", "why"),
    [
        (
            Forbid(CROSS, None, "der", "Apfel"),
            NAMES[2:3],
            "no attention over a source: name a layer, --forbid 'decoder.*.self@d",
        ),
        (
            Forbid(CROSS, None, 1, 0),
            NAMES[:2],
            "no attention over a source: name a layer, --forbid 'encoder.*.self@1>0'",
        ),
        (Pin("der", 0), NAMES[:2], "no attention over a source: name a layer, --force 'encoder.*.self@der>0'"),
        (
            Force("decoder.7.self", None, "der", 0),
            NAMES[:2],
            "called 'decoder.7.self': the layers of this model are encoder.0",
        ),
    ],
)
def test_layers_that_a_model_has_not_are_refused(change: Intervention, names: list[str], why: str) -> None:
    with pytest.raises(RegardError, match=re.escape(why)):
        resolve_words([change], TEXTS, names)


# ---- other tokens ----------------------------------------------------------------------------------------------------


def spelled(text: str) -> list[int]:
    return [int(part) for part in text.split()]


def test_tokens_are_replaced_wherever_they_stand_and_by_however_many() -> None:
    changes: list[Intervention] = [
        Replace("source", 1, "7"),
        Replace("source", (3, 4), "8 8 8"),
        Replace("target", 0, "9"),
    ]
    assert replace_in_source(changes, [0, 1, 2, 3, 4, 5], spelled) == [0, 7, 2, 8, 8, 8, 5]
    assert replace_in_source([Replace("source", 0, "")], [0, 1], spelled) == [1]
    assert replace_in_source([Zero("*")], [0, 1], spelled) == [0, 1]


def test_a_decoder_is_made_to_have_read_all_up_to_the_last_replaced_token() -> None:
    changes: list[Intervention] = [Replace("target", 1, "7"), Replace("target", 3, "8 8"), Replace("source", 5, "9")]
    assert forced_prefix(changes, [0, 1, 2, 3, 4, 5], spelled) == [0, 7, 2, 8, 8]
    assert forced_prefix(changes[2:], [0, 1, 2], spelled) == []
