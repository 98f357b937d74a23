"""A model that reads, and a head that answers: a class or a number for each row, or a tag for each token.

Shapes: ids and types (B, T), hidden (B, T, C), answers (B, n_classes) or (B, T, n_classes).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.masks import positions_of
from regard.models.bert import Bert
from regard.models.gpt import GPT
from regard.models.rnn import RNN


class Classifier(nn.Module):
    """BERT answers for a row from its first token, through its pooler; GPT from the last, the only one that saw them all. A
    recurrent model too, and where it reads both ways also from the first, the last that its way back comes to."""

    def __init__(self, config: ModelConfig, body: nn.Module) -> None:
        super().__init__()
        if not isinstance(body, (Bert, GPT, RNN)):
            raise RegardError(
                f"a {config.architecture} model cannot be given a head for classes: use a bert, gpt or rnn preset"
            )
        if config.n_classes < 1:
            raise RegardError("model.n_classes must be at least 1 for a model that answers")
        self.config, self.body, self.by_token = config, body, config.answer == "token"
        self.dropout = nn.Dropout(config.dropout)
        width = body.recurrent.d_out if isinstance(body, RNN) else config.d_model
        self.answers = nn.Linear(width, config.n_classes)
        nn.init.normal_(self.answers.weight, std=0.02)
        nn.init.zeros_(self.answers.bias)

    def hidden(self, ids: Tensor, types: Tensor) -> Tensor:
        if isinstance(self.body, Bert):
            return self.body.hidden(ids, types if self.config.token_types > 1 else None)
        if isinstance(self.body, RNN):
            return self.body.read(ids)
        return self.body.hidden(ids, positions_of(ids))

    def answer(self, hidden: Tensor, ids: Tensor) -> Tensor:
        return self.answers(self.dropout(hidden if self.by_token else self.pooled(hidden, ids)))

    def pooled(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """(B, C)"""
        if isinstance(self.body, Bert):
            return self.body.pooler(hidden)
        last = (ids >= 0).sum(1) - 1
        at_end = hidden[torch.arange(len(ids), device=ids.device), last]
        if not (isinstance(self.body, RNN) and self.config.bidirectional):
            return at_end
        way = hidden.shape[-1] // 2
        return torch.cat([at_end[:, :way], hidden[:, 0, way:]], -1)

    def forward(self, ids: Tensor, types: Tensor) -> Tensor:
        return self.answer(self.hidden(ids, types), ids)
