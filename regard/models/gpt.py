"""The decoder-only Transformer: p(x) = prod_t p(x_t | x_<t), every token predicted from those before it.

Shapes: ids (B, T), hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.masks import CAUSAL, Mask, document_mask, positions_of
from regard.layers.block import make_blocks
from regard.layers.decoding_state import DecodingState
from regard.layers.embedding import Embedding, Head
from regard.layers.norm import make_norm, normalize
from regard.layers.stack import Stack
from regard.models import presets as tables
from regard.models.initialization import initialize, new_seed
from regard.models.model import PREDICTION_TASKS, LanguageModel

# Tokens that a model with a state of fixed size reads at once: of all rows together, and at least of one row.
PREFILL_TOKENS, LEAST_PIECE = 16384, 64


class GPT(LanguageModel):
    """A decoder-only language model: GPT, LLaMA, PaLM, BLOOM, convolutional language models."""

    presets = tables.GPT
    tasks = ("causal-lm", *PREDICTION_TASKS)
    embeds = packs_documents = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        seed = new_seed()
        self.config = config = self.resolve(config)
        self.embedding = Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        self.embedding_norm = make_norm(config) if config.embedding_norm else nn.Identity()
        self.dropout = nn.Dropout(config.dropout)
        # The blocks are those of an encoder, [self, ff]: only the causal mask makes it a decoder.
        blocks = make_blocks(config, config.n_decoder_layers, "decoder", causal=True)
        self.decoder = Stack(config, blocks, CAUSAL, "decoder")
        tied = config.tie in ("decoder", "all")  # weight tying (tied embeddings)
        self.head = Head(
            self.embedding.weight if tied else nn.Parameter(torch.empty(config.target_vocab, config.d_model)),
            config.scale_logits,
            config.head_bias,
        )
        initialize(self, seed)

    def hidden(
        self, ids: Tensor, positions: Tensor, state: DecodingState | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Run ids (B, T) at positions (B, T); return hidden vectors (B, T, C). A state, if given, gets keys and values."""
        self.check_length(ids.shape[1])
        x = self.dropout(self.embedding_norm(self.decoder.embed(self.embedding(ids), positions)))
        return self.decoder(x, positions, state=state, mask=mask)

    @property
    def longest(self) -> int:
        """The number of tokens that a text may have: there is no limit where neither a KV cache nor positions grow."""
        return self.config.max_len if self.decoder.grows else sys.maxsize

    def check_length(self, length: int) -> None:
        """Refuse more tokens than the model was built for."""
        if length > self.longest:
            raise RegardError(f"{length} tokens, but the model was built for at most {self.longest} (model.max_len)")

    def head_input(self, ids: Tensor, mask: Mask | None = None) -> Tensor:
        """Run the model on ids (B, T), padded on the right; return hidden vectors (B, T, C), before the output matrix."""
        return self.hidden(ids, positions_of(ids), mask=mask)

    def packed_head_input(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the input of the head (B, T, C) for rows of several documents, which do not attend to each other.

        Positions (B, T) begin again with each document."""
        return self.hidden(ids, positions, mask=document_mask(CAUSAL))

    def forward(self, ids: Tensor, mask: Mask | None = None) -> Tensor:
        """Return the logits (B, T, V) of the token after each token."""
        return self.head(self.head_input(ids, mask))

    def packed(self, ids: Tensor, positions: Tensor) -> Tensor:
        """Return the logits (B, T, V) for rows of several documents."""
        return self.head(self.packed_head_input(ids, positions))

    def begin(self, prompt: Tensor, mask: Mask | None = None) -> tuple[Tensor, DecodingState]:
        """Prefill: read prompts (B, T) of any lengths; return the logits (B, V) after each, and the state to step from."""
        hidden, state = self.prefill(prompt, mask)
        return self.head(hidden), state

    def prefill(self, prompt: Tensor, mask: Mask | None = None) -> tuple[Tensor, DecodingState]:
        """Return the hidden vector (B, C) of the last token of each prompt (B, T), and the decoding state after it.

        Where the state does not grow, long prompts are read in pieces, so that memory does not grow with them either."""
        state = DecodingState(self, len(prompt), prompt.device, self.embedding.weight.dtype)
        positions, row = positions_of(prompt), torch.arange(len(prompt), device=prompt.device)
        piece = (
            max(LEAST_PIECE, PREFILL_TOKENS // max(1, len(prompt))) if self.decoder.reads_pieces else prompt.shape[1]
        )
        last, found = positions.argmax(1), None
        for first in range(0, prompt.shape[1], piece):
            here = slice(first, first + piece)
            hidden = self.hidden(prompt[:, here], positions[:, here], state, mask)  # (B, piece, C)
            at = (last - first).clamp(0, hidden.shape[1] - 1)
            own = hidden[row, at]
            found = own if found is None else torch.where((last >= first)[:, None], own, found)
        assert found is not None
        return found, state

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Return logits (N, V) after one more token (N,) of each row."""
        if not state.static:
            self.check_length(state.length + 1)
        x = self.decoder.embed(self.embedding(tokens), state.position())
        return self.head(self.decoder.step(self.dropout(normalize(x, self.embedding_norm)), state))
