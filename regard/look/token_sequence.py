"""A sequence of tokens as it is labelled along an axis of attention weights, and its grouping into words.

Subword pieces can be merged into words: a word of the keys gets the sum of the weights of its pieces, and a word of the
queries the mean of the rows of its pieces. So every row still sums to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from unicodedata import category

import numpy as np

from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import SPACE


@dataclass(frozen=True)
class TokenSequence:
    """Tokens, words or image patches that are read together."""

    label: str  # what they are: "source token"
    ids: tuple[int, ...]  # empty for words
    pieces: tuple[str, ...]
    words: tuple[tuple[str, tuple[int, ...]], ...]  # each with the positions of its pieces
    special: tuple[bool, ...]  # whether each is a special token or punctuation
    first_is_sink: bool = False  # the first token of a language model is an attention sink too

    def __len__(self) -> int:
        return len(self.pieces)

    @property
    def sinks(self) -> np.ndarray:
        """The likely attention sinks (n,): special tokens, punctuation, and the first token of a language model."""
        found = np.array(self.special, bool)
        found[0] |= self.first_is_sink
        return found

    def merge_words(self) -> TokenSequence:
        """Return the sequence of words; a word is special if all of its pieces are."""
        special = tuple(all(self.special[i] for i in places) for _, places in self.words)
        first = self.first_is_sink and bool(self.sinks[list(self.words[0][1])].all())
        names = tuple(word for word, _ in self.words)
        return TokenSequence(self.label.replace("token", "word"), (), names, single_words(names), special, first)

    def without_sinks(self) -> TokenSequence:
        """Return the sequence without its likely attention sinks."""
        kept = np.flatnonzero(~self.sinks)
        names = tuple(self.pieces[i] for i in kept)
        special = tuple(self.special[i] for i in kept)
        return TokenSequence(self.label, (), names, single_words(names), special)


def token_sequence(label: str, tokenizer: Tokenizer, ids: Sequence[int], first_is_sink: bool = False) -> TokenSequence:
    """Return the tokens of these ids with their pieces and words."""
    pieces = tokenizer.pieces(ids)
    special = (id in tokenizer.special_ids or is_punctuation(piece) for id, piece in zip(ids, pieces, strict=True))
    words = tuple((word, tuple(places)) for word, places in group_words(tokenizer, ids))
    return TokenSequence(label, tuple(ids), tuple(pieces), words, tuple(special), first_is_sink)


def patch_sequence(rows: int, columns: int) -> TokenSequence:
    """Return the tokens of a vision Transformer: the summary token and the patches, row by row."""
    names = ("summary", *(f"{i + 1},{j + 1}" for i in range(rows) for j in range(columns)))
    special = tuple(place == 0 for place in range(len(names)))
    return TokenSequence("patch (row, column)", tuple(range(len(names))), names, single_words(names), special)


def single_words(names: Sequence[str]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return words that are one piece each."""
    return tuple((name, (place,)) for place, name in enumerate(names))


def is_punctuation(piece: str) -> bool:
    """Return whether a piece is punctuation or white space only."""
    return all(category(char)[0] in "PZC" for char in piece.replace(SPACE, " "))


def group_words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[str, list[int]]]:
    """Return the words of a text, each with the positions of its pieces; special tokens and punctuation stand alone."""
    pieces = tokenizer.pieces(ids)
    spaced = any(SPACE in piece for piece in pieces)  # else pieces inside a word begin with "##"
    groups: list[list[int]] = []
    for i, piece in enumerate(pieces):
        begins = piece.startswith(SPACE) if spaced else not piece.startswith("##")
        alone = ids[i] in tokenizer.special_ids or (i > 0 and ids[i - 1] in tokenizer.special_ids)
        if i == 0 or begins or alone or is_word_boundary(pieces[i - 1].strip(SPACE), piece):
            groups.append([])
        groups[-1].append(i)
    return [(tokenizer.decode(ids[i] for i in group).strip() or pieces[group[0]], group) for group in groups]


def is_word_boundary(before: str, piece: str) -> bool:
    """Return whether letters follow punctuation or punctuation letters; white space alone is neither."""
    has_letters, had_letters = (any(char.isalnum() for char in text) for text in (piece, before))
    return bool(before) and has_letters != had_letters
