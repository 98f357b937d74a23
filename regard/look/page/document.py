"""Traces as the document of a page: JSON and deflated arrays, small enough to be opened in a browser.

Weights and scores are exact (fp32) while they are few. Beyond that scores are left out, and weights are fp16, then
quantized to uint8: one of 255 levels between zero and the largest weight of the row, or of fewer levels where the file
would become too large. Vectors are fp16 where fp32 would not fit, and those of as many tokens as fit. The notes of
every view say what was rounded or left out.
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
import torch
from torch import Tensor

from regard.look.beam_search_trace import BeamNode
from regard.look.model_trace import Activation, AttentionLayer, Candidate, TokenPrediction, Trace
from regard.look.token_sequence import TokenSequence

# Sizes in number of bytes before base64, which adds a third. A file shall stay below 15 MB.
EXACT_SIZE = 2_000_000  # of weights, or of weights and scores, up to which they stay exact
FP16_SIZE = 4_000_000  # of weights in fp16
WEIGHTS_SIZE = 7_000_000  # of quantized weights that leave room for vectors
MAX_WEIGHTS_SIZE = 10_000_000  # of quantized weights in any case
VECTORS_SIZE = 6_000_000
MAX_SIZE = 10_500_000
QUANTIZATIONS = (  # numbers of levels and sizes, tried in this order
    *((255, WEIGHTS_SIZE), (63, WEIGHTS_SIZE), (31, WEIGHTS_SIZE), (15, WEIGHTS_SIZE)),
    *((15, MAX_WEIGHTS_SIZE), (7, MAX_WEIGHTS_SIZE), (3, MAX_WEIGHTS_SIZE)),
)
MASKED = -1e30  # the score of a masked key
MAX_FP16 = 65504.0  # the largest number in fp16
Blob = dict[str, Any]


@dataclass
class Document:
    """The content of a page: `views` is JSON without the arrays; `blobs[i]` is array number i, deflated."""

    views: list[dict[str, Any]] = field(default_factory=list)
    blobs: list[bytes] = field(default_factory=list)

    @property
    def tree(self) -> dict[str, Any]:
        return {"version": 1, "views": self.views}

    @property
    def size(self) -> int:
        return sum(map(len, self.blobs))

    def json(self) -> str:
        """Return the JSON for a script element of the page; no text in it can end the element."""
        text = json.dumps(self.tree, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
        return text.replace("<", "\\u003c")

    def base64(self) -> list[str]:
        return [base64.b64encode(blob).decode("ascii") for blob in self.blobs]

    def add(self, numbers: np.ndarray) -> Blob:
        kind = {"float32": "f32", "float16": "f16", "uint8": "u8"}[numbers.dtype.name]
        self.blobs.append(deflate(numbers))
        return {"id": len(self.blobs) - 1, "shape": list(numbers.shape), "type": kind}


def make_document(traces: Sequence[Trace]) -> Document:
    """Return the document of one trace, or of two to be compared, which share the size of one."""
    document = Document()
    for trace in traces:
        document.views.append(add_trace(document, trace, len(traces)))
    return document


def add_trace(document: Document, trace: Trace, share: int) -> dict[str, Any]:
    """Add the arrays of a trace to a document, and return the trace as JSON."""
    before = document.size
    attention, rounded = add_attention(document, trace.attention, share)
    room = min(VECTORS_SIZE // share, MAX_SIZE // share - (document.size - before))
    activations, shortened = add_activations(document, trace.activations, trace.kind == "language", room)
    return {
        "title": trace.title,
        "kind": trace.kind,
        "model": trace.model,
        "input": trace.input,
        "output": trace.output,
        "changes": list(trace.changes),
        "strips": {name: sequence_json(sequence) for name, sequence in trace.sequences.items()},
        "attention": attention,
        "chain": activations,
        "predictions": [prediction_json(one) for one in trace.predictions],
        "labels": trace.labels and [{"label": label, "p": to_number(p)} for label, p in trace.labels],
        "tree": trace.tree and {"steps": [[node_json(node) for node in step] for step in trace.tree]},
        "picture": image_json(trace),
        "notes": [*trace.notes, *rounded, *shortened],
    }


# ---- attention --------------------------------------------------------------------------------------------------------


def add_attention(
    document: Document, layers: list[AttentionLayer], share: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Add weights and scores of every layer; return the layers as JSON, and notes on what was rounded."""
    cells = share * sum(math.prod(one.shape) for one in layers)
    if 8 * cells <= EXACT_SIZE:
        scores = [document.add(one.scores().float().clamp(min=MASKED).numpy()) for one in layers]
        return layers_json(layers, add_exact_weights(document, layers), scores), []
    notes = ["Scores before the softmax are left out, to keep this file small."]
    if 4 * cells <= EXACT_SIZE:
        return layers_json(layers, add_exact_weights(document, layers)), notes
    if 2 * cells <= FP16_SIZE:
        halves = [document.add(one.weights().half().numpy()) for one in layers]
        return layers_json(layers, halves), ["Weights are rounded to fp16, three digits.", *notes]
    blobs, levels = add_quantized_weights(document, layers, share)
    note = f"Weights are rounded to {levels} levels between 0 and the largest of their row, closer together near 0."
    return layers_json(layers, blobs), [note, *notes]


