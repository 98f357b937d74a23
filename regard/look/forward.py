"""One input through a model of any kind that attends: what its layers did, and what stands at each place.

A translator translates it, and its layers are those of the decode itself, along the surviving hypothesis. All others read
the text as it is; a vision Transformer reads the picture of a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.data.image_files import normalize, to_floats
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.look.alignment import Words
from regard.look.change.changes import kind_of
from regard.look.page import kinds_read, seen
from regard.look.page.kinds import Sight, reader_of
from regard.look.record import Record, layers_of, record
from regard.model_folder import ModelPackage
from regard.models.classification_model import ClassificationModel

KINDS = ("encoder", "decoder", "cross")


@dataclass(frozen=True)
class Strip:
    """What stands side by side, and looks or is looked at."""

    name: str  # what each of them is: "source token"
    labels: tuple[str, ...]
    words: Words
    special: np.ndarray  # (n,) special tokens and punctuation
    sinks: (
        np.ndarray
    )  # (n,) where heads look that have nothing to look for: these, and what a language model begins with

    def __len__(self) -> int:
        return len(self.labels)

    def by_words(self) -> Strip:
        """A place for each word; one is special if all of its pieces are."""
        special, sinks = (np.array([x[p].all() for _, p in self.words], bool) for x in (self.special, self.sinks))
        labels = tuple(word for word, _ in self.words)
        return Strip(self.name.replace("token", "word"), labels, alone(labels), special, sinks)

    def without_sinks(self) -> Strip:
        kept = np.flatnonzero(~self.sinks)
        labels = tuple(self.labels[i] for i in kept)
        return Strip(self.name, labels, alone(labels), self.special[kept], self.sinks[kept])


def alone(labels: Sequence[str]) -> Words:
    return [(label, [i]) for i, label in enumerate(labels)]


@dataclass(frozen=True)
class Forward:
    records: dict[str, Record]  # by layer
    vectors: dict[str, Tensor]  # (T, C) by the names of look/stream.py, if they were asked for
    strips: dict[str, tuple[Strip, Strip]]  # of each kind of layer: its queries and its keys
    output: str = ""  # a translation
    picture: np.ndarray | None = None  # (height, width, channels), bytes
    grid: tuple[int, int] = (0, 0)  # rows and columns of its patches

    def weights(self, layer: str) -> Tensor:
        """(H, T, S) float64. A row that does not sum to one, or a token without a name, is an error of ours, and is said."""
        weights = self.records[layer].weights()[0].double().cpu()
        named = tuple(map(len, self.strips[kind_of(layer)]))
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


def run(
    package: ModelPackage, text: str, patterns: str | Sequence[str] = "*", stream: bool = False, **options: Any
) -> Forward:
    """Options are those of `[decode]` and `to`, for models that translate. With `stream`, there are vectors too."""
    reader = reader_of(package.model)
    if not layers_of(reader):
        raise RegardError(f"this {package.config.architecture} has no attention: there is nothing to look at")
    if not text.strip():
        raise RegardError("there is nothing to read: give a sentence")
    sight = Sight(package, "", text, (), None, options)
    if reader.translates:
        return translated(sight, patterns, stream)
    if options:
        asked = "--to" if "to" in options else f"decode.{next(iter(options))}"
        raise RegardError(f"{asked} is for models that translate: this one only reads")
    return picture_read(sight, patterns, stream) if reader.sees_images else text_read(sight, patterns, stream)


def translated(sight: Sight, patterns: str | Sequence[str], stream: bool) -> Forward:
    translator = Translator(sight.package)
    with record(translator.model, patterns, stream=stream) as tape:
        (translation,) = translator.translate_sentences([sight.text], **sight.options)
    records, vectors = {name: tape[name][-1] for name in tape}, tape.vectors
    tokens = next(iter(records.values())).tokens
    assert tokens is not None
    tokenizers, (written,) = translator.tokenizers, tokens
    source_ids = translator.read(sight.text, sight.options.get("to"))
    source = strip("source token", seen.strip_of("", tokenizers.source, source_ids))
    # row t of a decoder has read token t, and what it looks at makes it write token t + 1
    reads = strip("target token (as read)", seen.strip_of("", tokenizers.target, written[:-1]))
    writes = strip("target token (as written)", seen.strip_of("", tokenizers.target, written[1:]))
    strips = {"encoder": (source, source), "decoder": (reads, reads), "cross": (writes, source)}
    return Forward(records, rows_of(vectors), strips, translation.text)


def text_read(sight: Sight, patterns: str | Sequence[str], stream: bool) -> Forward:
    package, reader = sight.package, sight.reader
    tokenizer = getattr(sight.tokenizers, reader.vocabularies[0])
    types: list[int] = []
    if isinstance(package.model, ClassificationModel):
        ids, types, _ = kinds_read.tagged_row(sight) if package.task == "tagging" else kinds_read.text_row(sight)
    elif reader.fills_blanks:
        ids = package.token_template.wrap(kinds_read.with_masks(tokenizer, sight.text))
    else:
        ids = [*package.token_template.before, *tokenizer.encode(sight.text)]
    inputs = [sight.row(row) for row in (sight.checked(ids), types) if row]
    records, vectors = recorded(sight, patterns, stream, *inputs)
    both = strip("token", seen.strip_of("", tokenizer, ids), first=reader.generates)
    return Forward(records, vectors, dict.fromkeys(("encoder", "decoder"), (both, both)))


def picture_read(sight: Sight, patterns: str | Sequence[str], stream: bool) -> Forward:
    package, size = sight.package, sight.package.config.value("vit.patch_size")
    pixels = kinds_read.read_for(package, Path(sight.text))  # (H, W, channels)
    floats = normalize(to_floats(torch.from_numpy(pixels[None].copy())), package.pixels["mean"], package.pixels["std"])
    first = next(package.model.parameters())
    records, vectors = recorded(sight, patterns, stream, floats.to(first))
    grid = pixels.shape[0] // size, pixels.shape[1] // size
    both = strip("patch (row, column)", kinds_read.patches(*grid))
    return Forward(records, vectors, {"encoder": (both, both)}, picture=pixels, grid=grid)


@torch.no_grad()
def recorded(
    sight: Sight, patterns: str | Sequence[str], stream: bool, *inputs: Tensor
) -> tuple[dict[str, Record], dict[str, Tensor]]:
    with record(sight.reader, patterns, stream=stream) as tape:
        sight.package.model(*inputs)
    return {name: tape[name][-1] for name in tape}, rows_of(tape.vectors)


def rows_of(vectors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
    """Of the one row of the last forward."""
    return {name: found[-1][0].detach() for name, found in vectors.items()}


def strip(name: str, found: seen.Strip, first: bool = False) -> Strip:
    special = np.array(found.special, bool)
    sinks = special.copy()
    sinks[0] |= first
    return Strip(name, found.pieces, [(word, [*places]) for word, places in found.words], special, sinks)
