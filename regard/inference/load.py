"""`regard.load`: a trained model from its folder, as the class for what it learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import exists
from regard.models.architectures import architecture_of


def load(path: str | Path, device: str = "auto", weights: str = "auto") -> Any:
    """A model by what it learned: a Translator, Writer, Labeller or Embedder, from a run folder or a model folder; or
    WordVectors, from their file or folder.

    `weights`: auto, fp32 or bf16, on a CPU also int8 and fp16."""
    from regard.inference.classifier import TASKS, Classifier
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Generator
    from regard.inference.translator import Translator
    from regard.vectors.word_vectors import WordVectors, is_folder

    if (exists(Path(path)) and Path(path).is_file()) or is_folder(Path(path)):
        return WordVectors.load(path)
    package = load_model(Path(path), pick_device(device), weights)
    if package.task in TASKS:
        return Classifier(package)
    kind = architecture_of(package.config)
    if kind.translates:
        return Translator(package)
    if kind.generates:
        return Generator(package)
    if kind.embeds:
        return Embedder(package)
    raise RegardError(f"{path} holds a {package.config.architecture} that learned {package.task}; nothing here uses it")
