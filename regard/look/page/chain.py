"""Every vector between a token and what is foretold from it, in the order in which they are made.

    embedding (+ position) = input
    in every sublayer:   [norm]  query  key  value  mix  output  residual    (ff: [norm]  inner  output  residual)
    final

`residual` is the stream after the sublayer: what it was before, plus `output`. A norm stands before the sublayer in a
pre-norm model, and after the sum in a post-norm one, whose stream goes on from there. Queries and keys are those that are
compared: where positions turn them, they are turned. Keys and values of cross-attention are the source's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from regard.kernels.attention_functions import merge_heads
from regard.look.record import Record

Vectors = Mapping[str, Tensor]  # by the recorder's names, (T, C) each


@dataclass(frozen=True)
class Stage:
    strip: str
    layer: int | None
    sublayer: str | None  # self, cross or ff
    stage: str
    values: Tensor  # (T, C)
    heads: int | None = None  # the values are those of so many heads side by side


def chain_of(vectors: Vectors, records: Mapping[str, Record], strips: tuple[str, str], post: bool) -> list[Stage]:
    """The whole chain of a Transformer, the encoder's part first; `strips`: what encoder and decoder read."""
    source, target = strips
    sides = [
        (stack, strip) for stack, strip in (("encoder", source), ("decoder", target)) if f"{stack}.input" in vectors
    ]
    return [stage for side in sides for stage in stack_stages(*side, source, vectors, records, post)]


def stack_stages(
    stack: str, strip: str, source: str, vectors: Vectors, records: Mapping[str, Record], post: bool
) -> Iterator[Stage]:
    for name in ("embedding", "position", "input"):
        if f"{stack}.{name}" in vectors:
            yield Stage(strip, None, None, name, vectors[f"{stack}.{name}"])
    stream = vectors[f"{stack}.input"]
    for layer, sublayer in sublayers_of(stack, vectors):
        name = f"{stack}.{layer}.{sublayer}"
        here = (strip, layer, sublayer)
        if not post:
            yield Stage(*here, "norm", vectors[f"{name}.input"])
        if name in records:
            yield from heads_of(here, source if sublayer == "cross" else strip, records[name])
        for inside in ("mix", "inner"):
            if f"{name}.{inside}" in vectors:
                heads = records[name].q.shape[1] if inside == "mix" else None
                yield Stage(*here, inside, vectors[f"{name}.{inside}"], heads)
        output = vectors[f"{name}.output"]
        stream = stream + output
        yield Stage(*here, "output", output)
        yield Stage(*here, "residual", stream)
        if post:
            stream = vectors[f"{name}.stream"]
            yield Stage(*here, "norm", stream)
    if not post:
        yield Stage(strip, None, None, "final", vectors[f"{stack}.output"])


def sublayers_of(stack: str, vectors: Vectors) -> list[tuple[int, str]]:
    """In the order in which they ran."""
    names = [name.split(".") for name in vectors if name.startswith(f"{stack}.") and name.endswith(".output")]
    return [(int(parts[1]), parts[2]) for parts in names if len(parts) == 4]


def heads_of(here: tuple[str, int, str], keys: str, record: Record) -> Iterator[Stage]:
    """Queries, keys and values of all heads side by side; grouped heads have fewer keys and values."""
    for name, values in (("query", record.q), ("key", record.k), ("value", record.v)):
        strip = here[0] if name == "query" else keys
        yield Stage(strip, *here[1:], name, merge_heads(values)[0], values.shape[1])


def alignment_chain(record: Record, strips: tuple[str, str]) -> list[Stage]:
    """Of a recurrent decoder: its states and the annotations as they are compared, and the mean that goes into a step."""
    source, target = strips
    mix = record.weights().to(record.v.dtype) @ record.v
    return [*heads_of((target, 0, "cross"), source, record), Stage(target, 0, "cross", "mix", merge_heads(mix)[0], 1)]
