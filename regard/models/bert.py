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
from regard.models.heads import MaskedHead, Pooler
from regard.models.init import initialise
from regard.models.sizes import resolve_sizes
from regard.text.tokenizer import PAD


class Bert(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve_sizes(config, PRESETS)
        self.embedding = Embedding(config.source_vocab, config.d_model, config.scale_embeddings)
        self.types = nn.Embedding(max(config.token_types, 1), config.d_model)  # which of two sentences a token is in
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        blocks = (encoder_block(config) for _ in range(config.n_encoder_layers))
        self.encoder = Stack(config, blocks, window(FULL, config.window), "encoder")
        self.pooler = Pooler(config)
        self.head = MaskedHead(config, self.embedding.weight)
        initialise(self)

    def hidden(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """(B, T, C); rows are padded on the right."""
        positions = positions_of(ids, PAD)
        types = torch.zeros_like(ids) if types is None else types
        x = self.encoder.embed(self.embedding(ids) + self.types(types), positions)
        return self.encoder(self.dropout(self.embedding_norm(x)), positions)

    def forward(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Logits (B, T, V) of the token that belongs in each place."""
        return self.head(self.hidden(ids, types))


PRESETS = {
    "bert-tiny": {"n_encoder_layers": 2, "d_model": 128, "n_heads": 2, "d_ff": 512},
    "bert-base": {"n_encoder_layers": 12, "d_model": 768, "n_heads": 12, "d_ff": 3072},
    "bert-large": {"n_encoder_layers": 24, "d_model": 1024, "n_heads": 16, "d_ff": 4096},
}
