"""A model with a linear head for classification, regression (a class or a number for each row) or tagging (each token).

Shapes: ids and types (B, T), hidden (B, T, C), predictions (B, n_classes) or (B, T, n_classes).
"""

from __future__ import annotations

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.models.initialization import init_module
from regard.models.model import PREDICTION_TASKS, Model, names_learning


class ClassificationModel(nn.Module):
    """A model (`body`) with a linear layer on top of its last hidden state.

    The layer reads the vector of every token, or one vector for each row, which the model's `pooled` chooses."""

    def __init__(self, config: ModelConfig, body: Model) -> None:
        super().__init__()
        if not set(PREDICTION_TASKS) & set(body.tasks):
            kinds = names_learning(PREDICTION_TASKS[0])
            raise RegardError(f"a {config.architecture} model cannot be given a head for classes: use a {kinds} preset")
        if config.n_classes < 1:
            raise RegardError("model.n_classes must be at least 1 for a model with a prediction head")
        self.config, self.body, self.by_token = config, body, config.prediction_head == "token"
        self.dropout = nn.Dropout(config.dropout)
        self.prediction_head = nn.Linear(body.width, config.n_classes)
        self.seed: int = body.seed  # type: ignore[assignment]
        init_module(self, self.seed, "", {})

    def init_weights(self) -> None:
        nn.init.normal_(self.prediction_head.weight, std=0.02)
        nn.init.zeros_(self.prediction_head.bias)

    def hidden(self, ids: Tensor, types: Tensor) -> Tensor:
        """Return the last hidden state of the body, (B, T) -> (B, T, C)."""
        return self.body.last_hidden_state(ids, types)

    def predict(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return the logits of the head, (B, n_classes) or, for tagging, (B, T, n_classes)."""
        return self.prediction_head(self.dropout(hidden if self.by_token else self.body.pooled(hidden, ids)))

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        """Return the logits of the head, (B, n_classes) or, for tagging, (B, T, n_classes)."""
        return self.predict(self.hidden(ids, types), ids)
