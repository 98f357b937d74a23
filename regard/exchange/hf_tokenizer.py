"""The tokenizer of a Hugging Face folder: its vocabulary, its special tokens, the template it puts around a text.

Token ids stay as they are. The special tokens are named in the tokenizer's files, or given by their ids in config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from regard.errors import RegardError
from regard.exchange.legacy_tokenizers import load_byte_level_bpe, load_marian, load_wordpiece, read_special_names
from regard.exchange.model_family import read_size
from regard.files import exists, read_json_object
from regard.model_folder import ModelPackage
from regard.models.model import Model
from regard.text.special_tokens import SPECIAL_TOKEN_NAMES, SpecialTokens, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.text.tokenizer_training import library_errors

# BERT's names of bos and eos are cls and sep.
ROLES = {"pad": ("pad",), "bos": ("bos", "cls"), "eos": ("eos", "sep"), "unk": ("unk",), "mask": ("mask",)}


@dataclass(frozen=True)
class HFTokenizer:
    """A tokenizer of Hugging Face, as the text of a tokenizer.json."""

    text: str
    target: str | None = None  # another one for the target language, with the same ids

    @property
    def pieces(self) -> dict[str, int]:
        return tokenizers.Tokenizer.from_str(self.text).get_vocab()

    def to_ours(self, special: SpecialTokens, size: int) -> Tokenizers:
        """Return it as our tokenizers, in a vocabulary of `size` rows."""
        with library_errors("the tokenizer cannot be used"):
            both = [Tokenizer(tokenizers.Tokenizer.from_str(text), special, size) for text in self.texts]
        return Tokenizers(both[0], both[-1])

    @property
    def texts(self) -> list[str]:
        return [self.text] if self.target is None else [self.text, self.target]

    def token_template(self, start: tuple[int, ...], end: tuple[int, ...]) -> SpecialTokenTemplate:
        """Return the special tokens around a text and between two texts.

        They are the difference between encoding with special tokens and without.
        """
        backend = tokenizers.Tokenizer.from_str(self.text)
        backend.no_truncation()
        backend.no_padding()
        text = backend.encode("a", add_special_tokens=False).ids
        one, two = backend.encode("a").ids, backend.encode("a", "a").ids
        at = next((i for i in range(len(one)) if one[i : i + len(text)] == text), 0)
        first, last = one[:at], one[at + len(text) :]
        middle = two[at + len(text) : len(two) - len(last) - len(text)]
        return SpecialTokenTemplate(tuple(first), tuple(middle), tuple(last), start, end)


# ---- import -----------------------------------------------------------------------------------------------------------


def read_tokenizer(folder: Path) -> HFTokenizer | None:
    """Read tokenizer.json, or the files that older versions of transformers wrote; return None if there is neither."""
    if exists(folder / "tokenizer.json"):
        data = read_json_object(folder / "tokenizer.json")
        with library_errors(f"{folder / 'tokenizer.json'} is not a usable tokenizer"):
            return HFTokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)).to_str())
    if exists(folder / "source.spm"):
        return HFTokenizer(*(load_marian(folder, side).to_str() for side in ("source", "target")))
    for unread in ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"):
        if exists(folder / unread):
            raise RegardError(f"{folder / unread} is not read: save its tokenizer as tokenizer.json with transformers")
    settings, names = read_json_object(folder / "tokenizer_config.json"), read_special_names(folder)
    backend = None
    if exists(folder / "vocab.txt"):
        backend = load_wordpiece(folder / "vocab.txt", settings, names)
    elif exists(folder / "merges.txt"):
        backend = load_byte_level_bpe(folder, settings, names)
    return HFTokenizer(backend.to_str()) if backend else None


def read_special_tokens(
    their: Mapping[str, Any], folder: Path, pieces: Mapping[str, int], model: type[Model]
) -> SpecialTokens:
    """Return the ids of the special tokens."""
    size = read_size(their, "vocab_size")
    if pieces and max(pieces.values()) >= size:
        raise RegardError(f"the tokenizer in {folder} has ids up to {max(pieces.values())}, the model {size} rows")
    names = read_special_names(folder)
    found = {role: find_special_id(role, their, names, pieces, model.fills_blanks) for role in ROLES}
    return SpecialTokens(**{role: i for role, i in found.items() if i is not None and 0 <= i < size})


def find_special_id(
    role: str, their: Mapping[str, Any], names: Mapping[str, str], pieces: Mapping[str, int], is_encoder: bool
) -> int | None:
    """Return the id of a special token: by its name in the tokenizer's files, its id in config.json, or our name for it."""
    keys = ROLES[role][::-1] if is_encoder else ROLES[role]
    for key in keys:
        if names.get(f"{key}_token") in pieces:
            return pieces[names[f"{key}_token"]]
    for key in keys:
        id = their.get(f"{key}_token_id")
        id = id[0] if isinstance(id, list) and id else id
        if isinstance(id, int):
            return id
    return pieces.get(SPECIAL_TOKEN_NAMES[role])


def find_start_ids(their: Mapping[str, Any], special: SpecialTokens, model: type[Model]) -> tuple[int, ...]:
    """Return the tokens that a decoder reads first; T5 and Marian start with the padding token."""
    if not model.translates:
        first = special.eos if special.bos is None and not model.fills_blanks else special.bos
        return () if first is None else (first,)
    first, forced = their.get("decoder_start_token_id"), their.get("forced_bos_token_id")
    first = special.pad if first is None else first
    start = [i for i in (first, forced) if i is not None]
    if first is None or not all(type(i) is int and 0 <= i < read_size(their, "vocab_size") for i in start):
        raise RegardError(
            "config.json does not say what its decoder starts with: decoder_start_token_id and forced_bos_token_id "
            "must be tokens of its vocabulary"
        )
    return tuple(start)


# ---- export -----------------------------------------------------------------------------------------------------------


def write_tokenizer(folder: Path, package: ModelPackage) -> dict[str, dict[str, Any]]:
    """Write tokenizer.json, with the token template if the tokenizer is ours; return the contents of the other files."""
    assert package.tokenizers is not None
    tokenizer, path = package.tokenizers.source, folder / "tokenizer.json"
    data = json.loads(tokenizer.to_str())
    if package.origin:
        path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
        return {}
    data |= {
        "post_processor": make_post_processor(package.token_template, tokenizer),
        "truncation": None,
        "padding": None,
    }
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    found = {f"{key}_token": getattr(tokenizer.special, role) for role, keys in ROLES.items() for key in keys}
    names: dict[str, Any] = {name: tokenizer.token(i) for name, i in found.items() if i is not None}
    inputs = ["input_ids", *(["token_type_ids"] if package.config.token_types > 1 else []), "attention_mask"]
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": package.config.max_len}
    return {"tokenizer_config.json": {**names, "model_input_names": inputs}}


def make_post_processor(token_template: SpecialTokenTemplate, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a token template as a post-processor of the tokenizers library."""

    def part(ids: tuple[int, ...], type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": tokenizer.token(i), "type_id": type_id}} for i in ids]

    a, b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    first = [*part(token_template.before, 0), a]
    used = {i: tokenizer.token(i) for i in (*token_template.before, *token_template.between, *token_template.after)}
    return {
        "type": "TemplateProcessing",
        "single": [*first, *part(token_template.after, 0)],
        "pair": [*first, *part(token_template.between, 0), b, *part(token_template.after, 1)],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in used.items()},
    }
