"""Recurrent encoder-decoders: one context vector (Sutskever, RNNenc), or attention over all of the source (RNNsearch).

| model.score            | it is       | the decoder                                             |
|------------------------|-------------|---------------------------------------------------------|
| none                   | Sutskever's | begins with the state that every encoder layer ends in  |
| constant               | RNNenc      | the same, and reads the last layer's again at each step |
| additive, dot, general | RNNsearch   | looks at all annotations before each step               |

Shapes: source (B, S) and target (B, T) ids, hidden (B, T, C), states (B, H), annotations (B, S, M), logits (B, T, V).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.alignment import Annotated, Attentive
from regard.layers.attend import Plan, reference
from regard.layers.cells import CELLS, State
from regard.layers.embedding import Embedding, Head
from regard.layers.locked import LockedDropout, word_dropout
from regard.layers.masks import FULL
from regard.layers.recurrent import Recurrent
from regard.models import presets
from regard.models.init import initialise
from regard.models.sizes import resolve_sizes
from regard.models.transformer import Transformer

PRESETS = presets.SEQ2SEQ
Memory = tuple[Tensor, ...]  # one row a sentence


class Seq2Seq(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config = resolve(config)
        self.source_embedding = Embedding(config.source_vocab, config.d_model, config.scale_embeddings)
        self.target_embedding = (
            self.source_embedding
            if config.tie in ("inputs", "all")
            else Embedding(config.target_vocab, config.d_model, config.scale_embeddings)
        )
        self.dropout = LockedDropout(config.dropout, config.variational)
        self.encoder = layers(config, config.d_model, config.n_encoder_layers, config.bidirectional)
        self.decoder = Searching(config, self.encoder.d_out) if attends(config) else OneContext(config)
        self.output_dropout = LockedDropout(config.output_dropout, config.variational)
        self.head = Head(
            nn.Parameter(torch.empty(config.target_vocab, config.d_model))
            if config.tie in ("none", "inputs")
            else self.target_embedding.weight,
            config.scale_logits,
            config.head_bias,
        )
        initialise(self)

    def embed(self, embedding: Embedding, ids: Tensor) -> Tensor:
        weight = word_dropout(embedding.weight, self.config.word_dropout, self.training)
        return self.dropout(F.embedding(ids.clamp(min=0), weight) * embedding.scale)  # (B, T, C)

    def encode(self, source: Tensor) -> tuple[Memory, State]:
        """What the decoder reads at every step, and the state it begins with."""
        if self.config.bidirectional:
            annotations, end = self.encoder(self.embed(self.source_embedding, source), real=source >= 0)
            return self.decoder.begin(annotations, end, source < 0)
        order = self.reading_order(source)
        read = source.gather(1, order)
        annotations, end = self.encoder(self.embed(self.source_embedding, read), real=read >= 0)
        if attends(self.config):
            annotations = annotations.gather(1, order.argsort(1)[..., None].expand_as(annotations))
        return self.decoder.begin(annotations, end, source < 0)

    def reading_order(self, source: Tensor) -> Tensor:
        """Columns (B, S) with padding in front, so that one direction ends on a word: the last, or the first."""
        columns = torch.arange(source.shape[1], device=source.device).expand_as(source)
        if self.config.reverse_source:
            return columns.flip(1)
        return (columns - (source < 0).sum(1, keepdim=True)) % source.shape[1]

    def read(self, source: Tensor, target: Tensor) -> Tensor:
        """Teacher forcing: what the head is given (B, T, C) for the token after each target token."""
        memory, state = self.encode(source)
        features, _ = self.decoder(self.embed(self.target_embedding, target), memory, state)
        return self.output_dropout(features)

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
        y = self.embed(self.target_embedding, tokens[:, None])
        features, state.state = self.decoder(y, state.memory, state.state)
        return self.output_dropout(features)[:, 0]


EncoderDecoder = Transformer | Seq2Seq  # what translates


class DecodeState:
    """What decoding carries from step to step: the memory of each sentence, the state of its hypotheses."""

    def __init__(self, memory: Memory, state: State) -> None:
        self.memory, self.state = memory, state

    def select(self, hypotheses: Tensor) -> None:
        """Hypothesis i becomes a copy of what hypothesis hypotheses[i] of the same sentence was."""
        self.state = tuple(x[hypotheses] for x in self.state)

    def select_sentences(self, sentences: Tensor) -> None:
        """Only these sentences stay; the caller selects their hypotheses as well."""
        self.memory = tuple(x[sentences] for x in self.memory)


# ---- decoders: the embedded target (N, T, C), memory and state -> what the head is given (N, T, C), and the next state ----


class OneContext(nn.Module):
    """All that is known of the source is the state that its encoder ended in. RNNenc (Cho et al. 2014) does not trust the
    decoder to remember it: the last layer's goes into every step, and into what the head is given."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        width, self.again = config.d_hidden, reads_again(config)
        self.n = CELLS[config.cell].states
        self.layers = layers(config, config.d_model + width * self.again, config.n_decoder_layers)
        if self.again:
            self.readout: nn.Module = Maxout(config.d_model + 2 * width, config.d_model)
        else:
            self.readout = nn.Linear(width, config.d_model) if width != config.d_model else nn.Identity()

    def begin(self, annotations: Tensor, end: State, padding: Tensor) -> tuple[Memory, State]:
        return (end[-self.n],), end

    def forward(self, y: Tensor, memory: Memory, state: State) -> tuple[Tensor, State]:
        if not self.again:
            s, state = through(self.layers, y, state)
            return self.readout(s), state
        (context,) = memory
        c = context.repeat_interleave(len(y) // len(context), 0)[:, None].expand(-1, y.shape[1], -1)  # (N, T, H)
        s, state = through(self.layers, torch.cat([y, c.to(y.dtype)], -1), state)
        return self.readout(joined(s, y, c)), state


class Searching(nn.Module):
    """RNNsearch (Bahdanau et al. 2015): s_0 = tanh(W_s h_1), where h_1 is what the encoder ended in, going backwards; then
    c_i by attention, s_i = cell(s_{i-1}, [y_{i-1}; c_i]), and the head is given a maxout of s_i, y_{i-1} and c_i. More
    layers stand on top of that one."""

    def __init__(self, config: ModelConfig, d_annotation: int) -> None:
        super().__init__()
        width, self.n = config.d_hidden, CELLS[config.cell].states
        sizes = (config.d_model, width, d_annotation, config.recurrent_norm, config.weight_dropout)
        self.attentive = Attentive(config.score, config.cell, *sizes)
        more = config.n_decoder_layers - 1
        self.above = layers(config, width, more) if more else None
        self.bridge = nn.Linear(width, self.n * width)
        self.dropout = LockedDropout(config.hidden_dropout, config.variational)
        self.readout = Maxout(width + config.d_model + d_annotation, config.d_model)

    def begin(self, annotations: Tensor, end: State, padding: Tensor) -> tuple[Memory, State]:
        annotations = self.dropout(annotations)
        first = self.bridge(end[-self.n]).tanh().chunk(self.n, -1)
        rest = self.above.start(len(annotations), annotations) if self.above else ()
        return (*self.attentive.prepared(annotations, padding), annotations), (*first, *rest)

    def forward(self, y: Tensor, memory: Memory, state: State) -> tuple[Tensor, State]:
        source, annotations = Annotated(*memory[:-1]), memory[-1]
        s, first, weights = self.attentive.over(y, source, state[: self.n])
        if self.attentive.cross.heard:
            self.tell(torch.cat([state[0][:, None].to(s.dtype), s[:, :-1]], 1), source, annotations)
        c = (weights.to(annotations.dtype) @ annotations).view(*y.shape[:2], -1)  # (N, T, M)
        rest: State = ()
        if self.above:
            s, rest = through(self.above, self.dropout(s), state[self.n :])
        return self.readout(joined(s, y, c)), (*first, *rest)

    def tell(self, states: Tensor, source: Annotated, annotations: Tensor) -> None:
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


def through(recurrent: Recurrent, x: Tensor, state: State) -> tuple[Tensor, State]:
    """A single step goes without the kernels that are made for many."""
    if x.shape[1] > 1:
        return recurrent(x, state)
    out, state = recurrent.step(x[:, 0], state)
    return out[:, None], state


# ---- settings ---------------------------------------------------------------------------------------------------------


def layers(config: ModelConfig, d_in: int, n: int, bidirectional: bool = False) -> Recurrent:
    return Recurrent(
        config.cell,
        d_in,
        [config.d_hidden] * n,
        bidirectional=bidirectional,
        dropout=config.hidden_dropout,
        weight_dropout=config.weight_dropout,
        variational=config.variational,
        norm=config.recurrent_norm,
    )


def attends(config: ModelConfig) -> bool:
    return config.score not in ("none", "constant")


def reads_again(config: ModelConfig) -> bool:
    """Whether the one context vector goes into every step."""
    return config.score == "constant"


def resolve(config: ModelConfig) -> ModelConfig:
    """The sizes this model will have; impossible ones are refused, and settings that mean nothing together."""
    config = resolve_sizes(config, PRESETS)
    if config.tie in ("inputs", "all") and config.source_vocab != config.target_vocab:
        raise RegardError(
            f"model.tie '{config.tie}' needs one vocabulary for both languages, but they have {config.source_vocab} and "
            f"{config.target_vocab} pieces: set tokenizer.joint true, or model.tie decoder"
        )
    if config.bidirectional and (not attends(config) or config.reverse_source):
        raise RegardError(
            "model.bidirectional is for encoders that attention looks at: without it the decoder goes on from "
            "where one direction ended, and there is nothing to reverse where both are read (model.reverse_source)"
        )
    if not attends(config) and config.n_encoder_layers != config.n_decoder_layers:
        raise RegardError(
            f"without attention (model.score {config.score}) every decoder layer begins with the state of an encoder layer: "
            f"{config.n_encoder_layers} and {config.n_decoder_layers} layers do not go together"
        )
    return config
