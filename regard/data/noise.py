"""Noise for pre-training: token masking (BERT), span corruption (T5), text infilling and sentence permutation (BART).

All are pure functions of token ids and a random generator: the same seed hides the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from regard.errors import RegardError
from regard.text.special_tokens import PAD, SpecialTokens
from regard.text.tokenizer_training import SPACE

KEPT, RANDOM = 0.1, 0.1  # shares of the chosen tokens that stay or become random; the others become the mask token


# ---- BERT --------------------------------------------------------------------------------------------------------


def mask_tokens(
    ids: np.ndarray,
    rng: np.random.Generator,
    vocab_size: int,
    special: SpecialTokens,
    rate: float = 0.15,
    words: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels (T,) of masked language modelling; a label is PAD where nothing is to be predicted.

    Special tokens are never chosen, and of the others at least one. With `words` (the word number of each token, -1 for
    special ones) whole words are chosen until there are enough tokens.
    """
    _check(rate)
    if words is None:
        words = np.where(np.isin(ids, special.ids), -1, np.arange(len(ids)))
    chosen = _choose_words(words, rng, rate)
    inputs, labels = ids.copy(), np.full(len(ids), PAD, np.int64)
    labels[chosen] = ids[chosen]
    draw = rng.random(len(chosen))
    pieces = rng.integers(0, vocab_size - len(special.ids), len(chosen))
    for id in special.ids:  # in order: random ids skip each special id
        pieces += pieces >= id
    replaced = np.where(draw < RANDOM, pieces, special.require("mask", "masked language modelling"))  # (chosen,)
    inputs[chosen] = np.where(draw < 1 - KEPT, replaced, ids[chosen])
    return inputs, labels


def _choose_words(words: np.ndarray, rng: np.random.Generator, rate: float) -> np.ndarray:
    """Return the indices of the tokens of random words, as few words as hold a share `rate` of all tokens in words."""
    at = np.flatnonzero(words >= 0)
    if not len(at):
        return at
    _, word, sizes = np.unique(words[at], return_inverse=True, return_counts=True)
    order = rng.permutation(len(sizes))
    enough = np.searchsorted(np.cumsum(sizes[order]), _share(len(at), rate)) + 1
    return at[np.isin(word, order[:enough])]


def word_numbers(ids: Sequence[int] | np.ndarray, pieces: Sequence[str], special: SpecialTokens) -> np.ndarray:
    """Return the word number of each id, -1 for special tokens; `pieces` are their texts, from `Tokenizer.pieces`.

    If any piece begins with "▁", that marks where words begin. Otherwise the pieces are those of WordPiece, where "##" marks
    a piece that continues a word. An unknown token is no word, but a word may continue after it.
    """
    marked, specials = any(piece.startswith(SPACE) for piece in pieces), set(special.ids)
    numbers, word, begins = [], -1, True
    for id, piece in zip(ids, pieces, strict=True):
        if id in specials:
            numbers.append(-1)
            begins = begins or id != special.unk
            continue
        word += begins or (piece.startswith(SPACE) if marked else not piece.startswith("##"))
        numbers.append(word)
        begins = False
    return np.array(numbers, np.int64)


# ---- T5 ----------------------------------------------------------------------------------------------------------


