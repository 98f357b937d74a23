"""Sub-word regularisation of byte-pair vocabularies: in training, merges of a piece are undone at random.

A piece that a merge made is its two halves again with some probability, and so are the halves: "apple" is read as app le,
now and then as a pp le. So a model learns what pieces are made of, and sees every sentence in many cuts (BPE-dropout,
Provilkov et al. 2020, which leaves merges out while cutting; undoing them afterwards needs no text, only ids).
"""

from __future__ import annotations

import json

import numpy as np

from regard.errors import RegardError
from regard.text.tokenizer import Tokenizer, Tokenizers

DEEPEST = 4  # a quarter of a quarter ...: with a chance of 0.1 one piece in ten thousand would go deeper


class BPEDropout:
    """The same texts in another cut. A text that would then be longer than its room stays as it was."""

    def __init__(self, tokenizer: Tokenizer, chance: float) -> None:
        self.halves, self.chance = halves(tokenizer), chance  # (V, 2), -1: not made by a merge

    @classmethod
    def both(cls, tokenizers: Tokenizers, chance: float) -> tuple[BPEDropout, BPEDropout]:
        """Of either side's vocabulary."""
        source = cls(tokenizers.source, chance)
        return source, source if tokenizers.target is tokenizers.source else cls(tokenizers.target, chance)

    def __call__(
        self, ids: np.ndarray, lengths: np.ndarray, room: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Texts end to end, and their lengths -> the same after chance."""
        cut, row = ids, np.repeat(np.arange(len(lengths)), lengths)
        fresh = np.ones(len(ids), bool)  # a merge has its chance once: those that stay do so for good
        for _ in range(DEEPEST):
            split = fresh & (rng.random(len(cut)) < self.chance) & (self.halves[cut, 0] >= 0)
            cut, row = undone(cut, split, self.halves), np.repeat(row, 1 + split)
            fresh = np.repeat(split, 1 + split)
        fits = np.bincount(row, minlength=len(lengths)) <= room
        whole = np.repeat(np.arange(len(lengths)), lengths)
        every = np.concatenate([row[fits[row]], whole[~fits[whole]]])
        order = every.argsort(kind="stable")
        made = np.concatenate([cut[fits[row]], ids[~fits[whole]]])[order]
        return made, np.bincount(every, minlength=len(lengths))


def undone(ids: np.ndarray, split: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Those pieces where `split` is set become two.  # (n,) -> (n + splits,)"""
    made = np.repeat(ids, 1 + split)
    ends = np.cumsum(1 + split)
    made[ends[split] - 1] = halves[ids[split], 1]
    made[ends[split] - 2] = halves[ids[split], 0]
    return made


def halves(tokenizer: Tokenizer) -> np.ndarray:
    """What each piece was merged from."""
    model = json.loads(tokenizer._backend.to_str())["model"]
    if model["type"] != "BPE":
        raise RegardError("tokenizer.dropout undoes merges, which only a bpe or byte-bpe vocabulary has: leave it at 0")
    vocab, table = model["vocab"], np.full((len(tokenizer), 2), -1, np.int64)
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made = vocab[left + right]
        if table[made, 0] < 0:
            table[made] = vocab[left], vocab[right]
    return table
