"""Texts as a model is scored on them, and its loss on each: translations, texts gone on with, blanks filled in."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.data.noise import mask_tokens
from regard.decode.constraints import pad_rows
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.model import TranslationModel
from regard.text.special_tokens import PAD

TOKENS = {"cpu": 2048, "cuda": 16384}  # read at a time
CHUNK = 1024  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class Rows:
    """Some texts as they are scored: what belongs after (or, for BERT, in) each place, PAD where nothing is asked."""

    read: Tensor  # (B, T)
    wanted: Tensor  # (B, T)
    source: Tensor | None = None  # (B, S)


@torch.inference_mode()
def memory_of(model: nn.Module, rows: Rows) -> Any:
    """What a decoder reads of the sources; None for a model that only reads, or only continues a text."""
    return model.encode(rows.source) if isinstance(model, TranslationModel) and rows.source is not None else None


@torch.inference_mode()
def losses_of(model: nn.Module, rows: Rows, memory: Any) -> list[float]:
    """-log p of all that is asked, of each row."""
    hidden = model.read_target(memory, rows.read) if isinstance(model, TranslationModel) else model.read(rows.read)  # type: ignore[operator]
    asked = rows.wanted != PAD
    pieces = zip(hidden[asked].split(CHUNK), rows.wanted[asked].split(CHUNK), strict=True)
    scored = [F.cross_entropy(model.head(h).float(), w, reduction="none") for h, w in pieces]  # type: ignore[operator]
    result = torch.zeros(len(rows.read), dtype=torch.float64, device=rows.read.device)
    return result.index_add(0, asked.nonzero()[:, 0], torch.cat(scored).double()).tolist()


def rows_of(
    package: ModelPackage, source: Sequence[str], target: Sequence[str] = (), to: str | None = None
) -> list[Rows]:
    """All texts in batches, the longest first."""
    device = next(package.model.parameters()).device
    texts = [text for text in texts_of(package, source, target, to) if any(id != PAD for id in text[1])]
    if not texts:
        raise RegardError("there is no text to measure the loss on: give a file with some lines")
    batches = []
    for group in grouped(texts, TOKENS["cuda" if device.type == "cuda" else "cpu"]):
        read, wanted, sources = (pad_rows([text[i] for text in group], device) for i in range(3))
        batches.append(Rows(read, wanted, sources if target else None))
    return batches


Text = tuple[list[int], list[int], list[int]]  # read, wanted, source


def grouped(texts: list[Text], tokens: int) -> Iterator[list[Text]]:
    order = sorted(texts, key=lambda text: -len(text[0]) - len(text[2]))
    while order:
        size = max(1, tokens // (len(order[0][0]) + len(order[0][2])))
        yield order[:size]
        order = order[size:]


def texts_of(package: ModelPackage, source: Sequence[str], target: Sequence[str], to: str | None) -> Iterator[Text]:
    if isinstance(package.model, TranslationModel):
        return pairs(Translator(package), source, target, to)
    kind = architecture_of(package.config)
    answers = kind.gives_classes(package.config)
    if (kind.generates or kind.fills_blanks) and not answers and package.tokenizers is not None:
        lines = (package.tokenizers.target.encode(line) for line in source if line.strip())
        return (going_on if kind.generates else blanks)(package, lines)
    raise RegardError("heads are scanned in models that translate, write or fill in blanks; this one does not")


def pairs(user: Translator, source: Sequence[str], target: Sequence[str], to: str | None) -> Iterator[Text]:
    """Those that the model has room for."""
    if len(source) != len(target):
        raise RegardError(
            f"the source has {len(source)} lines and the target {len(target)}: give files that are aligned"
        )
    token_template, most = user.token_template, user.model.config.max_len
    sources = user._tagged(user.tokenizers.source.encode_batch(source), to)
    for read, said in zip(sources, user.tokenizers.target.encode_batch(target), strict=True):
        text = (
            [*token_template.start, *said],
            [*[PAD] * (len(token_template.start) - 1), *said, *token_template.end],
            token_template.wrap(read),
        )
        if read and said and max(map(len, text)) <= most:
            yield text


def going_on(package: ModelPackage, lines: Iterator[list[int]]) -> Iterator[Text]:
    """Lines with their special tokens; where a model knows none, windows of all lines as one stream."""
    token_template, most = package.token_template, package.config.max_len + 1
    rows = (
        [token_template.wrap(ids) for ids in lines]
        if token_template.wrap(())
        else [[id for ids in lines for id in ids]]
    )
    given = max(0, len(token_template.before) - 1)
    for ids in (row[i : i + most] for row in rows for i in range(0, len(row), most - 1)):
        if len(ids) > 1 + given:
            yield ids[:-1], [*[PAD] * given, *ids[1 + given :]], []


def blanks(package: ModelPackage, lines: Iterator[list[int]]) -> Iterator[Text]:
    """The same blanks in every scan."""
    assert package.tokenizers is not None
    rng, token_template = np.random.default_rng(0), package.token_template
    for ids in lines:
        framed = np.array(token_template.wrap(ids[: package.config.max_len - len(token_template.wrap(()))]))
        read, wanted = mask_tokens(framed, rng, package.config.source_vocab, package.tokenizers.source.special)
        yield read.tolist(), wanted.tolist(), []
