"""Figures of attention weights: heat-maps of one head, of all heads of a layer, or of all layers and heads of a kind.

    draw_attention("runs/multi30k-en-de", "A man eats an apple.", layer="decoder.2.cross",
    words=True).save(Path("a.png"))

Rows are queries, columns are keys, and every row sums to one, which is checked. All maps of a figure are on one scale.
The figure of a vision Transformer shows the weights of its summary token over the image; the numbers are those of all
tokens.

`draw_alignment` draws the alignment of a translation with its source, as Bahdanau et al. did: the cross-attention of
one layer, in a Transformer the mean over its heads, with pieces merged into words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.files import disk_errors
from regard.inference.translator import Translator
from regard.look.figures import Drawable, HeatMap, draw_small_multiples, rounded, write_csv
from regard.look.interventions import LAYER_KINDS, layer_kind
from regard.look.model_trace import body_of, package_of
from regard.look.record import attention_layers, checked_indices, record
from regard.look.recorded_forward import RecordedForward, check_attention, record_forward
from regard.look.token_sequence import TokenSequence, group_words
from regard.text.alignment import merge_weights

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

HEADS_IN_A_ROW = 4  # where one layer is drawn


@dataclass(frozen=True)
class LayerWeights:
    """The attention weights of some heads of one layer."""

    layer: str
    heads: tuple[int, ...]
    weights: np.ndarray  # (H, T, S)
    queries: TokenSequence
    keys: TokenSequence
    off: float  # the largest |sum of a row - 1|, before keys were hidden

    def merge_words(self) -> LayerWeights:
        """Return the weights of words instead of pieces."""
        weights = merge_weights(self.weights, self.queries.words, self.keys.words)
        return replace(self, weights=weights, queries=self.queries.merge_words(), keys=self.keys.merge_words())

    def hide_sinks(self, renormalize: bool) -> LayerWeights:
        """Return the weights without keys that are sinks; renormalised, rows sum to one again where any weight is left."""
        sinks = self.keys.sinks
        if sinks.all():
            raise RegardError("every key is a special token or punctuation: nothing is left without --hide-sinks")
        weights = self.weights[..., ~sinks]
        if renormalize:
            left = weights.sum(-1, keepdims=True)
            weights = np.divide(weights, left, out=np.zeros_like(weights), where=left > 0)
        return replace(self, weights=weights, keys=self.keys.without_sinks())

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a line for each weight, for a table."""
        for (h, i, j), weight in np.ndenumerate(self.weights):
            at = {"layer": self.layer, "head": self.heads[h], "query": i, "query token": self.queries.pieces[i]}
            yield {**at, "key": j, "key token": self.keys.pieces[j], "weight": f"{weight:.6g}"}

    def numbers(self) -> dict[str, Any]:
        at = {"layer": self.layer, "kind": layer_kind(self.layer), "heads": [*self.heads], "row_sums_off_by": self.off}
        tokens = {"queries": [*self.queries.pieces], "keys": [*self.keys.pieces]}
        return {**at, **tokens, "weights": rounded(self.weights)}


