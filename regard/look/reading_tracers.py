"""Tracing models that only read: one forward pass over a text or an image.

`encode_with_masks`, `pair_ids`, `tagged_ids` and `image_input` make the inputs; look/recorded_forward.py uses them too.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from regard.config import ViTSettings
from regard.data.image_files import normalize, read_image, to_floats
from regard.data.labelled_text import CONTINUES, tags_to_pieces
from regard.errors import RegardError
from regard.look.interventions import InputAndOutput, Replace, replace_in_source
from regard.look.model_trace import ImagePatches, Trace, TraceRequest, predictions_of
from regard.look.output_comparison import check_places
from regard.look.token_sequence import group_words, patch_sequence, token_sequence
from regard.model_folder import ModelPackage
from regard.tasks.text_classification import encode_texts
from regard.text.tokenizer import Tokenizer

ONE_SEQUENCE = ("tokens", "tokens")  # the name of the only token sequence, for encoder and decoder


def check_request(request: TraceRequest) -> None:
    """Check that nothing is requested that only models that write can do."""
    if request.options:
        name = next(iter(request.options))
        option = f"--{name}" if name == "to" else f"--decode.{name}"
        raise RegardError(f"this model reads and writes nothing, so {option} has no meaning for it: leave it out")
    for change in request.changes:
        if isinstance(change, Replace) and change.side == "target":
            raise RegardError(f"'{change}': this model writes nothing; replace source:PLACE=TEXT, which it reads")


def replace_tokens(request: TraceRequest, ids: list[int], tokenizer: Tokenizer) -> tuple[TraceRequest, list[int]]:
    """Return the request with resolved interventions, and the ids with replaced tokens."""
    if not request.changes:
        return request, ids
    words = group_words(tokenizer, ids)
    request = request.resolve(InputAndOutput(words, words))
    other = replace_in_source(request.changes, ids, tokenizer.encode)
    check_places(request.changes, tokenizer, tokenizer, 0)
    return request, other


# ---- BERT -------------------------------------------------------------------------------------------------------------


def trace_filling(request: TraceRequest) -> Trace:
    """Trace the tokens in the places of <mask>; in a text without <mask>, the probability of each token."""
    check_request(request)
    tokenizer = request.tokenizers.source
    inside = encode_with_masks(tokenizer, request.text)
    if not inside:
        raise RegardError("there is nothing to read: give a text, with <mask> where something is to be filled in")
    ids = request.check_length(request.package.token_template.wrap(inside))
    request, ids = replace_tokens(request, ids, tokenizer)
    done = request.run(request.to_batch(ids))
    best = done.logits.argmax(-1).tolist()
    mask = tokenizer.special.mask
    full = [best[i] if id == mask else id for i, id in enumerate(ids)]
    masked = [i for i, id in enumerate(ids) if id == mask]
    places = masked or range(len(ids))
    given = range(0) if masked else places  # tokens that are visible to the model
    return request.trace(
        "filling",
        output=tokenizer.decode(full),
        sequences={"tokens": token_sequence("text", tokenizer, ids)},
        **request.layers(done, ONE_SEQUENCE),
        predictions=predictions_of("tokens", done.logits, [full[i] for i in places], tokenizer, places, given),
    )


def encode_with_masks(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text in which "<mask>" is the mask token.

    A space before it belongs to the mask, one after it to the next word."""
    first, *others = text.split("<mask>")
    ids = tokenizer.encode(first.rstrip() if others else first)
    for i, part in enumerate(others, 1):
        mask = tokenizer.special.require("mask", "<mask>")
        ids += [mask, *encode_continuation(tokenizer, part if i == len(others) else part.rstrip())]
    return ids


