"""Plain text for language modelling, denoising and classification: corpus, tokenized store, vocabulary of the model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from regard.config import Config, ModelConfig
from regard.data.text_corpus import TextCorpus
from regard.data.token_cache import ANY_LENGTH, Filters, Store, cache_folder, prepare_store
from regard.errors import RegardError
from regard.models.architectures import architecture_of
from regard.models.model import names_learning
from regard.terminal import progress_bar
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer
from regard.training.metrics_log import print_message


class TemplateTokenizer:
    """A tokenizer that adds the special tokens of a template around each document."""

    def __init__(self, tokenizer: Tokenizer, token_template: SpecialTokenTemplate) -> None:
        self.tokenizer, self.token_template = tokenizer, token_template

    def encode_batch(self, texts: list[str]) -> list[list[int]]:
        return [self.token_template.wrap(ids) for ids in self.tokenizer.encode_batch(texts)]

    def fingerprint(self) -> str:
        return self.tokenizer.fingerprint() + json.dumps(self.token_template.to_dict())

    def __len__(self) -> int:
        return len(self.tokenizer)


def make_text_corpus(config: Config, split: str) -> TextCorpus:
    """Return the corpus of a split, train, valid or test."""
    data = config.data
    return TextCorpus(getattr(data, split), Path(data.root), data.documents, split)


def make_text_corpora(config: Config, quiet: bool) -> dict[str, TextCorpus]:
    """Return the corpora for training and validation; without data.valid, a share of the training text is held out."""
    train = make_text_corpus(config, "train")
    if config.data.valid:
        return {"train": train, "valid": make_text_corpus(config, "valid")}
    train, valid, message = train.hold_out(config.data.valid_share, config.train.seed)
    print_message(message, quiet)
    return {"train": train, "valid": valid}


def prepare_text_store(corpus: TextCorpus, encoder: TemplateTokenizer | Tokenizer, quiet: bool) -> Store:
    """Tokenize a corpus, or take it from the cache, and print how much of it there is."""
    with progress_bar("tokenizing texts", quiet=quiet) as advance:
        store = prepare_store(corpus, (encoder,), Filters(ANY_LENGTH), cache_folder(), advance)
    print_message(f"{corpus.split} data: {store.report.describe('texts')}; {len(store.source.ids):,} tokens", quiet)
    return store


def check_task(config: Config) -> None:
    """Refuse a model whose architecture cannot learn the task."""
    if config.task not in architecture_of(config.model).tasks:
        wanted = names_learning(config.task)
        raise RegardError(
            f"the task {config.task} trains a {wanted}, but model.preset {config.model.preset} is a "
            f"{config.model.architecture}: choose a {wanted} preset"
        )


def set_vocabulary(config: ModelConfig, tokenizer: Tokenizer) -> ModelConfig:
    """Return the settings of a model with the vocabulary size, for each side it has, and the ids of the special tokens."""
    own = architecture_of(config).vocabularies
    n = {side: len(tokenizer) if side in own else 0 for side in ("source", "target")}
    return replace(config, source_vocab=n["source"], target_vocab=n["target"], **tokenizer.special.model_settings())