@dataclass(frozen=True)
class AttentionFigure(Drawable):
    """The attention weights of one input, as heat-maps and as numbers."""

    text: str
    output: str  # a translation
    maps: tuple[LayerWeights, ...]
    note: str = ""  # which keys are hidden
    pixels: np.ndarray | None = None  # (height, width, channels) uint8 of an image
    grid: tuple[int, int] = (0, 0)  # rows and columns of its patches

    @property
    def axes(self) -> tuple[str, str]:
        """The labels of rows and columns."""
        return f"query: {self.maps[0].queries.label}", f"key: {self.maps[0].keys.label}"

    def figure(self) -> Figure:
        columns = len(self.maps[0].heads) if len(self.maps) > 1 else min(HEADS_IN_A_ROW, len(self.maps[0].heads))
        panels = self.panels()
        off = max(kept.off for kept in self.maps)
        who = "" if self.pixels is None else "where the summary token looks"
        lines = [self.text, self.output, who, self.note or f"rows sum to 1 (off by {off:.0e} at most)"]
        return draw_small_multiples("\n".join(filter(None, lines)), panels, columns, "attention weight")

    def panels(self) -> list[HeatMap]:
        y, x = self.axes
        most = self.largest_weight()
        found: list[HeatMap] = []
        for kept in self.maps:
            for head, weights in zip(kept.heads, kept.weights, strict=True):
                title = f"{kept.layer}, head {head}"
                if self.pixels is None:
                    found.append(HeatMap(title, weights, kept.queries.pieces, kept.keys.pieces, x, y, most))
                else:
                    found.append(self.overlay(title, weights, most))
        return found

    def largest_weight(self) -> float:
        if self.pixels is None:
            return max(float(kept.weights.max()) for kept in self.maps)
        return max(float(self.patches(weights).max()) for kept in self.maps for weights in kept.weights)

    def patches(self, weights: np.ndarray) -> np.ndarray:
        """Return the weights of the summary token on each patch; its own key comes first, if it is not hidden."""
        rows, columns = self.grid
        return weights[0, -rows * columns :].reshape(rows, columns)

    def overlay(self, title: str, weights: np.ndarray, most: float) -> HeatMap:
        rows, columns = self.grid
        names = tuple(map(str, range(1, rows + 1))), tuple(map(str, range(1, columns + 1)))
        assert self.pixels is not None
        return ImageOverlay(
            title, self.patches(weights), *names, "key: column of patches", "key: row of patches", most, self.pixels
        )

    def numbers(self) -> dict[str, Any]:
        y, x = self.axes
        given = {"text": self.text, "output": self.output, "rows": y, "columns": x, "hidden": self.note}
        return {**given, "maps": [kept.numbers() for kept in self.maps]}

    def save_csv(self, path: Path) -> None:
        write_csv(path, (row for kept in self.maps for row in kept.rows()))

    def save_npz(self, path: Path) -> None:
        """Write the weights (H, T, S) of each layer under its name, with LAYER/queries and LAYER/keys."""
        arrays: dict[str, np.ndarray] = {}
        for kept in self.maps:
            arrays |= {kept.layer: kept.weights, f"{kept.layer}/queries": np.array(kept.queries.pieces)}
            arrays[f"{kept.layer}/keys"] = np.array(kept.keys.pieces)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


@dataclass(frozen=True)
class ImageOverlay(HeatMap):
    """Weights of patches over their image."""

    pixels: np.ndarray | None = None

    def paint(self, axes: Axes) -> AxesImage:
        assert self.pixels is not None
        rows, columns = self.values.shape
        edges = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        grey = self.pixels if self.pixels.shape[-1] == 3 else self.pixels[..., 0]
        axes.imshow(grey, cmap="gray", extent=edges, vmin=0, vmax=255)
        return axes.imshow(
            self.values, cmap="viridis", vmin=0, vmax=self.most, alpha=0.6, extent=edges, interpolation="nearest"
        )


def draw_attention(
    model: Any,
    text: str,
    layer: str = "",
    kind: str = "",
    head: int | None = None,
    words: bool = False,
    hide_sinks: bool = False,
    renormalize: bool = False,
    **options: Any,
) -> AttentionFigure:
    """Draw the attention of a model to a text or an image file; by default the last (cross-)attention layer.

    `model` is a folder or what `load` returns; `layer` may be a pattern, as in file names. Options are those of
    `[decode]`."""
    if renormalize and not hide_sinks:
        raise RegardError("--renormalize is for --hide-sinks: without it, rows sum to one as they are")
    package, _ = package_of(model)
    check_attention(package)
    names = choose_layers(list(attention_layers(body_of(package.model))), layer, kind)
    forward = record_forward(package, text, names, **options)
    maps = [layer_weights(forward, name, head) for name in names]
    if words:
        maps = [kept.merge_words() for kept in maps]
    note = ""
    if hide_sinks:
        note = describe_hidden(maps[0].keys, renormalize)
        maps = [kept.hide_sinks(renormalize) for kept in maps]
    return AttentionFigure(text, forward.output, tuple(maps), note, forward.pixels, forward.grid)


