"""Statistics of attention heads and of the residual stream.

For every head, the mean over all queries of

    entropy   - sum of w ln w over the keys, in nats: 0 for one key, ln n for n keys of the same weight
    distance  sum of w |i - j|: the mean distance of the keys; self-attention over texts only
    first     the weight on the first key
    special   the weight on special tokens and punctuation; with `first` it shows attention sinks
    itself    the weight of a token on itself; self-attention only

For every sublayer, over all tokens: the mean length |x| of the residual stream after it, and the root mean square of
its output relative to that of the stream it was added to.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from regard.errors import RegardError
from regard.look.figures import Drawable, HeatMap, Lines, Panel, draw, rounded, text_table, write_csv
from regard.look.interventions import layer_kind
from regard.look.model_trace import package_of
from regard.look.recorded_forward import RecordedForward, check_attention, record_forward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES = ("entropy", "distance", "first", "special", "itself")
TITLES = (
    "entropy of the weights (nats)",
    "mean distance of the key (places)",
    "share on the first key",
    "share on special tokens and punctuation",
    "share on itself",
)


@dataclass(frozen=True)
class LayerStatistics:
    """The measures of every head of one attention layer."""

    name: str
    measures: dict[str, np.ndarray]  # name -> (H,), NaN where it has no meaning
    max_entropy: float  # that of uniform weights over all visible keys

    def rows(self) -> Iterator[dict[str, Any]]:
        for head in range(len(self.measures["entropy"])):
            found = {name: rounded(values)[head] for name, values in self.measures.items()}
            yield {"layer": self.name, "head": head, **found, "entropy at most": float(f"{self.max_entropy:.6g}")}


@dataclass(frozen=True)
class SublayerStatistics:
    """The sizes of the output of a sublayer and of the residual stream."""

    name: str
    length: float  # mean |x| of the stream after it
    output: float  # root mean square of its output
    share: float  # the same relative to the stream before it

    def row(self) -> dict[str, Any]:
        named = {"stream |x|": self.length, "output rms": self.output, "output / stream": self.share}
        return {"sublayer": self.name, **{name: float(f"{x:.6g}") for name, x in named.items()}}


@dataclass(frozen=True)
class Statistics(Drawable):
    """The statistics of all heads and sublayers of a model over some texts."""

    layers: tuple[LayerStatistics, ...]
    stream: tuple[SublayerStatistics, ...]  # empty for recurrent models
    texts: int
    tokens: dict[str, int]  # number of queries by the kind of layer

    def figure(self) -> Figure:
        counted = ", ".join(f"{n:,} {kind}" for kind, n in self.tokens.items())
        title = f"Attention and residual stream, {self.texts:,} texts (queries: {counted})"
        return draw(title, [*self.head_panels(), *self.stream_panels()], 4)

    def head_panels(self) -> list[Panel]:
        names = tuple(layer.name for layer in self.layers)
        most = max(len(layer.measures["entropy"]) for layer in self.layers)
        found: list[Panel] = []
        for measure, title in zip(MEASURES, TITLES, strict=True):
            values = np.full((len(names), most), np.nan)
            for row, layer in zip(values, self.layers, strict=True):
                row[: len(layer.measures[measure])] = layer.measures[measure]
            if np.isfinite(values).any():
                found.append(HeatMap(title, values, names, tuple(map(str, range(most))), "head", "layer"))
        return found

    def stream_panels(self) -> list[Panel]:
        if not self.stream:
            return []
        after, adds = "mean |x|", "rms of output / rms of stream"
        return [
            self.lines_by_depth("stream after each sublayer", after, {sub.name: sub.length for sub in self.stream}),
            self.lines_by_depth("what each sublayer adds", adds, {sub.name: sub.share for sub in self.stream}),
        ]

    def lines_by_depth(self, title: str, y: str, values: dict[str, float]) -> Lines:
        """Return a line for each kind of sublayer, over the blocks."""
        split = {name: (name.rsplit(".", 1)[0], f"{name.split('.')[0]} {name.split('.')[-1]}") for name in values}
        blocks = list(dict.fromkeys(block for block, _ in split.values()))
        lines = {line: np.full(len(blocks), np.nan) for _, line in split.values()}
        for name, (block, line) in split.items():
            lines[line][blocks.index(block)] = values[name]
        return Lines(title, np.arange(len(blocks)), lines, "block", y, log=True, ticks=tuple(blocks))

    def rows(self) -> Iterator[dict[str, Any]]:
        return (row for layer in self.layers for row in layer.rows())

    def numbers(self) -> dict[str, Any]:
        stream = [sub.row() for sub in self.stream]
        return {"texts": self.texts, "queries": self.tokens, "heads": [*self.rows()], "stream": stream}

    def save_csv(self, path: Path) -> None:
        write_csv(path, self.rows())

    def __str__(self) -> str:
        tables = [
            text_table([*self.rows()]),
            *([text_table([sub.row() for sub in self.stream])] if self.stream else []),
        ]
        return "\n\n".join(tables)


def measure_statistics(
    model: Any, texts: Sequence[str], progress: Callable[[int], None] = lambda done: None, **options: Any
) -> Statistics:
    """Measure heads and stream over all texts, each translated or read once.

    `model` is a folder or what `load` returns; options are those of `[decode]`."""
    if not texts:
        raise RegardError("there is nothing to read: give a text, or a file with some")
    package, _ = package_of(model)
    check_attention(package)
    heads, stream, tokens = RunningMeans(), RunningMeans(), defaultdict[str, int](int)
    for text in texts:
        forward = record_forward(package, text, stream=True, **options)
        for kind, (queries, _) in forward.tokens.items():
            tokens[kind] += len(queries) * any(layer_kind(name) == kind for name in forward.records)
        for name in forward.records:
            heads.add(name, head_measures(forward, name))
        for name, values in stream_measures(forward.vectors):
            stream.add(name, values)
        progress(1)
    layers = tuple(layer_statistics(name, found) for name, found in heads.items())
    sublayers = tuple(sublayer_statistics(name, found) for name, found in stream.items())
    return Statistics(layers, sublayers, len(texts), {kind: n for kind, n in tokens.items() if n})


class RunningMeans:
    """Means of rows that are added text by text, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, int] = {}

    def add(self, name: str, rows: np.ndarray) -> None:
        """Add rows (n, ...)."""
        self.sums[name] = self.sums.get(name, 0) + rows.sum(0)
        self.counts[name] = self.counts.get(name, 0) + len(rows)

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, total / self.counts[name]) for name, total in self.sums.items())


