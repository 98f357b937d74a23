"""Where a run begins: with fresh weights and a vocabulary of its own, or with those of another model."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import model_folder as folders
from regard.config import Config, ModelConfig
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import exists
from regard.models.architectures import make_model
from regard.models.classification_model import ClassificationModel
from regard.models.weights import weights_of
from regard.terminal import count_progress, progress_bar
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.checkpoint import Checkpoints
from regard.training.metrics_log import print_message
from regard.training.run_folder import initial_model_facts, save_initial_model_facts
from regard.vectors.initial_embeddings import initialize_embeddings, load_vectors_for
from regard.vectors.word_vectors import WordVectors

HEADS = ("head.", "pooler.", "answers.")  # what a new task may leave behind, or begin anew


@dataclass(frozen=True)
class Start:
    """What a run takes from the model it begins with; a run that has begun has all of it in its own folder."""

    folder: Path
    config: Config
    quiet: bool = False
    init: folders.ModelPackage | None = None
    vectors: WordVectors | None = None
    kept: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, folder: Path, config: Config, quiet: bool = False) -> Start:
        begun = bool(Checkpoints(folder / "checkpoints").steps())
        given = Path(config.train.init) if config.train.init else None
        loaded = load_model(given, torch.device("cpu")) if given and not begun else None
        if not begun:
            save_initial_model_facts(folder, loaded)
        return cls(folder, config, quiet, loaded, None if begun else given_vectors(config), initial_model_facts(folder))

    def tokenizers(self, learn: Callable[[], Tokenizers]) -> Tokenizers:
        """Those in the run folder, those of the model it begins with, or new ones."""
        forms = (["tokenizer.json"], ["tokenizer.source.json", "tokenizer.target.json"])
        if any(all(exists(self.folder / name) for name in form) for form in forms):  # one of two: a killed run's
            return Tokenizers.load(self.folder)
        if self.init is not None:
            if self.init.tokenizers is None:
                raise RegardError(f"the model in {self.config.train.init} has no tokenizer, so it can read no text")
            found = self.init.tokenizers
        elif self.config.tokenizer.file:
            found = given_tokenizers(Path(self.config.tokenizer.file))
        else:
            kind = self.config.tokenizer.kind
            print_message(f"training a {kind} tokenizer of {self.config.tokenizer.vocab_size:,} pieces", self.quiet)
            found = learn()
        found.save(self.folder)
        return found

    def text_tokenizer(self, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """One vocabulary, learned from `texts`."""

        def learn() -> Tokenizers:
            with progress_bar("reading texts", quiet=self.quiet) as advance:
                joint = Tokenizer.train(count_progress(texts(), advance), self.config.tokenizer)
            return Tokenizers(joint, joint)

        return self.tokenizers(learn).source

    def token_template(self, own: SpecialTokenTemplate) -> SpecialTokenTemplate:
        """That of an imported model, which is used to it; else the task's."""
        return SpecialTokenTemplate.from_dict(self.kept["token_template"]) if self.kept.get("origin") else own

    def model(self, sizes: ModelConfig) -> nn.Module:
        """Fresh weights, and those of the model the run begins with wherever it has them."""
        torch.manual_seed(self.config.train.seed)
        model = make_model(sizes)
        if self.init is not None:
            fresh = transfer(self.init.model, model, self.config.train.init)
            print_message(f"weights of {self.config.train.init}; fresh: {', '.join(fresh) or 'none'}", self.quiet)
        if self.vectors is not None:
            found = initialize_embeddings(model, Tokenizers.load(self.folder), self.vectors)
            print_message(f"word vectors of {self.config.train.vectors} begin {found}", self.quiet)
        return model


def given_tokenizers(path: Path) -> Tokenizers:
    """Those of a run or model folder, or one file for both sides."""
    if exists(path) and path.is_dir():
        return Tokenizers.load(path if any(path.glob("tokenizer*.json")) else folders.find(path))
    joint = Tokenizer.load(path)
    return Tokenizers(joint, joint)


def given_vectors(config: Config) -> WordVectors | None:
    """Those of `train.vectors`; read before the data, so that what is wrong with them is said at once."""
    if not config.train.vectors:
        return None
    if config.task == "images":
        raise RegardError("train.vectors begins embeddings of words, and images have none: leave it out")
    if config.train.init:
        raise RegardError("train.vectors would replace what the model in train.init has learned: leave one of them out")
    return load_vectors_for(Path(config.train.vectors), config.model.d_model)


@torch.no_grad()
def transfer(old: nn.Module, new: nn.Module, where: str) -> list[str]:
    """Copy weights by name; only heads may be left over on either side. Returns the names that stay fresh."""
    given, own = _by_name(old), _by_name(new)
    left = [name for name in given if name not in own and not name.startswith(HEADS)]
    fresh = [name for name in own if name not in given or own[name].shape != given[name].shape]
    wrong = left + [name for name in fresh if not name.startswith(HEADS)]
    if wrong:
        listed = ", ".join(sorted(wrong))
        raise RegardError(f"the weights of {where} do not fit this model ({listed}): leave its sizes as they are")
    for name in own.keys() - fresh:
        own[name].copy_(given[name])
    return fresh


def _by_name(model: nn.Module) -> dict[str, torch.Tensor]:
    """Weights under the names of the model that reads, without the head around it."""
    prefix = "body." if isinstance(model, ClassificationModel) else ""
    return {name.removeprefix(prefix): p for name, p in weights_of(model).items()}
