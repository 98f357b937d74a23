"""BPE-dropout, a subword regularization: during training, merges of byte-pair pieces are undone at random.

A piece that a merge made is split into its two halves with some probability, and so are the halves: "apple" may be read as
"app le" or "a pp le". The model learns what pieces consist of and sees every sentence in many segmentations. Provilkov et
al. (2020) leave merges out while a text is tokenized; undoing them afterwards needs only the ids.
"""

from __future__ import annotations

import json

import numpy as np

from regard.errors import RegardError
from regard.text.tokenizer import Tokenizer, Tokenizers

MAX_DEPTH = 4  # splits of halves of halves ...: with a probability of 0.1 one piece in ten thousand would go deeper


class BPEDropout:
    """Splits merged pieces of texts at random; a text that would become too long stays as it was."""

    def __init__(self, tokenizer: Tokenizer, probability: float) -> None:
        self.halves, self.probability = merge_table(tokenizer), probability  # (V, 2)

    @classmethod
    def for_both_sides(cls, tokenizers: Tokenizers, probability: float) -> tuple[BPEDropout, BPEDropout]:
        """Return the dropout of the source and of the target vocabulary."""
        source = cls(tokenizers.source, probability)
        return source, source if tokenizers.target is tokenizers.source else cls(tokenizers.target, probability)

    def __call__(
        self, ids: np.ndarray, lengths: np.ndarray, max_len: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the ids of texts, one after the other, and their lengths after dropout; texts have up to `max_len` ids."""
        pieces, row = ids, np.repeat(np.arange(len(lengths)), lengths)
        is_new = np.ones(len(ids), bool)  # each merge is drawn for once: a piece that stayed whole is not drawn again
        for _ in range(MAX_DEPTH):
            split = is_new & (rng.random(len(pieces)) < self.probability) & (self.halves[pieces, 0] >= 0)
            pieces, row = split_pieces(pieces, split, self.halves), np.repeat(row, 1 + split)
            is_new = np.repeat(split, 1 + split)
        fits = np.bincount(row, minlength=len(lengths)) <= max_len  # (texts,)
        old_row = np.repeat(np.arange(len(lengths)), lengths)
        chosen_row = np.concatenate([row[fits[row]], old_row[~fits[old_row]]])
        order = chosen_row.argsort(kind="stable")
        chosen = np.concatenate([pieces[fits[row]], ids[~fits[old_row]]])[order]
        return chosen, np.bincount(chosen_row, minlength=len(lengths))


def split_pieces(ids: np.ndarray, split: np.ndarray, halves: np.ndarray) -> np.ndarray:
    """Return the ids with two halves in place of each piece where `split` is set.  # (n,) -> (n + splits,)"""
    made = np.repeat(ids, 1 + split)
    ends = np.cumsum(1 + split)
    made[ends[split] - 1] = halves[ids[split], 1]
    made[ends[split] - 2] = halves[ids[split], 0]
    return made


def merge_table(tokenizer: Tokenizer) -> np.ndarray:
    """Return the ids of the two halves that each piece was merged from, -1 for pieces without a merge.  # (V, 2)"""
    model = json.loads(tokenizer._backend.to_str())["model"]
    if model["type"] != "BPE":
        raise RegardError(
            "tokenizer.bpe_dropout undoes merges, which only a bpe or byte-bpe vocabulary has: leave it at 0"
        )
    vocab, table = model["vocab"], np.full((len(tokenizer), 2), -1, np.int64)
    for merge in model["merges"]:
        left, right = merge.split(" ") if isinstance(merge, str) else merge
        made = vocab[left + right]
        if table[made, 0] < 0:
            table[made] = vocab[left], vocab[right]
    return table