def choose_layers(names: Sequence[str], layer: str, kind: str) -> list[str]:
    """Return the names of the layers that are drawn together."""
    if kind and kind not in LAYER_KINDS:
        raise RegardError(f"--kind must be one of {', '.join(LAYER_KINDS)}, not '{kind}'")
    found = [n for n in names if fnmatchcase(n, layer or "*") and (not kind or layer_kind(n) == kind)]
    if names and not found:
        asked = " and ".join(filter(None, [layer and f"called '{layer}'", kind and f"of the kind {kind}"]))
        raise RegardError(f"no layer is {asked}: the layers of this model are {', '.join(names)}")
    if not layer and not kind:
        return ([n for n in found if layer_kind(n) == "cross"] or found)[-1:]
    if len({layer_kind(n) for n in found}) > 1:
        raise RegardError(f"'{layer}' names layers that look at different things: add --kind encoder, decoder or cross")
    return found


def layer_weights(forward: RecordedForward, layer: str, head: int | None) -> LayerWeights:
    """Return the weights of one head of a layer, or of all."""
    weights = forward.weights(layer)
    heads = checked_indices(range(len(weights)) if head is None else [head], len(weights), "heads")
    off = float((weights.sum(-1) - 1).abs().max())
    return LayerWeights(layer, tuple(heads.tolist()), weights[heads].numpy(), *forward.tokens[layer_kind(layer)], off)


def describe_hidden(keys: TokenSequence, renormalize: bool) -> str:
    """Return a sentence that names the hidden keys."""
    what = dict.fromkeys(label for label, sink in zip(keys.pieces, keys.sinks, strict=True) if sink)
    how = "rows are made to sum to 1 again" if renormalize else "weights are as they were, rows sum to 1 or less"
    return f"hidden keys: {'  '.join(what) or 'none'}; {how}"


# ---- alignment of words -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class AlignmentFigure(Drawable):
    """Cross-attention weights between the words of a translation and of its source."""

    layer: str
    translation: str
    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: np.ndarray  # (target, source), from 0 to 1

    def figure(self) -> Figure:
        """Draw the weights in grey, from black for 0 to white for 1, as Bahdanau et al. did."""
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
        return {**given, "target": [*self.target], "weights": rounded(self.weights)}


def draw_alignment(translator: Translator, text: str, layer: str = "", **options: Any) -> AlignmentFigure:
    """Translate a sentence and draw the cross-attention of a layer, by default the last. Options are those of `[decode]`."""
    if not text.strip():
        raise RegardError("there is nothing to translate: give a sentence")
    name = cross_attention_layer(translator, layer)
    source = group_words(translator.tokenizers.source, translator.read(text, options.get("to")))
    with record(translator.model, name) as tape:
        (translation,) = translator.translate_sentences([text], **options)
    (one,) = tape[name]
    assert one.tokens is not None
    n_start = len(translator.token_template.start)
    weights = one.weights()[0].mean(0)[n_start - 1 :]  # (T, S): a row for each token that was generated
    target = group_words(translator.tokenizers.target, one.tokens[0][n_start:])
    merged = merge_weights(weights.double().cpu().numpy(), target, source)
    source_words, target_words = (tuple(word for word, _ in side) for side in (source, target))
    return AlignmentFigure(name, translation.text, source_words, target_words, merged)


def cross_attention_layer(translator: Translator, asked: str) -> str:
    """Return the name of the layer that is asked for, or of the last cross-attention layer."""
    names = [name for name in attention_layers(translator.model) if name.split(".")[-1] == "cross"]
    if not names:
        raise RegardError(
            "this model has no attention over its source (model.attention_score none): there is nothing to draw"
        )
    if asked and asked not in names:
        raise RegardError(f"no layer '{asked}' looks at the source: choose one of {', '.join(names)}")
    return asked or names[-1]
