"""How each kind of model is looked into: a model and an input -> a view (look/page/seen.py).

| kind           | models                             | what it reads and foretells                                        |
|----------------|------------------------------------|--------------------------------------------------------------------|
| translation    | encoder-decoders: 2017, T5, BART   | the source; its translation, and the tree of the search            |
| alignment      | RNNsearch                          | the same, with one layer that looks at the source                  |
| language       | GPT                                | the prompt and what it goes on with                                |
| filling        | BERT                               | what belongs where the text says <mask>, or in every place         |
| classification | BERT and GPT that learned answers  | a class, a number, or a tag for each word                          |
| picture        | ViT                                | the class of a picture                                             |

The first three write (look/page/kinds_write.py), the others read (look/page/kinds_read.py); what they share is here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.look.page.chain import chain_of
from regard.look.page.seen import Seen, attention_of, described
from regard.look.record import Record, layers_of, record
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.classification_model import ClassificationModel
from regard.models.model import Model
from regard.text.tokenizer import Tokenizers

ALONE = ("tokens", "tokens")  # the strip of a model with one
TRANSLATIONS = {"translation", "alignment"}  # the kinds of models that translate


@dataclass(frozen=True)
class Sight:
    """A model, what it is given, and how."""

    package: ModelPackage
    name: str
    text: str
    changes: tuple[Any, ...]  # look/change/intervene.py
    along: Seen | None
    options: dict[str, Any]
    said: tuple[str, ...] = ()  # the changes as they were asked for

    @property
    def reader(self) -> Model:
        """The model under its answers."""
        return reader_of(self.package.model)

    @property
    def tokenizers(self) -> Tokenizers:
        if self.package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        return self.package.tokenizers

    def placed(self, strips: Any) -> Sight:
        """With places in the changes for the words in them, which are those of the unchanged input and output."""
        from regard.look.change.intervene import resolved

        found = resolved(self.changes, strips, layers_of(self.reader))
        return replace(self, changes=tuple(found), said=tuple(map(str, self.changes)))

    def changed(self) -> AbstractContextManager[Any]:
        if not self.changes:
            return nullcontext()
        from regard.look.change.intervene import changed

        return changed(self.reader, self.changes)

    def checked(self, ids: list[int]) -> list[int]:
        longest = self.package.config.max_len
        if len(ids) > longest:
            raise RegardError(f"the text has {len(ids)} tokens, but the model reads at most {longest}: shorten it")
        return ids

    def row(self, ids: Sequence[int]) -> Tensor:
        """(1, T)"""
        return torch.tensor([ids], device=next(self.reader.parameters()).device)

    def view(self, kind: str, **parts: Any) -> Seen:
        model = {"name": self.name} if self.name else {}
        model |= described(self.package.model, self.package.config)
        given = {"input": self.text, "model": model, "name": self.name, "changes": self.said}
        return Seen(kind, **(given | parts))


def reader_of(model: nn.Module) -> Model:
    reader = model.body if isinstance(model, ClassificationModel) else model
    assert isinstance(reader, Model)
    return reader


def kind_of(package: ModelPackage) -> str:
    if isinstance(package.model, ClassificationModel):
        return "classification"
    kind = architecture_of(package.config)
    if kind.translates:
        return "alignment" if kind.is_recurrent else "translation"
    return "filling" if kind.fills_blanks else "picture" if kind.sees_images else "language"


def check_kinds(first: Seen, package: ModelPackage, name: str) -> None:
    """Whether a second model can be compared with a first view."""
    kinds = first.kind, kind_of(package)
    if kinds[0] != kinds[1] and not set(kinds) <= TRANSLATIONS:
        names = first.name or first.model["architecture"], name or package.config.architecture
        both = " and ".join(f"{name} ({kind})" for name, kind in zip(names, kinds, strict=True))
        raise RegardError(f"{both} are models of two kinds, which cannot be compared: look into each by itself")


def eyes_for(package: ModelPackage) -> Callable[[Sight], Seen]:
    """Who looks into such a model; one in which nothing attends to anything is refused."""
    from regard.look.page import kinds_read, kinds_write

    reader, config = reader_of(package.model), package.config
    found = layers_of(reader)
    if not found and kind_of(package) == "alignment":
        raise RegardError(
            f"this model has no attention (model.score {config.score}), so there is nothing to look at: "
            f"train one with model.score additive, dot or general"
        )
    if not found:
        raise RegardError(f"no layer of this {config.architecture} attends to anything: there is nothing to look at")
    writers = {**dict.fromkeys(TRANSLATIONS, kinds_write.translation), "language": kinds_write.language}
    return {**writers, **kinds_read.READERS}[kind_of(package)]


@dataclass(frozen=True)
class Kept:
    """One forward."""

    records: dict[str, Record]
    vectors: dict[str, Tensor]  # (T, C) each
    result: Tensor  # logits, of the one row

    def parts(self, sight: Sight, strips: tuple[str, str]) -> dict[str, Any]:
        """Of a Transformer; `strips`: what its encoder and its decoder read."""
        post = sight.package.config.norm == "post" and not sight.package.config.parallel
        chain = chain_of(self.vectors, self.records, strips, post)
        return {"attention": attention_of(self.records, strips), "chain": chain}


@torch.no_grad()
def keep(sight: Sight, *inputs: Tensor) -> Kept:
    """Run the model on one row."""
    with sight.changed(), record(sight.reader, "*", stream=True) as tape:
        result = sight.package.model(*inputs)
    records = {name: tape[name][-1] for name in tape if tape[name]}
    return Kept(records, {name: found[-1][0] for name, found in tape.vectors.items() if found}, result[0])
