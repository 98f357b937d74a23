"""Looking into models that read: one forward of a text or a picture."""

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
from regard.look.alignment import words
from regard.look.change.compare import check_places
from regard.look.change.intervene import Replace, Strips, other_source
from regard.look.page.kinds import ALONE, Sight, keep
from regard.look.page.seen import Patches, Seen, Strip, predictions_of, strip_of
from regard.model_folder import ModelPackage
from regard.tasks.text_classification import encode_texts
from regard.text.tokenizer import Tokenizer


def check_asked(sight: Sight) -> None:
    """Whether it was asked for something that only models that write can do."""
    if sight.options:
        name = next(iter(sight.options))
        option = f"--{name}" if name == "to" else f"--decode.{name}"
        raise RegardError(f"this model reads and writes nothing, so {option} has no meaning for it: leave it out")
    for change in sight.changes:
        if isinstance(change, Replace) and change.strip == "target":
            raise RegardError(f"'{change}': this model writes nothing; replace source:PLACE=TEXT, which it reads")


def altered(sight: Sight, ids: list[int], tokenizer: Tokenizer) -> tuple[Sight, list[int]]:
    """What is read under changes of tokens; and the other changes with their places."""
    if not sight.changes:
        return sight, ids
    there = words(tokenizer, ids)
    sight = sight.placed(Strips(there, there))
    other = other_source(sight.changes, ids, tokenizer.encode)
    check_places(sight.changes, tokenizer, tokenizer, 0)
    return sight, other


# ---- BERT ---------------------------------------------------------------------------------------------------------------


def filling(sight: Sight) -> Seen:
    """What belongs where the text says <mask>; where it does not, how likely each of its tokens was."""
    check_asked(sight)
    tokenizer = sight.tokenizers.source
    inside = with_masks(tokenizer, sight.text)
    if not inside:
        raise RegardError("there is nothing to read: give a text, with <mask> where something is to be filled in")
    sight, ids = altered(sight, sight.checked(sight.package.token_template.wrap(inside)), tokenizer)
    kept = keep(sight, sight.row(ids))
    best = kept.result.argmax(-1).tolist()
    mask = tokenizer.special.mask
    full = [best[i] if id == mask else id for i, id in enumerate(ids)]
    masked = [i for i, id in enumerate(ids) if id == mask]
    places = masked or range(len(ids))
    given = range(0) if masked else places  # what it could see
    return sight.view(
        "filling",
        output=tokenizer.decode(full),
        strips={"tokens": strip_of("text", tokenizer, ids)},
        **kept.parts(sight, ALONE),
        predictions=predictions_of("tokens", kept.result, [full[i] for i in places], tokenizer, places, given),
    )


