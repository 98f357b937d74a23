"""One recorded forward pass over one input, for the figures of attention and its statistics.

A translator translates the text, and what is recorded is the reading of the hypothesis that it returned. Other models
read the text as it is; a vision Transformer reads an image file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.decode.batch_decoding import decode
from regard.errors import RegardError
from regard.inference.arguments import decode_config
from regard.inference.translator import Translator
from regard.look.interventions import layer_kind
from regard.look.model_trace import TraceRequest, body_of
from regard.look.reading_tracers import encode_with_masks, image_input, pair_ids, tagged_ids
from regard.look.record import AttentionRecord, Tape, attention_layers, record
from regard.look.token_sequence import TokenSequence, patch_sequence, token_sequence
from regard.model_folder import ModelPackage
from regard.models.classification_model import ClassificationModel

Patterns = str | Sequence[str]  # of names of layers


@dataclass(frozen=True)
class RecordedForward:
    """The attention of one input, with labels for queries and keys."""

    records: dict[str, AttentionRecord]  # by layer
    vectors: dict[str, Tensor]  # (T, C) by the names of look/record.py, if they were asked for
    tokens: dict[str, tuple[TokenSequence, TokenSequence]]  # queries and keys of each kind of layer
    output: str = ""  # a translation
    pixels: np.ndarray | None = None  # (height, width, channels) uint8 of an image
    grid: tuple[int, int] = (0, 0)  # rows and columns of its patches

    def weights(self, layer: str) -> Tensor:
        """Return the weights (H, T, S) in float64, after checking that every row sums to 1 and every token has a label."""
        weights = self.records[layer].weights()[0].double().cpu()
        named = tuple(map(len, self.tokens[layer_kind(layer)]))
        if weights.shape[1:] != named:
            raise RegardError(
                f"{layer} has {weights.shape[1]} queries and {weights.shape[2]} keys, but names for {named[0]} and "
                f"{named[1]}: this is an error in Regard, please report it"
            )
        off = (weights.sum(-1) - 1).abs()
        if not off.max() < 1e-4:
            head, row = divmod(int(off.argmax()), off.shape[1])
            raise RegardError(
                f"row {row} of head {head} in {layer} sums to {float(weights[head, row].sum()):.6g} and not to 1: "
                f"this is an error in Regard, please report it"
            )
        return weights


def check_attention(package: ModelPackage) -> None:
    """Refuse a model without attention."""
    if not attention_layers(body_of(package.model)):
        raise RegardError(f"this {package.config.architecture} has no attention: there is nothing to look at")


def record_forward(
    package: ModelPackage, text: str, patterns: Patterns = "*", stream: bool = False, **options: Any
) -> RecordedForward:
    """Run a model on one input and record the layers whose names match; with `stream`, the vectors between them too.

    Options are those of `[decode]` and `to`, for models that translate."""
    reader = body_of(package.model)
    if not text.strip():
        raise RegardError("there is nothing to read: give a sentence")
    request = TraceRequest(package, "", text, (), None, options)
    if reader.translates:
        return record_translation(request, patterns, stream)
    if options:
        asked = "--to" if "to" in options else f"decode.{next(iter(options))}"
        raise RegardError(f"{asked} is for models that translate: this one only reads")
    return record_image(request, patterns, stream) if reader.sees_images else record_text(request, patterns, stream)


def record_translation(request: TraceRequest, patterns: Patterns, stream: bool) -> RecordedForward:
    """Translate a text and record the reading of the hypothesis that is returned."""
    translator = Translator(request.package)
    ids = translator.read(request.text, request.options.get("to"))
    if attention_layers(translator.model):
        with record(translator.model, patterns, stream=stream) as tape:
            (translation,) = translator.translate_sentences([request.text], **request.options)
        tokens = next(iter(last_records(tape).values())).tokens
        assert tokens is not None
        (written,), output = tokens, translation.text
    else:
        tape, written, output = read_translation(translator, request, ids, patterns, stream)
    tokenizers = translator.tokenizers
    source = token_sequence("source token", tokenizers.source, ids)
    # Row t of a decoder has read token t, and its attention is used to predict token t + 1.
    read = token_sequence("target token (as read)", tokenizers.target, written[:-1])
    predicted = token_sequence("target token (as written)", tokenizers.target, written[1:])
    sequences = {"encoder": (source, source), "decoder": (read, read), "cross": (predicted, source)}
    return RecordedForward(last_records(tape), last_vectors(tape), sequences, output)


@torch.no_grad()
def read_translation(
    translator: Translator, request: TraceRequest, ids: list[int], patterns: Patterns, stream: bool
) -> tuple[Tape, list[int], str]:
    """Translate a text by a model without attention, whose decoding does not know recorders, and read the translation.

    Returns the recording, the tokens of the translation, and its text."""
    options = {name: value for name, value in request.options.items() if name != "to"}
    template, limit = translator.token_template, translator.model.config.max_len
    inner = ids[len(template.before) : len(ids) - len(template.after)]
    source, chosen = request.to_batch(ids), decode_config(translator.options, options)
    ((best, *_),) = decode(translator.model, [inner], chosen, limit, source.device, token_template=template)
    ended = [translator.model.config.eos_token_id] * best.ended
    written = [*template.start, *best.tokens, *ended]
    with record(translator.model, patterns, stream=stream) as tape:
        translator.model(source, request.to_batch(written[:-1]))
    return tape, written, translator.tokenizers.target.decode(best.tokens)


def record_text(request: TraceRequest, patterns: Patterns, stream: bool) -> RecordedForward:
    """Record a model that reads a text."""
    package, reader = request.package, request.reader
    tokenizer = getattr(request.tokenizers, reader.vocabularies[0])
    types: list[int] = []
    if isinstance(package.model, ClassificationModel):
        ids, types, _ = tagged_ids(request) if package.task == "tagging" else pair_ids(request)
    elif reader.fills_blanks:
        ids = package.token_template.wrap(encode_with_masks(tokenizer, request.text))
    else:
        ids = [*package.token_template.before, *tokenizer.encode(request.text)]
    inputs = [request.to_batch(row) for row in (request.check_length(ids), types) if row]
    tape = run_recorded(request, patterns, stream, *inputs)
    both = token_sequence("token", tokenizer, ids, first_is_sink=reader.generates)
    tokens = dict.fromkeys(("encoder", "decoder"), (both, both))
    return RecordedForward(last_records(tape), last_vectors(tape), tokens)


def record_image(request: TraceRequest, patterns: Patterns, stream: bool) -> RecordedForward:
    """Record a vision Transformer that reads an image file."""
    pixels, batch, grid = image_input(request.package, Path(request.text))
    tape = run_recorded(request, patterns, stream, batch)
    both = patch_sequence(*grid)
    tokens = {"encoder": (both, both)}
    return RecordedForward(last_records(tape), last_vectors(tape), tokens, pixels=pixels, grid=grid)


@torch.no_grad()
def run_recorded(request: TraceRequest, patterns: Patterns, stream: bool, *inputs: Tensor) -> Tape:
    """Run the model on a batch of one row and return the recording."""
    with record(request.reader, patterns, stream=stream) as tape:
        request.package.model(*inputs)
    return tape


def last_records(tape: Tape) -> dict[str, AttentionRecord]:
    return {name: tape[name][-1] for name in tape}


def last_vectors(tape: Tape) -> dict[str, Tensor]:
    """Return the vectors of the only row of the last forward pass, (T, C) each."""
    return {name: found[-1][0].detach() for name, found in tape.vectors.items()}
