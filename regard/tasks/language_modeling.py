"""Causal language modelling: predict every token of a text from those before it.

Rows are windows of one long stream, or packed documents that do not see each other. A recurrent model reads parallel
streams, whose state is carried from batch to batch (truncated BPTT).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from regard.config import Config
from regard.data.batches import Batches, batch_size
from regard.data.text_batches import PackedBatches, StatefulBatches, StreamBatches
from regard.data.text_corpus import TextCorpus
from regard.data.token_cache import Store
from regard.decode.generation import generate_texts, max_length_of
from regard.errors import RegardError
from regard.metrics.translation_scores import perplexity
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.model import LanguageModel, StatefulLanguageModel
from regard.tasks.initial_model import InitialModel
from regard.tasks.text_data import (
    TemplateTokenizer,
    check_task,
    make_text_corpora,
    make_text_corpus,
    prepare_text_store,
    set_vocabulary,
)
from regard.text.special_tokens import EMPTY_TEMPLATE, SpecialTokenTemplate, bert_template
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.job import Job, Poll, Validation
from regard.training.objective import Objective, PackedObjective, make_token_objective
from regard.training.truncated_bptt import StatefulObjective, make_recurrent_objective
from regard.training.validation import total_loss

STREAM = EMPTY_TEMPLATE  # where a file is one document, no special tokens mark its ends

# How a recurrent model is evaluated: in at most MAX_STREAMS parallel streams. Each first reads LEAD_BATCHES batches of
# SCORED_WIDTH tokens before its own part, which is at least STREAM_LEADS times as long. A short text is one stream.
MAX_STREAMS, STREAM_LEADS, LEAD_BATCHES, SCORED_WIDTH = 64, 8, 4, 256


@dataclass(frozen=True)
class LanguageModelingJob(Job):
    """A run of causal-lm."""

    train: Store
    valid: Store
    valid_characters: int

    def batches(self) -> Batches:
        return make_batches(self.train, self.config)

    def objective(self) -> Objective:
        train = self.config.train
        if self.config.data.packing == "documents":
            return PackedObjective(self.model, train.label_smoothing, train.z_loss)
        if isinstance(self.model, StatefulLanguageModel):
            return make_recurrent_objective(self.model, train, stream_count(self.config))
        return make_token_objective(self.model, train)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        result = measure(model, self.valid, self.valid_characters, self.config, device, dtype, poll)
        return replace(result, samples=self._sample(poll))

    def _sample(self, poll: Poll) -> list[str]:
        """Return texts that the model samples."""
        n, length = self.config.train.samples, min(100, max_length_of(self.model) - 2)
        text = self._prompt_text() if n else ""
        if not text or length < 1:
            return []
        poll()
        assert self.tokenizers is not None
        assert isinstance(self.model, LanguageModel)
        tokenizer = self.tokenizers.target
        options = replace(self.config.decode, beam=1, temperature=0.8, max_new_tokens=length, nbest=n)
        prompt = [*self.token_template.before, *tokenizer.encode(text)]
        return [text for text, _ in generate_texts(self.model, tokenizer, [prompt], options)]

    def _prompt_text(self) -> str:
        """Return what samples begin with: a line break.

        If the vocabulary has no line breaks and no special token begins a text, it is the first known word of the validation
        text, or nothing.
        """
        assert self.tokenizers is not None
        tokenizer = self.tokenizers.target
        if self.token_template.before or tokenizer.encode("\n"):
            return "\n"
        known = (id for id in self.valid.source.ids if id not in tokenizer.special_ids)
        return tokenizer.decode(islice(known, 1))

    def next_steps(self) -> list[str]:
        return [*super().next_steps(), f'regard generate {self.quoted_folder} "..."']


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> LanguageModelingJob:
    """Prepare a run: tokenizer, tokenized texts and model."""
    check_task(config)
    if config.data.packing == "documents" and not architecture_of(config.model).packs_documents:
        raise RegardError(
            f"data.packing documents hides texts of a row from each other, which a {config.model.architecture} cannot: "
            f"use stream"
        )
    initial = InitialModel.load(folder, config, quiet)
    corpora = make_text_corpora(config, quiet)
    tokenizer = initial.get_text_tokenizer(lambda: (text for (text,) in corpora["train"].rows()))
    special = tokenizer.special
    if marks_documents(config):
        token_template = initial.get_token_template(bert_template(special)).with_end_tokens(special)
    else:
        token_template = initial.get_token_template(STREAM)
    train, valid = (
        prepare_language_store(corpora[split], tokenizer, token_template, config, quiet) for split in ("train", "valid")
    )
    model = initial.build_model(set_vocabulary(config.model, tokenizer))
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    amount = f"{len(train.source.ids):,} training tokens"
    both, characters = Tokenizers(tokenizer, tokenizer), corpora["valid"].characters()
    return LanguageModelingJob(folder, config, model, both, token_template, train.key, amount, train, valid, characters)


def marks_documents(config: Config) -> bool:
    """Return whether special tokens mark the ends of documents."""
    data = config.data
    objects = any(".jsonl" in spec for spec in (*data.train, *data.valid, *data.test))  # one document each
    return data.packing == "documents" or data.documents != "file" or objects


def prepare_language_store(
    corpus: TextCorpus, tokenizer: Tokenizer, token_template: SpecialTokenTemplate, config: Config, quiet: bool
) -> Store:
    """Tokenize a corpus, with the special tokens of documents if their ends are marked."""
    encoder = TemplateTokenizer(tokenizer, token_template if marks_documents(config) else STREAM)
    store = prepare_text_store(corpus, encoder, quiet)
    if store.source.lengths.sum() == 1:
        raise RegardError(f"{', '.join(corpus.specs)} is one token, and none comes after it; give a longer text")
    return store


def make_batches(store: Store, config: Config, shifting: bool = True) -> Batches:
    """Return the batches that the settings and the architecture ask for."""
    width, tokens, seed = config.model.max_len, config.train.batch_tokens, config.train.seed
    if config.data.packing == "documents":
        return PackedBatches(store.source, width, tokens, seed)
    if not architecture_of(config.model).carries_state:
        return StreamBatches(store.source, width, tokens, seed, shifting)
    if config.train.carry_state:
        return StatefulBatches(store.source, bptt_length(config), stream_count(config), seed)
    return StreamBatches(store.source, bptt_length(config), tokens, seed)


def bptt_length(config: Config) -> int:
    """Return the number of tokens that truncated BPTT goes back."""
    return config.train.bptt or config.model.max_len


def stream_count(config: Config) -> int:
    """Return the number of parallel streams that a recurrent model reads."""
    return batch_size(config.train.batch_tokens, bptt_length(config))


def measure(
    model: nn.Module,
    store: Store,
    characters: int,
    config: Config,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    """Return loss, perplexity and bits per character of a whole text."""
    objective, batches = make_evaluation(model, store, config)
    total, tokens = total_loss(objective, batches.iterate_once(), device, dtype, poll)
    bits = total / math.log(2) / characters
    return Validation(total / tokens, {"perplexity": perplexity(total, tokens), "bits_per_character": bits})


def make_evaluation(model: nn.Module, store: Store, config: Config) -> tuple[Objective, Batches]:
    """Return the objective and the batches that measure the loss of a text.

    The text is read in windows of the model's length, each from the start; by a recurrent model in few long streams.
    """
    if isinstance(model, StatefulLanguageModel):
        n = min(MAX_STREAMS, max(1, len(store.source.ids) // (STREAM_LEADS * LEAD_BATCHES * SCORED_WIDTH)))
        lead = LEAD_BATCHES if n > 1 else 0
        return StatefulObjective(model, n), StatefulBatches(store.source, SCORED_WIDTH, n, 0, shifting=False, lead=lead)
    objective = PackedObjective(model) if config.data.packing == "documents" else Objective(model)
    return objective, make_batches(store, config, shifting=False)


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    """Return loss, perplexity and bits per character on `data.test`."""
    corpus = make_text_corpus(config, "test")
    assert package.tokenizers is not None
    store = prepare_language_store(corpus, package.tokenizers.source, package.token_template, config, quiet=False)
    return measure(package.model, store, corpus.characters(), config, device)
