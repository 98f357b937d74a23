"""Tokenizers from before tokenizer.json: BERT's list of words, GPT-2's merges, Marian's two languages."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from regard.errors import RegardError
from regard.exchange.spm import read_spm, unigram
from regard.files import check_regular, exists, read_json_object, read_text
from regard.text.tokenizer_training import library_errors

BERT_NAMES = {f"{key}_token": f"[{key.upper()}]" for key in ("pad", "unk", "cls", "sep", "mask")}


def names_in(folder: Path) -> dict[str, str]:
    """pad_token, cls_token, ... as the files beside a tokenizer name them."""
    names = dict(BERT_NAMES) if is_word_list(folder) else {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in read_json_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
    return names


def is_word_list(folder: Path) -> bool:
    """Return whether the vocabulary of a folder is BERT's list of words, whose special tokens need not be named."""
    return exists(folder / "vocab.txt") and not any(exists(folder / name) for name in ("tokenizer.json", "source.spm"))


def from_word_list(path: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """vocab.txt: WordPiece, one piece a line, between [CLS] and [SEP]."""
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
    add_specials(backend, names)
    with library_errors(f"{path} has not the special tokens {cls} and {sep}"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{cls}:0 $A:0 {sep}:0",
            pair=f"{cls}:0 $A:0 {sep}:0 $B:1 {sep}:1",
            special_tokens=[(cls, vocab[cls]), (sep, vocab[sep])],
        )
    return backend


def from_merges(folder: Path, settings: Mapping[str, Any], names: Mapping[str, str]) -> tokenizers.Tokenizer:
    """vocab.json and merges.txt: byte-level BPE. RoBERTa and BART, which have a cls token, put two </s> between texts."""
    with library_errors(f"cannot read vocab.json and merges.txt in {folder}"):
        files = (str(check_regular(folder / name)) for name in ("vocab.json", "merges.txt"))
        model = models.BPE.from_file(*files)
    backend = tokenizers.Tokenizer(model)
    space = bool(settings.get("add_prefix_space", False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    backend.decoder = decoders.ByteLevel()
    add_specials(backend, names)
    cls, sep = names.get("cls_token"), names.get("sep_token")
    vocab = backend.get_vocab()
    if cls in vocab and sep in vocab:
        last, first = (sep, vocab[sep]), (cls, vocab[cls])
        backend.post_processor = processors.RobertaProcessing(last, first, add_prefix_space=space)
    return backend


def marian(folder: Path, side: str) -> tokenizers.Tokenizer:
    """source.spm and target.spm cut the text of their languages, vocab.json numbers the pieces of both. A text may begin
    with the code of the language to translate into, >>fra<<."""
    ids: dict[str, int] = read_json_object(folder / "vocab.json")
    names = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": "<pad>", **names_in(folder)}
    if names["unk_token"] not in ids or names["eos_token"] not in ids or set(ids.values()) != set(range(len(ids))):
        raise RegardError(f"{folder / 'vocab.json'} has gaps, or lacks {names['unk_token']} or {names['eos_token']}")
    backend = unigram(read_spm(folder / f"{side}.spm"), ids, names["unk_token"])
    add_specials(backend, names)
    backend.add_tokens([AddedToken(piece, normalized=False) for piece in ids if re.fullmatch(">>.+<<", piece)])
    end = names["eos_token"]
    backend.post_processor = processors.TemplateProcessing(
        single=f"$A {end}", pair=f"$A $B {end}", special_tokens=[(end, ids[end])]
    )
    return backend


def add_specials(backend: tokenizers.Tokenizer, names: Mapping[str, str]) -> None:
    known = (name for key, name in names.items() if key.endswith("_token") and backend.token_to_id(name) is not None)
    backend.add_special_tokens([AddedToken(name, normalized=False, special=True) for name in dict.fromkeys(known)])
