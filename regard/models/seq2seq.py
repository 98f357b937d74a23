"""Recurrent encoder-decoders: one context vector (Sutskever, RNNenc), or attention over all of the source (RNNsearch).

| model.score            | it is       | the decoder                                             |
|------------------------|-------------|---------------------------------------------------------|
| none                   | Sutskever's | begins with the state that every encoder layer ends in  |
| constant               | RNNenc      | the same, and reads the last layer's again at each step |
| additive, dot, general | RNNsearch   | looks at all annotations before each step               |

Shapes: source (B, S) and target (B, T) ids, hidden (B, T, C), states (B, H), annotations (B, S, M), logits (B, T, V).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig, RecurrentSettings, Seq2SeqSettings
from regard.config.registry import ALIGNMENT, RECURRENT, find
from regard.errors import RegardError
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import Plan, reference
from regard.layers.cells import CellState as Hidden
from regard.layers.cells import cell_settings
from regard.layers.decoding_state import LENGTH, PerRow, PerSentence, State, Storage
from regard.layers.embedding import Embedding, Head
from regard.layers.recurrent import Recurrent
from regard.layers.recurrent_attention import AttentionCell, SourceAnnotations
from regard.layers.variational_dropout import VariationalDropout, word_dropout
from regard.models import presets as tables
from regard.models.initialization import initialize, new_seed
from regard.models.model import TranslationModel

Memory = tuple[Tensor, ...]  # one row a sentence


class Seq2Seq(TranslationModel):
    presets = tables.SEQ2SEQ
    tasks = ("translation",)
    made_of = (RECURRENT, ALIGNMENT)
    is_recurrent = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        seed = new_seed()
        self.config = config = self.resolve(config)
        self.source_embedding = Embedding(config.source_vocab, config.d_model, config.scale_embeddings)
        self.target_embedding = (
            self.source_embedding
            if config.tie in ("inputs", "all")
            else Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        )
        self.settings = s = config.table(RecurrentSettings)
        self.reverse_source = config.table(Seq2SeqSettings).reverse_source
        self.dropout = VariationalDropout(config.dropout, s.variational)
        self.encoder = layers(config, config.d_model, config.n_encoder_layers, s.bidirectional)
        self.decoder = (
            RNNSearchDecoder(config, self.encoder.d_out) if uses_attention(config) else FixedContextDecoder(config)
        )
        self.output_dropout = VariationalDropout(s.output_dropout, s.variational)
        self.head = Head(
            nn.Parameter(torch.empty(config.target_vocab, config.d_model))
            if config.tie in ("none", "inputs")
            else self.target_embedding.weight,
            config.scale_logits,
            config.head_bias,
        )
        initialize(self, seed)

    @classmethod
    def resolve(cls, config: ModelConfig) -> ModelConfig:
        config = super().resolve(config)
        check_sizes(config)
        return config

    def embed(self, embedding: Embedding, ids: Tensor) -> Tensor:
        weight = word_dropout(embedding.weight, self.settings.word_dropout, self.training)
        return self.dropout(F.embedding(ids.clamp(min=0), weight) * embedding.scale)  # (B, T, C)

    def encode(self, source: Tensor) -> tuple[Memory, Hidden]:
        """What the decoder reads at every step, and the state it begins with."""
        if self.settings.bidirectional:
            annotations, end = self.encoder(self.embed(self.source_embedding, source), real=source >= 0)
            return self.decoder.begin(annotations, end, source < 0)
        order = self.reading_order(source)
        read = source.gather(1, order)
        annotations, end = self.encoder(self.embed(self.source_embedding, read), real=read >= 0)
        if uses_attention(self.config):
            annotations = annotations.gather(1, order.argsort(1)[..., None].expand_as(annotations))
        return self.decoder.begin(annotations, end, source < 0)

    def reading_order(self, source: Tensor) -> Tensor:
        """Columns (B, S) with padding in front, so that one direction ends on a word: the last, or the first."""
        columns = torch.arange(source.shape[1], device=source.device).expand_as(source)
        if self.reverse_source:
            return columns.flip(1)
        return (columns - (source < 0).sum(1, keepdim=True)) % source.shape[1]

    def read_target(self, encoded: tuple[Memory, Hidden], target: Tensor) -> Tensor:
        memory, state = encoded
        features, _ = self.decoder(self.embed(self.target_embedding, target), memory, state)
        return self.output_dropout(features)

    def begin(self, source: Tensor) -> State:
        """Read the source once; `step` then writes the translation token by token."""
        memory, first = self.encode(source)
        state = State(self, len(source), source.device, first[0].dtype)
        state.store_memory(self.decoder, **self.decoder.named(memory))
        Recurrent.store_state(first, state.parts[self.decoder])
        return state

    def step(self, tokens: Tensor, state: State) -> Tensor:
        """Return logits (N, V) after one more token (N,) of each hypothesis, those of a sentence one after the other."""
        return self.head(self.advance(tokens, state))

    def advance(self, tokens: Tensor, state: State) -> Tensor:
        """Return what the head is given (N, C) in a step."""
        kept = state.parts[self.decoder]
        y = self.embed(self.target_embedding, tokens[:, None])
        features, after = self.decoder(y, self.decoder.memory(kept), Recurrent.load_state(kept))
        Recurrent.store_state(after, kept)
        return self.output_dropout(features)[:, 0]


# ---- decoders: the embedded target (N, T, C), memory and state -> what the head is given (N, T, C), and the next state ----


class FixedContextDecoder(nn.Module):
    """All that is known of the source is the state that its encoder ended in. RNNenc (Cho et al. 2014) does not trust the
    decoder to remember it: the last layer's goes into every step, and into what the head is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = width = config.table(RecurrentSettings).d_hidden
        self.again = repeats_context(config)
        self.n = states_of(config)
        self.layers = layers(config, config.d_model + width * self.again, config.n_decoder_layers)
        if self.again:
            self.readout: nn.Module = Maxout(config.d_model + 2 * width, config.d_model)
        else:
            self.readout = nn.Linear(width, config.d_model) if width != config.d_model else nn.Identity()

    def begin(self, annotations: Tensor, end: Hidden, padding: Tensor) -> tuple[Memory, Hidden]:
        return (end[-self.n],), end

    def state(self) -> dict[str, Storage]:
        return {"context": PerSentence((self.width,)), **self.layers.storage()}

    def named(self, memory: Memory) -> dict[str, Tensor]:
        """Return what was made of the source under the names of `state`."""
        return {"context": memory[0]}

    def memory(self, kept: Any) -> Memory:
        """Return what was made of the source as `forward` takes it."""
        return (kept.context,)

    def forward(self, y: Tensor, memory: Memory, state: Hidden) -> tuple[Tensor, Hidden]:
        if not self.again:
            s, state = through(self.layers, y, state)
            return self.readout(s), state
        (context,) = memory
        c = context.repeat_interleave(len(y) // len(context), 0)[:, None].expand(-1, y.shape[1], -1)  # (N, T, H)
        s, state = through(self.layers, torch.cat([y, c.to(y.dtype)], -1), state)
        return self.readout(joined(s, y, c)), state


class RNNSearchDecoder(nn.Module):
    """RNNsearch (Bahdanau et al. 2015): s_0 = tanh(W_s h_1), where h_1 is what the encoder ended in, going backwards; then
    c_i by attention, s_i = cell(s_{i-1}, [y_{i-1}; c_i]), and the head is given a maxout of s_i, y_{i-1} and c_i. More
    layers stand on top of that one."""

    def __init__(self, config: ModelConfig, d_annotation: int) -> None:
        super().__init__()
        s = config.table(RecurrentSettings)
        self.width = width = s.d_hidden
        self.n = states_of(config)
        self.attentive = AttentionCell(config, config.d_model, width, d_annotation)
        more = config.n_decoder_layers - 1
        self.above = layers(config, width, more) if more else None
        self.bridge = nn.Linear(width, self.n * width)
        self.dropout = VariationalDropout(s.hidden_dropout, s.variational)
        self.readout = Maxout(width + config.d_model + d_annotation, config.d_model)

    def begin(self, annotations: Tensor, end: Hidden, padding: Tensor) -> tuple[Memory, Hidden]:
        annotations = self.dropout(annotations)
        first = self.bridge(end[-self.n]).tanh().chunk(self.n, -1)
        rest = self.above.zero_state(len(annotations), annotations) if self.above else ()
        return (*self.attentive.prepare_source(annotations, padding), annotations), (*first, *rest)

    def state(self) -> dict[str, Storage]:
        keys, entering, annotations = self.attentive.widths()
        above = self.above.storage(self.n) if self.above else {}
        return {
            "keys": PerSentence((LENGTH, keys)),
            "entering": PerSentence((LENGTH, entering)),
            "real": PerSentence((LENGTH,), torch.bool),
            "annotations": PerSentence((LENGTH, annotations)),
            **{f"state_{i}": PerRow((self.width,)) for i in range(self.n)},
            **above,
        }

    def named(self, memory: Memory) -> dict[str, Tensor]:
        """Return what was made of the source under the names of `state`."""
        keys, entering, padding, annotations = memory
        return {"keys": keys, "entering": entering, "real": ~padding, "annotations": annotations}

    def memory(self, kept: Any) -> Memory:
        """Return what was made of the source as `forward` takes it."""
        return kept.keys, kept.entering, ~kept.real, kept.annotations

    def forward(self, y: Tensor, memory: Memory, state: Hidden) -> tuple[Tensor, Hidden]:
        source, annotations = SourceAnnotations(*memory[:-1]), memory[-1]
        s, first, weights = self.attentive.run_steps(y, source, state[: self.n])
        if self.attentive.cross.is_observed:
            self.tell(torch.cat([state[0][:, None].to(s.dtype), s[:, :-1]], 1), source, annotations)
        c = (weights.to(annotations.dtype) @ annotations).view(*y.shape[:2], -1)  # (N, T, M)
        rest: Hidden = ()
        if self.above:
            s, rest = through(self.above, self.dropout(s), state[self.n :])
        return self.readout(joined(s, y, c)), (*first, *rest)

    def tell(self, states: Tensor, source: SourceAnnotations, annotations: Tensor) -> None:
        """Whoever listens hears what the steps looked with (N, T, H): T of a sentence, or one of each of its hypotheses."""
        cross = self.attentive.cross
        q = cross.score.queries(states).view(len(annotations), -1, source.keys.shape[-1])
        at = source.padding.long().neg()  # 0, or -1 on padding, which is all that a mask without order asks
        plan = Plan(reference, FULL, at.new_zeros(q.shape[:2]), at)
        cross.attend(q[:, None], source.keys[:, None], annotations[:, None], plan)


class Maxout(nn.Module):
    """The larger of every two outputs."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.pairs = nn.Linear(d_in, 2 * d_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(x).unflatten(-1, (-1, 2)).amax(-1)


def joined(*parts: Tensor) -> Tensor:
    """Side by side, in the precision of the first."""
    return torch.cat([part.to(parts[0].dtype) for part in parts], -1)


def through(recurrent: Recurrent, x: Tensor, state: Hidden) -> tuple[Tensor, Hidden]:
    """A single step goes without the kernels that are made for many."""
    if x.shape[1] > 1:
        return recurrent(x, state)
    out, state = recurrent.step(x[:, 0], state)
    return out[:, None], state


# ---- settings ---------------------------------------------------------------------------------------------------------


def layers(config: ModelConfig, d_in: int, n: int, bidirectional: bool = False) -> Recurrent:
    s = config.table(RecurrentSettings)
    return Recurrent(
        config.cell,
        d_in,
        [s.d_hidden] * n,
        bidirectional=bidirectional,
        dropout=s.hidden_dropout,
        weight_dropout=s.weight_dropout,
        variational=s.variational,
        norm=s.norm,
        settings=cell_settings(config),
    )


def states_of(config: ModelConfig) -> int:
    """How many tensors the state of a cell has."""
    states: int = find("cell", config.cell).states
    return states


def uses_attention(config: ModelConfig) -> bool:
    return config.score not in ("none", "constant")


def repeats_context(config: ModelConfig) -> bool:
    """Whether the one context vector goes into every step."""
    return config.score == "constant"


def check_sizes(config: ModelConfig) -> None:
    """Refuse settings that mean nothing together."""
    reverse = config.table(Seq2SeqSettings).reverse_source
    if config.table(RecurrentSettings).bidirectional and (not uses_attention(config) or reverse):
        raise RegardError(
            "model.recurrent.bidirectional is for encoders that attention looks at: without it the decoder goes on from "
            "where one direction ended, and there is nothing to reverse where both are read (model.seq2seq.reverse_source)"
        )
    if not uses_attention(config) and config.n_encoder_layers != config.n_decoder_layers:
        raise RegardError(
            f"without attention (model.score {config.score}) every decoder layer begins with the state of an encoder layer: "
            f"{config.n_encoder_layers} and {config.n_decoder_layers} layers do not go together"
        )