def add_exact_weights(document: Document, layers: list[AttentionLayer]) -> list[Blob]:
    return [document.add(one.weights().float().numpy()) for one in layers]


def layers_json(
    layers: list[AttentionLayer], weights: list[Blob], scores: Sequence[Blob | None] | None = None
) -> list[dict[str, Any]]:
    return [layer_json(*parts) for parts in zip(layers, weights, scores or [None] * len(layers), strict=True)]


def layer_json(one: AttentionLayer, weights: Blob, scores: Blob | None) -> dict[str, Any]:
    """Return an attention layer as JSON, with its arrays in the document."""
    known = {"name": one.name, "kind": one.kind, "layer": one.layer, "heads": one.heads}
    axes = {"queries": one.queries, "keys": one.keys, "causal": one.causal}
    numbers = {"weights": weights, "scores": scores, "scale": to_number(one.scale), "difference": one.difference()}
    return {**known, **axes, "seen": mask_json(one.seen().numpy()), **numbers}


def mask_json(seen: np.ndarray) -> dict[str, Any]:
    """Return a mask (H or 1, T, S) as the spans of keys that are visible in any head; where heads differ, also of each."""
    whole = spans_json(np.asarray(seen.any(0)))
    return whole if (seen == seen[0]).all() else {**whole, "heads": [spans_json(head) for head in seen]}


def spans_json(seen: np.ndarray) -> dict[str, Any]:
    """Return the first and the last visible key of each query of a mask (T, S), and the masked keys between them.

    The span of a query without visible keys ends before it begins."""
    some = seen.any(1)
    first = np.where(some, seen.argmax(1), 0)
    last = np.where(some, seen.shape[1] - 1 - seen[:, ::-1].argmax(1), -1)
    places = np.arange(seen.shape[1])
    inside = (places >= first[:, None]) & (places <= last[:, None])
    return {"first": first.tolist(), "last": last.tolist(), "forbidden": np.argwhere(inside & ~seen).tolist()}


def add_quantized_weights(document: Document, layers: list[AttentionLayer], share: int) -> tuple[list[Blob], int]:
    """Add weights with as many levels as the size allows, and return that number."""
    before = len(document.blobs)
    for levels, room in fitting_quantizations(layers, share):
        del document.blobs[before:]
        blobs = [add_quantized_layer(document, one, levels) for one in layers]
        if sum(map(len, document.blobs[before:])) <= room // share:
            break
    return blobs, levels


def add_quantized_layer(document: Document, one: AttentionLayer, levels: int) -> Blob:
    kept = QuantizedWeights.of(one.weights(), levels)
    return {**document.add(kept.codes.numpy()), "levels": levels, "scale": document.add(kept.scale.numpy())}


def fitting_quantizations(layers: list[AttentionLayer], share: int) -> tuple[tuple[int, int], ...]:
    """Return the quantizations from the first that should fit, estimated from one head of each layer."""
    heads = [one.weights()[[i % one.heads]] for i, one in enumerate(layers)]  # (1, T, S) each
    for i, (levels, room) in enumerate(QUANTIZATIONS):
        sizes = (len(deflate(QuantizedWeights.of(head, levels).codes.numpy())) for head in heads)
        if sum(one.heads * size for one, size in zip(layers, sizes, strict=True)) <= room // share:
            return QUANTIZATIONS[i:]
    return QUANTIZATIONS[-1:]


