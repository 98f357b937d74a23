"""The decoder-only Transformer: p(x) = prod_t p(x_t | x_<t), every token predicted from those before it.

Shapes: ids (B, T), hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.block import encoder_block
from regard.layers.cache import NO_CACHE, Cache, StepCache
from regard.layers.embedding import Embedding, Head
from regard.layers.masks import CAUSAL, Mask, documents, positions_of, window
from regard.layers.norm import make_norm
from regard.layers.stack import Stack
from regard.models import presets
from regard.models.init import initialise
from regard.models.sizes import resolve_sizes

PRESETS = presets.GPT


class GPT(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve_sizes(config, PRESETS)
        self.embedding = Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        # its blocks are an encoder's, [self, ff]: only the mask makes it a decoder
        blocks = (encoder_block(config) for _ in range(config.n_decoder_layers))
        self.decoder = Stack(config, blocks, window(CAUSAL, config.window), "decoder")
        tied = config.tie in ("decoder", "all")
        self.head = Head(
            self.embedding.weight if tied else nn.Parameter(torch.empty(config.target_vocab, config.d_model)),
            config.scale_logits,
            config.head_bias,
        )
        initialise(self, config.embedding_norm)

    def hidden(self, ids: Tensor, positions: Tensor, cache: Cache = NO_CACHE, mask: Mask | None = None) -> Tensor:
        """(B, T, C); a mask other than the causal one keeps the model's window."""
        length = cache.key_positions(positions).shape[1]
        if length > self.config.max_len:
            raise RegardError(
                f"{length} tokens, but the model was built for at most {self.config.max_len} (model.max_len)"
            )
        if mask is not None:
            mask = window(mask, self.config.window)
        x = self.dropout(self.embedding_norm(self.decoder.embed(self.embedding(ids), positions)))
        return self.decoder(x, positions, cache=cache, mask=mask)

    def read(self, ids: Tensor, mask: Mask | None = None) -> Tensor:
        """What the head is given (B, T, C) for the token after each token; rows are padded on the right."""
        return self.hidden(ids, positions_of(ids), mask=mask)

    def read_packed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The same for rows of several documents, whose positions (B, T) begin again with each; none sees another."""
        return self.hidden(ids, positions, mask=documents(CAUSAL))

    def forward(self, ids: Tensor, mask: Mask | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each token."""
        return self.head(self.read(ids, mask))

    def packed(self, ids: Tensor, positions: Tensor) -> Tensor:
        return self.head(self.read_packed(ids, positions))

    def begin(self, prompt: Tensor, mask: Mask | None = None) -> tuple[Tensor, StepCache]:
        """Read prompts (B, T) of any lengths at once: the logits (B, V) after each, and the state `step` goes on from."""
        cache, positions = StepCache(), positions_of(prompt)
        hidden = self.hidden(prompt, positions, cache, mask)
        last = positions.argmax(1)
        return self.head(hidden[torch.arange(len(prompt), device=prompt.device), last]), cache

    def step(self, tokens: Tensor, state: StepCache) -> Tensor:
        """Logits (N, V) after one more token (N,) of each row."""
        return self.head(self.hidden(tokens[:, None], state.next_positions(tokens), state)[:, -1])
