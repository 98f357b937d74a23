"""What heads and layers do on the whole: numbers of every head, and how the residual stream grows.

Of every head, the mean over all queries of

    entropy   - sum of w ln w over the keys, in nats: 0 looks at one key, ln n at n keys alike
    distance  sum of w |i - j|: how many places away it looks on average; of self-attention over texts alone
    first     the weight on the first key
    special   the weight on special tokens and punctuation; with `first`, where attention sinks show
    itself    the weight of a token on itself; of self-attention alone

Of every sublayer, over all tokens: the mean length |x| of the stream after it, and the root mean square of what it returned
against that of the stream it was added to.
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
from regard.look.drawn import Drawn, table, write_csv
from regard.look.figures import Heat, Lines, Panel, draw, short
from regard.look.forward import Forward, kind_of, run
from regard.look.page.seen import package_of

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
class Layer:
    """One attention layer."""

    name: str
    measures: dict[str, np.ndarray]  # name -> (H,), NaN where it makes no sense
    most: float  # the entropy of looking at all keys alike

    def rows(self) -> Iterator[dict[str, Any]]:
        for head in range(len(self.measures["entropy"])):
            found = {name: short(values)[head] for name, values in self.measures.items()}
            yield {"layer": self.name, "head": head, **found, "entropy at most": float(f"{self.most:.6g}")}


@dataclass(frozen=True)
class Sublayer:
    """What a sublayer adds to the stream."""

    name: str
    length: float  # mean |x| of the stream after it
    output: float  # root mean square of what it returned,
    share: float  # ... and that against the stream before it

    def row(self) -> dict[str, Any]:
        named = {"stream |x|": self.length, "output rms": self.output, "output / stream": self.share}
        return {"sublayer": self.name, **{name: float(f"{x:.6g}") for name, x in named.items()}}


@dataclass(frozen=True)
class Statistics(Drawn):
    layers: tuple[Layer, ...]
    stream: tuple[Sublayer, ...]  # empty for recurrent models
    texts: int
    tokens: dict[str, int]  # queries that were counted, by the kind of layer

    def figure(self) -> Figure:
        counted = ", ".join(f"{n:,} {kind}" for kind, n in self.tokens.items())
        title = f"Attention and residual stream, {self.texts:,} texts (queries: {counted})"
        return draw(title, [*self.heads(), *self.streams()], 4)

    def heads(self) -> list[Panel]:
        names = tuple(layer.name for layer in self.layers)
        most = max(len(layer.measures["entropy"]) for layer in self.layers)
        found: list[Panel] = []
        for measure, title in zip(MEASURES, TITLES, strict=True):
            values = np.full((len(names), most), np.nan)
            for row, layer in zip(values, self.layers, strict=True):
                row[: len(layer.measures[measure])] = layer.measures[measure]
            if np.isfinite(values).any():
                found.append(Heat(title, values, names, tuple(map(str, range(most))), "head", "layer"))
        return found

    def streams(self) -> list[Panel]:
        if not self.stream:
            return []
        after, adds = "mean |x|", "rms of output / rms of stream"
        return [
            self.by_depth("stream after each sublayer", after, {sub.name: sub.length for sub in self.stream}),
            self.by_depth("what each sublayer adds", adds, {sub.name: sub.share for sub in self.stream}),
        ]

    def by_depth(self, title: str, y: str, values: dict[str, float]) -> Lines:
        """A line for each kind of sublayer, over the blocks."""
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
        tables = [table([*self.rows()]), *([table([sub.row() for sub in self.stream])] if self.stream else [])]
        return "\n\n".join(tables)


def statistics(
    model: Any, texts: Sequence[str], progress: Callable[[int], None] = lambda done: None, **options: Any
) -> Statistics:
    """Over all texts, each translated or read once. `model` is a folder or what `load` returns; options are those of
    `[decode]`."""
    if not texts:
        raise RegardError("there is nothing to read: give a text, or a file with some")
    package, _ = package_of(model)
    heads, stream, tokens = Mean(), Mean(), defaultdict[str, int](int)
    for text in texts:
        forward = run(package, text, stream=True, **options)
        for kind, (queries, _) in forward.strips.items():
            tokens[kind] += len(queries) * any(kind_of(name) == kind for name in forward.records)
        for name in forward.records:
            heads.add(name, measured(forward, name))
        for name, values in streamed(forward.vectors):
            stream.add(name, values)
        progress(1)
    layers = tuple(layer_of(name, found) for name, found in heads.items())
    sublayers = tuple(sublayer_of(name, found) for name, found in stream.items())
    return Statistics(layers, sublayers, len(texts), {kind: n for kind, n in tokens.items() if n})


class Mean:
    """Of rows that come a text at a time, by name."""

    def __init__(self) -> None:
        self.sums: dict[str, np.ndarray] = {}
        self.counts: dict[str, int] = {}

    def add(self, name: str, rows: np.ndarray) -> None:
        """rows (n, ...)"""
        self.sums[name] = self.sums.get(name, 0) + rows.sum(0)
        self.counts[name] = self.counts.get(name, 0) + len(rows)

    def items(self) -> Iterator[tuple[str, np.ndarray]]:
        return ((name, total / self.counts[name]) for name, total in self.sums.items())


def measured(forward: Forward, layer: str) -> np.ndarray:
    """(T, 1 + measures, H): of each query the entropy of looking everywhere, and every measure of every head."""
    queries, keys = forward.strips[kind_of(layer)]
    weights, seen = forward.weights(layer).numpy(), forward.records[layer].plan.seen()[0, 0].cpu().numpy()
    most = np.broadcast_to(np.log(seen.sum(-1)), weights.shape[:-1])  # (H, T)
    entropy = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
    shares = [weights[..., 0], weights[..., keys.special].sum(-1)]
    distance = itself = np.full_like(entropy, np.nan)
    if kind_of(layer) != "cross":
        i = np.arange(len(queries))
        itself = weights[:, i, i]
        if forward.picture is None:  # patches lie in a plane: their numbers are no distances
            distance = (weights * np.abs(i[:, None] - i)).sum(-1)
    return np.stack([most, entropy, distance, *shares, itself]).transpose(2, 0, 1)


def layer_of(name: str, found: np.ndarray) -> Layer:
    """found (1 + measures, H)"""
    return Layer(name, dict(zip(MEASURES, found[1:], strict=True)), float(found[0, 0]))


def streamed(vectors: dict[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """Of each sublayer, for each token (T, 3): |x| of the stream after it, and the mean squares of what it returned and of
    the stream before. In a parallel block all sublayers add to one stream, which has the name of the last."""
    outputs = [name.removesuffix(".output") for name in vectors if name.count(".") == 3 and name.endswith(".output")]
    before: dict[str, np.ndarray] = {}
    for name in outputs:
        stack, after = name.split(".")[0], next_stream(name, outputs, vectors)
        stream = before.get(stack, squares(vectors[f"{stack}.input"]))
        width = vectors[after].shape[-1]
        yield name, np.stack([np.sqrt(width * squares(vectors[after])), squares(vectors[f"{name}.output"]), stream], 1)
        if after == f"{name}.stream":
            before[stack] = squares(vectors[after])


def next_stream(name: str, outputs: Sequence[str], vectors: dict[str, Tensor]) -> str:
    """The first sum that holds what this sublayer returned."""
    later = (f"{other}.stream" for other in outputs[outputs.index(name) :])
    return next(stream for stream in later if stream in vectors)


def squares(x: Tensor) -> np.ndarray:
    """Their mean in each row, (T,)."""
    return x.double().square().mean(-1).cpu().numpy()


def sublayer_of(name: str, found: np.ndarray) -> Sublayer:
    length, output, stream = (float(x) for x in found)
    return Sublayer(name, length, math.sqrt(output), math.sqrt(output / stream) if stream else math.nan)
