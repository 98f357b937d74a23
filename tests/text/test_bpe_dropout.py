"""BPE-dropout: other segmentations of the same text."""

from __future__ import annotations

import random

import numpy as np
import pytest

from regard.config import TokenizerConfig
from regard.errors import RegardError
from regard.text.bpe_dropout import BPEDropout, merge_table
from regard.text.tokenizer import Tokenizer

WORDS = ["apple", "apples", "table", "tables", "able", "stable", "unstable", "苹果", "苹果树", "übermorgen", "morgen"]
ROOM = 1000


def lines() -> list[str]:
    rng = random.Random(0)
    return [" ".join(rng.choices(WORDS, k=6)) for _ in range(300)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.train(lines(), TokenizerConfig(kind="byte-bpe", vocab_size=340, language_tokens=("de", "fr")))


def joined(tokenizer: Tokenizer, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    encoded = tokenizer.encode_batch(texts)
    return np.array([i for ids in encoded for i in ids]), np.array([len(ids) for ids in encoded])


def rows(ids: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


@pytest.mark.parametrize("kind", ["byte-bpe", "bpe"])
@pytest.mark.parametrize("chance", [0.0, 0.1, 0.5, 1.0])
def test_the_text_is_always_the_same(kind: str, chance: float) -> None:
    tokenizer = Tokenizer.train(lines(), TokenizerConfig(kind=kind, vocab_size=340))
    texts = [*lines()[:50], "", "a"]
    ids, lengths = joined(tokenizer, texts)
    made, new = BPEDropout(tokenizer, chance)(ids, lengths, ROOM, np.random.default_rng(1))
    assert tokenizer.decode_batch(rows(made, new)) == texts
    assert (new >= lengths).all()
    assert (new.sum() > lengths.sum()) == (chance > 0)
    assert new.sum() == len(made)


def test_halves_are_what_a_piece_was_merged_from(tokenizer: Tokenizer) -> None:
    table = merge_table(tokenizer)
    assert table.shape == (len(tokenizer), 2)
    assert (table[: 5 + 2] == -1).all()  # special tokens and language tags have no halves
    merged = [i for i in range(len(tokenizer)) if table[i, 0] >= 0]
    assert len(merged) == len(tokenizer) - 7 - 256
    names = [tokenizer._backend.id_to_token(i) or "" for i in range(len(tokenizer))]
    assert all(names[i] == names[table[i, 0]] + names[table[i, 1]] for i in merged)


def test_merges_are_undone_at_the_rate_asked_for(tokenizer: Tokenizer) -> None:
    """Compare the counts of splits with their probabilities by a chi-square test.

    A piece of a merged half and a byte stays whole with 1 - p, becomes two with p (1 - p) and three with p p; 13.8 is the
    99.9% quantile of chi-square with two degrees of freedom.
    """
    table = merge_table(tokenizer)
    deep = next(i for i in range(len(table)) if table[i, 0] >= 0 and (table[table[i]][:, 0] >= 0).sum() == 1
                and all((table[table[h]][:, 0] < 0).all() for h in table[i] if table[h, 0] >= 0))  # fmt: skip
    n, p = 20_000, 0.3
    made, new = BPEDropout(tokenizer, p)(np.full(n, deep), np.ones(n, np.int64), ROOM, np.random.default_rng(3))
    seen = np.bincount(new, minlength=4)[1:4]
    expected = n * np.array([1 - p, p * (1 - p), p * p])
    assert ((seen - expected) ** 2 / expected).sum() < 13.8
    assert new.sum() == len(made)


def test_a_text_without_room_stays_as_it_was(tokenizer: Tokenizer) -> None:
    ids, lengths = joined(tokenizer, lines()[:40])
    room = int(lengths.max()) + 3
    dropout = BPEDropout(tokenizer, 0.5)
    made, new = dropout(ids, lengths, room, np.random.default_rng(5))
    assert (new <= room).all()
    before, after = rows(ids, lengths), rows(made, new)
    assert {len(b) == len(a) for b, a in zip(before, after, strict=True)} == {True, False}
    assert all(b == a for b, a in zip(before, after, strict=True) if len(b) == len(a))


def test_the_same_generator_makes_the_same_cuts(tokenizer: Tokenizer) -> None:
    ids, lengths = joined(tokenizer, lines()[:20])
    first, second, other = (BPEDropout(tokenizer, 0.2)(ids, lengths, ROOM, np.random.default_rng(s)) for s in (7, 7, 8))
    assert np.array_equal(first[0], second[0])
    assert not np.array_equal(first[0], other[0])


def test_nothing_in_nothing_out(tokenizer: Tokenizer) -> None:
    empty = np.array([], np.int64)
    made, new = BPEDropout(tokenizer, 0.5)(empty, np.zeros(3, np.int64), ROOM, np.random.default_rng(0))
    assert len(made) == 0
    assert new.tolist() == [0, 0, 0]


def test_only_vocabularies_of_merges_have_any() -> None:
    words = Tokenizer.train(lines(), TokenizerConfig(kind="word", vocab_size=60))
    with pytest.raises(RegardError, match=r"tokenizer\.bpe_dropout .* only a bpe or byte-bpe vocabulary"):
        merge_table(words)