def head_measures(forward: RecordedForward, layer: str) -> np.ndarray:
    """Return (T, 1 + measures, H): for each query the entropy of uniform weights, and every measure of every head."""
    queries, keys = forward.tokens[layer_kind(layer)]
    weights, seen = forward.weights(layer).numpy(), forward.records[layer].plan.seen()[0, 0].cpu().numpy()
    most = np.broadcast_to(np.log(seen.sum(-1)), weights.shape[:-1])  # (H, T)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    shares = [weights[..., 0], weights[..., np.array(keys.special, bool)].sum(-1)]
    distance = itself = np.full_like(entropy, np.nan)
    if layer_kind(layer) != "cross":
        i = np.arange(len(queries))
        itself = weights[:, i, i]
        if forward.pixels is None:  # patches lie in a plane, so the difference of their indices is no distance
            distance = (weights * np.abs(i[:, None] - i)).sum(-1)
    return np.stack([most, entropy, distance, *shares, itself]).transpose(2, 0, 1)


def layer_statistics(name: str, means: np.ndarray) -> LayerStatistics:
    """Return the statistics of a layer from means (1 + measures, H)."""
    return LayerStatistics(name, dict(zip(MEASURES, means[1:], strict=True)), float(means[0, 0]))


def stream_measures(vectors: dict[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (T, 3) for each sublayer: |x| of the stream after it, and mean squares of its output and of the stream before.

    In a parallel block all sublayers add to one stream, which has the name of the last."""
    outputs = [name.removesuffix(".output") for name in vectors if name.count(".") == 3 and name.endswith(".output")]
    before: dict[str, np.ndarray] = {}
    for name in outputs:
        stack, after = name.split(".")[0], next_stream(name, outputs, vectors)
        stream = before.get(stack, mean_square(vectors[f"{stack}.input"]))
        width = vectors[after].shape[-1]
        yield (
            name,
            np.stack([np.sqrt(width * mean_square(vectors[after])), mean_square(vectors[f"{name}.output"]), stream], 1),
        )
        if after == f"{name}.stream":
            before[stack] = mean_square(vectors[after])


def next_stream(name: str, outputs: Sequence[str], vectors: dict[str, Tensor]) -> str:
    """Return the name of the first sum that contains the output of this sublayer."""
    later = (f"{other}.stream" for other in outputs[outputs.index(name) :])
    return next(stream for stream in later if stream in vectors)


def mean_square(x: Tensor) -> np.ndarray:
    """Return the mean square of each row, (T,)."""
    return x.double().square().mean(-1).cpu().numpy()


def sublayer_statistics(name: str, means: np.ndarray) -> SublayerStatistics:
    """Return the statistics of a sublayer from the means of its three measures."""
    length, output, stream = (float(x) for x in means)
    return SublayerStatistics(name, length, math.sqrt(output), math.sqrt(output / stream) if stream else math.nan)
