"""Word alignment of given pairs of texts by the cross-attention of a translation model (decode/source_attention.py)."""

from __future__ import annotations

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np

from regard.decode.source_attention import forced_attention
from regard.models.model import TranslationModel
from regard.text.alignment import Link, Span, link_words, merge_weights, pieces_of_words, word_spans
from regard.text.casing import ASCII_QUOTES
from regard.text.placeholders import protected_pattern
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizers

# ---- pairs of sentences ----------------------------------------------------------------------------------------------


def align_pairs(
    model: TranslationModel,
    tokenizers: Tokenizers,
    token_template: SpecialTokenTemplate,
    pairs: Sequence[tuple[str, str]],
    languages: Sequence[tuple[str, str]],
    tags: Sequence[Sequence[int]],
    max_len: int,
) -> list[list[Link]]:
    """Return the links of pairs of sentences, given their languages and the language tokens before each source.

    A side that is longer than the model reads has no links beyond its first `max_len` tokens. What the translation keeps
    unchanged (links, code, private-use characters, ...: text/placeholders.py) is linked to itself and not read."""
    masked = [
        MaskedPair(*pair, protected_pattern(*pair_languages))
        for pair, pair_languages in zip(pairs, languages, strict=True)
    ]
    encoded = [
        (
            tokenizers.source.encode_with_offsets(pair.source_text),
            tokenizers.target.encode_with_offsets(pair.target_text),
        )
        for pair in masked
    ]
    room = max_len - len(token_template.wrap(())) - max(map(len, tags), default=0)
    sources = [[*tag, *source[0][:room]] for tag, (source, _) in zip(tags, encoded, strict=True)]
    targets = [target[0][: max_len - len(token_template.start)] for _, target in encoded]
    weights = forced_attention(model, sources, targets, token_template) if pairs else []
    found = []
    for pair, tag, (source, target), own in zip(masked, tags, encoded, weights, strict=True):
        before = len(token_template.before) + len(tag)
        inner = own[:, before : before + len(source[1][:room])]
        found.append(pair.links(inner, source[1][:room], target[1]))
    return found


class MaskedPair:
    """A pair of sentences with placeholders for what both have and is not translated, and the links of these."""

    def __init__(self, source: str, target: str, pattern: re.Pattern[str]) -> None:
        self.source, self.target = source, target
        same = equal_spans(source, target, pattern)
        numbers = {pair: i for i, pair in enumerate(same, 1)}
        self.kept = [Link(*one, *other, 1.0) for one, other in same]
        self.source_text, self.source_words = mask_spans(source, {one: i for (one, _), i in numbers.items()})
        self.target_text, self.target_words = mask_spans(target, {other: i for (_, other), i in numbers.items()})

    def links(self, weights: np.ndarray, source_pieces: Sequence[Span], target_pieces: Sequence[Span]) -> list[Link]:
        """Return the links of all words, given the weights (T, S) and spans of the pieces of the masked sentences."""
        sides = (
            (self.source_text, self.source_words, source_pieces[: weights.shape[1]]),
            (self.target_text, self.target_words, target_pieces[: weights.shape[0]]),
        )
        groups = [pieces_of_words([masked for _, masked in words], pieces, text) for text, words, pieces in sides]
        found = [
            [(span, ("", places)) for (span, _), places in zip(words, own, strict=True) if places]
            for (_, words, _), own in zip(sides, groups, strict=True)
        ]
        sources, targets = found
        links = list(self.kept)
        if sources and targets:
            merged = merge_weights(weights, [word for _, word in targets], [word for _, word in sources])
            spans = [span for span, _ in sources], [span for span, _ in targets]
            links += link_words(self.source, self.target, *spans, merged)
        return sorted(links, key=lambda link: (link.target_begin, link.source_begin))


def equal_spans(source: str, target: str, pattern: re.Pattern[str]) -> list[tuple[Span, Span]]:
    """Return the spans of matches of a pattern that both texts have, in pairs: the first with the first, and so on.

    Private-use characters are matched one by one, because a translation may have them in another order."""
    waiting: dict[str, list[Span]] = defaultdict(list)
    for span in match_spans(target, pattern):
        waiting[target[slice(*span)]].append(span)
    spans = ((span, waiting[source[slice(*span)]]) for span in match_spans(source, pattern))
    return [(span, others.pop(0)) for span, others in spans if others]


def match_spans(text: str, pattern: re.Pattern[str]) -> Iterator[Span]:
    """Yield the spans of the matches of a pattern; private-use characters are spans of their own."""
    for found in pattern.finditer(text):
        if unicodedata.category(found[0][0]) == "Co":
            yield from ((i, i + 1) for i in range(*found.span()))
        else:
            yield found.span()


def mask_spans(text: str, numbers: dict[Span, int]) -> tuple[str, list[tuple[Span, Span]]]:
    """Return a text with a placeholder of this number for each span, without asterisks, and where its other words are.

    The words are given as spans of the text as it was and of the text that is returned, in which curly quotation marks and
    white space are plain."""
    masked, words, at = "", [], 0
    for (begin, end), number in [*sorted(numbers.items()), ((len(text), len(text)), 0)]:
        outside = text[at:begin]
        words += [((at + b, at + e), (len(masked) + b, len(masked) + e)) for b, e in word_spans(outside)]
        masked += "".join(" " if char.isspace() else char for char in outside).translate(ASCII_QUOTES)
        masked += f"⟦{number}⟧" if number and text[begin:end].strip("*_") else ""
        at = end
    return masked, words
