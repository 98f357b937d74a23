"""The encoder-only Transformer (BERT): every token attends to every other, and masked tokens are predicted.

Shapes: ids and types (B, T), hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.masks import FULL, positions_of
from regard.layers.block import make_blocks
from regard.layers.embedding import Embedding
from regard.layers.norm import make_norm
from regard.layers.stack import Stack
from regard.models import presets as tables
from regard.models.heads import MaskedLMHead, Pooler
from regard.models.initialization import initialize, new_seed
from regard.models.model import PREDICTION_TASKS, Model


class Bert(Model):
    """An encoder with a masked language modelling head and a pooler: BERT, RoBERTa, RoFormer, DeBERTa."""

    presets = tables.BERT
    tasks = ("masked-lm", *PREDICTION_TASKS)
    sides = ("encoder",)
    vocabularies = ("source",)
    fills_blanks = embeds = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        seed = new_seed()
        self.config = config = self.resolve(config)
        self.embedding = Embedding(config.source_vocab, config.d_model, config.scale_embeddings)
        # which of two sentences a token is in
        self.types = nn.Embedding(config.token_types, config.d_model) if config.token_types else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        blocks = make_blocks(config, config.n_encoder_layers, "encoder", causal=False)
        self.encoder = Stack(config, blocks, FULL, "encoder")
        self.pooler = Pooler(config)
        self.head = MaskedLMHead(config, self.embedding.weight)  # weight tying
        initialize(self, seed)

    def hidden(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Return hidden vectors (B, T, C) of ids (B, T), padded on the right; `types` says which sentence a token is in."""
        positions = positions_of(ids)
        x = self.embedding(ids)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        x = self.encoder.embed(x, positions)
        return self.encoder(self.dropout(self.embedding_norm(x)), positions)

    head_input = hidden  # the name that all models use for the input of their head

    def last_hidden_state(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the encoder's output, (B, T) -> (B, T, C); a model without token types ignores `types`."""
        return self.hidden(ids, types if self.config.token_types > 1 else None)

    def pooled(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return one vector for each row (B, C): the pooler's, made of the first token."""
        return self.pooler(hidden)

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the logits (B, T, V) of the original token in each place."""
        return self.head(self.head_input(ids, types))