def encode_continuation(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of a text that follows another: encoded after a letter, so that a leading space counts."""
    before, both = tokenizer.encode("a"), tokenizer.encode("a" + text)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text)


# ---- class heads ------------------------------------------------------------------------------------------------------


def trace_classification(request: TraceRequest) -> Trace:
    """Trace a class, a number or tags. A tab separates the texts of a pair."""
    check_request(request)
    tokenizer, tagging = request.tokenizers.source, request.package.task == "tagging"
    ids, types, firsts = tagged_ids(request) if tagging else pair_ids(request)
    request, ids = replace_tokens(request, ids, tokenizer)
    if len(ids) != len(types):
        raise RegardError(f"replace it by as many pieces: the text would have {len(ids)} instead of {len(types)}")
    done = request.run(request.to_batch(request.check_length(ids)), request.to_batch(types))
    sequences = {"tokens": token_sequence("text", tokenizer, ids)}
    parts = {"sequences": sequences, **request.layers(done, ONE_SEQUENCE)}
    if request.package.task == "regression":
        return request.trace("classification", output=f"{float(done.logits[0]):.4g}", **parts)
    names = request.package.labels
    if not tagging:
        return request.trace("classification", **parts, **rank_labels(done.logits, names))
    best = done.logits.argmax(-1).tolist()
    tagged = " ".join(f"{word}/{names[best[i]]}" for word, i in zip(request.text.split(), firsts, strict=True))
    found = predictions_of("tokens", done.logits, [best[i] for i in firsts], names, firsts)
    return request.trace("classification", output=tagged, **parts, predictions=found)


def pair_ids(request: TraceRequest) -> tuple[list[int], list[int], list[int]]:
    """Return ids and token types of a text or a pair of texts; the last result is empty."""
    first, tab, second = request.text.partition("\t")
    pair = (first, second) if tab else (first,)
    (ids,), (types,) = encode_texts([pair], request.tokenizers.source, request.package.token_template)
    return ids, types, []


def tagged_ids(request: TraceRequest) -> tuple[list[int], list[int], list[int]]:
    """Return ids and token types of a text, and the places of the first piece of each word, whose tag is the word's.

    Words are separated by white space."""
    words, template = request.text.split(), request.package.token_template
    pieces, marks = tags_to_pieces(words, [0] * len(words), request.tokenizers.source)
    ids = template.wrap(pieces)
    return ids, [0] * len(ids), [len(template.before) + i for i, mark in enumerate(marks) if mark != CONTINUES]


def rank_labels(logits: Tensor, names: Sequence[str]) -> dict[str, Any]:
    """Return the most probable class and all classes with their probabilities, as fields of a trace."""
    p = logits.double().softmax(-1).tolist()
    labels = sorted(zip(names, p, strict=True), key=lambda pair: -pair[1])
    return {"output": labels[0][0], "labels": labels}


# ---- ViT --------------------------------------------------------------------------------------------------------------


def trace_image(request: TraceRequest) -> Trace:
    """Trace the class of an image; its tokens are the summary token and the patches, row by row."""
    check_request(request)
    if tokens := [change for change in request.changes if isinstance(change, Replace)]:
        raise RegardError(f"'{tokens[0]}': a picture has no words that could be replaced; change the file instead")
    pixels, batch, (rows, columns) = image_input(request.package, Path(request.text))
    sequence = patch_sequence(rows, columns)
    if request.changes:
        request = request.resolve(InputAndOutput(sequence.words, sequence.words))
    done = request.run(batch)
    return request.trace(
        "picture",
        sequences={"tokens": sequence},
        **request.layers(done, ONE_SEQUENCE),
        **rank_labels(done.logits, request.package.labels),
        image=ImagePatches(encode_png(pixels), rows, columns),
    )


def image_input(package: ModelPackage, path: Path) -> tuple[np.ndarray, Tensor, tuple[int, int]]:
    """Read an image in the size of the training images.

    Return its pixels (H, W, channels) uint8, the normalised batch (1, ...) for the model, and rows and columns of
    patches."""
    config, own = package.config, package.config.table(ViTSettings)
    side = round((config.max_len - 1) ** 0.5) * own.patch_size  # imported models have square images
    height, width = map(int, package.pixels.get("size", (side, side)))
    pixels = read_image(path, height, width, own.image_channels)
    floats = normalize(to_floats(torch.from_numpy(pixels[None].copy())), package.pixels["mean"], package.pixels["std"])
    first = next(package.model.parameters())
    return pixels, floats.to(first), (pixels.shape[0] // own.patch_size, pixels.shape[1] // own.patch_size)


def encode_png(pixels: np.ndarray) -> bytes:
    """Return an image (H, W, channels) as a PNG file."""
    grey = pixels.shape[-1] == 1
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if grey else pixels).save(file, format="PNG")
    return file.getvalue()


READING_TRACERS = {"filling": trace_filling, "classification": trace_classification, "picture": trace_image}
