"""The encoder-decoder Transformer of *Attention Is All You Need*, and its pre-norm form.

Shapes: source (B, S) and target (B, T) ids, hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.block import decoder_block, encoder_block
from regard.layers.cache import NO_CACHE, Cache, StepCache
from regard.layers.embedding import Embedding, Head
from regard.layers.masks import CAUSAL, FULL, positions_of, window
from regard.layers.norm import make_norm
from regard.layers.schemes import check_positions
from regard.layers.stack import Stack
from regard.models import presets
from regard.models.init import initialise
from regard.models.sizes import resolve_sizes

PRESETS = presets.TRANSFORMER


class Transformer(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve(config)
        self.source_embedding = Embedding(config.source_vocab, config.d_model, config.scale_embeddings)
        self.target_embedding = (
            self.source_embedding
            if config.tie in ("inputs", "all")
            else Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        )
        norms = (make_norm(config) if config.embedding_norm else nn.Identity() for _ in range(2))
        self.source_norm, self.target_norm = norms
        self.dropout = nn.Dropout(config.dropout)
        encoder = (encoder_block(config) for _ in range(config.n_encoder_layers))
        self.encoder = Stack(config, encoder, window(FULL, config.window), "encoder")
        decoder = (decoder_block(config) for _ in range(config.n_decoder_layers))
        self.decoder = Stack(config, decoder, window(CAUSAL, config.window), "decoder")
        self.head = Head(
            nn.Parameter(torch.empty(config.target_vocab, config.d_model))
            if config.tie in ("none", "inputs")
            else self.target_embedding.weight,
            config.scale_logits,
            config.head_bias,
        )
        initialise(self, config.embedding_norm)

    def encode(self, source: Tensor) -> tuple[Tensor, Tensor]:
        """The memory (B, S, C) that the decoder reads, and the positions of its tokens (B, S)."""
        positions = positions_of(source)
        x = self.dropout(self.source_norm(self.encoder.embed(self.source_embedding(source), positions)))
        return self.encoder(x, positions), positions

    def decode(
        self, target: Tensor, positions: Tensor, memory: Tensor, memory_positions: Tensor, cache: Cache = NO_CACHE
    ) -> Tensor:
        """Hidden vectors (B, T, C) of the target tokens."""
        x = self.dropout(self.target_norm(self.decoder.embed(self.target_embedding(target), positions)))
        return self.decoder(x, positions, memory, memory_positions, cache)

    def read(self, source: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: what the head is given (B, T, C) for the token after each target token."""
        memory, memory_positions = self.encode(source)
        return self.decode(target, positions_of(target), memory, memory_positions)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each target token."""
        return self.head(self.read(source, target))

    def begin(self, source: Tensor) -> DecodeState:
        """Read the source once; `step` then writes the translation token by token."""
        return DecodeState(*self.encode(source))

    def step(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """Logits (N, V) after one more token (N,) of each hypothesis, those of a sentence one after the other: one each at
        first, then as many as `select` left."""
        return self.head(self.advance(tokens, state))

    def advance(self, tokens: Tensor, state: DecodeState) -> Tensor:
        """What the head is given (N, C) in a step."""
        positions = state.cache.next_positions(
            tokens
        )  # (B, K): the hypotheses of a sentence stand side by side in its row
        tokens = tokens.view_as(positions)
        return self.decode(tokens, positions, state.memory, state.memory_positions, state.cache).flatten(0, 1)


class DecodeState:
    """What decoding carries from step to step: the memory of each sentence, the cache of its hypotheses."""

    def __init__(self, memory: Tensor, memory_positions: Tensor) -> None:
        self.memory, self.memory_positions, self.cache = memory, memory_positions, StepCache()

    def select(self, hypotheses: Tensor) -> None:
        """Hypothesis i becomes a copy of what hypothesis hypotheses[i] of the same sentence was."""
        self.cache.follow(hypotheses.view(len(self.memory), -1) % self.cache.width)

    def select_sentences(self, sentences: Tensor) -> None:
        """Only these sentences stay; the caller selects their hypotheses as well."""
        self.memory, self.memory_positions = self.memory[sentences], self.memory_positions[sentences]
        self.cache.select(sentences)
        self.cache.select_memory(sentences)


def resolve(config: ModelConfig) -> ModelConfig:
    """The sizes this model will have; impossible ones are refused, and positions where they make no sense."""
    config = resolve_sizes(config, PRESETS)
    for place in ("encoder", "decoder", "cross"):
        check_positions(config, place)
    if config.tie in ("inputs", "all") and config.source_vocab != config.target_vocab:
        raise RegardError(
            f"model.tie '{config.tie}' needs one vocabulary for both languages, but they have {config.source_vocab} and "
            f"{config.target_vocab} pieces: set tokenizer.joint true, or model.tie decoder"
        )
    return config
