"""`regard.load`: a trained model from its folder, as the class for what it learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import exists
from regard.models.architectures import of


def load(path: str | Path, device: str = "auto", weights: str = "auto") -> Any:
    """A model by what it learned: a Translator, Writer, Labeller or Embedder, from a run folder or a model folder; or
    WordVectors, from their file or folder.

    `weights`: auto, fp32 or bf16, on a CPU also int8 and fp16."""
    from regard.inference.classifier import TASKS, Labeller
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Writer
    from regard.inference.translator import Translator
    from regard.vectors.word_vectors import WordVectors, is_folder

    if (exists(Path(path)) and Path(path).is_file()) or is_folder(Path(path)):
        return WordVectors.load(path)
    bundle = load_model(Path(path), pick_device(device), weights)
    if bundle.task in TASKS:
        return Labeller(bundle)
    kind = of(bundle.config)
    if kind.translates:
        return Translator(bundle)
    if kind.writes:
        return Writer(bundle)
    if kind.embeds:
        return Embedder(bundle)
    raise RegardError(f"{path} holds a {bundle.config.architecture} that learned {bundle.task}; nothing here uses it")
