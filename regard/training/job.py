"""The interface between training and a task: batches, objective, validation, and the model package of the result.

Each task implements `Job` in a module of regard/tasks; `regard.tasks.TASKS` lists them.
"""

from __future__ import annotations

import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

from regard.config import Config
from regard.data.batches import Batches
from regard.model_folder import ModelPackage
from regard.text.special_tokens import SpecialTokenTemplate
from regard.text.tokenizer import Tokenizers
from regard.training.objective import Objective
from regard.training.run_folder import initial_model_facts

Poll = Callable[[], None]  # called often during validation; raises to interrupt it


@dataclass(frozen=True)
class Validation:
    """The result of a validation: loss, scores by name, and sample outputs."""

    loss: float  # per scored token, row or image; natural log
    scores: dict[str, float] = field(default_factory=dict)  # by name; higher is better, but for perplexity
    samples: list[str] = field(default_factory=list)  # outputs for a person to read

    def metric(self, name: str) -> float:
        """Return the metric of this name, so that higher is better: the loss is negated."""
        return -self.loss if name == "loss" else self.scores[name]

    def describe(self) -> str:
        return "  ".join([f"loss {self.loss:.4f}", *(f"{name} {value:.4g}" for name, value in self.scores.items())])


@dataclass(frozen=True)
class Job(ABC):
    """A run that is ready to train: its configuration, its model and its data. Each task has a subclass."""

    folder: Path
    config: Config  # complete: preset sizes, vocabulary sizes and classes filled in
    model: nn.Module
    tokenizers: Tokenizers | None
    token_template: SpecialTokenTemplate
    data_key: str  # identifies the tokenized training data: equal keys mean equal examples
    data_amount: str  # how much training data there is, in words

    @property
    def scored(self) -> str:
        """What the loss is a mean over, in the plural, for the speed that is shown while training."""
        return "tokens"

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names that `train.metric` may have."""
        return ("loss",)

    @abstractmethod
    def batches(self) -> Batches:
        """Return the training data in batches."""

    @abstractmethod
    def objective(self) -> Objective:
        """Return the training loss."""

    @abstractmethod
    def validate(self, model: nn.Module, device: torch.device, dtype: torch.dtype, poll: Poll) -> Validation:
        """Measure the model, which is in evaluation mode, on the validation data."""

    def package(self) -> ModelPackage:
        """Return the model with everything that belongs into its model folder."""
        data = self.config.data
        translates, initial = self.config.task == "translation", initial_model_facts(self.folder)
        return ModelPackage(
            self.model,
            self.tokenizers,
            self.config.task,
            self.config.decode,
            source=data.source if translates else "",
            target=data.target if translates else "",
            token_template=self.token_template,
            pooling=initial.get("pooling", "mean"),
            origin=initial.get("origin", {}),
        )

    def next_steps(self) -> list[str]:
        """Return commands to suggest to the user when the run is finished."""
        return [f"regard evaluate {self.quoted_folder}"] if self.config.data.test else []

    @property
    def quoted_folder(self) -> str:
        """The folder of the run as a word of a command line."""
        return shlex.quote(str(self.folder))
