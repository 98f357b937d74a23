"""The recurrent language model: the next token is predicted from a state of fixed size, which holds all that was read.

Shapes: ids (B, T), hidden (B, T, C), logits (B, T, V).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig, RecurrentSettings
from regard.config.registry import RECURRENT
from regard.errors import RegardError
from regard.layers.cells import CellState as Hidden
from regard.layers.decoding_state import DecodingState, Storage
from regard.layers.embedding import Embedding, Head
from regard.layers.recurrent import make_recurrent
from regard.layers.variational_dropout import VariationalDropout, word_dropout
from regard.models import presets as tables
from regard.models.initialization import initialize, new_seed
from regard.models.model import PREDICTION_TASKS, StatefulLanguageModel


class RNN(StatefulLanguageModel):
    """A recurrent language model with any cell, such as AWD-LSTM; bidirectional only below a classification head."""

    presets = tables.RNN
    tasks = ("causal-lm", *PREDICTION_TASKS)
    made_of = (RECURRENT,)
    embeds = is_recurrent = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        seed = new_seed()
        self.config = config = self.resolve(config)
        self.settings = s = config.table(RecurrentSettings)
        if s.bidirectional and config.prediction_head == "none":
            raise RegardError(
                "a language model may not read what it is to predict: model.recurrent.bidirectional is for models with "
                "a prediction head (classification, regression, tagging)"
            )
        self.embedding = Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        self.dropout = VariationalDropout(config.dropout, s.variational)
        if s.interleaved or s.bidirectional_layers:
            raise RegardError(
                "model.recurrent.interleaved and model.recurrent.bidirectional_layers are for encoders of seq2seq models: "
                "leave them out"
            )
        side = "encoder" if s.bidirectional else "decoder"
        self.recurrent = make_recurrent(
            config, config.d_model, layer_widths(config), side, bidirectional=s.bidirectional
        )
        self.output_dropout = VariationalDropout(s.output_dropout, s.variational)
        if not s.bidirectional:
            matrix = nn.Parameter(torch.empty(config.target_vocab, self.recurrent.d_out))
            weight = self.embedding.weight if is_tied(config) else matrix  # weight tying
            self.head = Head(weight, config.scale_logits, config.head_bias)
        initialize(self, seed)

    def embed(self, ids: Tensor) -> Tensor:
        """Return embeddings (B, T, C), with dropout of words and of features."""
        weight = word_dropout(self.embedding.weight, self.settings.word_dropout, self.training)
        return self.dropout(F.embedding(ids.clamp(min=0), weight) * self.embedding.scale)  # (B, T, C)

    def start(self, rows: int) -> Hidden:
        return self.recurrent.zero_state(rows, self.embedding.weight.detach())

    def hidden(self, ids: Tensor, state: Hidden | None = None, real: Tensor | None = None) -> tuple[Tensor, Hidden]:
        """Return what the last layer gives at each token (B, T, C), continuing from a state, and the state after the last.

        `real` (B, T) says which ids are tokens. In a forward direction padding at the end of a row changes nothing before
        it, so `real` may be None."""
        return self.recurrent(self.embed(ids), state, real, tokens=ids >= 0)

    def head_input(self, ids: Tensor) -> Tensor:
        """Run the model on ids (B, T), padded on the right, and return the input of the head (B, T, C)."""
        return self.output_dropout(self.hidden(ids, real=ids >= 0 if self.settings.bidirectional else None)[0])

    @property
    def width(self) -> int:
        return self.recurrent.d_out

    def pooled(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return one vector for each row (B, C): that of the last token, with the backward half of the first token."""
        at_end = super().pooled(hidden, ids)
        if not self.settings.bidirectional:
            return at_end
        way = hidden.shape[-1] // 2
        return torch.cat([at_end[:, :way], hidden[:, 0, way:]], -1)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each token."""
        return self.head(self.head_input(ids))

    def begin(self, prompt: Tensor) -> tuple[Tensor, DecodingState]:
        """Prefill: read prompts (B, T) of any lengths; return the logits (B, V) after each, and the state to step from."""
        hidden, state = self.prefill(prompt)
        return self.head(hidden), state

    def prefill(self, prompt: Tensor) -> tuple[Tensor, DecodingState]:
        """Return the hidden vector (B, C) of the last token of each prompt (B, T), and the decoding state after it.

        Rows are moved to the right, so that all end in the last column: padding in front leaves the zero state unchanged."""
        n = prompt.shape[1]
        empty = (prompt < 0).sum(1, keepdim=True)  # (B, 1)
        places = torch.arange(n, device=prompt.device) - empty  # (B, T), negative for padding
        real = None if not empty.any() else places >= 0
        hidden, after = self.hidden(prompt.gather(1, places % n), real=real)
        state = DecodingState(self, len(prompt), prompt.device, hidden.dtype)
        self.recurrent.store_state(after, state.parts[self])
        return hidden[:, -1], state

    def state(self) -> dict[str, Storage]:
        """Declare the state of each layer; unlike a cache of keys it never grows."""
        return self.recurrent.storage()

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Return logits (N, V) after one more token (N,) of each row."""
        kept = state.parts[self]
        hidden, after = self.recurrent.step(self.embed(tokens[:, None])[:, 0], self.recurrent.load_state(kept))
        self.recurrent.store_state(after, kept)
        return self.head(hidden)


def is_tied(config: ModelConfig) -> bool:
    """Return whether weights are tied, so that the head is the embedding matrix; a bidirectional model has no head."""
    return config.tie in ("decoder", "all") and not config.table(RecurrentSettings).bidirectional


def layer_widths(config: ModelConfig) -> list[int]:
    """Return the width of each layer: d_hidden, but the last one has that of the embeddings if they are the head."""
    hidden = config.table(RecurrentSettings).d_hidden
    return [hidden] * (config.n_decoder_layers - 1) + [config.d_model if is_tied(config) else hidden]