@dataclass(frozen=True)
class QuantizedWeights:
    """Attention weights in uint8 with one scale a row: value = scale[row] * (code / levels)^2.

    The levels are squares, so they are closer together near zero: in a long row most weights are small beside the
    largest, and evenly spaced levels would round them to zero."""

    codes: Tensor  # (H, T, S) uint8, on the CPU
    scale: Tensor  # (H, T) fp32: the largest weight of each row
    levels: int = 255

    @classmethod
    def of(cls, weights: Tensor, levels: int = 255) -> QuantizedWeights:
        """Return non-negative weights (H, T, S) quantized to at most 255 levels above zero."""
        w = weights.detach().float().cpu()
        scale = w.amax(-1)
        codes = ((w / scale.clamp(min=1e-30)[..., None]).sqrt() * levels).round().to(torch.uint8)
        return cls(codes, scale, levels)

    def weights(self) -> Tensor:
        return self.scale[..., None] * (self.codes.float() / self.levels) ** 2

    def bytes(self) -> bytes:
        """Return the codes, row by row."""
        return self.codes.contiguous().numpy().tobytes()


def deflate(numbers: np.ndarray) -> bytes:
    little = numbers.astype(numbers.dtype.newbyteorder("<"), copy=False)
    return zlib.compress(little.tobytes(), 6)


# ---- activations ------------------------------------------------------------------------------------------------------


def add_activations(
    document: Document, stages: list[Activation], last: bool, room: int
) -> tuple[list[dict[str, Any]], list[str]]:
    """Add the vectors of all tokens if they fit, else of the first tokens of each sequence, or with `last` of the last.

    Return the activations as JSON, and notes on what was rounded or left out."""
    lengths = {one.sequence: len(one.values) for one in stages}
    most = max(lengths.values(), default=0)
    exact = 2 * fp16_size(stages, lengths, most) <= room
    n = most if exact else next((n for n in range(most, 0, -1) if fp16_size(stages, lengths, n) <= room), 1)
    notes = [] if exact else ["Vectors are rounded to fp16, three digits."]
    if n < most:
        which = "last" if last else "first"
        notes.append(f"Vectors are there for the {which} {n} tokens of each text, to keep this file small.")
    places = {name: [*range(length)][-n:] if last else [*range(length)][:n] for name, length in lengths.items()}
    return [add_activation(document, one, places[one.sequence], exact) for one in stages], notes


def fp16_size(stages: Iterable[Activation], lengths: dict[str, int], n: int) -> int:
    """Return the number of bytes of at most n tokens of each sequence in fp16."""
    return sum(2 * min(n, lengths[one.sequence]) * one.values.shape[1] for one in stages)


def add_activation(document: Document, one: Activation, places: list[int], exact: bool) -> dict[str, Any]:
    """Add the vectors of some tokens, and return the activation as JSON."""
    values = one.values[places].float().cpu()
    numbers = values.numpy() if exact else values.clamp(-MAX_FP16, MAX_FP16).half().numpy()
    where = {"strip": one.sequence, "layer": one.layer, "sublayer": one.sublayer, "stage": one.stage}
    return {**where, "heads": one.heads, "tokens": places, "values": document.add(numbers)}


# ---- other parts ------------------------------------------------------------------------------------------------------


def sequence_json(sequence: TokenSequence) -> dict[str, Any]:
    """Return a token sequence as JSON; the page calls likely attention sinks special."""
    words = [[word, list(places)] for word, places in sequence.words]
    known = {"label": sequence.label, "ids": list(sequence.ids), "pieces": list(sequence.pieces)}
    return {**known, "words": words, "special": sequence.sinks.astype(int).tolist()}


def prediction_json(one: TokenPrediction) -> dict[str, Any]:
    """Return a prediction as JSON."""
    chosen = {**candidate_json(one.chosen), "log_prob": to_number(one.chosen.log_prob)}
    top = [{**candidate_json(candidate), "p": to_number(math.exp(candidate.log_prob))} for candidate in one.top]
    return {"strip": one.sequence, "place": one.place, "given": one.given, "chosen": chosen, "top": top}


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    return {"id": candidate.id, "piece": candidate.piece, "logit": to_number(candidate.logit)}


def node_json(node: BeamNode) -> dict[str, Any]:
    """Return a node of the beam tree as JSON."""
    known = {"token": node.token, "piece": node.piece, "parent": node.parent, "log_prob": to_number(node.log_prob)}
    return {**known, "ended": node.ended, "best": node.best}


def image_json(trace: Trace) -> dict[str, Any] | None:
    """Return the image of a trace as JSON, if it has one."""
    if trace.image is None:
        return None
    png = "data:image/png;base64," + base64.b64encode(trace.image.png).decode("ascii")
    return {"png": png, "rows": trace.image.rows, "columns": trace.image.columns}


def to_number(x: float) -> float:
    """Return a number with seven digits; JSON has no infinity, so it is clamped."""
    return float(f"{min(max(x, -1e30), 1e30):.7g}")
