"""Word alignment: links between the words of a text and those of its translation, from attention weights.

A word is a run of letters or digits, one Chinese character, one private-use character, or one other character that is no
white space, so that a span of characters always covers whole words. The weights of subword pieces become weights of words
(`merge_weights`), and weights of words become links (`link_words`).
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

Span = tuple[int, int]  # begin and end, in characters of a text
Words = Sequence[tuple[str, Sequence[int]]]  # each word, and the positions of its pieces

HAN = "\u3005\u3007\u3400-\u9fff"
WORD = re.compile(rf"[^\W_{HAN}]+|\S")
MIN_WEIGHT = 0.1  # links with a smaller weight are left out, unless a word has no other


class Link(NamedTuple):
    """A link between a word of a text and a word of its translation, in characters of either."""

    source_begin: int
    source_end: int
    target_begin: int
    target_end: int
    weight: float  # how much of the attention of the target word the source word gets, from 0 to 1

    def shift(self, source: int, target: int) -> Link:
        """Return the link of the same words where more characters stand before them."""
        return Link(
            self.source_begin + source,
            self.source_end + source,
            self.target_begin + target,
            self.target_end + target,
            self.weight,
        )


def word_spans(text: str) -> list[Span]:
    """Return where each word of a text begins and ends."""
    return [found.span() for found in WORD.finditer(text)]


def pieces_of_words(words: Sequence[Span], pieces: Sequence[Span], text: str) -> list[list[int]]:
    """Return the positions of the pieces of each word, given the spans of both in one text, in order.

    A piece that covers several words belongs to each of them; the white space at its beginning does not count.
    """
    found: list[list[int]] = [[] for _ in words]
    first = 0
    for i, (begin, end) in enumerate(pieces):
        while begin < end and text[begin].isspace():
            begin += 1
        while first < len(words) and words[first][1] <= begin:
            first += 1
        at = first
        while at < len(words) and words[at][0] < end:
            found[at].append(i)
            at += 1
    return found


def merge_weights(weights: np.ndarray, queries: Words, keys: Words) -> np.ndarray:
    """Return weights of words for weights of pieces: (..., pieces, pieces) -> (..., words, words).

    Keys are summed and queries averaged, so the sums of the rows do not change."""
    merged = np.stack([weights[..., list(places)].sum(-1) for _, places in keys], -1)
    return np.stack([merged[..., list(places), :].mean(-2) for _, places in queries], -2)


def link_words(
    source: str, target: str, sources: Sequence[Span], targets: Sequence[Span], weights: np.ndarray
) -> list[Link]:
    """Return the links of each target word, given the weights (targets, sources) of all words.

    Words are linked to words and punctuation to punctuation, because attention rests on punctuation where a target word
    has no counterpart. The weights of a target word are divided by their sum. A number or name that both texts have once
    is linked to itself.
    """
    if not sources or not targets:
        return []
    texts = [[text[begin:end] for begin, end in spans] for text, spans in ((source, sources), (target, targets))]
    kinds = [np.array([word[0].isalnum() for word in words]) for words in texts]
    allowed = weights * (kinds[1][:, None] == kinds[0][None, :])
    anchors = unique_names(*texts)
    links = []
    for i, row in enumerate(allowed):
        if i in anchors:
            row = np.zeros_like(row)
            row[anchors[i]] = 1.0
        total = row.sum()
        if total <= 0:
            continue
        row = row / total
        best = int(row.argmax())
        links += [
            Link(*sources[j], *targets[i], round(float(row[j]), 4))
            for j in range(len(row))
            if row[j] >= MIN_WEIGHT or j == best
        ]
    return links


def unique_names(sources: Sequence[str], targets: Sequence[str]) -> dict[int, int]:
    """Return the positions of target words that are sure to come from a source word, and the position of that word.

    Such a word has a digit or a capital, and both texts have it once."""
    counts = Counter(sources), Counter(targets)
    place = {word: j for j, word in enumerate(sources)}
    return {
        i: place[word]
        for i, word in enumerate(targets)
        if counts[0][word] == counts[1][word] == 1 and any(char.isdigit() or char.isupper() for char in word)
    }


def compose_links(first: Iterable[Link], second: Iterable[Link]) -> list[Link]:
    """Return the links of a text and its translation by way of a third text.

    `first` links the text to the third one, `second` the third one to the translation. The weight of a link is the sum of
    the products of weights over all words of the third text that lie between."""
    into: dict[Span, list[Link]] = defaultdict(list)
    for link in first:
        into[link.target_begin, link.target_end].append(link)
    weights: dict[tuple[int, int, int, int], float] = defaultdict(float)
    for link in second:
        for before in into[link.source_begin, link.source_end]:
            place = (before.source_begin, before.source_end, link.target_begin, link.target_end)
            weights[place] += before.weight * link.weight
    largest: dict[Span, float] = defaultdict(float)
    for place, weight in weights.items():
        largest[place[2:]] = max(largest[place[2:]], weight)
    kept = (Link(*place, round(w, 4)) for place, w in weights.items() if w >= MIN_WEIGHT or w == largest[place[2:]])
    return sorted(kept, key=lambda link: (link.target_begin, link.source_begin))
