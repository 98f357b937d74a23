"""Views as what a page reads: one JSON document, and arrays beside it, deflated and small enough to be opened.

Weights and scores are exact (fp32) while they are few. Beyond that scores are left out, and weights are fp16, then a byte
each: a level between zero and the largest of its row, one of 255, or of fewer where the file would not stay small. Vectors
are fp16 where fp32 would not fit, and those of as many tokens as fit. Every view says in its notes what was done to it.
"""

from __future__ import annotations

import base64
import json
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from regard.look.compact import Compact
from regard.look.page.chain import Stage
from regard.look.page.seen import Attention, Candidate, Prediction, Seen, Strip, Twig

# Bytes, before they are written as text, which makes a third more of them. A file is to stay below 15 MB.
EXACT = 2_000_000  # of weights, or of weights and scores, up to which they stay exact
HALVES = 4_000_000  # of weights in fp16
WEIGHTS = 7_000_000  # of weights in bytes, beside which there is room for vectors
MOST = 10_000_000  # of weights in any case
VECTORS = 6_000_000
ALL = 10_500_000
LADDER = ((255, WEIGHTS), (63, WEIGHTS), (31, WEIGHTS), (15, WEIGHTS), (15, MOST), (7, MOST), (3, MOST))  # levels, room
HIDDEN = -1e30  # a score where a query may not look
HALF = 65504.0  # the largest number in fp16
Blob = dict[str, Any]


