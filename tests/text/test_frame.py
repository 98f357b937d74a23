"""What stands around a text: single texts, pairs, and there and back."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from tokens import EOS, MASK, SOS

from regard.text.frame import CLASSIC, OWN, Frame

IDS = st.lists(st.integers(5, 20), max_size=5)
SPECIALS = st.lists(st.integers(1, 4), max_size=3).map(tuple)
FRAMES = st.builds(Frame, SPECIALS, SPECIALS, SPECIALS, SPECIALS)


def test_our_own_and_berts_by_hand() -> None:
    assert OWN.one([7, 8]) == [7, 8, EOS]
    assert CLASSIC.one([7, 8]) == [SOS, 7, 8, EOS]
    assert CLASSIC.pair([7, 8], [9]) == ([SOS, 7, 8, EOS, 9, EOS], [0, 0, 0, 0, 1, 1])


def test_a_pair_between_two_separators() -> None:
    """RoBERTa's."""
    ids, types = Frame(before=(SOS,), between=(EOS, EOS), after=(EOS,)).pair([7], [8, 9])
    assert ids == [SOS, 7, EOS, EOS, 8, 9, EOS]
    assert types == [0, 0, 0, 0, 1, 1, 1]


@given(FRAMES, IDS, IDS)
def test_texts_stand_whole_in_their_frame(frame: Frame, first: list[int], second: list[int]) -> None:
    one = frame.one(first)
    assert [i for i in one if i > MASK] == first
    assert len(one) == len(frame.before) + len(first) + len(frame.after)
    ids, types = frame.pair(first, second)
    assert [i for i in ids if i > MASK] == first + second
    assert types == sorted(types)
    assert types.count(1) == len(second) + len(frame.after)


@given(FRAMES)
def test_a_frame_comes_back_from_its_dictionary(frame: Frame) -> None:
    assert Frame.from_dict(frame.to_dict()) == frame
    assert Frame.from_dict({}) == OWN  # models from before there were frames
