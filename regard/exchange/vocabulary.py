"""The tokenizer of a folder from elsewhere: read whatever form it has, renumber it, see what it puts around a text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from regard.errors import RegardError
from regard.exchange import renumber
from regard.exchange.numbering import Numbering
from regard.exchange.pieces import from_merges, from_word_list, marian
from regard.exchange.roles import names_in
from regard.files import exists, json_object
from regard.folder import Bundle
from regard.text.frame import Frame
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.text.vocabulary import EOS, MASK, PAD, SOS, SPECIALS, UNK, library_errors

ROLES = {"pad_token": PAD, "bos_token": SOS, "cls_token": SOS, "eos_token": EOS, "sep_token": EOS, "unk_token": UNK}
ROLES |= {"mask_token": MASK}


@dataclass(frozen=True)
class Foreign:
    """A tokenizer with its own ids, as the parts of a tokenizer.json."""

    data: dict[str, Any]
    target: dict[str, Any] | None = (
        None  # that of the target language where it cuts text otherwise; the ids are the same
    )

    @property
    def pieces(self) -> dict[str, int]:
        return renumber.pieces_of(self.data)

    def ours(self, numbering: Numbering) -> Tokenizers:
        source = renumbered(self.data, numbering)
        return Tokenizers(source, renumbered(self.target, numbering) if self.target else source)

    def memory(self, numbering: Numbering) -> dict[str, Any] | None:
        return None if self.target else renumber.memory(self.data, numbering)

    def frame(self, numbering: Numbering, start: tuple[int, ...]) -> Frame:
        """What stands around a text and between two: the difference between encoding with special tokens and without."""
        backend = tokenizers.Tokenizer.from_str(json.dumps(self.data))
        backend.no_truncation()
        backend.no_padding()
        text = backend.encode("a", add_special_tokens=False).ids
        one, two = backend.encode("a").ids, backend.encode("a", "a").ids
        at = next((i for i in range(len(one)) if one[i : i + len(text)] == text), 0)
        first, last = one[:at], one[at + len(text) :]
        middle = two[at + len(text) : len(two) - len(last) - len(text)]
        before, between, after = (tuple(numbering.ours[i] for i in ids) for ids in (first, middle, last))
        return Frame(before, between, after, start)


def renumbered(data: dict[str, Any], numbering: Numbering) -> Tokenizer:
    with library_errors("the tokenizer cannot be renumbered"):
        data = renumber.guarded(renumber.to_ours(data, numbering))
        return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(data)))


def read(folder: Path) -> Foreign | None:
    """tokenizer.json where there is one, otherwise what older versions wrote; None where there is nothing."""
    if exists(folder / "tokenizer.json"):
        data = json_object(folder / "tokenizer.json")
        with library_errors(f"{folder / 'tokenizer.json'} is not a usable tokenizer"):
            return Foreign(json.loads(tokenizers.Tokenizer.from_str(json.dumps(data)).to_str()))
    if exists(folder / "source.spm"):
        source, target = (json.loads(marian(folder, side).to_str()) for side in ("source", "target"))
        return Foreign(source, target)
    for unread in ("tokenizer.model", "spiece.model", "spm.model", "sentencepiece.bpe.model"):
        if exists(folder / unread):
            raise RegardError(f"{folder / unread} is not read: save its tokenizer as tokenizer.json with transformers")
    settings, names = json_object(folder / "tokenizer_config.json"), names_in(folder)
    backend = None
    if exists(folder / "vocab.txt"):
        backend = from_word_list(folder / "vocab.txt", settings, names)
    elif exists(folder / "merges.txt"):
        backend = from_merges(folder, settings, names)
    return Foreign(json.loads(backend.to_str())) if backend else None


def write(folder: Path, bundle: Bundle, numbering: Numbering) -> dict[str, dict[str, Any]]:
    """tokenizer.json with its old ids, or with ours where it is ours; and what belongs in the files beside it."""
    assert bundle.tokenizers is not None
    path = folder / "tokenizer.json"
    bundle.tokenizers.source.save(path)
    data, kept = json_object(path), bundle.origin.get("tokenizer")
    data = renumber.to_theirs(data, numbering, kept) if kept else data | {"post_processor": template(bundle.frame)}
    path.write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")
    if kept:
        return {}
    names: dict[str, Any] = {role: SPECIALS[i] for role, i in ROLES.items()}
    inputs = ["input_ids", *(["token_type_ids"] if bundle.config.token_types > 1 else []), "attention_mask"]
    names |= {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": bundle.config.max_len}
    return {"tokenizer_config.json": {**names, "model_input_names": inputs}}


def template(frame: Frame) -> dict[str, Any]:
    """A frame as a post-processor of the tokenizers library."""

    def part(ids: tuple[int, ...], type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": SPECIALS[i], "type_id": type_id}} for i in ids]

    a, b = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    first = [*part(frame.before, 0), a]
    used = {i: SPECIALS[i] for i in (*frame.before, *frame.between, *frame.after)}
    return {
        "type": "TemplateProcessing",
        "single": [*first, *part(frame.after, 0)],
        "pair": [*first, *part(frame.between, 0), b, *part(frame.after, 1)],
        "special_tokens": {name: {"id": name, "ids": [i], "tokens": [name]} for i, name in used.items()},
    }
