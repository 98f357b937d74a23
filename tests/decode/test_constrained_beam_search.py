"""Constrained beam search: phrases are always there, against exhaustive search, and equal to beam search without any."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial

import numpy as np
import pytest
import torch
from oracle import FIRST_WORD, Said, TableModel, every_sequence, padded, random_sources, random_table, tiny_transformer
from tokens import EOS

from regard.config import DecodeConfig
from regard.decode.beam_search import beam_search
from regard.decode.constrained_beam_search import (
    OutputConstraints,
    Phrase,
    allocate,
    constrained_beam_search,
    decode_constrained,
)
from regard.decode.constraints import Hypothesis

CPU = torch.device("cpu")
NAMES = [[5], [6], [7]]
A, B, C = FIRST_WORD, FIRST_WORD + 1, FIRST_WORD + 2


def must_contain(*phrases: Sequence[int], **other: int) -> OutputConstraints:
    return OutputConstraints(tuple(Phrase(tuple(ids)) for ids in phrases), **other)


def search(
    model: object, sources: list[list[int]], limits: list[int], constraints: list[OutputConstraints], **options: object
) -> list[list[Hypothesis]]:
    return constrained_beam_search(
        model,  # type: ignore[arg-type]
        padded(sources),
        torch.tensor(limits),
        constraints,
        DecodeConfig(**options),  # type: ignore[arg-type]
    )


def contains(tokens: Sequence[int], *phrases: Sequence[int]) -> bool:
    """Whether the phrases stand in the tokens without overlapping, by trying all places."""
    if not phrases:
        return True
    first, n = [*phrases[0]], len(phrases[0])
    places = [i for i in range(len(tokens) - n + 1) if list(tokens[i : i + n]) == first]
    return any(contains([*tokens[:i], -7, *tokens[i + n :]], *phrases[1:]) for i in places)


def assert_same(found: list[Hypothesis], expected: Sequence[Said | Hypothesis]) -> None:
    rows = [(s.tokens, s.score, s.log_prob, s.ended) if isinstance(s, Hypothesis) else s for s in expected]
    assert [(h.tokens, h.ended) for h in found] == [(tokens, ended) for tokens, _, _, ended in rows]
    np.testing.assert_allclose([h.score for h in found], [score for _, score, _, _ in rows], atol=1e-5)
    np.testing.assert_allclose([h.log_prob for h in found], [log_prob for _, _, log_prob, _ in rows], atol=1e-5)


# ---- without phrases -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", ["likely", "proven"])
@pytest.mark.parametrize("penalty", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("beam", [1, 2, 5])
def test_without_constraints_it_is_beam_search(beam: int, penalty: float, stop: str) -> None:
    model, sources = tiny_transformer(seed=3), random_sources(seed=4, count=6)
    options = DecodeConfig(beam=beam, nbest=beam, length_penalty=penalty, beam_stop=stop)
    limits = torch.tensor([4, 9, 14, 20, 3, 12])
    expected = beam_search(model, padded(sources), limits, options)
    found = constrained_beam_search(model, padded(sources), limits, [OutputConstraints()] * 6, options)
    for one, other in zip(found, expected, strict=True):
        assert_same(one, other)


# ---- phrases ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [0.0, 1.0])
@pytest.mark.parametrize("phrases", [[(A,)], [(A, B)], [(B,), (A,)], [(C, C)], [(A, B), (B,)], [(B,), (B,)]])
def test_a_beam_as_wide_as_the_language_is_exhaustive_search_among_what_satisfies(
    phrases: list[tuple[int, ...]], penalty: float
) -> None:
    table = random_table(seed=1, words=3)
    found = search(
        TableModel(table), NAMES, [4] * 3, [must_contain(*phrases)] * 3, beam=500, nbest=500, length_penalty=penalty
    )
    for name, ranked in zip(NAMES, found, strict=True):
        every = every_sequence(partial(table, name[0]), 4, penalty)
        expected = [said for said in every if contains(said[0], *phrases)]
        assert expected
        assert_same(ranked, expected)


@pytest.mark.parametrize("beam", [1, 2, 4, 9])
def test_random_phrases_are_always_there(beam: int) -> None:
    rng = random.Random(beam)
    for seed in range(6):
        model, sources = tiny_transformer(seed=seed, end=rng.choice([0.0, 2.0, 4.0])), random_sources(seed, count=5)
        words = range(FIRST_WORD, model.config.target_vocab)
        drawn = [
            [tuple(rng.choices(words, k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
            for _ in range(len(sources))
        ]
        limits = [rng.randint(1, 20) for _ in sources]
        found = search(model, sources, limits, [must_contain(*own) for own in drawn], beam=beam, nbest=1)
        for own, limit, ranked in zip(drawn, limits, found, strict=True):
            assert ranked
            for hypothesis in ranked:
                assert contains(hypothesis.tokens, *own)
                assert len(hypothesis.tokens) + hypothesis.ended <= max(limit, sum(map(len, own)) + 1)


def test_a_phrase_is_forced_before_the_limit() -> None:
    """A model that never says A, in as many steps as the phrase and the end token have."""

    def table(name: int, said: tuple[int, ...]) -> np.ndarray:
        log_p = np.full(FIRST_WORD + 3, -1.0)
        log_p[A], log_p[EOS] = -50.0, -9.0
        return log_p

    (ranked,) = search(TableModel(table), [[5]], [2], [must_contain((A, A, A))], beam=3)
    assert contains(ranked[0].tokens, (A, A, A))
    assert len(ranked[0].tokens) <= 4  # the limit is raised to the phrase and the end token
    (ranked,) = search(TableModel(table), [[5]], [6], [must_contain((A, A, A))], beam=3)
    assert contains(ranked[0].tokens, (A, A, A))


def test_what_a_sentence_must_contain_does_not_depend_on_its_neighbours() -> None:
    model, sources = tiny_transformer(seed=1), random_sources(seed=2, count=5)
    drawn = [
        must_contain((A, B)),
        must_contain(),
        must_contain((C,), (B, A)),
        must_contain(no_repeat_ngram_size=2),
        must_contain((A,)),
    ]
    options = DecodeConfig(beam=4, nbest=2)
    together = decode_constrained(model, sources, drawn, options, 64, CPU)
    alone = [decode_constrained(model, [s], [d], options, 64, CPU)[0] for s, d in zip(sources, drawn, strict=True)]
    for one, other in zip(together, alone, strict=True):
        assert_same(one, other)


def test_a_phrase_is_written_otherwise_at_the_beginning() -> None:
    table = random_table(seed=5, words=3)
    phrase = OutputConstraints((Phrase((A, B), (C, B)),))
    found = search(TableModel(table), NAMES, [4] * 3, [phrase] * 3, beam=500, nbest=500)
    for name, ranked in zip(NAMES, found, strict=True):
        every = every_sequence(partial(table, name[0]), 4, 1.0)
        expected = [s for s in every if contains(s[0], (A, B)) or s[0][:2] == [C, B]]
        assert_same(ranked, expected)


def test_a_phrase_ends_where_a_word_ends() -> None:
    table = random_table(seed=6, words=3)
    continues = torch.zeros(FIRST_WORD + 3, dtype=torch.bool)
    continues[C] = True
    options = DecodeConfig(beam=50, nbest=50)
    found = constrained_beam_search(
        TableModel(table),
        padded(NAMES),
        torch.tensor([4] * 3),
        [must_contain((A,))] * 3,
        options,
        continues_word=continues,
    )
    for ranked in found:
        assert ranked
        assert all(h.tokens[h.tokens.index(A) + 1 : h.tokens.index(A) + 2] != [C] for h in ranked)


# ---- repetitions -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_ngram_is_repeated(n: int) -> None:
    model, sources = tiny_transformer(seed=8, end=0.0), random_sources(seed=9, count=6)
    plain = search(model, sources, [30] * 6, [OutputConstraints()] * 6, beam=3)
    found = search(model, sources, [30] * 6, [must_contain(no_repeat_ngram_size=n)] * 6, beam=3)

    def ngrams(tokens: list[int]) -> list[tuple[int, ...]]:
        return [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]

    assert any(len(set(ngrams(h.tokens))) < len(ngrams(h.tokens)) for ranked in plain for h in ranked)
    for ranked in found:
        assert all(len(set(ngrams(h.tokens))) == len(ngrams(h.tokens)) for h in ranked)


# ---- allocation ------------------------------------------------------------------------------------------------------


def test_places_are_divided_among_banks_that_have_candidates() -> None:
    assert allocate([0, 0, 0, 0], 3) == [0, 1, 2]
    assert allocate([0, 0, 0, 1, 1, 2], 4) == [0, 3, 4, 5]  # 2, 1, 0, and 1 again
    assert allocate([0, 0, 2], 2) == [0, 2]
    assert allocate([0, 1, 2, 3], 2) == [2, 3]
    assert allocate([], 4) == []
