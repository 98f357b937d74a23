"""Evaluation of a translation model on a test set: BLEU, chrF and other scores, perplexity, decoding time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from regard.data.batches import PairBatches
from regard.data.pair_store import prepare_pair_store
from regard.data.parallel_corpus import ParallelCorpus
from regard.data.token_cache import Filters
from regard.errors import RegardError
from regard.inference.translator import Translator
from regard.metrics.translation_scores import TranslationScores, perplexity, score_translations
from regard.models.ensemble import Ensemble
from regard.training.objective import Objective, OutputObjective
from regard.training.validation import BATCH_TOKENS, total_loss


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    scores: TranslationScores
    perplexity: float
    scored: int  # pairs that perplexity is over: those that are not too long for the model
    hypotheses: list[str]
    seconds: float  # of decoding

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.scores.to_dict(),
            "perplexity": self.perplexity,
            "perplexity_pairs": self.scored,
            "decode_seconds": self.seconds,
        }

    def table(self) -> str:
        n = len(self.hypotheses)
        over = "" if self.scored == n else f" (over the {self.scored:,} pairs that fit the model)"
        speed = f"{n:,} sentences decoded in {self.seconds:.1f} s"
        return f"{self.scores.table()}\nperplexity {self.perplexity:.3f}{over}; {speed}"


def evaluate(
    translator: Translator, corpus: ParallelCorpus, progress: Callable[[int], None] = lambda done: None, **options: Any
) -> Evaluation:
    """Translate every source sentence of a corpus and score the hypotheses against the references."""
    directions, sources, references = map(list, zip(*corpus.directed_rows(), strict=True))
    if len(set(directions)) > 1:
        raise RegardError(f"one direction at a time can be scored, not {', '.join(corpus.directions)}")
    if directions[0] and directions[0] not in (translator.directions or directions):
        known = ", ".join(translator.directions)
        raise RegardError(f"this model does not translate {directions[0]}: it knows {known}")
    if translator.directions and not directions[0]:
        known = translator.directions[0]
        raise RegardError(f"this model has several directions: write the corpus's own behind it, as in '...@{known}'")
    to = directions[0].split(">")[-1] or None
    begun = time.perf_counter()
    hypotheses = [t.text for t in translator.translate_sentences(sources, progress=progress, to=to, **options)]
    seconds = time.perf_counter() - begun
    tokenizers, model = translator.tokenizers, translator.model
    token_template = translator.token_template
    filters = Filters(model.config.max_len - max(len(token_template.wrap(())), len(token_template.start)))
    pairs = prepare_pair_store(corpus, tokenizers, filters)
    device: torch.device = next(model.parameters()).device
    # An ensemble has all logits in memory: its members have no common output matrix.
    is_ensemble = isinstance(model, Ensemble)
    objective, size = (OutputObjective(model), BATCH_TOKENS // 8) if is_ensemble else (Objective(model), BATCH_TOKENS)
    total, tokens = total_loss(objective, PairBatches(pairs, size, 0, token_template).iterate_once(), device)
    scores = score_translations(hypotheses, references, sources, to or translator.target)
    return Evaluation(scores, perplexity(total, tokens), len(pairs), hypotheses, seconds)
