"""How good the model is now: loss over the validation pairs, and BLEU of real translations."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

import torch

from regard.config import DecodeConfig, TrainConfig
from regard.decode.engine import decode
from regard.evaluate.likelihood import negative_log_likelihood
from regard.evaluate.translation import corpus_bleu, perplexity
from regard.models.transformer import Transformer
from regard.training.setup import Job


@dataclass(frozen=True)
class Validation:
    loss: float  # negative log-likelihood per token, natural log
    bleu: float
    samples: list[tuple[str, str, str]]  # source, reference, translation

    @property
    def perplexity(self) -> float:
        return perplexity(self.loss, 1)

    def metric(self, name: str) -> float:
        """Higher is better."""
        return self.bleu if name == "bleu" else -self.loss


class Validator:
    def __init__(self, job: Job, device: torch.device, dtype: torch.dtype) -> None:
        self.job, self.device, self.dtype = job, device, dtype
        # Greedy: the same ranking of checkpoints as a beam for a fraction of its time.
        self.decode: DecodeConfig = dataclasses.replace(job.config.decode, beam=1, nbest=1, temperature=0.0)

    def run(self, model: Transformer, poll: Callable[[], None] = lambda: None) -> Validation:
        """`poll` is called often and may raise to break off."""
        training = model.training
        model.eval()
        try:
            with torch.compiler.set_stance("force_eager"):  # blocks are compiled for training's shapes alone
                total, tokens = negative_log_likelihood(model, self.job.valid, self.device, self.dtype, poll)
                bleu, samples = self._translate(model, poll)
        finally:
            model.train(training)
        return Validation(total / tokens, bleu, samples)

    def _translate(self, model: Transformer, poll: Callable[[], None]) -> tuple[float, list[tuple[str, str, str]]]:
        train: TrainConfig = self.job.config.train
        pairs = self.job.valid_pairs[: train.valid_sentences or None]
        tokenizers = self.job.tokenizers
        sources = tokenizers.source.encode_batch([source for source, _ in pairs])
        found = decode(model, sources, self.decode, model.config.max_len, self.device, lambda done: poll())
        texts = tokenizers.target.decode_batch(best[0].tokens for best in found)
        samples = [(source, reference, text) for (source, reference), text in zip(pairs, texts, strict=True)]
        bleu = corpus_bleu(texts, [reference for _, reference in pairs], self.job.config.data.target)
        return bleu, samples[: train.samples]
