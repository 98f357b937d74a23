"""Recurrent encoder-decoders: one context vector (Sutskever, RNNenc), or attention over all of the source (RNNsearch, GNMT,
Deep-Att).

| model.attention_score  | model     | the decoder                                                        |
|------------------------|-----------|--------------------------------------------------------------------|
| none                   | Sutskever | begins with the final state of every encoder layer                 |
| constant               | RNNenc    | also reads the final state of the last encoder layer at every step |
| additive, dot, general | RNNsearch | attends to all annotations before each step                        |

Deep models with attention differ from RNNsearch in these settings; their layers above the first are `decoder.above`:

| model    | encoder                                          | decoder                                                     |
|----------|--------------------------------------------------|-------------------------------------------------------------|
| GNMT     | the lowest layer alone is bidirectional,         | every layer and the head read the context, residual sums    |
|          | residual sums                                    |                                                             |
| Deep-Att | two columns of alternating directions,           | fast-forward connections                                    |
|          | fast-forward connections                         |                                                             |

Shapes: source (B, S) and target (B, T) ids, hidden (B, T, C), states (B, H), annotations (B, S, M), logits (B, T, V).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig, RecurrentSettings, Seq2SeqSettings
from regard.config.registry import ALIGNMENT, RECURRENT
from regard.errors import RegardError
from regard.kernels.masks import FULL
from regard.layers.attention_kernels import AttentionPlan, reference
from regard.layers.cells import CellState as Hidden
from regard.layers.cells import cell_shape
from regard.layers.decoding_state import LENGTH, DecodingState, PerRow, PerSentence, Storage
from regard.layers.embedding import Embedding, Head
from regard.layers.recurrent import InterleavedRecurrent, Recurrent, half_projection, make_recurrent
from regard.layers.recurrent_attention import AttentionCell, SourceAnnotations
from regard.layers.recurrent_feedforward import make_feedforwards
from regard.layers.variational_dropout import VariationalDropout, word_dropout
from regard.models import presets as tables
from regard.models.initialization import initialize, new_seed
from regard.models.model import TranslationModel

Memory = tuple[Tensor, ...]  # what the decoder reads of the source, one row for each sentence


class Seq2Seq(TranslationModel):
    """A recurrent encoder-decoder with any cell: Sutskever et al. 2014, RNNenc, RNNsearch, GNMT, Deep-Att."""

    presets = tables.SEQ2SEQ
    tasks = ("translation",)
    made_of = (RECURRENT, ALIGNMENT)
    is_recurrent = True

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
        self.settings = s = config.table(RecurrentSettings)
        self.reverse_source = config.table(Seq2SeqSettings).reverse_source
        self.dropout = VariationalDropout(config.dropout, s.variational)
        self.encoder = make_encoder(config)
        attends, d_annotation = uses_attention(config), self.encoder.d_out
        # Deep-Att: outputs and input projections of the highest layers are reduced to a quarter of their width.
        self.annotate = nn.Linear(d_annotation, d_annotation // 4, bias=False) if attends and s.fast_forward else None
        d_annotation = d_annotation if self.annotate is None else self.annotate.out_features
        self.decoder = RNNSearchDecoder(config, d_annotation) if attends else FixedContextDecoder(config)
        self.output_dropout = VariationalDropout(s.output_dropout, s.variational)
        self.head = Head(
            nn.Parameter(torch.empty(config.target_vocab, self.decoder.d_out))
            if config.tie in ("none", "inputs")
            else self.target_embedding.weight,  # weight tying (tied embeddings)
            config.scale_logits,
            config.head_bias,
        )
        initialize(self, seed)

    @classmethod
    def resolve(cls, config: ModelConfig) -> ModelConfig:
        config = super().resolve(config)
        check_settings(config)
        return config

    def embed(self, embedding: Embedding, ids: Tensor) -> Tensor:
        """Return embeddings (B, T, C), with dropout of words and of features."""
        weight = word_dropout(embedding.weight, self.settings.word_dropout, self.training)
        return self.dropout(F.embedding(ids.clamp(min=0), weight) * embedding.scale)  # (B, T, C)

    def encode(self, source: Tensor) -> tuple[Memory, Hidden]:
        """Run the encoder on sources (B, S); return what the decoder reads at every step, and the state it begins with."""
        if ends_backward(self.config):
            annotations, end = self.encoder(self.embed(self.source_embedding, source), real=source >= 0)
        else:
            order = self.reading_order(source)
            read = source.gather(1, order)
            annotations, end = self.encoder(self.embed(self.source_embedding, read), real=read >= 0)
            if uses_attention(self.config):
                annotations = annotations.gather(1, order.argsort(1)[..., None].expand_as(annotations))
        return self.decoder.begin(annotations if self.annotate is None else self.annotate(annotations), end, source < 0)

    def reading_order(self, source: Tensor) -> Tensor:
        """Return the columns (B, S) in the order of reading, with padding in front, so that the final state is a token's:
        that of the last token, or of the first where the source is reversed."""
        columns = torch.arange(source.shape[1], device=source.device).expand_as(source)
        if self.reverse_source:
            return columns.flip(1)
        return (columns - (source < 0).sum(1, keepdim=True)) % source.shape[1]

    def read_target(self, encoded: tuple[Memory, Hidden], target: Tensor) -> Tensor:
        """Run the decoder on the right target (B, T) and return the input of the head (B, T, C)."""
        memory, state = encoded
        features, _ = self.decoder(self.embed(self.target_embedding, target), memory, state, target >= 0)
        return self.output_dropout(features)

    def begin(self, source: Tensor) -> DecodingState:
        """Run the encoder on sources (B, S) once; `step` then writes the translation token by token."""
        memory, first = self.encode(source)
        state = DecodingState(self, len(source), source.device, first[0].dtype)
        state.store_memory(self.decoder, **self.decoder.named(memory))
        Recurrent.store_state(first, state.parts[self.decoder])
        return state

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Return the logits (N, V) after one more token (N,) of each hypothesis; those of a sentence are neighbours."""
        return self.head(self.advance(tokens, state))

    def advance(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Run the decoder on one more token (N,) of each hypothesis and return the input of the head (N, C)."""
        kept = state.parts[self.decoder]
        y = self.embed(self.target_embedding, tokens[:, None])
        features, after = self.decoder(y, self.decoder.memory(kept), Recurrent.load_state(kept))
        Recurrent.store_state(after, kept)
        return self.output_dropout(features)[:, 0]


# ---- decoders: the embedded target (N, T, C), memory and state -> the input of the head (N, T, C), and the next state ----


class FixedContextDecoder(nn.Module):
    """A decoder that starts from the final state of the encoder and sees nothing else of the source.

    RNNenc (Cho et al. 2014) repeats the state of the last layer as an input of every step and of the readout, so that the
    decoder need not remember it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.width = width = config.table(RecurrentSettings).d_hidden
        self.repeats_context = repeats_context(config)
        self.n = cell_states(config)
        widths = [width] * config.n_decoder_layers
        self.layers = make_recurrent(config, config.d_model + width * self.repeats_context, widths, "decoder")
        self.d_out = config.d_model
        if self.repeats_context:
            self.readout: nn.Module = Maxout(config.d_model + 2 * width, config.d_model)
        else:
            self.readout = nn.Linear(width, config.d_model) if width != config.d_model else nn.Identity()

    def begin(self, annotations: Tensor, end: Hidden, padding: Tensor) -> tuple[Memory, Hidden]:
        """Return the context vector (B, H) of the source, and the state that the decoder begins with."""
        return (end[-self.n],), end

    def state(self) -> dict[str, Storage]:
        return {"context": PerSentence((self.width,)), **self.layers.storage()}

    def named(self, memory: Memory) -> dict[str, Tensor]:
        """Return the memory of the source under the names that `state` declares."""
        return {"context": memory[0]}

    def memory(self, kept: Any) -> Memory:
        """Return the memory of the source from the decoding state, as `forward` takes it."""
        return (kept.context,)

    def forward(self, y: Tensor, memory: Memory, state: Hidden, tokens: Tensor | None = None) -> tuple[Tensor, Hidden]:
        """Run embedded targets y (N, T, C) from a state; return the input of the head (N, T, C) and the next state.

        `tokens` (N, T) is False at padding, and None where there is none."""
        if not self.repeats_context:
            s, state = run_layers(self.layers, y, state, tokens)
            return self.readout(s), state
        (context,) = memory
        c = context.repeat_interleave(len(y) // len(context), 0)[:, None].expand(-1, y.shape[1], -1)  # (N, T, H)
        s, state = run_layers(self.layers, torch.cat([y, c.to(y.dtype)], -1), state, tokens)
        return self.readout(concatenate(s, y, c)), state


class RNNSearchDecoder(nn.Module):
    """The decoder of RNNsearch (Bahdanau et al. 2015), with attention over the annotations of the source.

    s_0 = tanh(W_s h_1), where h_1 is the final state of the backward encoder; then c_i by attention from s_{i-1},
    s_i = cell(s_{i-1}, [y_{i-1}; c_i]), and the input of the head is a maxout of s_i, y_{i-1} and c_i. Further recurrent
    layers (`above`) read s_i; those of GNMT read c_i too, and those of Deep-Att half of the input projection W [y; c]."""

    def __init__(self, config: ModelConfig, d_annotation: int) -> None:
        super().__init__()
        s = config.table(RecurrentSettings)
        self.width = width = s.d_hidden
        self.n = cell_states(config)
        self.attentive = AttentionCell(config, config.d_model, width, d_annotation)
        more, seq2seq = config.n_decoder_layers - 1, config.table(Seq2SeqSettings)
        self.feeds_context = seq2seq.context == "all"
        self.d_fast = half_projection(self.attentive.cell) if s.fast_forward else 0
        self.adds_input = s.residual == 1
        self.above = (
            make_recurrent(
                *(config, width, [width] * more, "decoder"),
                first=2,
                d_context=d_annotation * self.feeds_context,
                d_fast=self.d_fast,
            )
            if more
            else None
        )
        self.feedforwards = nn.ModuleList(make_feedforwards(config, [width] * bool(more), "decoder"))
        self.bridge = nn.Linear(width, self.n * width)
        self.dropout = VariationalDropout(s.hidden_dropout, s.variational)
        self.reads_token = seq2seq.readout == "maxout"
        d_read = width + d_annotation + config.d_model * self.reads_token
        self.d_out = d_read if seq2seq.readout == "concat" else config.d_model
        self.readout: nn.Module = Maxout(d_read, self.d_out) if self.reads_token else nn.Identity()
        if seq2seq.readout == "linear":
            self.readout = nn.Linear(d_read, self.d_out, bias=False)

    def begin(self, annotations: Tensor, end: Hidden, padding: Tensor) -> tuple[Memory, Hidden]:
        """Return what attention reads of the annotations (B, S, M), and the state that the decoder begins with."""
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
        """Return the memory of the source under the names that `state` declares."""
        keys, entering, padding, annotations = memory
        return {"keys": keys, "entering": entering, "real": ~padding, "annotations": annotations}

    def memory(self, kept: Any) -> Memory:
        """Return the memory of the source from the decoding state, as `forward` takes it."""
        return kept.keys, kept.entering, ~kept.real, kept.annotations

    def forward(self, y: Tensor, memory: Memory, state: Hidden, tokens: Tensor | None = None) -> tuple[Tensor, Hidden]:
        """Run embedded targets y (N, T, C) from a state; return the input of the head (N, T, C) and the next state.

        `tokens` (N, T) is False at padding, and None where there is none."""
        source, annotations = SourceAnnotations(*memory[:-1]), memory[-1]
        s, first, weights = self.attentive.run_steps(y, source, state[: self.n])
        if self.attentive.cross.is_observed:
            self.expose_attention(torch.cat([state[0][:, None].to(s.dtype), s[:, :-1]], 1), source, annotations)
        c = (weights.to(annotations.dtype) @ annotations).view(*y.shape[:2], -1)  # (N, T, M)
        rest: Hidden = ()
        fast = (
            self.attentive.cell.project_linearly(concatenate(s, y, c)[..., self.width :], self.d_fast)
            if self.d_fast
            else None
        )
        s = s + y.to(s.dtype) if self.adds_input else s
        for feedforward in self.feedforwards:
            s = feedforward(s, tokens)
        if self.above:
            context = c if self.feeds_context else None
            s, rest = run_layers(self.above, self.dropout(s), state[self.n :], tokens, context, fast)
        return self.readout(concatenate(s, y, c) if self.reads_token else concatenate(s, c)), (*first, *rest)

    def expose_attention(self, states: Tensor, source: SourceAnnotations, annotations: Tensor) -> None:
        """Expose queries, keys and values to active recorders; `states` (N, T, H) are those that the steps attended with.

        The queries of a sentence are its T steps, or one step of each of its hypotheses."""
        cross = self.attentive.cross
        q = cross.score.queries(states).view(len(annotations), -1, source.keys.shape[-1])
        at = source.padding.long().neg()  # positions: 0, or -1 on padding; the full mask needs no order
        plan = AttentionPlan(reference, FULL, at.new_zeros(q.shape[:2]), at)
        cross.attend(q[:, None], source.keys[:, None], annotations[:, None], plan)


class Maxout(nn.Module):
    """A linear layer of which the larger of every two outputs is taken."""

    def __init__(self, d_in: int, d_out: int) -> None:
        super().__init__()
        self.pairs = nn.Linear(d_in, 2 * d_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.pairs(x).unflatten(-1, (-1, 2)).amax(-1)


def concatenate(*parts: Tensor) -> Tensor:
    """Concatenate features, in the precision of the first part."""
    return torch.cat([part.to(parts[0].dtype) for part in parts], -1)


def run_layers(
    recurrent: Recurrent,
    x: Tensor,
    state: Hidden,
    tokens: Tensor | None = None,
    context: Tensor | None = None,
    fast: Tensor | None = None,
) -> tuple[Tensor, Hidden]:
    """Run recurrent layers over x (N, T, C) from a state; a single step needs no kernel for sequences."""
    if x.shape[1] > 1:
        return recurrent(x, state, tokens=tokens, context=context, fast=fast)
    out, state = recurrent.step(x[:, 0], state, *(None if each is None else each[:, 0] for each in (context, fast)))
    return out[:, None], state


# ---- settings ---------------------------------------------------------------------------------------------------------


def make_encoder(config: ModelConfig) -> Recurrent | InterleavedRecurrent:
    """Return the recurrent layers of the encoder."""
    s = config.table(RecurrentSettings)
    fast = s.fast_forward and uses_attention(config)
    size = (config, config.d_model, [s.d_hidden] * config.n_encoder_layers, "encoder")
    if s.interleaved:
        return InterleavedRecurrent(partial(make_recurrent, *size, alternating=True, returns_fast=fast))
    return make_recurrent(*size, bidirectional=s.bidirectional, returns_fast=fast)


def ends_backward(config: ModelConfig) -> bool:
    """Return whether the highest layer of the encoder reads in both directions, so that its last state is that after the
    first token, and padding at the end does no harm."""
    s = config.table(RecurrentSettings)
    return s.interleaved or (s.bidirectional and s.bidirectional_layers in (0, config.n_encoder_layers))


def cell_states(config: ModelConfig) -> int:
    """Return how many tensors the state of a cell has."""
    return cell_shape(config).states


def uses_attention(config: ModelConfig) -> bool:
    """Return whether the decoder attends to the source (RNNsearch)."""
    return config.attention_score not in ("none", "constant")


def repeats_context(config: ModelConfig) -> bool:
    """Return whether the context vector is an input of every step (RNNenc)."""
    return config.attention_score == "constant"


def check_settings(config: ModelConfig) -> None:
    """Refuse settings that contradict each other."""
    s, seq2seq = config.table(RecurrentSettings), config.table(Seq2SeqSettings)
    if (s.bidirectional or s.interleaved) and (not uses_attention(config) or seq2seq.reverse_source):
        raise RegardError(
            f"model.recurrent.{'bidirectional' if s.bidirectional else 'interleaved'} is for encoders that attention looks "
            "at: without it the decoder continues from where one direction ended, and there is nothing to "
            "reverse where both are read (model.seq2seq.reverse_source)"
        )
    if not uses_attention(config) and config.n_encoder_layers != config.n_decoder_layers:
        raise RegardError(
            f"without attention (model.attention_score {config.attention_score}) every decoder layer begins with the state "
            f"of an encoder layer: {config.n_encoder_layers} and {config.n_decoder_layers} layers do not go together"
        )
    if s.bidirectional_layers and (not s.bidirectional or s.bidirectional_layers > config.n_encoder_layers):
        raise RegardError(
            f"model.recurrent.bidirectional_layers {s.bidirectional_layers} says how many of the {config.n_encoder_layers} "
            f"encoder layers model.recurrent.bidirectional is for: set that true, and no more layers than there are"
        )
    if s.interleaved and s.bidirectional:
        raise RegardError(
            "model.recurrent.interleaved reads in both directions already: leave model.recurrent.bidirectional out"
        )
    if not uses_attention(config) and (seq2seq.context, seq2seq.readout) != ("first", "maxout"):
        raise RegardError(
            f"model.seq2seq.context and model.seq2seq.readout are for decoders with attention, and model.attention_score is "
            f"{config.attention_score}: leave them out"
        )
    if seq2seq.context == "all" and config.n_decoder_layers < 2:
        raise RegardError(
            "model.seq2seq.context all feeds the context to the layers above the first, and there are none: leave it out, "
            "or raise model.n_decoder_layers"
        )
    if seq2seq.readout == "concat" and config.tie in ("decoder", "all"):
        raise RegardError(
            f"with model.seq2seq.readout concat the head reads vectors of another width than the embeddings: "
            f"choose model.tie inputs or none, not {config.tie}"
        )
    if s.residual == 1 and config.d_model != s.d_hidden:
        raise RegardError(
            f"model.recurrent.residual 1 adds embeddings ({config.d_model} numbers) to the output of the first layer "
            f"({s.d_hidden} numbers): choose a higher layer, or equal widths"
        )
