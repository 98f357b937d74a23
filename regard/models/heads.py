"""What stands on top of a stack: hidden vectors (B, T, C) to answers.

MERGED: A model that reads, and a head that answers: a class or a number for each row, or a tag for each token.

Shapes: ids and types (B, T), hidden (B, T, C), answers (B, n_classes) or (B, T, n_classes).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.feedforward import ACTIVATIONS
from regard.layers.norm import make_norm
from regard.models.initialization import init_module
from regard.models.model import ANSWERS, Model, names_learning


class MaskedHead(nn.Module):
    """BERT's: one more layer and a norm before the embedding matrix, used the other way round, and a bias a token."""

    def __init__(self, config: ModelConfig, weight: Tensor) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_model)
        self.activation = ACTIVATIONS[config.activation]
        self.norm = make_norm(config)
        self.weight = weight  # (V, C)
        self.bias = nn.Parameter(torch.zeros(len(weight)))

    def features(self, x: Tensor) -> Tensor:
        """What the matrix multiplies."""
        return self.norm(self.activation(self.inner(x)))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.features(x), self.weight, self.bias)


class Pooler(nn.Module):
    """tanh(W x_0 + b): the first token speaks for its row."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x[:, 0]).tanh()  # (B, C)


class Classifier(nn.Module):
    """A model that gives `vectors`, and a linear layer that turns them into answers: those of each token, or one vector of
    each row, which the model's `pooled` chooses."""

    def __init__(self, config: ModelConfig, body: Model) -> None:
        super().__init__()
        if not set(ANSWERS) & set(body.tasks):
            kinds = names_learning(ANSWERS[0])
            raise RegardError(f"a {config.architecture} model cannot be given a head for classes: use a {kinds} preset")
        if config.n_classes < 1:
            raise RegardError("model.n_classes must be at least 1 for a model that answers")
        self.config, self.body, self.by_token = config, body, config.answer == "token"
        self.dropout = nn.Dropout(config.dropout)
        self.answers = nn.Linear(body.width, config.n_classes)
        self.seed: int = body.seed  # type: ignore[assignment]
        init_module(self, self.seed, "", {})

    def init_weights(self) -> None:
        nn.init.normal_(self.answers.weight, std=0.02)
        nn.init.zeros_(self.answers.bias)

    def hidden(self, ids: Tensor, types: Tensor) -> Tensor:
        return self.body.vectors(ids, types)

    def answer(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.answers(self.dropout(hidden if self.by_token else self.body.pooled(hidden, ids)))

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        return self.answer(self.hidden(ids, types), ids)
