"""Pre-training on damaged text: BERT fills in blanks (masked-lm), T5 writes the missing spans (spans), BART the whole text
as it was (denoising). What is damaged is drawn anew in every epoch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from regard.config import Config
from regard.data.noise import corrupt_spans, denoise, mask_tokens, word_numbers
from regard.data.shards import Store
from regard.data.text_batches import CorruptedBatches, Corruption, DenoisingBatches, MaskedBatches
from regard.errors import RegardError
from regard.metrics.translation_scores import perplexity
from regard.model_folder import ModelPackage
from regard.tasks.initial_model import Start
from regard.tasks.text_data import check_task, text_corpus, text_store, with_vocabulary
from regard.text.special_tokens import SpecialTokenTemplate, bert_template, eos_template
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.job import Job, Poll, Validation
from regard.training.objective import Objective, token_objective
from regard.training.validation import BATCH_TOKENS, total_loss

USUAL = {"masked-lm": 0.15, "spans": 0.15, "denoising": 0.3}  # shares of tokens that are hidden


@dataclass(frozen=True)
class FillingJob(Job):
    train: Store
    valid: Store
    rewrite: Corruption

    def batches(self) -> CorruptedBatches:
        train = self.config.train
        return batches_of(self.train, self.config, self.token_template, self.rewrite, train.batch_tokens, train.seed)

    def objective(self) -> Objective:
        return token_objective(self.model, self.config.train)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        return measure(model, self.valid, self.config, self.token_template, self.rewrite, device, dtype, poll)


def batches_of(
    store: Store,
    config: Config,
    token_template: SpecialTokenTemplate,
    rewrite: Corruption,
    batch_tokens: int,
    seed: int,
) -> CorruptedBatches:
    kind = MaskedBatches if config.task == "masked-lm" else DenoisingBatches
    around = max(len(token_template.wrap(())), len(token_template.start) + 1)
    length = config.model.max_len - around
    if length < 1:
        raise RegardError(
            f"model.max_len {config.model.max_len} has no room beside the {around} tokens around a text: raise it"
        )
    return kind(store.source, config.data.packing, length, batch_tokens, seed, rewrite, token_template)


def measure(
    model: nn.Module,
    store: Store,
    config: Config,
    token_template: SpecialTokenTemplate,
    rewrite: Corruption,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    """Loss on what is hidden; always the same damage."""
    batches = batches_of(store, config, token_template, rewrite, BATCH_TOKENS, 0).once()
    total, tokens = total_loss(Objective(model), batches, device, dtype, poll)
    return Validation(total / tokens, {"perplexity": perplexity(total, tokens)})


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    assert package.tokenizers is not None
    tokenizer = package.tokenizers.source
    store = text_store(text_corpus(config, "test"), tokenizer, quiet=False)
    return measure(package.model, store, config, package.token_template, damage(config, tokenizer), device)


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> FillingJob:
    check_task(config)
    start = Start.of(folder, config, quiet)
    corpora = {split: text_corpus(config, split) for split in ("train", "valid")}
    tokenizer = start.text_tokenizer(lambda: (text for (text,) in corpora["train"].rows()))
    train, valid = (text_store(corpora[split], tokenizer, quiet) for split in ("train", "valid"))
    model = start.model(with_vocabulary(config.model, tokenizer))
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    token_template = start.token_template((bert_template if config.task == "masked-lm" else eos_template)(tokenizer.special))
    amount = f"{len(train.source.ids):,} training tokens"
    both, rewrite = Tokenizers(tokenizer, tokenizer), damage(config, tokenizer)
    return FillingJob(folder, config, model, both, token_template, train.key, amount, train, valid, rewrite)


def damage(config: Config, tokenizer: Tokenizer) -> Corruption:
    """The damage this task does: (ids, chance) -> (what is read, what should be said)."""
    data, rate = config.data, config.data.noise or USUAL[config.task]
    if config.task == "masked-lm":
        tokenizer.special.require("mask", "the task masked-lm")
        return partial(masked_words if data.whole_words else masked, tokenizer=tokenizer, rate=rate)
    if config.task == "spans":
        sentinels = tokenizer.sentinels()
        if not sentinels:
            raise RegardError("spans need special tokens for the gaps: set tokenizer.extra 100, or begin with a T5")
        return partial(corrupt_spans, sentinels=sentinels, rate=rate, mean_span=data.mean_span)
    ends = sentence_ends(tokenizer) if data.permute else ()
    mask = tokenizer.special.require("mask", "the task denoising")
    return partial(denoise, mask=mask, ends=ends, rate=rate, mean_span=data.mean_span)


def masked(
    ids: np.ndarray, rng: np.random.Generator, tokenizer: Tokenizer, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    return mask_tokens(ids, rng, len(tokenizer), tokenizer.special, rate)


def masked_words(
    ids: np.ndarray, rng: np.random.Generator, tokenizer: Tokenizer, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    words = word_numbers(ids, tokenizer.pieces(ids), tokenizer.special)
    return mask_tokens(ids, rng, len(tokenizer), tokenizer.special, rate, words)


def sentence_ends(tokenizer: Tokenizer) -> list[int]:
    """The pieces that end on a full stop, an exclamation or a question mark."""
    return [i for i, piece in enumerate(tokenizer.pieces(range(len(tokenizer)))) if piece.endswith((".", "!", "?"))]
