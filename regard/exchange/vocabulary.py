"""The tokenizer of a folder from elsewhere: its form, its special tokens, what it puts around a text.

Its ids stay as they are. Which tokens are special is said by their names in the tokenizer's files, or by their ids in
config.json.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from regard.errors import RegardError
from regard.exchange.family import whole
from regard.exchange.pieces import from_merges, from_word_list, marian, names_in
from regard.files import exists, read_json_object
from regard.model_folder import ModelPackage
from regard.models.model import Model
from regard.text.special_tokens import SPECIAL_TOKEN_NAMES, SpecialTokens, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.text.tokenizer_training import library_errors

# BERT calls its first token cls and its last sep; others have bos and eos.
ROLES = {"pad": ("pad",), "bos": ("bos", "cls"), "eos": ("eos", "sep"), "unk": ("unk",), "mask": ("mask",)}


@dataclass(frozen=True)
class Foreign:
    """A tokenizer from elsewhere, as the text of a tokenizer.json."""

    text: str
    target: str | None = None  # that of the target language where it cuts text otherwise; the ids are the same

    @property
    def pieces(self) -> dict[str, int]:
        return tokenizers.Tokenizer.from_str(self.text).get_vocab()

    def ours(self, special: SpecialTokens, size: int) -> Tokenizers:
        """As it is, in a vocabulary of `size` rows."""
        with library_errors("the tokenizer cannot be used"):
            made = [Tokenizer(tokenizers.Tokenizer.from_str(text), special, size) for text in self.texts]
        return Tokenizers(made[0], made[-1])

    @property
    def texts(self) -> list[str]:
        return [self.text] if self.target is None else [self.text, self.target]

    def token_template(self, start: tuple[int, ...], end: tuple[int, ...]) -> SpecialTokenTemplate:
        """What stands around a text and between two: the difference between encoding with special tokens and without."""
        backend = tokenizers.Tokenizer.from_str(self.text)
        backend.no_truncation()
        backend.no_padding()
        text = backend.encode("a", add_special_tokens=False).ids
        one, two = backend.encode("a").ids, backend.encode("a", "a").ids
        at = next((i for i in range(len(one)) if one[i : i + len(text)] == text), 0)
        first, last = one[:at], one[at + len(text) :]
        middle = two[at + len(text) : len(two) - len(last) - len(text)]
        return SpecialTokenTemplate(tuple(first), tuple(middle), tuple(last), start, end)


# ---- in ---------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> Foreign | None:
    """tokenizer.json where there is one, otherwise what older versions wrote; None where there is nothing."""
    if exists(folder / "tokenizer.json"):
        data = read_json_object(folder / "tokenizer.json")
        with library_errors(f"{folder / 'tokenizer.json'} is not a usable tokenizer"):
            return Foreign(tokenizers.Tokenizer.from_str(json.dumps(data)).to_str())
    if exists(folder / "source.spm"):
        return Foreign(*(marian(folder, side).to_str() for side in ("source", "target")))
    for unread in ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"):
        if exists(folder / unread):
            raise RegardError(f"{folder / unread} is not read: save its tokenizer as tokenizer.json with transformers")
    settings, names = read_json_object(folder / "tokenizer_config.json"), names_in(folder)
    backend = None
    if exists(folder / "vocab.txt"):
        backend = from_word_list(folder / "vocab.txt", settings, names)
    elif exists(folder / "merges.txt"):
        backend = from_merges(folder, settings, names)
    return Foreign(backend.to_str()) if backend else None


def special_tokens(
    their: Mapping[str, Any], folder: Path, pieces: Mapping[str, int], model: type[Model]
) -> SpecialTokens:
    """Those of a model from elsewhere, at their ids."""
    size = whole(their, "vocab_size")
    if pieces and max(pieces.values()) >= size:
        raise RegardError(f"the tokenizer in {folder} has ids up to {max(pieces.values())}, the model {size} rows")
    names = names_in(folder)
    found = {role: wanted_id(role, their, names, pieces, model.fills_blanks) for role in ROLES}
    return SpecialTokens(**{role: i for role, i in found.items() if i is not None and 0 <= i < size})


def wanted_id(
    role: str, their: Mapping[str, Any], names: Mapping[str, str], pieces: Mapping[str, int], encoder: bool
) -> int | None:
    keys = ROLES[role][::-1] if encoder else ROLES[role]
    for key in keys:
        if names.get(f"{key}_token") in pieces:
            return pieces[names[f"{key}_token"]]
    for key in keys:
        id = their.get(f"{key}_token_id")
        id = id[0] if isinstance(id, list) and id else id
        if isinstance(id, int):
            return id
    return pieces.get(SPECIAL_TOKEN_NAMES[role])


def start_of(their: Mapping[str, Any], special: SpecialTokens, model: type[Model]) -> tuple[int, ...]:
    """What a decoder reads before its first word: T5's and Marian's their padding, which is a token like any other there."""
    if not model.translates:
        first = special.eos if special.bos is None and not model.fills_blanks else special.bos
        return () if first is None else (first,)
    first, forced = their.get("decoder_start_token_id"), their.get("forced_bos_token_id")
    first = special.pad if first is None else first
    start = [i for i in (first, forced) if i is not None]
    if first is None or not all(type(i) is int and 0 <= i < whole(their, "vocab_size") for i in start):
        raise RegardError(
            "config.json does not say what its decoder starts with: decoder_start_token_id and forced_bos_token_id "
            "must be tokens of its vocabulary"
        )
    return tuple(start)


# ---- out --------------------------------------------------------------------------------------------------------------


def write(folder: Path, package: ModelPackage) -> dict[str, dict[str, Any]]:
    """tokenizer.json as it came, or one of ours with its frame; and what belongs in the files beside it."""
    assert package.tokenizers is not None
    tokenizer, path = package.tokenizers.source, folder / "tokenizer.json"
    data = json.loads(tokenizer.to_str())
    if package.origin:
        path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
        return {}
    data |= {"post_processor": template(package.token_template, tokenizer), "truncation": None, "padding": None}
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    found = {f"{key}_token": getattr(tokenizer.special, role) for role, keys in ROLES.items() for key in keys}
    names: dict[str, Any] = {name: tokenizer.token(i) for name, i in found.items() if i is not None}
    inputs = ["input_ids", *(["token_type_ids"] if package.config.token_types > 1 else []), "attention_mask"]
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": package.config.max_len}
    return {"tokenizer_config.json": {**names, "model_input_names": inputs}}


def template(token_template: SpecialTokenTemplate, tokenizer: Tokenizer) -> dict[str, Any]:
    """A token_template as a post-processor of the tokenizers library."""

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
