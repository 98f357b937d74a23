"""The encoder-decoder Transformer of *Attention Is All You Need*, and its pre-norm form.

Shapes: source (B, S) and target (B, T) ids, hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.kernels.masks import CAUSAL, FULL, positions_of
from regard.layers.block import make_blocks
from regard.layers.decoding_state import DecodingState
from regard.layers.embedding import Embedding, Head
from regard.layers.norm import make_norm, normalize
from regard.layers.stack import Stack
from regard.models import presets as tables
from regard.models.initialization import initialize, new_seed
from regard.models.model import TranslationModel


class Transformer(TranslationModel):
    """An encoder-decoder Transformer: the original, Marian, T5, BART, convolutional sequence-to-sequence models."""

    presets = tables.TRANSFORMER
    tasks = ("translation", "span-corruption", "denoising")
    embeds = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        seed = new_seed()
        self.config = config = self.resolve(config)
        self.source_embedding = Embedding(config.source_vocab, config.d_model, config.scale_embeddings)
        self.target_embedding = (  # weight tying of the two inputs
            self.source_embedding
            if config.tie in ("inputs", "all")
            else Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        )
        norms = (make_norm(config) if config.embedding_norm else nn.Identity() for _ in range(2))
        self.source_norm, self.target_norm = norms
        self.dropout = nn.Dropout(config.dropout)
        encoder = make_blocks(config, config.n_encoder_layers, "encoder", causal=False)
        self.encoder = Stack(config, encoder, FULL, "encoder")
        decoder = make_blocks(config, config.n_decoder_layers, "decoder", causal=True, crosses=True)
        self.decoder = Stack(config, decoder, CAUSAL, "decoder")
        self.head = Head(
            nn.Parameter(torch.empty(config.target_vocab, config.d_model))
            if config.tie in ("none", "inputs")
            else self.target_embedding.weight,  # weight tying (tied embeddings)
            config.scale_logits,
            config.head_bias,
        )
        initialize(self, seed)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """Run the encoder on sources (B, S); return its output (B, S, C), the memory, and the positions (B, S)."""
        positions = positions_of(source)
        x = self.dropout(self.source_norm(self.encoder.embed(self.source_embedding(source), positions)))
        return self.encoder(x, positions), positions

    def read_target(self, encoded: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
        """Run the decoder on the right target (B, T) and return its hidden vectors (B, T, C), before the output matrix."""
        positions = positions_of(target)
        x = self.dropout(self.target_norm(self.decoder.embed(self.target_embedding(target), positions)))
        return self.decoder(x, positions, *encoded)

    def last_hidden_state(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the encoder's output, (B, T) -> (B, T, C)."""
        return self.encode(ids)[0]

    def begin(self, source: Tensor) -> DecodingState:
        """Run the encoder on sources (B, S) and store the keys and values of cross-attention; return the decoding state.

        `step` then writes the translation token by token."""
        memory, positions = self.encode(source)
        state = DecodingState(self, len(source), source.device, memory.dtype)
        self.decoder.store_memory(memory, positions, state)
        return state

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Return the logits (N, V) after one more token (N,) of each hypothesis; those of a sentence are neighbours."""
        return self.head(self.advance(tokens, state))

    def advance(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Run the decoder on one more token (N,) of each hypothesis and return its hidden vectors (N, C), before the output
        matrix."""
        x = self.decoder.embed(self.target_embedding(tokens), state.position())
        return self.decoder.step(self.dropout(normalize(x, self.target_norm)), state)
