"""SentencePiece models (.spm, spiece.model): the few fields of their protocol buffer that cut text, and nothing else."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from regard.errors import RegardError
from regard.files import read_bytes
from regard.text.tokenizer_training import library_errors

NORMAL, UNKNOWN, UNIGRAM = 1, 2, 1  # kinds of pieces; kind of model


@dataclass(frozen=True)
class SentencePiece:
    pieces: list[tuple[str, float, int]]  # text, score, kind
    charsmap: bytes  # how characters are normalised


def fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """(number, value) of each field of a message: numbers as they are, anything else as bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        number, wire = divmod(varint(), 8)
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 2: None, 5: 4}[wire]
        size = varint() if size is None else size
        if at + size > len(data):
            raise ValueError("it ends too early")
        yield number, data[at : at + size]
        at += size


def read_spm(path: Path) -> SentencePiece:
    try:
        pieces, charsmap, kind = [], b"", UNIGRAM
        for number, value in fields(read_bytes(path)):
            inside: dict[int, Any] = dict(fields(value)) if isinstance(value, bytes) and number in (1, 2, 3) else {}
            if number == 1:
                score = struct.unpack("<f", inside.get(2, bytes(4)))[0]
                pieces.append((inside[1].decode(), score, int(inside.get(3, NORMAL))))
            elif number == 2:
                kind = int(inside.get(3, UNIGRAM))
            elif number == 3:
                charsmap = inside.get(2, b"")
    except (OSError, ValueError, KeyError, IndexError, struct.error, AttributeError, TypeError) as error:
        raise RegardError(f"{path} is not a SentencePiece model ({type(error).__name__}: {error})") from None
    if kind != UNIGRAM:
        raise RegardError(
            f"{path} is a SentencePiece model of merges: save its tokenizer as tokenizer.json with transformers"
        )
    return SentencePiece(pieces, charsmap)


def unigram(spm: SentencePiece, ids: dict[str, int], unknown: str) -> tokenizers.Tokenizer:
    """Cuts text as `spm` does, with the ids of a vocabulary that also holds pieces of other models: those are so unlikely
    that they stand only for what would be unknown otherwise."""
    scores = {text: score for text, score, kind in spm.pieces if kind == NORMAL}
    never = min(scores.values(), default=0.0) - 100
    vocab = [(text, scores.get(text, never)) for text, _ in sorted(ids.items(), key=lambda item: item[1])]
    backend = tokenizers.Tokenizer(models.Unigram(vocab, unk_id=ids[unknown], byte_fallback=False))
    steps = [normalizers.Strip(left=True, right=True), normalizers.Replace(Regex(" {2,}"), " ")]
    with library_errors("its table of characters cannot be used"):
        first = [normalizers.Precompiled(spm.charsmap)] if spm.charsmap else []
    backend.normalizer = normalizers.Sequence([*first, *steps])
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    return backend
