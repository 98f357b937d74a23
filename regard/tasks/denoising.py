"""Pre-training by denoising: masked language modelling (BERT), span corruption (T5) and text infilling (BART).

The tokens to hide are drawn anew in every epoch (data/noise.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from regard.config import Config
from regard.data.noise import corrupt_spans, denoise, mask_tokens, word_numbers
from regard.data.text_batches import CorruptedBatches, Corruption, DenoisingBatches, MaskedBatches
from regard.data.token_cache import Store
from regard.errors import RegardError
from regard.metrics.translation_scores import perplexity
from regard.model_folder import ModelPackage
from regard.tasks.initial_model import InitialModel
from regard.tasks.text_data import check_task, make_text_corpora, make_text_corpus, prepare_text_store, set_vocabulary
from regard.text.special_tokens import SpecialTokenTemplate, bert_template, eos_template
from regard.text.tokenizer import Tokenizer, Tokenizers
from regard.training.job import Job, Poll, Validation
from regard.training.objective import Objective, make_token_objective
from regard.training.validation import BATCH_TOKENS, total_loss

# The share of hidden tokens where data.mask_ratio is 0.
DEFAULT_MASK_RATIO = {"masked-lm": 0.15, "span-corruption": 0.15, "denoising": 0.3}


@dataclass(frozen=True)
class DenoisingJob(Job):
    """A run of masked-lm, span-corruption or denoising."""

    train: Store
    valid: Store
    corrupt: Corruption

    @property
    def scored(self) -> str:
        return "scored tokens"

    def batches(self) -> CorruptedBatches:
        train = self.config.train
        return make_batches(self.train, self.config, self.token_template, self.corrupt, train.batch_tokens, train.seed)

    def objective(self) -> Objective:
        return make_token_objective(self.model, self.config.train)

    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        return measure(model, self.valid, self.config, self.token_template, self.corrupt, device, dtype, poll)


def make_batches(
    store: Store,
    config: Config,
    token_template: SpecialTokenTemplate,
    corrupt: Corruption,
    batch_tokens: int,
    seed: int,
) -> CorruptedBatches:
    """Return batches of corrupted texts, cut so that they fit the model together with their special tokens."""
    kind = MaskedBatches if config.task == "masked-lm" else DenoisingBatches
    around = max(len(token_template.wrap(())), len(token_template.start) + 1)
    length = config.model.max_len - around
    if length < 1:
        raise RegardError(
            f"model.max_len {config.model.max_len} has no room beside the {around} tokens around a text: raise it"
        )
    return kind(store.source, config.data.packing, length, batch_tokens, seed, corrupt, token_template)


def measure(
    model: nn.Module,
    store: Store,
    config: Config,
    token_template: SpecialTokenTemplate,
    corrupt: Corruption,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Poll = lambda: None,
) -> Validation:
    """Return loss and perplexity of the hidden tokens; the same tokens are hidden at every call."""
    batches = make_batches(store, config, token_template, corrupt, BATCH_TOKENS, 0).iterate_once()
    total, tokens = total_loss(Objective(model), batches, device, dtype, poll)
    return Validation(total / tokens, {"perplexity": perplexity(total, tokens)})


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    """Return loss and perplexity on `data.test`."""
    assert package.tokenizers is not None
    tokenizer = package.tokenizers.source
    store = prepare_text_store(make_text_corpus(config, "test"), tokenizer, quiet=False)
    return measure(package.model, store, config, package.token_template, make_corruption(config, tokenizer), device)


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> DenoisingJob:
    """Prepare a run: tokenizer, tokenized texts and model."""
    check_task(config)
    initial = InitialModel.load(folder, config, quiet)
    corpora = make_text_corpora(config, quiet)
    tokenizer = initial.get_text_tokenizer(lambda: (text for (text,) in corpora["train"].rows()))
    train, valid = (prepare_text_store(corpora[split], tokenizer, quiet) for split in ("train", "valid"))
    model = initial.build_model(set_vocabulary(config.model, tokenizer))
    config = replace(config, model=model.config)  # type: ignore[arg-type]
    token_template = initial.get_token_template(
        (bert_template if config.task == "masked-lm" else eos_template)(tokenizer.special)
    )
    amount = f"{len(train.source.ids):,} training tokens"
    both, corrupt = Tokenizers(tokenizer, tokenizer), make_corruption(config, tokenizer)
    return DenoisingJob(folder, config, model, both, token_template, train.key, amount, train, valid, corrupt)


def make_corruption(config: Config, tokenizer: Tokenizer) -> Corruption:
    """Return the corruption of the task, a function (ids, rng) -> (inputs, labels or target)."""
    data, rate = config.data, config.data.mask_ratio or DEFAULT_MASK_RATIO[config.task]
    if config.task == "masked-lm":
        tokenizer.special.require("mask", "the task masked-lm")
        return partial(mask_whole_words if data.whole_words else mask_single_tokens, tokenizer=tokenizer, rate=rate)
    if config.task == "span-corruption":
        sentinels = tokenizer.sentinels()
        if not sentinels:
            raise RegardError(
                "span-corruption needs special tokens for the gaps: set tokenizer.n_sentinels 100, or begin with a T5"
            )
        return partial(corrupt_spans, sentinels=sentinels, rate=rate, mean_span=data.mean_span)
    ends = sentence_ends(tokenizer) if data.permute else ()
    mask = tokenizer.special.require("mask", "the task denoising")
    return partial(denoise, mask=mask, ends=ends, rate=rate, mean_span=data.mean_span)


def mask_single_tokens(
    ids: np.ndarray, rng: np.random.Generator, tokenizer: Tokenizer, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    return mask_tokens(ids, rng, len(tokenizer), tokenizer.special, rate)


def mask_whole_words(
    ids: np.ndarray, rng: np.random.Generator, tokenizer: Tokenizer, rate: float
) -> tuple[np.ndarray, np.ndarray]:
    words = word_numbers(ids, tokenizer.pieces(ids), tokenizer.special)
    return mask_tokens(ids, rng, len(tokenizer), tokenizer.special, rate, words)


def sentence_ends(tokenizer: Tokenizer) -> list[int]:
    """Return the ids of tokens that end with a full stop, an exclamation mark or a question mark."""
    return [i for i, piece in enumerate(tokenizer.pieces(range(len(tokenizer)))) if piece.endswith((".", "!", "?"))]
