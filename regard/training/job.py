"""What training asks of a task: its data in batches, its objective, its score, and what the finished model is packed with.

A task is one file of this folder; `tasks.TASKS` knows them all.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from regard.config import Config, ModelConfig
from regard.data.batches import Batches
from regard.model_folder import ModelPackage
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizers
from regard.training.objective import Objective
from regard.training.run_folder import initial_model_facts

Poll = Callable[[], None]  # called often; may raise to break off


@dataclass(frozen=True)
class Validation:
    loss: float  # per scored token, row or image; natural log
    scores: dict[str, float] = field(default_factory=dict)  # by name; higher is better, but for perplexity
    samples: list[str] = field(default_factory=list)  # something to read

    def metric(self, name: str) -> float:
        """Higher is better."""
        return -self.loss if name == "loss" else self.scores[name]

    def describe(self) -> str:
        return "  ".join([f"loss {self.loss:.4f}", *(f"{name} {value:.4g}" for name, value in self.scores.items())])


@dataclass(frozen=True)
class Job(ABC):
    """A run, ready to train."""

    folder: Path
    config: Config  # complete: preset sizes, vocabulary sizes and classes filled in
    model: nn.Module
    tokenizers: Tokenizers | None
    token_template: SpecialTokenTemplate
    key: str  # of the training data: the same key, the same examples
    amount: str  # of training data, in words

    @property
    def metrics(self) -> tuple[str, ...]:
        """What `train.metric` may name."""
        return ("loss",)

    @abstractmethod
    def batches(self) -> Batches:
        """What is trained on."""

    @abstractmethod
    def objective(self) -> Objective: ...

    @abstractmethod
    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        """How good the model is now; it is in evaluation mode."""

    @property
    def sizes(self) -> ModelConfig:
        return self.config.model

    def package(self) -> ModelPackage:
        data = self.config.data
        translates, old = self.config.task == "translation", initial_model_facts(self.folder)
        return ModelPackage(
            self.model,
            self.tokenizers,
            self.config.task,
            self.config.decode,
            source=data.source if translates else "",
            target=data.target if translates else "",
            token_template=self.token_template,
            pooling=old.get("pooling", "mean"),
            origin=old.get("origin", {}),
        )

    def next_steps(self) -> list[str]:
        """Commands for the finished run."""
        return [f"regard evaluate {self.folder}"]
