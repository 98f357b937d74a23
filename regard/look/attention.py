"""Where heads look, as heat-maps: one head, all heads of a layer, or all layers and heads of a kind.

    attention("runs/multi30k-en-de", "A man eats an apple.", layer="decoder.2.cross", words=True).save(Path("a.png"))

Rows are queries, columns are keys, and every row sums to one, which is checked. All maps of a picture are on one scale. Of
a vision Transformer the picture shows where its summary token looks; the numbers are of all tokens.
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
from regard.look.alignment import by_words
from regard.look.drawn import Drawn, write_csv
from regard.look.figures import Heat, grid, short
from regard.look.forward import KINDS, Forward, Strip, kind_of, run
from regard.look.page.kinds import reader_of
from regard.look.page.seen import package_of
from regard.look.record import indices, layers_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

ACROSS = 4  # heads in a row, where one layer is drawn


@dataclass(frozen=True)
class Map:
    """One layer."""

    layer: str
    heads: tuple[int, ...]
    weights: np.ndarray  # (H, T, S)
    queries: Strip
    keys: Strip
    off: float  # the largest |sum of a row - 1|, before anything was hidden

    def merged(self) -> Map:
        """Words instead of pieces."""
        weights = by_words(self.weights, self.queries.words, self.keys.words)
        return replace(self, weights=weights, queries=self.queries.by_words(), keys=self.keys.by_words())

    def hiding(self, renormalise: bool) -> Map:
        """Without the keys that are sinks; renormalised, rows sum to one again, but for those that had nothing else."""
        sinks = self.keys.sinks
        if sinks.all():
            raise RegardError("every key is a special token or punctuation: nothing is left without --hide-sinks")
        weights = self.weights[..., ~sinks]
        if renormalise:
            left = weights.sum(-1, keepdims=True)
            weights = np.divide(weights, left, out=np.zeros_like(weights), where=left > 0)
        return replace(self, weights=weights, keys=self.keys.without_sinks())

    def rows(self) -> Iterator[dict[str, Any]]:
        """A line for each weight, for a table."""
        for (h, i, j), weight in np.ndenumerate(self.weights):
            at = {"layer": self.layer, "head": self.heads[h], "query": i, "query token": self.queries.labels[i]}
            yield {**at, "key": j, "key token": self.keys.labels[j], "weight": f"{weight:.6g}"}

    def numbers(self) -> dict[str, Any]:
        at = {"layer": self.layer, "kind": kind_of(self.layer), "heads": [*self.heads], "row_sums_off_by": self.off}
        tokens = {"queries": [*self.queries.labels], "keys": [*self.keys.labels]}
        return {**at, **tokens, "weights": short(self.weights)}


@dataclass(frozen=True)
class Attention(Drawn):
    text: str
    output: str  # a translation
    maps: tuple[Map, ...]
    note: str = ""  # what is hidden
    picture: np.ndarray | None = None  # (height, width, channels), bytes
    grid: tuple[int, int] = (0, 0)

    @property
    def axes(self) -> tuple[str, str]:
        """What rows and columns are."""
        return f"query: {self.maps[0].queries.name}", f"key: {self.maps[0].keys.name}"

    def figure(self) -> Figure:
        columns = len(self.maps[0].heads) if len(self.maps) > 1 else min(ACROSS, len(self.maps[0].heads))
        panels = self.panels()
        off = max(kept.off for kept in self.maps)
        who = "" if self.picture is None else "where the summary token looks"
        lines = [self.text, self.output, who, self.note or f"rows sum to 1 (off by {off:.0e} at most)"]
        return grid("\n".join(filter(None, lines)), panels, columns, "attention weight")

    def panels(self) -> list[Heat]:
        y, x = self.axes
        most = self.brightest()
        found: list[Heat] = []
        for kept in self.maps:
            for head, weights in zip(kept.heads, kept.weights, strict=True):
                title = f"{kept.layer}, head {head}"
                if self.picture is None:
                    found.append(Heat(title, weights, kept.queries.labels, kept.keys.labels, x, y, most))
                else:
                    found.append(self.over_picture(title, weights, most))
        return found

    def brightest(self) -> float:
        if self.picture is None:
            return max(float(kept.weights.max()) for kept in self.maps)
        return max(float(self.patches(weights).max()) for kept in self.maps for weights in kept.weights)

    def patches(self, weights: np.ndarray) -> np.ndarray:
        """What the summary token gives to each patch; its own key comes first, if it is not hidden."""
        rows, columns = self.grid
        return weights[0, -rows * columns :].reshape(rows, columns)

    def over_picture(self, title: str, weights: np.ndarray, most: float) -> Heat:
        rows, columns = self.grid
        names = tuple(map(str, range(1, rows + 1))), tuple(map(str, range(1, columns + 1)))
        assert self.picture is not None
        return Over(
            title, self.patches(weights), *names, "key: column of patches", "key: row of patches", most, self.picture
        )

    def numbers(self) -> dict[str, Any]:
        y, x = self.axes
        given = {"text": self.text, "output": self.output, "rows": y, "columns": x, "hidden": self.note}
        return {**given, "maps": [kept.numbers() for kept in self.maps]}

    def save_csv(self, path: Path) -> None:
        write_csv(path, (row for kept in self.maps for row in kept.rows()))

    def save_npz(self, path: Path) -> None:
        """The weights (H, T, S) of each layer under its name, and beside them LAYER/queries and LAYER/keys."""
        arrays: dict[str, np.ndarray] = {}
        for kept in self.maps:
            arrays |= {kept.layer: kept.weights, f"{kept.layer}/queries": np.array(kept.queries.labels)}
            arrays[f"{kept.layer}/keys"] = np.array(kept.keys.labels)
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Over(Heat):
    """Weights of patches over the picture they are of."""

    picture: np.ndarray | None = None

    def paint(self, axes: Axes) -> AxesImage:
        assert self.picture is not None
        rows, columns = self.values.shape
        edges = (-0.5, columns - 0.5, rows - 0.5, -0.5)
        grey = self.picture if self.picture.shape[-1] == 3 else self.picture[..., 0]
        axes.imshow(grey, cmap="gray", extent=edges, vmin=0, vmax=255)
        return axes.imshow(
            self.values, cmap="viridis", vmin=0, vmax=self.most, alpha=0.6, extent=edges, interpolation="nearest"
        )


def attention(
    model: Any,
    text: str,
    layer: str = "",
    kind: str = "",
    head: int | None = None,
    words: bool = False,
    hide_sinks: bool = False,
    renormalise: bool = False,
    **options: Any,
) -> Attention:
    """Where a model looks in a text, or in the picture of a file; by default the last layer, and of a translator the last
    that looks at the source. `model` is a folder or what `load` returns; `layer` may be a pattern, as in file names. Options
    are those of `[decode]`."""
    if renormalise and not hide_sinks:
        raise RegardError("--renormalise is for --hide-sinks: without it, rows sum to one as they are")
    package, _ = package_of(model)
    names = chosen(list(layers_of(reader_of(package.model))), layer, kind)
    forward = run(package, text, names, **options)
    maps = [map_of(forward, name, head) for name in names]
    if words:
        maps = [kept.merged() for kept in maps]
    note = ""
    if hide_sinks:
        note = hidden_note(maps[0].keys, renormalise)
        maps = [kept.hiding(renormalise) for kept in maps]
    return Attention(text, forward.output, tuple(maps), note, forward.picture, forward.grid)


def chosen(names: Sequence[str], layer: str, kind: str) -> list[str]:
    """Layers to be drawn together."""
    if kind and kind not in KINDS:
        raise RegardError(f"--kind must be one of {', '.join(KINDS)}, not '{kind}'")
    found = [n for n in names if fnmatchcase(n, layer or "*") and (not kind or kind_of(n) == kind)]
    if names and not found:
        asked = " and ".join(filter(None, [layer and f"called '{layer}'", kind and f"of the kind {kind}"]))
        raise RegardError(f"no layer is {asked}: the layers of this model are {', '.join(names)}")
    if not layer and not kind:
        return ([n for n in found if kind_of(n) == "cross"] or found)[-1:]
    if len({kind_of(n) for n in found}) > 1:
        raise RegardError(f"'{layer}' names layers that look at different things: add --kind encoder, decoder or cross")
    return found


def map_of(forward: Forward, layer: str, head: int | None) -> Map:
    weights = forward.weights(layer)
    heads = indices(range(len(weights)) if head is None else [head], len(weights), "heads")
    off = float((weights.sum(-1) - 1).abs().max())
    return Map(layer, tuple(heads.tolist()), weights[heads].numpy(), *forward.strips[kind_of(layer)], off)


def hidden_note(keys: Strip, renormalise: bool) -> str:
    what = dict.fromkeys(label for label, sink in zip(keys.labels, keys.sinks, strict=True) if sink)
    how = "rows are made to sum to 1 again" if renormalise else "weights are as they were, rows sum to 1 or less"
    return f"hidden keys: {'  '.join(what) or 'none'}; {how}"
