"""Classification, regression and tagging of texts, and classification of images, with a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch

from regard import model_folder
from regard.config import ViTSettings
from regard.data.image_files import read_image
from regard.data.labelled_text import CONTINUES, tags_to_pieces
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.tasks import image_classification, text_classification
from regard.tasks.text_classification import EncodedExamples

TASKS = ("classification", "regression", "tagging", "image-classification")
Item = str | tuple[str, str] | Path


@dataclass(frozen=True)
class Prediction:
    """The prediction of a classifier for one item."""

    label: str  # the likeliest class; in regression the number, in tagging all tags
    probability: float  # of that class; 1 in regression and tagging
    probabilities: dict[str, float]  # of every class; empty in regression and tagging
    value: float | None = None  # the number, in regression
    tags: tuple[tuple[str, str], ...] = ()  # each word and its tag, in tagging

    def __str__(self) -> str:
        return " ".join(f"{word}/{tag}" for word, tag in self.tags) if self.tags else self.label


class Classifier:
    """A model trained on labels: classes or numbers of texts, tags of words, classes of images. `regard.load` returns one.

    Examples:
        >>> import regard
        >>> classifier = regard.load("runs/sentiment")
        >>> prediction = classifier.classify("A film to remember.")
        >>> prediction.label in classifier.labels, round(sum(prediction.probabilities.values()), 3)
        (True, 1.0)
        >>> len(classifier.classify(["Wonderful.", "A waste of time."]))
        2

    Attributes:
        model: The model, a torch module.
        labels: The classes or tags, in the order of the model's outputs.
    """

    def __init__(self, package: model_folder.ModelPackage) -> None:
        """Take a loaded model folder."""
        if package.task not in TASKS:
            raise RegardError(
                f"this model learned {package.task}, not to predict labels: fine-tune it on labelled data first"
            )
        if package.tokenizers is None and package.task != "image-classification":
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        self.package, self.model, self.labels = package, package.model, package.labels
        self.device = next(package.model.parameters()).device

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Classifier:
        """Load a classifier from a run or model folder; `device` is auto, cpu, cuda or cuda:N."""
        return cls(load_model(Path(path), pick_device(device)))

    @overload
    def classify(self, items: str | Path) -> Prediction: ...  # type: ignore[overload-overlap]  # a string is an iterable of strings too
    @overload
    def classify(self, items: Sequence[Item]) -> list[Prediction]: ...
    def classify(self, items: str | Path | Sequence[Item]) -> Prediction | list[Prediction]:
        """Classify one item, or several: a string or path gives a `Prediction`, a list a list.

        Items are texts, pairs of texts (tuples), or paths of images, whatever the model was trained on.
        """
        if isinstance(items, (str, Path)):
            return self.classify([items])[0]
        items = check_items(items)
        if not items:
            return []
        if self.package.task == "image-classification":
            return self._classify_images([Path(str(item)) for item in items])
        texts = [(str(item),) if isinstance(item, (str, Path)) else tuple(item) for item in items]
        if self.package.task == "tagging":
            return self._tag([" ".join(text).split() for text in texts])
        found = self._outputs(self._rows(texts))
        if self.package.task == "regression":
            return [Prediction(f"{float(output[0]):.4g}", 1.0, {}, value=float(output[0])) for output in found]
        return [self._predict_class(output) for output in found]

    def _rows(self, texts: list[tuple[str, ...]]) -> EncodedExamples:
        assert self.package.tokenizers is not None
        ids, types = text_classification.encode_texts(
            texts, self.package.tokenizers.source, self.package.token_template
        )
        self._check_length(ids)
        return EncodedExamples(ids, types, [0.0 if self.package.task == "regression" else 0] * len(ids))

    def _check_length(self, ids: list[list[int]]) -> None:
        longest = self.package.config.max_len
        for i, row in enumerate(ids):
            if len(row) > longest:
                raise RegardError(
                    f"text {i + 1} has {len(row)} tokens, but the model reads at most {longest}: shorten it"
                )

    def _outputs(self, rows: EncodedExamples) -> list[np.ndarray]:
        found, _ = text_classification.predict(self.model, rows, self.package.task, self.device, torch.float32)
        return found

    def _predict_class(self, logits: np.ndarray) -> Prediction:
        """Return the likeliest class and the softmax of the logits (C,)."""
        p = np.exp(logits - logits.max())
        p /= p.sum()
        best = int(p.argmax())
        return Prediction(self.labels[best], float(p[best]), dict(zip(self.labels, p.tolist(), strict=True)))

    def _tag(self, sentences: list[list[str]]) -> list[Prediction]:
        """Tag the words of sentences; a word has the tag that is predicted for its first subword piece."""
        assert self.package.tokenizers is not None
        tokenizer, token_template = self.package.tokenizers.source, self.package.token_template
        ids, firsts = [], []
        for words in sentences:
            pieces, marks = tags_to_pieces(words, [0] * len(words), tokenizer)
            ids.append(token_template.wrap(pieces))
            firsts.append([len(token_template.before) + i for i, mark in enumerate(marks) if mark != CONTINUES])
        self._check_length(ids)
        rows = EncodedExamples(ids, [[0] * len(row) for row in ids], [[CONTINUES] * len(row) for row in ids])
        predictions = []
        for words, at, logits in zip(sentences, firsts, self._outputs(rows), strict=True):
            predicted = [self.labels[logits[i].argmax()] for i in at]
            tags = tuple(zip(words, predicted, strict=True))
            predictions.append(Prediction(" ".join(tag for _, tag in tags), 1.0, {}, tags=tags))
        return predictions

    def _classify_images(self, paths: list[Path]) -> list[Prediction]:
        config, own = self.package.config, self.package.config.table(ViTSettings)
        # An imported model does not state the size of its images, which are square then.
        side = round((config.max_len - 1) ** 0.5) * own.patch_size
        height, width = map(int, self.package.pixels.get("size", (side, side)))
        pixels = np.stack([read_image(path, height, width, own.image_channels) for path in paths])
        logits = image_classification.predict_logits(
            self.model, pixels, self.package.pixels, self.device, torch.float32, lambda: None
        )
        return [self._predict_class(row) for row in logits.numpy()]


def check_items(items: Any) -> list[Any]:
    """Return items as a list; anything but texts, pairs of texts and paths is a TypeError that says which item it is."""
    if isinstance(items, bytes) or not isinstance(items, Iterable):
        raise TypeError(f"classify takes a text, a path or a list of them, not {type(items).__name__}")
    found = list(items)
    for i, item in enumerate(found):
        pair = isinstance(item, (tuple, list)) and len(item) == 2 and all(isinstance(text, str) for text in item)
        if not (pair or isinstance(item, (str, Path))):
            raise TypeError(f"classify takes texts, pairs of texts and paths, but item {i} is a {type(item).__name__}")
    return found
