"""Language modelling: every token of a text from those before it. Rows are windows of one long stream, or several documents
that do not see each other; a recurrent model reads streams side by side, which go on from batch to batch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch
from torch import nn

from regard.config import Config
from regard.data.batches import Batches, batch_size
from regard.data.shards import Store
from regard.data.text_batches import PackedBatches, StatefulBatches, StreamBatches
from regard.data.text_corpus import TextCorpus
from regard.decode.generation import generate_texts, max_length_of
from regard.errors import RegardError
from regard.metrics.translation_scores import perplexity
from regard.model_folder import ModelPackage
from regard.models.architectures import architecture_of
from regard.models.model import LanguageModel, StatefulLanguageModel
from regard.tasks.initial_model import Start
from regard.tasks.text_data import Framed, check_task, text_corpus, text_store, with_vocabulary
from regard.text.special_tokens import EMPTY_TEMPLATE, SpecialTokenTemplate, bert_template
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.job import Job, Poll, Validation
from regard.training.objective import Objective, PackedObjective, token_objective
from regard.training.truncated_bptt import StatefulObjective, recurrent_objective
from regard.training.validation import total_loss

STREAM = EMPTY_TEMPLATE  # a file is one document: nothing marks its ends

# How a recurrent model is scored: in at most so many streams, each ENOUGH times as long as the LEAD batches of WIDTH tokens
# that it reads before its own part begins. A short text is one stream.
STREAMS, ENOUGH, LEAD, WIDTH = 64, 8, 4, 256


@dataclass(frozen=True)
class LanguageJob(Job):
    train: Store
    valid: Store
    valid_characters: int

    def batches(self) -> Batches:
        return batches_of(self.train, self.config)

    def objective(self) -> Objective:
        train = self.config.train
        if self.config.data.packing == "documents":
            return PackedObjective(self.model, train.label_smoothing, train.z_loss)
        if isinstance(self.model, StatefulLanguageModel):
            return recurrent_objective(self.model, train, streams(self.config))
        return token_objective(self.model, train)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        result = measure(model, self.valid, self.valid_characters, self.config, device, dtype, poll)
        return replace(result, samples=self._written(poll))

    def _written(self, poll: Poll) -> list[str]:
        """What the model writes by itself."""
        n, length = self.config.train.samples, min(100, max_length_of(self.model) - 2)
        beginning = self._beginning() if n else ""
        if not beginning or length < 1:
            return []
        poll()
        assert self.tokenizers is not None
        assert isinstance(self.model, LanguageModel)
        tokenizer = self.tokenizers.target
        options = replace(self.config.decode, beam=1, temperature=0.8, max_new_tokens=length, nbest=n)
        prompt = [*self.token_template.before, *tokenizer.encode(beginning)]
        return [text for text, _ in generate_texts(self.model, tokenizer, [prompt], options)]

    def _beginning(self) -> str:
        """A new line; where the vocabulary has no lines and nothing else begins a text, the first word of it that is known,
        if there is one."""
        assert self.tokenizers is not None
        tokenizer = self.tokenizers.target
        if self.token_template.before or tokenizer.encode("\n"):
            return "\n"
        known = (id for id in self.valid.source.ids if id not in tokenizer.special_ids)
        return tokenizer.decode(islice(known, 1))

    def next_steps(self) -> list[str]:
        return [*super().next_steps(), f'regard generate {self.folder} "..."']


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> LanguageJob:
    check_task(config)
    if config.data.packing == "documents" and not architecture_of(config.model).packs_documents:
        raise RegardError(
            f"data.packing documents hides texts of a row from each other, which a {config.model.architecture} cannot: "
            f"use stream"
        )
    start = Start.of(folder, config, quiet)
    corpora = {split: text_corpus(config, split) for split in ("train", "valid")}
    tokenizer = start.text_tokenizer(lambda: (text for (text,) in corpora["train"].rows()))
    special = tokenizer.special
    token_template = (
        start.token_template(bert_template(special)).with_end_tokens(special)
        if apart(config)
        else start.token_template(STREAM)
    )
    train, valid = (store_of(corpora[split], tokenizer, token_template, config, quiet) for split in ("train", "valid"))
    model = start.model(with_vocabulary(config.model, tokenizer))
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    amount = f"{len(train.source.ids):,} training tokens"
    both, characters = Tokenizers(tokenizer, tokenizer), corpora["valid"].characters()
    return LanguageJob(folder, config, model, both, token_template, train.key, amount, train, valid, characters)


def apart(config: Config) -> bool:
    """Whether documents have ends that are marked."""
    data = config.data
    objects = any(".jsonl" in spec for spec in (*data.train, *data.valid, *data.test))  # a document each
    return data.packing == "documents" or data.documents != "file" or objects


def store_of(
    corpus: TextCorpus, tokenizer: Tokenizer, token_template: SpecialTokenTemplate, config: Config, quiet: bool
) -> Store:
    store = text_store(corpus, Framed(tokenizer, token_template if apart(config) else STREAM), quiet)
    if store.source.lengths.sum() == 1:
        raise RegardError(f"{', '.join(corpus.specs)} is one token, and none comes after it; give a longer text")
    return store


def batches_of(store: Store, config: Config, shifting: bool = True) -> Batches:
    width, tokens, seed = config.model.max_len, config.train.batch_tokens, config.train.seed
    if config.data.packing == "documents":
        return PackedBatches(store.source, width, tokens, seed)
    if not architecture_of(config.model).carries_state:
        return StreamBatches(store.source, width, tokens, seed, shifting)
    if config.train.carry_state:
        return StatefulBatches(store.source, bptt(config), streams(config), seed)
    return StreamBatches(store.source, bptt(config), tokens, seed)


def bptt(config: Config) -> int:
    return config.train.bptt or config.model.max_len


def streams(config: Config) -> int:
    """How many a recurrent model reads side by side."""
    return batch_size(config.train.batch_tokens, bptt(config))


def measure(
    model: nn.Module,
    store: Store,
    characters: int,
    config: Config,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    """Loss over all of a text."""
    objective, batches = scoring(model, store, config)
    total, tokens = total_loss(objective, batches.once(), device, dtype, poll)
    bits = total / math.log(2) / characters
    return Validation(total / tokens, {"perplexity": perplexity(total, tokens), "bits_per_character": bits})


def scoring(model: nn.Module, store: Store, config: Config) -> tuple[Objective, Batches]:
    """In windows as long as the model reads, each begun anew; by a recurrent model in few streams, from end to end."""
    if isinstance(model, StatefulLanguageModel):
        n = min(STREAMS, max(1, len(store.source.ids) // (ENOUGH * LEAD * WIDTH)))
        return StatefulObjective(model, n), StatefulBatches(
            store.source, WIDTH, n, 0, shifting=False, lead=LEAD if n > 1 else 0
        )
    objective = PackedObjective(model) if config.data.packing == "documents" else Objective(model)
    return objective, batches_of(store, config, shifting=False)


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    corpus = text_corpus(config, "test")
    assert package.tokenizers is not None
    store = store_of(corpus, package.tokenizers.source, package.token_template, config, quiet=False)
    return measure(package.model, store, corpus.characters(), config, device)
