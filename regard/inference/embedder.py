"""Text embeddings: one vector for each text, compared by cosine similarity."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from regard import model_folder
from regard.decode.constraints import pad_rows
from regard.decode.generation import length_batches, max_length_of
from regard.device import pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.inference.arguments import check_string, check_texts
from regard.models.classification_model import ClassificationModel
from regard.models.model import Model, names_where
from regard.text.special_tokens import PAD, SpecialTokenTemplate

POOLINGS = ("mean", "first")
BATCH_TOKENS = 8192


class Embedder:
    """An encoder or language model whose last layer is pooled over the tokens of a text, into one vector.

    `regard.load` returns one for an encoder such as BERT; `Embedder.load` makes one of any model that reads text.

    Examples:
        >>> from regard import Embedder
        >>> embedder = Embedder.load("en-de-fr-zh")
        >>> vectors = embedder.embed(["I ate an apple.", "I had a pear.", "The train is late."])
        >>> vectors.shape
        (3, 512)
        >>> same, other = vectors[0] @ vectors[1:].T  # vectors have length 1, so these are cosines
        >>> bool(same > other)
        True

    Attributes:
        model: The model, a torch module.
        tokenizer: Its tokenizer.
        pooling: "mean" or "first".
    """

    def __init__(self, package: model_folder.ModelPackage) -> None:
        """Take a loaded model folder."""
        model = package.model.body if isinstance(package.model, ClassificationModel) else package.model
        if not (isinstance(model, Model) and model.embeds):
            raise RegardError(
                f"texts cannot be embedded by a {package.config.architecture} model: use a {names_where('embeds')}"
            )
        if package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        self.model, self.pooling = model, package.pooling
        self.tokenizer = getattr(package.tokenizers, model.vocabularies[0])
        # A language model never reads its end token in training, so none is appended.
        self.token_template = (
            SpecialTokenTemplate(before=package.token_template.before, after=())
            if model.generates
            else package.token_template
        )

    @classmethod
    def load(cls, path: str | Path, device: str = "auto") -> Embedder:
        """Load an embedder from a run or model folder, or a bundled model by its name."""
        return cls(load_model(Path(path), pick_device(device)))

    def embed(
        self,
        texts: str | Iterable[str],
        pooling: str | None = None,
        normalize: bool = True,
        truncate: bool = False,
        batch_tokens: int = BATCH_TOKENS,
        progress: Callable[[int], None] = lambda done: None,
    ) -> np.ndarray:
        """Return the vectors (N, C) of N texts in fp32; of a single string its vector (C,).

        Args:
            texts: A text, or several.
            pooling: "mean" over tokens, or the "first" token; by default the model's own.
            normalize: Scale vectors to length 1, so that dot products are cosines.
            truncate: Cut texts that are longer than the model's max_len; by default they are refused.
            batch_tokens: Padded tokens in a batch.
            progress: A function that is called with the number of texts done since its last call.
        """
        if isinstance(texts, str):
            return self.embed([texts], pooling, normalize, truncate, batch_tokens, progress)[0]
        texts, pooling = check_texts(texts, "embed"), self.choose_pooling(pooling)
        rows = self.encode_rows(texts, truncate)
        vectors = np.zeros((len(rows), self.model.width), np.float32)
        for group in length_batches([len(row) for row in rows], batch_tokens):
            vectors[group] = self.embed_rows([rows[i] for i in group], pooling)
            progress(len(group))
        return normalize_rows(vectors) if normalize else vectors

    def encode_rows(self, texts: list[str], truncate: bool = False) -> list[list[int]]:
        """Return the token ids of each text, special tokens included; a text that has none, or too many, is refused."""
        return [self._row(i, ids, truncate) for i, ids in enumerate(self.tokenizer.encode_batch(texts))]

    def embed_rows(self, rows: list[list[int]], pooling: str) -> np.ndarray:
        """Return the vectors (B, C) of a batch of rows of token ids in fp32, not normalized."""
        return self._vectors(rows, pooling).float().cpu().numpy()

    def choose_pooling(self, asked: str | None) -> str:
        """Return the pooling that was asked for, by default the model's own; one that the model cannot have is refused."""
        check_string(asked, "pooling")
        pooling = asked or self.pooling
        if pooling not in POOLINGS:
            raise RegardError(f"pooling must be one of {', '.join(POOLINGS)}, not '{pooling}'")
        if pooling == "first" and self.model.generates:
            raise RegardError("a language model's first token has seen nothing but itself: use pooling mean")
        return pooling

    def _row(self, number: int, ids: list[int], truncate: bool) -> list[int]:
        room = max_length_of(self.model) - len(self.token_template.wrap(()))
        if len(ids) > room and not truncate:
            raise RegardError(
                f"text {number + 1} has {len(ids)} tokens, but the model was built for at most {room} (model.max_len): "
                f"split it, or cut it with truncate"
            )
        row = self.token_template.wrap(ids[:room])
        if not row:
            raise RegardError(f"text {number + 1} is empty: there is no token to make a vector of")
        return row

    @torch.inference_mode()
    def _vectors(self, rows: list[list[int]], pooling: str) -> Tensor:
        """Return the pooled vectors (B, C) of a batch of token ids."""
        ids = pad_rows(rows, next(self.model.parameters()).device)  # (B, T)
        hidden = self.model.last_hidden_state(ids)  # (B, T, C)
        if pooling == "first":
            return hidden[:, 0]
        real = (ids != PAD)[:, :, None]
        return hidden.masked_fill(~real, 0).sum(1) / real.sum(1)


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Return the rows scaled to length 1; a row of zeros stays."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length == 0, 1, length)


def similarity(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return the cosine similarity (N, M) of the rows of `a` (N, C) and those of `b` (M, C)."""
    return normalize_rows(np.asarray(a)) @ normalize_rows(np.asarray(b)).T
