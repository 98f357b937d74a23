"""Regard: sequence models from raw text to a trained, evaluated, inspectable and served model.

    translator = regard.load("runs/toy-en-de")
    translator.translate("I ate an apple.").text

Names are imported when they are first used, so that `import regard` and `regard --help` do not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.inference.classifier import Classifier
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Generator
    from regard.inference.load import load
    from regard.inference.model_spec import summary
    from regard.inference.translator import Translation, Translator, translate
    from regard.look.record import record
    from regard.tasks.run import resume, train
    from regard.vectors.word_vectors import WordVectors

__version__ = "0.1.0"
__all__ = [
    "Classifier",
    "Embedder",
    "Generator",
    "RegardError",
    "Translation",
    "Translator",
    "WordVectors",
    "load",
    "record",
    "resume",
    "summary",
    "train",
    "translate",
]

_MODULES = {
    "load": "regard.inference.load",
    "Embedder": "regard.inference.embedder",
    "Classifier": "regard.inference.classifier",
    "WordVectors": "regard.vectors.word_vectors",
    "Generator": "regard.inference.generator",
    "translate": "regard.inference.translator",
    "Translator": "regard.inference.translator",
    "Translation": "regard.inference.translator",
    "train": "regard.tasks.run",
    "resume": "regard.tasks.run",
    "record": "regard.look.record",
    "summary": "regard.inference.model_spec",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'regard' has no attribute '{name}'")
    return getattr(import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
