"""What can be learned, one file a kind; a recipe's `task` names it."""

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
    "spans": "denoising",
    "denoising": "denoising",
    "classification": "text_classification",
    "regression": "text_classification",
    "tagging": "text_classification",
    "images": "image_classification",
}


def prepare_job(folder: Path, config: Config, quiet: bool = False) -> Job:
    """From a configuration to everything a run needs: vocabulary, data in batches, and a model."""
    return _module(config.task).prepare_job(folder, config, quiet)


def evaluate(package: ModelPackage, config: Config, device: torch.device) -> Validation:
    """Loss and scores on `data.test`, for every task but translation, whose report is evaluate/evaluation.py."""
    return _module(config.task).evaluate(package, config, device)


def _module(task: str) -> ModuleType:
    return import_module(f"regard.tasks.{TASKS[task]}")
