"""Random draws of word2vec against their distributions (chi-square, with fixed seeds)."""

from __future__ import annotations

import numpy as np
import torch
from numba import njit

from regard.vectors import word2vec_gpu
from regard.vectors.word2vec_numba import draw_noise, subsample, window_bounds
from regard.vectors.word_counts import Vocabulary, alias_table

DRAWS = 200_000
VOCABULARY = Vocabulary([f"w{i}" for i in range(30)], (1000 / np.arange(1, 31)).astype(np.int64))


def seeded(seed: int) -> np.ndarray:
    return np.array([0x9E3779B97F4A7C15 * (2 * seed + 1) % 2**64], np.uint64)


def unlikely(observed: np.ndarray, expected: np.ndarray) -> bool:
    """Return whether chi-square is above its mean by five of its standard deviations."""
    n = len(expected) - 1
    return ((observed - expected) ** 2 / expected).sum() > n + 5 * (2 * n) ** 0.5


@njit
def draw_many(n: int, share: np.ndarray, other: np.ndarray, state: np.ndarray) -> np.ndarray:
    found = np.zeros(len(share), np.int64)
    for _ in range(n):
        found[draw_noise(state, share, other)] += 1
    return found


def test_negatives_are_drawn_by_counts_to_a_power() -> None:
    p = VOCABULARY.counts**0.75 / (VOCABULARY.counts**0.75).sum()
    found = draw_many(DRAWS, *alias_table(VOCABULARY.noise(0.75)), seeded(1))
    assert not unlikely(found, DRAWS * p)
    assert unlikely(found, DRAWS * VOCABULARY.counts / VOCABULARY.counts.sum())  # the test would see another power


def test_windows_reach_evenly_from_one_to_the_largest() -> None:
    state = seeded(2)
    reaches = [50 - window_bounds(50, 100, 5, True, state)[0] for _ in range(20_000)]
    found = np.bincount(reaches, minlength=6)
    assert found[0] == 0
    assert len(found) == 6
    assert not unlikely(found[1:], np.full(5, 4000.0))


def test_windows_stay_in_their_sentence() -> None:
    state = seeded(3)
    assert window_bounds(0, 3, 5, False, state) == (0, 3)
    assert window_bounds(9, 30, 5, False, state) == (4, 15)
    assert window_bounds(0, 1, 5, True, state) == (0, 1)


def kept_by_threads(text: np.ndarray, keep: np.ndarray) -> np.ndarray:
    kept = np.empty(len(text), np.int32)
    return kept[: subsample(text, keep.astype(np.float32), kept, seeded(4))]


def kept_by_gpu(text: np.ndarray, keep: np.ndarray) -> np.ndarray:
    generator = torch.Generator().manual_seed(4)
    lengths = torch.tensor([len(text)])
    return word2vec_gpu.subsample(torch.from_numpy(text), lengths, torch.from_numpy(keep).float(), generator)[0].numpy()


def test_frequent_words_stay_with_their_probability() -> None:
    rng = np.random.default_rng(0)
    text = rng.choice(30, DRAWS, p=VOCABULARY.counts / VOCABULARY.counts.sum()).astype(np.int32)
    there = np.bincount(text, minlength=30)
    for rule in ("word2vec", "paper"):
        keep = VOCABULARY.keep_probability(0.02, rule)
        assert keep.min() < 0.5
        for kept in (kept_by_threads(text, keep), kept_by_gpu(text, keep)):
            found = np.bincount(kept, minlength=30)
            rare = keep == 1
            assert (found[rare] == there[rare]).all()
            spread = np.sqrt(there * keep * (1 - keep))[~rare]
            assert (np.abs(found - there * keep)[~rare] < 4.5 * spread).all()


def test_the_gpu_keeps_sentences_apart() -> None:
    ids, lengths = torch.arange(6, dtype=torch.int32), torch.tensor([1, 3, 2])
    keep = torch.tensor([1.0, 1, 0, 1, 1, 1])
    left, sentence = word2vec_gpu.subsample(ids, lengths, keep, torch.Generator())
    assert left.tolist() == [0, 1, 3, 4, 5]
    assert sentence.tolist() == [0, 1, 1, 2, 2]
