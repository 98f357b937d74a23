"""A recurrent language model: all it has read is in a state of one size, and the next token is predicted from that alone.

Shapes: ids (B, T), hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.embedding import Embedding, Head
from regard.layers.locked import LockedDropout, word_dropout
from regard.layers.recurrent import Recurrent, State
from regard.models import presets
from regard.models.init import initialise
from regard.models.sizes import resolve_sizes

PRESETS = presets.RNN


class Running:
    """What a model remembers of the rows it is writing; unlike a cache of keys it never fills up."""

    filled = 0

    def __init__(self, state: State) -> None:
        self.state = state

    def select(self, rows: Tensor) -> None:
        """Row i becomes what row rows[i] was."""
        self.state = tuple(x[rows] for x in self.state)


class RNN(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve_sizes(config, PRESETS)
        if config.bidirectional and config.answer == "none":
            raise RegardError(
                "a language model may not read what it is to predict: model.bidirectional is for models that answer "
                "(classification, regression, tagging)"
            )
        self.embedding = Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        self.dropout = LockedDropout(config.dropout, config.variational)
        self.recurrent = Recurrent(
            config.cell,
            config.d_model,
            widths(config),
            bidirectional=config.bidirectional,
            dropout=config.hidden_dropout,
            weight_dropout=config.weight_dropout,
            variational=config.variational,
            norm=config.recurrent_norm,
        )
        self.output_dropout = LockedDropout(config.output_dropout, config.variational)
        if not config.bidirectional:
            matrix = nn.Parameter(torch.empty(config.target_vocab, self.recurrent.d_out))
            weight = self.embedding.weight if tied(config) else matrix
            self.head = Head(weight, config.scale_logits, config.head_bias)
        initialise(self)

    def embed(self, ids: Tensor) -> Tensor:
        weight = word_dropout(self.embedding.weight, self.config.word_dropout, self.training)
        return self.dropout(F.embedding(ids.clamp(min=0), weight) * self.embedding.scale)  # (B, T, C)

    def hidden(self, ids: Tensor, state: State | None = None, real: Tensor | None = None) -> tuple[Tensor, State]:
        """What the last layer gives at each token (B, T, C), going on from a state, and the state after the last one.

        `real` (B, T) says which ids are tokens; forwards, padding at the end of a row need not be told apart."""
        return self.recurrent(self.embed(ids), state, real)

    def read(self, ids: Tensor) -> Tensor:
        """What the head is given (B, T, C) for the token after each token; rows are padded on the right."""
        return self.output_dropout(self.hidden(ids, real=ids >= 0 if self.config.bidirectional else None)[0])

    def forward(self, ids: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each token."""
        return self.head(self.read(ids))

    def begin(self, prompt: Tensor) -> tuple[Tensor, Running]:
        """Read prompts (B, T) of any lengths at once: the logits (B, V) after each, and the state `step` goes on from.

        Rows move to the right, so that all end together: padding that comes first leaves a state of zeros as it is."""
        n = prompt.shape[1]
        empty = (prompt < 0).sum(1, keepdim=True)  # (B, 1)
        places = torch.arange(n, device=prompt.device) - empty  # (B, T), negative for padding
        real = None if not empty.any() else places >= 0
        hidden, state = self.hidden(prompt.gather(1, places % n), real=real)
        return self.head(hidden[:, -1]), Running(state)

    def step(self, tokens: Tensor, state: Running) -> Tensor:
        """Logits (N, V) after one more token (N,) of each row."""
        hidden, state.state = self.recurrent.step(self.embed(tokens[:, None])[:, 0], state.state)
        return self.head(hidden)


def tied(config: ModelConfig) -> bool:
    """Whether the head is the embedding matrix; what reads both ways has no head."""
    return config.tie in ("decoder", "all") and not config.bidirectional


def widths(config: ModelConfig) -> list[int]:
    """Of each layer; the last gives vectors as wide as the embeddings where these are the head."""
    hidden = config.d_hidden
    return [hidden] * (config.n_decoder_layers - 1) + [config.d_model if tied(config) else hidden]