def corrupt_spans(
    ids: np.ndarray, rng: np.random.Generator, sentinels: Sequence[int], rate: float = 0.15, mean_span: float = 3.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return source and target of span corruption (T5).

    In the source each hidden span is one sentinel; the target has each sentinel and its span, then a last sentinel. As in
    T5, kept and hidden spans alternate, a kept one first, and the lengths of each kind are a uniformly random partition.
    So the token of a text of one token is never hidden.
    """
    _check(rate, mean_span)
    n_hidden = min(_share(len(ids), rate), len(ids) - 1)
    if n_hidden < 1:
        return ids.copy(), np.array(_take_sentinels(sentinels, 0, len(ids)), ids.dtype)
    n_spans = min(max(1, round(n_hidden / mean_span)), n_hidden, len(ids) - n_hidden)
    marks = np.array(_take_sentinels(sentinels, n_spans, len(ids)), ids.dtype)[:, None]
    lengths = np.stack([_partition(len(ids) - n_hidden, n_spans, rng), _partition(n_hidden, n_spans, rng)], 1)
    spans = np.split(ids, np.cumsum(lengths)[:-1])
    kept, hidden = spans[0::2], spans[1::2]
    source = [part for pair in zip(kept, marks[:-1], strict=True) for part in pair]
    target = [part for pair in zip(marks[:-1], hidden, strict=True) for part in pair]
    return np.concatenate(source), np.concatenate([*target, marks[-1]])


def _partition(n: int, parts: int, rng: np.random.Generator) -> np.ndarray:
    """Return `parts` lengths of at least 1 that add up to n, drawn uniformly from all such lists."""
    cuts = np.sort(rng.choice(n - 1, parts - 1, replace=False)) + 1
    return np.diff(cuts, prepend=0, append=n)


def _take_sentinels(sentinels: Sequence[int], n_spans: int, length: int) -> Sequence[int]:
    """Return the sentinels for some spans, and one more; too few are an error."""
    if len(sentinels) <= n_spans:
        need = f"{n_spans} hidden spans in a text of {length:,} tokens need {n_spans + 1} sentinels"
        remedy = "give the vocabulary more of them, cut the texts shorter, or hide fewer or longer spans"
        raise RegardError(f"{need}, but there are {len(sentinels)}; {remedy}")
    return sentinels[: n_spans + 1]


# ---- BART --------------------------------------------------------------------------------------------------------


def denoise(
    ids: np.ndarray,
    rng: np.random.Generator,
    mask: int,
    ends: Sequence[int] = (),
    rate: float = 0.3,
    mean_span: float = 3.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Return source and target of BART: the text with sentences permuted and spans hidden, and the original text."""
    return infill(permute_sentences(ids, rng, ends), rng, mask, rate, mean_span), ids.copy()


def infill(
    ids: np.ndarray, rng: np.random.Generator, mask: int, rate: float = 0.3, mean_span: float = 3.0
) -> np.ndarray:
    """Replace spans with a share `rate` of the tokens by a single `mask` each, which does not tell their length.

    Lengths are Poisson distributed; a span of length 0 inserts a mask where nothing is missing. All orders of spans and
    kept tokens are equally likely.
    """
    _check(rate, mean_span)
    n_hidden = _share(len(ids), rate)
    lengths = _poisson_lengths(n_hidden, mean_span, rng)
    n_slots = len(ids) - n_hidden + len(lengths)  # each becomes one token: a kept one or a mask
    spans = rng.choice(n_slots, len(lengths), replace=False)  # in random order, since the last length was cut to fit
    widths = np.ones(n_slots, np.int64)
    widths[spans] = lengths
    source = np.full(n_slots, mask, ids.dtype)
    kept = np.ones(n_slots, bool)
    kept[spans] = False
    source[kept] = ids[(np.cumsum(widths) - 1)[kept]]
    return source


def _poisson_lengths(total: int, mean: float, rng: np.random.Generator) -> list[int]:
    """Draw Poisson lengths until they add up to `total`; the last is cut to fit."""
    lengths, left = [], total
    while left:
        lengths.append(min(int(rng.poisson(mean)), left))
        left -= lengths[-1]
    return lengths


def permute_sentences(ids: np.ndarray, rng: np.random.Generator, ends: Sequence[int]) -> np.ndarray:
    """Permute the sentences randomly; a sentence ends after an id of `ends`, or after the last of several in a row."""
    is_end = np.isin(ids, ends)
    sentences = np.split(ids, np.flatnonzero(is_end[:-1] & ~is_end[1:]) + 1)
    return np.concatenate([sentences[i] for i in rng.permutation(len(sentences))])


# ---- shared ------------------------------------------------------------------------------------------------------


def _share(n: int, rate: float) -> int:
    """Return the share `rate` of n tokens, rounded, but at least one if there is any."""
    return min(n, max(1, round(n * rate)))


def _check(rate: float, mean_span: float = 1.0) -> None:
    if not 0 < rate < 1:
        raise RegardError(f"the rate of hidden tokens is {rate}; it must lie between 0 and 1")
    if not 0 < mean_span < math.inf:
        raise RegardError(f"the mean length of hidden spans is {mean_span}; it must be above 0")
