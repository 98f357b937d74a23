"""The model card a finished run writes beside its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from regard.training.checkpoint import Progress
from regard.training.setup import Job

if TYPE_CHECKING:
    from regard.training.validate import Validation


def model_card(job: Job, result: Validation, steps: list[int], progress: Progress) -> str:
    config, model = job.config, job.model.config
    parameters = sum(p.numel() for p in job.model.parameters())
    weights = f"checkpoint of step {steps[0]}" if len(steps) == 1 else f"mean of the checkpoints of steps {steps}"
    layers = f"{model.n_encoder_layers} encoder, {model.n_decoder_layers} decoder"
    shared = "joint" if config.tokenizer.joint else "separate"
    return f"""---
language: [{config.data.source}, {config.data.target}]
library_name: regard
pipeline_tag: translation
---
# {config.name}

A Transformer that translates {config.data.source} to {config.data.target}, trained with Regard.

| | |
|---|---|
| parameters | {parameters:,} |
| layers | {layers}, width {model.d_model}, {model.n_heads} heads, {model.norm}-norm |
| vocabulary | {config.tokenizer.kind}, {model.source_vocab:,} and {model.target_vocab:,} pieces, {shared} |
| training data | {", ".join(config.data.train)}: {job.train.report.describe()} |
| trained | {progress.step:,} steps, {progress.tokens:,} target tokens, {progress.seconds:,.0f} s of training |
| weights | {weights} |
| validation | {", ".join(config.data.valid)}: loss {result.loss:.4f} per token, BLEU {result.bleu:.2f} (greedy) |

Scores on a test set: `regard evaluate`. Every setting of the run is in its config.toml.
"""
