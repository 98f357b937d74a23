"""Beam search with a convolutional model, whose state holds inputs instead of keys, against the oracles."""

from __future__ import annotations

import pytest
import torch
from oracle import every_sequence, random_sources, slow_beam, tiny_transformer
from test_beam_search import assert_same, forward_table, search

from regard.models.transformer import Transformer


def convolutional(seed: int) -> Transformer:
    return tiny_transformer(seed, mixer="convolution", **{"convolution.dilations": (1, 2)}, positions="learned")


@torch.no_grad()
def test_a_convolutional_model_searched_exhaustively() -> None:
    """All translations of two tokens, with log-probabilities from full forward passes without a cache."""
    model, sources = convolutional(0), random_sources(0, 3)
    for source, ranked in zip(sources, search(model, sources, [2] * 3, beam=400, nbest=400), strict=True):
        assert_same(ranked, every_sequence(forward_table(model, source), 2, penalty=1.0), tolerance=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("k", [1, 3, 5])
def test_a_beam_finds_what_a_slow_one_finds_without_a_cache(k: int) -> None:
    model, sources = convolutional(1), random_sources(1, 4)
    found = search(model, sources, [12] * 4, beam=k, nbest=k, beam_stop="proven")
    assert len({len(ranked[0][0]) for ranked in found}) > 1  # some end early
    for source, ranked in zip(sources, found, strict=True):
        expected = slow_beam(forward_table(model, source), k, 12, penalty=1.0)
        assert_same(ranked, expected[: len(ranked)], tolerance=1e-4)
