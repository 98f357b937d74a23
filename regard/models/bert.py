"""The encoder-only Transformer: every token sees every other, and learns by filling in blanks.

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
from regard.models.heads import MaskedHead, Pooler
from regard.models.initialization import initialize, new_seed
from regard.models.model import ANSWERS, Model


class Bert(Model):
    presets = tables.BERT
    tasks = ("masked-lm", *ANSWERS)
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
        self.head = MaskedHead(config, self.embedding.weight)
        initialize(self, seed)

    def hidden(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """(B, T, C); rows are padded on the right."""
        positions = positions_of(ids)
        x = self.embedding(ids)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        x = self.encoder.embed(x, positions)
        return self.encoder(self.dropout(self.embedding_norm(x)), positions)

    read = hidden  # as the other models call what their heads are given

    def vectors(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        return self.hidden(ids, types if self.config.token_types > 1 else None)

    def pooled(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """(B, C), made by the pooler from the first token."""
        return self.pooler(hidden)

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the token that belongs in each place."""
        return self.head(self.read(ids, types))
