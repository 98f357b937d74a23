"""The initial model of a run: fresh weights and newly trained tokenizers, or those of another model (fine-tuning)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard import model_folder as folders
from regard.config import Config, ModelConfig, TokenizerConfig
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import exists
from regard.models.architectures import make_model
from regard.models.classification_model import ClassificationModel
from regard.models.initialization import is_made_in_parts
from regard.models.weights import weights_of
from regard.tasks.run_config import DEFAULT_SENTINELS
from regard.terminal import count_progress, progress_bar
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.checkpoint import Checkpoints
from regard.training.metrics_log import print_message
from regard.training.parallel import cuts_new_models
from regard.training.run_folder import initial_model_facts, save_initial_model_facts
from regard.vectors.initial_embeddings import initialize_embeddings, load_vectors_for
from regard.vectors.word_vectors import WordVectors

HEADS = ("head.", "pooler.", "prediction_head.")  # weights that a new task may drop, or initialize freshly


@dataclass(frozen=True)
class InitialModel:
    """The source of tokenizers, special tokens and weights of a run, which may be nothing.

    It is the model of `train.init_from`, or the word vectors of `train.pretrained_embeddings`. A run that has checkpoints
    keeps all of them in its own folder, and the initial model is not loaded again.
    """

    folder: Path
    config: Config
    quiet: bool = False
    package: folders.ModelPackage | None = None  # the model of train.init_from
    vectors: WordVectors | None = None  # the word vectors of train.pretrained_embeddings
    facts: dict[str, Any] = field(default_factory=dict)  # see `initial_model_facts`

    @classmethod
    def load(cls, folder: Path, config: Config, quiet: bool = False) -> InitialModel:
        """Load the model and the word vectors that the settings name, unless the run in `folder` has checkpoints."""
        begun = bool(Checkpoints(folder / "checkpoints").steps())
        given = Path(config.train.init_from) if config.train.init_from else None
        loaded = load_model(given, torch.device("cpu")) if given and not begun else None
        if not begun:
            save_initial_model_facts(folder, loaded)
        vectors = None if begun else load_initial_vectors(config)
        return cls(folder, config, quiet, loaded, vectors, initial_model_facts(folder))

    def get_tokenizers(self, train: Callable[[], Tokenizers]) -> Tokenizers:
        """Return the tokenizers in the run folder, those of the initial model, those of `tokenizer.file`, or new ones."""
        forms = (["tokenizer.json"], ["tokenizer.source.json", "tokenizer.target.json"])
        # One file of two is what a killed run leaves: it does not count.
        if any(all(exists(self.folder / name) for name in form) for form in forms):
            return Tokenizers.load(self.folder)
        if self.package is not None:
            if self.package.tokenizers is None:
                raise RegardError(
                    f"the model in {self.config.train.init_from} has no tokenizer, so it can read no text"
                )
            check_vocabulary_settings(self.config)
            found = self.package.tokenizers
        elif self.config.tokenizer.file:
            found = load_tokenizers(Path(self.config.tokenizer.file))
        else:
            kind = self.config.tokenizer.kind
            print_message(
                f"training a {kind} tokenizer of at most {self.config.tokenizer.vocab_size:,} pieces", self.quiet
            )
            found = train()
        found.save(self.folder)
        return found

    def get_text_tokenizer(self, texts: Callable[[], Iterable[str]]) -> Tokenizer:
        """Return the tokenizer of a task with one vocabulary; a new one is trained on `texts`."""

        def train() -> Tokenizers:
            with progress_bar("reading texts", quiet=self.quiet) as advance:
                joint = Tokenizer.train(count_progress(texts(), advance), self.config.tokenizer)
            return Tokenizers(joint, joint)

        return self.get_tokenizers(train).source

    def get_token_template(self, default: SpecialTokenTemplate) -> SpecialTokenTemplate:
        """Return the special tokens that an imported model was trained with, else the default of the task."""
        return SpecialTokenTemplate.from_dict(self.facts["token_template"]) if self.facts.get("origin") else default

    def build_model(self, config: ModelConfig) -> nn.Module:
        """Return a model with the weights of the initial model where it has them, and fresh ones elsewhere."""
        torch.manual_seed(self.config.train.seed)
        if self.package is None and self.vectors is None and cuts_new_models(self.config.train):
            with torch.device("meta"):
                model = make_model(config)
            if is_made_in_parts(model):
                return model  # its processes fill it block by block, each with its own share
            torch.manual_seed(self.config.train.seed)
        model = make_model(config)
        if self.package is not None:
            fresh = transfer_weights(self.package.model, model, self.config.train.init_from)
            print_message(f"weights of {self.config.train.init_from}; fresh: {', '.join(fresh) or 'none'}", self.quiet)
        if self.vectors is not None:
            found = initialize_embeddings(model, Tokenizers.load(self.folder), self.vectors)
            print_message(f"word vectors of {self.config.train.pretrained_embeddings} begin {found}", self.quiet)
        return model


def check_vocabulary_settings(config: Config) -> None:
    """Refuse settings of a vocabulary that would have no effect, because it is that of the initial model.

    `tokenizer.bpe_dropout` has an effect with any vocabulary. The directions of the data set `tokenizer.language_tokens`,
    and `tokenizer.positional_unknown` is checked against the vocabulary."""
    defaults = replace(TokenizerConfig(), n_sentinels=DEFAULT_SENTINELS.get(config.task, 0))
    for name in ("kind", "vocab_size", "joint", "nfc", "lowercase", "file", "n_sentinels"):
        if getattr(config.tokenizer, name) != getattr(defaults, name):
            raise RegardError(
                f"tokenizer.{name} would do nothing: the vocabulary is that of the model in train.init_from; leave it out"
            )


def load_tokenizers(path: Path) -> Tokenizers:
    """Return the tokenizers of a run or model folder, or the tokenizer of a file for both sides."""
    if exists(path) and path.is_dir():
        return Tokenizers.load(path if any(path.glob("tokenizer*.json")) else folders.find(path))
    joint = Tokenizer.load(path)
    return Tokenizers(joint, joint)


def load_initial_vectors(config: Config) -> WordVectors | None:
    """Return the word vectors of `train.pretrained_embeddings`.

    They are read before the data, so that errors are reported at once."""
    if not config.train.pretrained_embeddings:
        return None
    if config.task == "image-classification":
        raise RegardError("train.pretrained_embeddings begins embeddings of words, and images have none: leave it out")
    if config.train.init_from:
        raise RegardError(
            "train.pretrained_embeddings would replace what the model in train.init_from has learned: "
            "leave one of them out"
        )
    return load_vectors_for(Path(config.train.pretrained_embeddings), config.model.d_model)


@torch.no_grad()
def transfer_weights(old: nn.Module, new: nn.Module, where: str) -> list[str]:
    """Copy weights by name; only heads may be missing on either side. Return the names of weights that stay fresh."""
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
    """Return the weights of a model by name; those inside a classification model have the names of its body."""
    prefix = "body." if isinstance(model, ClassificationModel) else ""
    return {name.removeprefix(prefix): p for name, p in weights_of(model).items()}
