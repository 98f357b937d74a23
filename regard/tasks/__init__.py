"""The tasks that models are trained for, each a module with `prepare_job` and `evaluate`; a recipe names one as `task`."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from regard.config import Config

if TYPE_CHECKING:
    import torch

    from regard.model_folder import ModelPackage
    from regard.training.job import Job, Validation

TASKS = {
    "translation": "translation",
    "causal-lm": "language_modeling",
    "masked-lm": "denoising",
    "span-corruption": "denoising",
    "denoising": "denoising",
    "classification": "text_classification",
    "regression": "text_classification",
    "tagging": "text_classification",
    "image-classification": "image_classification",
}


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> Job:
    """Prepare everything that a run needs from its configuration: tokenizers, tokenized data and a model."""
    return _module(config.task).prepare_job(folder, config, quiet)


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    """Return loss and scores on `data.test`, for every task but translation, which evaluate/evaluation.py measures."""
    return _module(config.task).evaluate(package, config, device)


def _module(task: str) -> ModuleType:
    return import_module(f"regard.tasks.{TASKS[task]}")
