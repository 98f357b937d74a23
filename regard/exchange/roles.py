"""Which tokens of theirs are our five: by their names in the tokenizer's files, or by their ids in config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.exchange.family import whole
from regard.exchange.numbering import Numbering
from regard.files import exists, json_object
from regard.models.architectures import ARCHITECTURES
from regard.text.vocabulary import EOS, MASK, PAD, SOS, SPECIALS, UNK

# BERT calls its first token cls and its last sep; others have bos and eos.
NAMES = {PAD: ("pad",), SOS: ("bos", "cls"), EOS: ("eos", "sep"), UNK: ("unk",), MASK: ("mask",)}
ORDER = (EOS, PAD, SOS, UNK, MASK)  # a token with several roles takes the first


def numbering_of(their: Mapping[str, Any], folder: Path, pieces: Mapping[str, int], architecture: str) -> Numbering:
    size = whole(their, "vocab_size")
    if pieces and max(pieces.values()) >= size:
        raise RegardError(f"the tokenizer in {folder} has ids up to {max(pieces.values())}, the model {size} rows")
    wanted = {
        role: wanted_id(role, their, names_in(folder), pieces, ARCHITECTURES[architecture].fills_blanks)
        for role in ORDER
    }
    first = their.get("decoder_start_token_id")
    starts_as_padding = ARCHITECTURES[architecture].translates and first in (None, wanted[PAD])
    if starts_as_padding:
        wanted[SOS] = None  # padding is what its decoder starts with, and ours cannot see padding
    special: dict[int, int] = {}
    for role in ORDER:
        found = wanted[role]
        if found is not None and 0 <= found < size and found not in special.values():
            special[role] = found
    copies = {}
    if starts_as_padding and PAD in special:
        copies = {SOS: PAD}
    elif SOS not in special and EOS in special and wanted[SOS] == wanted[EOS]:
        copies = {SOS: EOS}
    return Numbering(size, tuple(special.get(role) for role in range(len(SPECIALS))), copies)


def wanted_id(
    role: int, their: Mapping[str, Any], names: Mapping[str, str], pieces: Mapping[str, int], encoder: bool
) -> int | None:
    keys = NAMES[role][::-1] if encoder else NAMES[role]
    for key in keys:
        if names.get(f"{key}_token") in pieces:
            return pieces[names[f"{key}_token"]]
    for key in keys:
        id = their.get(f"{key}_token_id")
        id = id[0] if isinstance(id, list) and id else id
        if isinstance(id, int):
            return id
    return pieces.get(SPECIALS[role])


def names_in(folder: Path) -> dict[str, str]:
    """pad_token, cls_token, ... as the files beside a tokenizer name them."""
    names = dict(BERT_NAMES) if is_word_list(folder) else {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        for key, value in json_object(folder / file).items():
            text = value.get("content") if isinstance(value, dict) else value
            if key.endswith("_token") and isinstance(text, str):
                names[key] = text
    return names


BERT_NAMES = {f"{key}_token": f"[{key.upper()}]" for key in ("pad", "unk", "cls", "sep", "mask")}


def is_word_list(folder: Path) -> bool:
    """Return whether the vocabulary of a folder is BERT's list of words, whose special tokens need not be named."""
    return exists(folder / "vocab.txt") and not any(exists(folder / name) for name in ("tokenizer.json", "source.spm"))


def start_of(their: Mapping[str, Any], numbering: Numbering, architecture: str) -> tuple[int, ...]:
    """What a decoder reads before its first word."""
    if not ARCHITECTURES[architecture].translates:
        return (SOS,) if numbering.special[SOS] is not None else (EOS,)
    first = their.get("decoder_start_token_id")
    forced = their.get("forced_bos_token_id")
    start = [SOS if first in (None, numbering.special[PAD]) else numbering.ours[first]]
    return (*start, *([numbering.ours[forced]] if isinstance(forced, int) else []))