@dataclass
class Document:
    """`views` is JSON but for the arrays; `blobs[i]` is array number i, deflated."""

    views: list[dict[str, Any]] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        return {"version": 1, "views": self.views}

    @property
    def size(self) -> int:
        return sum(map(len, self.blobs))

    def json(self) -> str:
        """For a script element of a page: no text in it can end the element."""
        text = json.dumps(self.tree, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c")

    def base64(self) -> list[str]:
        return [base64.b64encode(blob).decode("ascii") for blob in self.blobs]

    def add(self, numbers: np.ndarray) -> Blob:
        kind = {"float32": "f32", "float16": "f16", "uint8": "u8"}[numbers.dtype.name]
        self.blobs.append(deflated(numbers))
        return {"id": len(self.blobs) - 1, "shape": list(numbers.shape), "type": kind}


def document_of(views: Sequence[Seen]) -> Document:
    """One view, or two to be compared, which then share the room there is."""
    document = Document()
    for seen in views:
        document.views.append(view_of(document, seen, len(views)))
    return document


def view_of(document: Document, seen: Seen, share: int) -> dict[str, Any]:
    before = document.size
    attention, rounded = attention_of(document, seen.attention, share)
    room = min(VECTORS // share, ALL // share - (document.size - before))
    chain, shortened = chain_of(document, seen.chain, seen.kind == "language", room)
    return {
        "title": seen.title,
        "kind": seen.kind,
        "model": seen.model,
        "input": seen.input,
        "output": seen.output,
        "changes": list(seen.changes),
        "strips": {name: strip_of(strip) for name, strip in seen.strips.items()},
        "attention": attention,
        "chain": chain,
        "predictions": [prediction_of(one) for one in seen.predictions],
        "labels": seen.labels and [{"label": label, "p": number(p)} for label, p in seen.labels],
        "tree": seen.tree and {"steps": [[twig_of(twig) for twig in step] for step in seen.tree]},
        "picture": picture_of(seen),
        "notes": [*seen.notes, *rounded, *shortened],
    }


# ---- attention --------------------------------------------------------------------------------------------------------


def attention_of(document: Document, layers: list[Attention], share: int) -> tuple[list[dict[str, Any]], list[str]]:
    """Every layer, and what a reader should know about its numbers."""
    cells = share * sum(math.prod(one.shape) for one in layers)
    if 8 * cells <= EXACT:
        scores = [document.add(one.scores().float().clamp(min=HIDDEN).numpy()) for one in layers]
        return layers_with(layers, exact_weights(document, layers), scores), []
    notes = ["Scores before the softmax are left out, to keep this file small."]
    if 4 * cells <= EXACT:
        return layers_with(layers, exact_weights(document, layers)), notes
    if 2 * cells <= HALVES:
        halves = [document.add(one.weights().half().numpy()) for one in layers]
        return layers_with(layers, halves), ["Weights are rounded to fp16, three digits.", *notes]
    blobs, levels = rounded_weights(document, layers, share)
    note = f"Weights are rounded to {levels} levels between 0 and the largest of their row, closer together near 0."
    return layers_with(layers, blobs), [note, *notes]


def exact_weights(document: Document, layers: list[Attention]) -> list[Blob]:
    return [document.add(one.weights().float().numpy()) for one in layers]


def layers_with(
    layers: list[Attention], weights: list[Blob], scores: Sequence[Blob | None] | None = None
) -> list[dict[str, Any]]:
    return [layer_of(*parts) for parts in zip(layers, weights, scores or [None] * len(layers), strict=True)]


def layer_of(one: Attention, weights: Blob, scores: Blob | None) -> dict[str, Any]:
    known = {"name": one.name, "kind": one.kind, "layer": one.layer, "heads": one.heads}
    strips = {"queries": one.queries, "keys": one.keys, "causal": one.causal}
    numbers = {"weights": weights, "scores": scores, "scale": number(one.scale), "difference": one.difference()}
    return {**known, **strips, "seen": seen_of(one.seen().numpy()), **numbers}


def seen_of(seen: np.ndarray) -> dict[str, Any]:
    """(H or 1, T, S) as the first and the last key that each query may see in any head, and those between that it may not;
    where heads differ, also the same of each head."""
    whole = spans_of(np.asarray(seen.any(0)))
    return whole if (seen == seen[0]).all() else {**whole, "heads": [spans_of(head) for head in seen]}


def spans_of(seen: np.ndarray) -> dict[str, Any]:
    """(T, S); a query that may see nothing ends before it begins."""
    some = seen.any(1)
    first = np.where(some, seen.argmax(1), 0)
    last = np.where(some, seen.shape[1] - 1 - seen[:, ::-1].argmax(1), -1)
    places = np.arange(seen.shape[1])
    inside = (places >= first[:, None]) & (places <= last[:, None])
    return {"first": first.tolist(), "last": last.tolist(), "forbidden": np.argwhere(inside & ~seen).tolist()}


def rounded_weights(document: Document, layers: list[Attention], share: int) -> tuple[list[Blob], int]:
    """As many levels as the room allows, and how many these are."""
    before = len(document.blobs)
    for levels, room in fitting(layers, share):
        del document.blobs[before:]
        blobs = [rounded_layer(document, one, levels) for one in layers]
        if sum(map(len, document.blobs[before:])) <= room // share:
            break
    return blobs, levels


def rounded_layer(document: Document, one: Attention, levels: int) -> Blob:
    kept = Compact.of(one.weights(), levels)
    return {**document.add(kept.codes.numpy()), "levels": levels, "scale": document.add(kept.scale.numpy())}


def fitting(layers: list[Attention], share: int) -> tuple[tuple[int, int], ...]:
    """The steps of the ladder from the first that should fit, judged by one head of each layer."""
    heads = [one.weights()[[i % one.heads]] for i, one in enumerate(layers)]  # (1, T, S) each
    for i, (levels, room) in enumerate(LADDER):
        sizes = (len(deflated(Compact.of(head, levels).codes.numpy())) for head in heads)
        if sum(one.heads * size for one, size in zip(layers, sizes, strict=True)) <= room // share:
            return LADDER[i:]
    return LADDER[-1:]


def deflated(numbers: np.ndarray) -> bytes:
    little = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    return zlib.compress(little.tobytes(), 6)


# ---- chain ------------------------------------------------------------------------------------------------------------


def chain_of(document: Document, stages: list[Stage], last: bool, room: int) -> tuple[list[dict[str, Any]], list[str]]:
    """All tokens if they fit, else the first of each strip, or where a model went on writing the last."""
    lengths = {one.strip: len(one.values) for one in stages}
    most = max(lengths.values(), default=0)
    exact = 2 * size(stages, lengths, most) <= room
    n = most if exact else next((n for n in range(most, 0, -1) if size(stages, lengths, n) <= room), 1)
    notes = [] if exact else ["Vectors are rounded to fp16, three digits."]
    if n < most:
        which = "last" if last else "first"
        notes.append(f"Vectors are there for the {which} {n} tokens of each text, to keep this file small.")
    places = {strip: [*range(length)][-n:] if last else [*range(length)][:n] for strip, length in lengths.items()}
    return [stage_of(document, one, places[one.strip], exact) for one in stages], notes


def size(stages: Iterable[Stage], lengths: dict[str, int], n: int) -> int:
    """Bytes of at most n tokens a strip in fp16."""
    return sum(2 * min(n, lengths[one.strip]) * one.values.shape[1] for one in stages)


def stage_of(document: Document, one: Stage, places: list[int], exact: bool) -> dict[str, Any]:
    values = one.values[places].float().cpu()
    numbers = values.numpy() if exact else values.clamp(-HALF, HALF).half().numpy()
    where = {"strip": one.strip, "layer": one.layer, "sublayer": one.sublayer, "stage": one.stage}
    return {**where, "heads": one.heads, "tokens": places, "values": document.add(numbers)}


# ---- the rest ---------------------------------------------------------------------------------------------------------


def strip_of(strip: Strip) -> dict[str, Any]:
    words = [[word, list(places)] for word, places in strip.words]
    known = {"label": strip.label, "ids": list(strip.ids), "pieces": list(strip.pieces)}
    return {**known, "words": words, "special": [int(special) for special in strip.special]}


def prediction_of(one: Prediction) -> dict[str, Any]:
    chosen = {**token_of(one.chosen), "log_prob": number(one.chosen.log_prob)}
    top = [{**token_of(candidate), "p": number(math.exp(candidate.log_prob))} for candidate in one.top]
    return {"strip": one.strip, "place": one.place, "given": one.given, "chosen": chosen, "top": top}


def token_of(candidate: Candidate) -> dict[str, Any]:
    return {"id": candidate.id, "piece": candidate.piece, "logit": number(candidate.logit)}


def twig_of(twig: Twig) -> dict[str, Any]:
    return {**vars(twig), "log_prob": number(twig.log_prob)}


def picture_of(seen: Seen) -> dict[str, Any] | None:
    if seen.picture is None:
        return None
    png = "data:image/png;base64," + base64.b64encode(seen.picture.png).decode("ascii")
    return {"png": png, "rows": seen.picture.rows, "columns": seen.picture.columns}


def number(x: float) -> float:
    """Seven digits; JSON has no infinity."""
    return float(f"{min(max(x, -1e30), 1e30):.7g}")
