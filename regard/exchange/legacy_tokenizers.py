"""Tokenizers in the formats before tokenizer.json: WordPiece vocabularies, byte-level BPE merges, SentencePiece models."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from regard.errors import RegardError
from regard.files import check_regular, exists, read_bytes, read_json_object, read_text
from regard.text.tokenizer_training import library_errors

BERT_NAMES = {f"{key}_token": f"[{key.upper()}]" for key in ("pad", "unk", "cls", "sep", "mask")}


def read_special_names(folder: Path) -> dict[str, str]:
    """Return pad_token, cls_token, ... as tokenizer_config.json and special_tokens_map.json name them."""
    names = dict(BERT_NAMES) if is_wordpiece_folder(folder) else {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
    return names


def is_wordpiece_folder(folder: Path) -> bool:
    """Return whether the vocabulary of a folder is BERT's vocab.txt, whose special tokens need not be named."""
    return exists(folder / "vocab.txt") and not any(exists(folder / name) for name in ("tokenizer.json", "source.spm"))


def load_wordpiece(path: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Load vocab.txt: WordPiece, one piece a line; texts stand between [CLS] and [SEP]."""
    try:
        words = read_text(path).split("\n")
    except (OSError, ValueError) as error:
        raise RegardError(f"cannot read {path}: {error}") from None
    vocab = {word.rstrip("\r"): i for i, word in enumerate(words[:-1] if words[-1] == "" else words)}
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token=names["unk_token"], max_input_chars_per_word=100))
    backend.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(prefix="##", cleanup=True)
    cls, sep = names["cls_token"], names["sep_token"]
    add_special_tokens(backend, names)
    with library_errors(f"{path} has not the special tokens {cls} and {sep}"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
        )
    return backend


def load_byte_level_bpe(folder: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """Load vocab.json and merges.txt: byte-level BPE.

    RoBERTa and BART, which have a cls token, put two </s> between texts.
    """
    with library_errors(f"cannot read vocab.json and merges.txt in {folder}"):
        files = (str(check_regular(folder / name)) for name in ("vocab.json", "merges.txt"))
        model = models.BPE.from_file(*files)
    backend = tokenizers.Tokenizer(model)
    space = bool(settings.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = decoders.ByteLevel()
    add_special_tokens(backend, names)
    cls, sep = names.get("cls_token"), names.get("sep_token")
    vocab = backend.get_vocab()
    if cls in vocab and sep in vocab:
        last, first = (sep, vocab[sep]), (cls, vocab[cls])
        backend.post_processor = processors.RobertaProcessing(last, first, add_prefix_space=space)
    return backend


def add_special_tokens(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> None:
    known = (name for key, name in names.items() if key.endswith("_token") and backend.token_to_id(name) is not None)
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in dict.fromkeys(known)])


# ---- SentencePiece and Marian -----------------------------------------------------------------------------------------

NORMAL, UNIGRAM = 1, 1  # type of a piece; type of a model


@dataclass(frozen=True)
class SentencePiece:
    """A SentencePiece model: the fields of its protocol buffer that split text."""

    pieces: list[tuple[str, float, int]]  # text, score, type
    charsmap: bytes  # precompiled normalization of characters


def read_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (number, value) of each field of a protocol buffer message: integers as int, everything else as bytes."""
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
    """Read a SentencePiece unigram model."""
    try:
        pieces, charsmap, kind = [], b"", UNIGRAM
        for number, value in read_fields(read_bytes(path)):
            inside: dict[int, Any] = (
                dict(read_fields(value)) if isinstance(value, bytes) and number in (1, 2, 3) else {}
            )
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


def make_unigram(spm: SentencePiece, ids: dict[str, int], unknown: str) -> tokenizers.Tokenizer:
    """Return a tokenizer that splits text as `spm` does, with ids of a vocabulary that also holds other models' pieces.

    Those pieces have such a low score that they are used only for text that would be unknown otherwise.
    """
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


def load_marian(folder: Path, side: str) -> tokenizers.Tokenizer:
    """Load source.spm or target.spm, which split text, with the ids of both languages' pieces in vocab.json.

    A text may begin with the code of the language to translate into, such as >>fra<<.
    """
    ids: dict[str, int] = read_json_object(folder / "vocab.json")
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", **read_special_names(folder)}
    if names["unk_token"] not in ids or names["eos_token"] not in ids or set(ids.values()) != set(range(len(ids))):
        raise RegardError(f"{folder / 'vocab.json'} has gaps, or lacks {names['unk_token']} or {names['eos_token']}")
    backend = make_unigram(read_spm(folder / f"{side}.spm"), ids, names["unk_token"])
    add_special_tokens(backend, names)
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in ids if re.fullmatch(">>.+<<", piece)])
    end = names["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, ids[end])]
    )
    return backend
