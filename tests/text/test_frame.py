"""What stands around a text: single texts, pairs, and there and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import EOS, MASK, SOS

from regard.errors import RegardError
from regard.text.special_token_template import CLASSIC, NOTHING, OWN, SpecialTokenTemplate, classic, plain
from regard.text.special_tokens import SpecialTokens
from regard.text.tokenizer_training import LEARNED

IDS = st.lists(st.integers(5, 20), max_size=5)
SPECIALS = st.lists(st.integers(1, 4), max_size=3).map(tuple)
FRAMES = st.builds(SpecialTokenTemplate, SPECIALS, SPECIALS, SPECIALS, SPECIALS)


def test_our_own_and_berts_by_hand() -> None:
    assert OWN.one([7, 8]) == [7, 8, EOS]
    assert CLASSIC.one([7, 8]) == [SOS, 7, 8, EOS]
    assert CLASSIC.pair([7, 8], [9]) == ([SOS, 7, 8, EOS, 9, EOS], [0, 0, 0, 0, 1, 1])


def test_a_pair_between_two_separators() -> None:
    """RoBERTa's."""
    ids, types = SpecialTokenTemplate(before=(SOS,), between=(EOS, EOS), after=(EOS,)).pair([7], [8, 9])
    assert ids == [SOS, 7, EOS, EOS, 8, 9, EOS]
    assert types == [0, 0, 0, 0, 1, 1, 1]


@given(FRAMES, IDS, IDS)
def test_texts_stand_whole_in_their_frame(
    token_template: SpecialTokenTemplate, first: list[int], second: list[int]
) -> None:
    one = token_template.one(first)
    assert [i for i in one if i > MASK] == first
    assert len(one) == len(token_template.before) + len(first) + len(token_template.after)
    ids, types = token_template.pair(first, second)
    assert [i for i in ids if i > MASK] == first + second
    assert types == sorted(types)
    assert types.count(1) == len(second) + len(token_template.after)


@given(FRAMES)
def test_a_frame_comes_back_from_its_dictionary(token_template: SpecialTokenTemplate) -> None:
    assert SpecialTokenTemplate.from_dict(token_template.to_dict()) == token_template
    assert SpecialTokenTemplate.from_dict({}) == OWN  # models from before there were frames


def test_frames_of_a_vocabulary_follow_its_special_tokens() -> None:
    """By hand; a vocabulary that has no token to begin with begins with the one that ends, as GPT-2's."""
    assert (plain(LEARNED), classic(LEARNED)) == (OWN, CLASSIC)
    assert plain(SpecialTokens(bos=7, eos=3)) == SpecialTokenTemplate((), (3,), (3,), (7,), (3,))
    assert classic(SpecialTokens(eos=50256)) == SpecialTokenTemplate((50256,), (50256,), (50256,), (50256,), (50256,))
    with pytest.raises(RegardError, match="no eos token, which the end of a text needs"):
        plain(SpecialTokens(bos=7))


def test_a_text_is_ended_only_where_it_was_not() -> None:
    assert NOTHING.ended(SpecialTokens(eos=9)) == SpecialTokenTemplate((), (9,), (9,), (), ())
    assert OWN.ended(SpecialTokens()) == OWN


def test_what_is_never_generated_is_every_special_token_but_the_end() -> None:
    assert SpecialTokens(bos=5, eos=9, unk=2, mask=7, pad=0).settings() == {
        "eos_token_id": 9, "suppress_tokens": (0, 2, 5, 7),
    }  # fmt: skip
    assert SpecialTokens(bos=9, eos=9, unk=9, pad=9).settings() == {"eos_token_id": 9, "suppress_tokens": ()}
    assert SpecialTokens().settings() == {"eos_token_id": -1, "suppress_tokens": ()}
