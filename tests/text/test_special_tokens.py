"""Special tokens and templates: around single texts and pairs, saved and read back, made from a vocabulary."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokens import BERT_TEMPLATE, EOS, MASK, SOS

from regard.errors import RegardError
from regard.text.special_tokens import (
    DEFAULT_SPECIAL_TOKENS,
    EMPTY_TEMPLATE,
    EOS_TEMPLATE,
    SpecialTokens,
    SpecialTokenTemplate,
    bert_template,
    eos_template,
)

IDS = st.lists(st.integers(5, 20), max_size=5)
SPECIALS = st.lists(st.integers(1, 4), max_size=3).map(tuple)
TEMPLATES = st.builds(SpecialTokenTemplate, SPECIALS, SPECIALS, SPECIALS, SPECIALS)


def test_eos_and_bert_templates_by_hand() -> None:
    assert EOS_TEMPLATE.wrap([7, 8]) == [7, 8, EOS]
    assert BERT_TEMPLATE.wrap([7, 8]) == [SOS, 7, 8, EOS]
    assert BERT_TEMPLATE.wrap_pair([7, 8], [9]) == ([SOS, 7, 8, EOS, 9, EOS], [0, 0, 0, 0, 1, 1])


def test_a_pair_between_two_separators() -> None:
    """RoBERTa puts two separators between the texts of a pair."""
    ids, types = SpecialTokenTemplate(before=(SOS,), between=(EOS, EOS), after=(EOS,)).wrap_pair([7], [8, 9])
    assert ids == [SOS, 7, EOS, EOS, 8, 9, EOS]
    assert types == [0, 0, 0, 0, 1, 1, 1]


@given(TEMPLATES, IDS, IDS)
def test_texts_stand_whole_in_their_template(
    token_template: SpecialTokenTemplate, first: list[int], second: list[int]
) -> None:
    one = token_template.wrap(first)
    assert [i for i in one if i > MASK] == first
    assert len(one) == len(token_template.before) + len(first) + len(token_template.after)
    ids, types = token_template.wrap_pair(first, second)
    assert [i for i in ids if i > MASK] == first + second
    assert types == sorted(types)
    assert types.count(1) == len(second) + len(token_template.after)


@given(TEMPLATES)
def test_a_template_comes_back_from_its_dictionary(token_template: SpecialTokenTemplate) -> None:
    assert SpecialTokenTemplate.from_dict(token_template.to_dict()) == token_template
    assert SpecialTokenTemplate.from_dict({}) == EOS_TEMPLATE  # models that were saved without a template


def test_templates_of_a_vocabulary_follow_its_special_tokens() -> None:
    """Compare with templates by hand; a vocabulary without a begin token, as GPT-2's, uses its end token instead."""
    assert eos_template(DEFAULT_SPECIAL_TOKENS) == EOS_TEMPLATE
    assert bert_template(DEFAULT_SPECIAL_TOKENS) == SpecialTokenTemplate(before=(SOS,))
    assert eos_template(SpecialTokens(bos=7, eos=3)) == SpecialTokenTemplate((), (3,), (3,), (7,), (3,))
    assert bert_template(SpecialTokens(eos=50256)) == SpecialTokenTemplate(
        (50256,), (50256,), (50256,), (50256,), (50256,)
    )
    with pytest.raises(RegardError, match="no eos token, which the end of a text needs"):
        eos_template(SpecialTokens(bos=7))


def test_a_text_is_ended_only_where_it_was_not() -> None:
    assert EMPTY_TEMPLATE.with_end_tokens(SpecialTokens(eos=9)) == SpecialTokenTemplate((), (9,), (9,), (), ())
    assert EOS_TEMPLATE.with_end_tokens(SpecialTokens()) == EOS_TEMPLATE


def test_what_is_never_generated_is_every_special_token_but_the_end() -> None:
    assert SpecialTokens(bos=5, eos=9, unk=2, mask=7, pad=0).model_settings() == {
        "eos_token_id": 9, "suppress_tokens": (0, 2, 5, 7),
    }  # fmt: skip
    assert SpecialTokens(bos=9, eos=9, unk=9, pad=9).model_settings() == {"eos_token_id": 9, "suppress_tokens": ()}
    assert SpecialTokens().model_settings() == {"eos_token_id": -1, "suppress_tokens": ()}