def with_masks(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text in which "<mask>" is that token. A space before it is its own, one after it the next word's."""
    first, *others = text.split("<mask>")
    ids = tokenizer.encode(first.rstrip() if others else first)
    for i, part in enumerate(others, 1):
        ids += [
            tokenizer.special.require("mask", "<mask>"),
            *going_on(tokenizer, part if i == len(others) else part.rstrip()),
        ]
    return ids


def going_on(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids of a text that stands after something else: whether a space comes first is seen by that."""
    before, both = tokenizer.encode("a"), tokenizer.encode("a" + text)
    return both[len(before) :] if both[: len(before)] == before else tokenizer.encode(text)


# ---- answers ------------------------------------------------------------------------------------------------------------


def classification(sight: Sight) -> Seen:
    """A class, a number or tags. A tab stands between the texts of a pair."""
    check_asked(sight)
    tokenizer, tagging = sight.tokenizers.source, sight.package.task == "tagging"
    ids, types, firsts = tagged_row(sight) if tagging else text_row(sight)
    sight, ids = altered(sight, ids, tokenizer)
    if len(ids) != len(types):
        raise RegardError(f"replace it by as many pieces: the text would have {len(ids)} instead of {len(types)}")
    kept = keep(sight, sight.row(sight.checked(ids)), sight.row(types))
    parts = {"strips": {"tokens": strip_of("text", tokenizer, ids)}, **kept.parts(sight, ALONE)}
    if sight.package.task == "regression":
        return sight.view("classification", output=f"{float(kept.result[0]):.4g}", **parts)
    names = sight.package.labels
    if not tagging:
        return sight.view("classification", **parts, **ranked(kept.result, names))
    best = kept.result.argmax(-1).tolist()
    said = " ".join(f"{word}/{names[best[i]]}" for word, i in zip(sight.text.split(), firsts, strict=True))
    found = predictions_of("tokens", kept.result, [best[i] for i in firsts], names, firsts)
    return sight.view("classification", output=said, **parts, predictions=found)


def text_row(sight: Sight) -> tuple[list[int], list[int], list[int]]:
    first, tab, second = sight.text.partition("\t")
    pair = (first, second) if tab else (first,)
    (ids,), (types,) = encode_texts([pair], sight.tokenizers.source, sight.package.token_template)
    return ids, types, []


def tagged_row(sight: Sight) -> tuple[list[int], list[int], list[int]]:
    """Words are what white space leaves; a word's tag is that of its first piece, whose places are the last result."""
    words, token_template = sight.text.split(), sight.package.token_template
    pieces, marks = tags_to_pieces(words, [0] * len(words), sight.tokenizers.source)
    ids = token_template.wrap(pieces)
    return ids, [0] * len(ids), [len(token_template.before) + i for i, mark in enumerate(marks) if mark != CONTINUES]


def ranked(logits: Tensor, names: Sequence[str]) -> dict[str, Any]:
    p = logits.double().softmax(-1).tolist()
    labels = sorted(zip(names, p, strict=True), key=lambda pair: -pair[1])
    return {"output": labels[0][0], "labels": labels}


# ---- ViT ----------------------------------------------------------------------------------------------------------------


def picture(sight: Sight) -> Seen:
    """The class of a picture; its tokens are the summary and the patches, row by row."""
    check_asked(sight)
    if tokens := [change for change in sight.changes if isinstance(change, Replace)]:
        raise RegardError(f"'{tokens[0]}': a picture has no words that could be replaced; change the file instead")
    package, size = sight.package, sight.package.config.value("vit.patch_size")
    pixels = read_for(package, Path(sight.text))  # (H, W, channels)
    floats = normalize(to_floats(torch.from_numpy(np.stack([pixels]))), package.pixels["mean"], package.pixels["std"])
    first = next(package.model.parameters())
    rows, columns = pixels.shape[0] // size, pixels.shape[1] // size
    strip = patches(rows, columns)
    there = [(name, [*places]) for name, places in strip.words]
    sight = sight.placed(Strips(there, there)) if sight.changes else sight
    kept = keep(sight, floats.to(first))
    return sight.view(
        "picture",
        strips={"tokens": strip},
        **kept.parts(sight, ALONE),
        **ranked(kept.result, package.labels),
        picture=Patches(as_png(pixels), rows, columns),
    )


def read_for(package: ModelPackage, path: Path) -> np.ndarray:
    """A picture in the size that the model learned, (H, W, channels) bytes."""
    config, own = package.config, package.config.table(ViTSettings)
    side = round((config.max_len - 1) ** 0.5) * own.patch_size  # of an imported model, whose images are square
    height, width = map(int, package.pixels.get("size", (side, side)))
    return read_image(path, height, width, own.image_channels)


def patches(rows: int, columns: int) -> Strip:
    names = ["summary", *(f"{i + 1},{j + 1}" for i in range(rows) for j in range(columns))]
    words = tuple((name, (place,)) for place, name in enumerate(names))
    special = tuple(place == 0 for place in range(len(names)))
    return Strip("patch (row, column)", tuple(range(len(names))), tuple(names), words, special)


def as_png(pixels: np.ndarray) -> bytes:
    grey = pixels.shape[-1] == 1
    file = io.BytesIO()
    Image.fromarray(pixels[..., 0] if grey else pixels).save(file, format="PNG")
    return file.getvalue()


READERS = {"filling": filling, "classification": classification, "picture": picture}
