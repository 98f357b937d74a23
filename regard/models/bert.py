"""The encoder-only Transformer: every token sees every other, and learns by filling in blanks.

Shapes: ids and types (B, T), hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.layers.block import encoder_block
from regard.layers.embedding import Embedding
from regard.layers.masks import FULL, positions_of, window
from regard.layers.norm import make_norm
from regard.layers.stack import Stack
from regard.models import presets
from regard.models.heads import MaskedHead, Pooler
from regard.models.init import initialise
from regard.models.sizes import resolve_sizes

PRESETS = presets.BERT


class Bert(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve_sizes(config, PRESETS)
        self.embedding = Embedding(config.source_vocab, config.d_model, config.scale_embeddings)
        # which of two sentences a token is in
        self.types = nn.Embedding(config.token_types, config.d_model) if config.token_types else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        blocks = (encoder_block(config) for _ in range(config.n_encoder_layers))
        self.encoder = Stack(config, blocks, window(FULL, config.window), "encoder")
        self.pooler = Pooler(config)
        self.head = MaskedHead(config, self.embedding.weight)
        initialise(self, config.embedding_norm)

    def hidden(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """(B, T, C); rows are padded on the right."""
        positions = positions_of(ids)
        x = self.embedding(ids)
        if self.types is not None:
            x = x + self.types(torch.zeros_like(ids) if types is None else types)
        x = self.encoder.embed(x, positions)
        return self.encoder(self.dropout(self.embedding_norm(x)), positions)

    read = hidden  # as the other models call what their heads are given

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the token that belongs in each place."""
        return self.head(self.read(ids, types))
