"""Which words of a sentence its translation was written from: a model and a sentence -> a matrix of words.

The weights are those of cross-attention along the best hypothesis, in a Transformer the mean over a layer's heads. Pieces
are put together to words: what a word of the source is given is the sum over its pieces, and a word of the translation
looks where its pieces look on average. So every row still sums to 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.look.drawn import Drawn
from regard.look.figures import short
from regard.look.record import layers_of, record
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import SPACE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Words = list[tuple[str, list[int]]]  # each word, and the places of its pieces


@dataclass(frozen=True)
class Picture(Drawn):
    layer: str
    translation: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: np.ndarray  # (target, source), from 0 to 1

    def figure(self) -> Figure:
        """Grey from black for 0 to white for 1, as Bahdanau et al. drew it."""
        from matplotlib.figure import Figure

        rows, columns = self.weights.shape
        longest = max(map(len, self.target))
        size = (0.1 * longest + 0.36 * columns + 1.2, 0.36 * rows + 2.2)
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        axes = figure.add_subplot()
        axes.imshow(self.weights, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
        axes.xaxis.tick_top()
        axes.set_xticks(range(columns), self.source, rotation=90, parse_math=False)
        axes.set_yticks(range(rows), self.target, parse_math=False)
        axes.tick_params(length=0)
        return figure

    def numbers(self) -> dict[str, Any]:
        given = {"layer": self.layer, "translation": self.translation, "source": [*self.source]}
        return {**given, "target": [*self.target], "weights": short(self.weights)}


def picture(translator: Translator, text: str, layer: str = "", **options: Any) -> Picture:
    """Translate a sentence and keep where a layer looked, by default the last. Options are those of `[decode]`."""
    if not text.strip():
        raise RegardError("there is nothing to translate: give a sentence")
    name = cross_layer(translator, layer)
    with record(translator.model, name) as tape:
        (translation,) = translator.translate_sentences([text], **options)
    (kept,) = tape[name]
    assert kept.tokens is not None
    begun = len(translator.token_template.start)
    weights = kept.weights()[0].mean(0)[begun - 1 :]  # (T, S): a row for each token that was written
    source = words(translator.tokenizers.source, translator.read(text, options.get("to")))
    target = words(translator.tokenizers.target, kept.tokens[0][begun:])
    merged = by_words(weights.double().cpu().numpy(), target, source)
    return Picture(name, translation.text, tuple(w for w, _ in source), tuple(w for w, _ in target), merged)


def cross_layer(translator: Translator, asked: str) -> str:
    names = [name for name in layers_of(translator.model) if name.split(".")[-1] == "cross"]
    if not names:
        raise RegardError("this model has no attention over its source (model.score none): there is nothing to draw")
    if asked and asked not in names:
        raise RegardError(f"no layer '{asked}' looks at the source: choose one of {', '.join(names)}")
    return asked or names[-1]


def by_words(weights: np.ndarray, target: Words, source: Words) -> np.ndarray:
    """(..., pieces, pieces) -> (..., words, words): sums over keys, means over queries, so rows sum to what they did."""
    given = np.stack([weights[..., places].sum(-1) for _, places in source], -1)
    return np.stack([given[..., places, :].mean(-2) for _, places in target], -2)


def words(tokenizer: Tokenizer, ids: Sequence[int]) -> Words:
    """Pieces put together; special tokens and punctuation stand alone."""
    pieces = tokenizer.pieces(ids)
    spaced = any(SPACE in piece for piece in pieces)  # else it is "##" that tells pieces which go on
    groups: list[list[int]] = []
    for i, piece in enumerate(pieces):
        begins = piece.startswith(SPACE) if spaced else not piece.startswith("##")
        alone = ids[i] in tokenizer.special_ids or (i > 0 and ids[i - 1] in tokenizer.special_ids)
        if i == 0 or begins or alone or unlike(piece, pieces[i - 1].strip(SPACE)):
            groups.append([])
        groups[-1].append(i)
    return [(tokenizer.decode(ids[i] for i in group).strip() or pieces[group[0]], group) for group in groups]


def unlike(piece: str, last: str) -> bool:
    """Whether letters follow punctuation, or the other way round; a space alone is neither."""
    lettered, before = (any(char.isalnum() for char in text) for text in (piece, last))
    return bool(last) and lettered != before
