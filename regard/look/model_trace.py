"""The trace of one input through one model: its tokens, attention, activations and predictions.

look/tracers.py makes a `Trace` according to the kind of model. A trace holds exact numbers; look/page/document.py makes
it small enough for a page. Row t of a decoder is the step that predicted token t + 1: its token sequence is what the
decoder read.

The activations of a token are all vectors between its embedding and the logits, in the order in which they are computed:

    embedding (+ position) = input
    in every sublayer:   [norm]  query  key  value  mix  output  residual    (ff: [norm]  inner  output  residual)
    final

`residual` is the residual stream after the sublayer: what it was before, plus `output`. A norm comes before the
sublayer in a pre-norm model, and after the sum in a post-norm one, whose stream continues from the norm. Queries and
keys are those that are compared: with rotary positions they are rotated. Keys and values of cross-attention are those
of the source.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.kernels.attention_functions import merge_heads
from regard.look.beam_search_trace import BeamNode
from regard.look.intervention_hooks import intervene
from regard.look.interventions import InputAndOutput, Intervention, resolve_words
from regard.look.record import AttentionRecord, attention_layers, record
from regard.look.token_sequence import TokenSequence
from regard.models.architectures import architecture_of
from regard.models.classification_model import ClassificationModel
from regard.models.model import Model
from regard.text.tokenizer import Tokenizer, Tokenizers

if TYPE_CHECKING:
    from regard.model_folder import ModelPackage

CANDIDATES = 10  # most probable tokens of a prediction
Names = tuple[str, str]  # names of the token sequences that encoder and decoder read


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer. Weights are computed when asked for: those of a long text may not all fit into memory."""

    name: str
    kind: str  # encoder, decoder, cross or alignment
    layer: int
    queries: str  # the name of a token sequence
    keys: str
    causal: bool
    record: AttentionRecord

    @property
    def heads(self) -> int:
        return self.record.q.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.record.q.shape[2], self.record.k.shape[2]

    def weights(self) -> Tensor:
        """Return the weights, (H, T, S)."""
        return self.record.weights()[0].cpu()

    def scores(self) -> Tensor:
        """Return the scores before the softmax, (H, T, S); -inf where a key is masked."""
        return self.record.scores()[0].cpu()

    def seen(self) -> Tensor:
        """Return the mask (H or 1, T, S) under all interventions; True: the key is visible."""
        found = self.record.plan.seen()[0].cpu()
        return found.expand(-1, self.shape[1], -1)

    @property
    def scale(self) -> float:
        """The factor of the product of query and key; 1 where the score is no scaled product."""
        if self.kind == "alignment":
            return 1.0
        scheme = self.record.plan.scheme
        scheme = getattr(scheme, "inner", scheme)  # under UniformScores, the scheme of the unchanged heads
        return (scheme.scale or self.record.q.shape[-1] ** -0.5) * scheme.terms**-0.5

    def difference(self) -> float | None:
        """Return the largest difference of weights @ values from the kernel's result; None without such a result."""
        return self.record.difference()


@dataclass(frozen=True)
class Activation:
    """The vectors of all tokens of a sequence at one stage of the computation."""

    sequence: str
    layer: int | None
    sublayer: str | None  # self, cross or ff
    stage: str
    values: Tensor  # (T, C)
    heads: int | None = None  # the values are those of so many heads, concatenated


@dataclass(frozen=True)
class Candidate:
    """A token that was predicted, with its probability."""

    id: int
    piece: str
    log_prob: float
    logit: float


@dataclass(frozen=True)
class TokenPrediction:
    """The most probable tokens at one position, and the one that was chosen."""

    sequence: str
    place: int  # the row that made it
    chosen: Candidate
    top: tuple[Candidate, ...]  # most probable first
    given: bool = False  # the model did not choose the token: it was in the input, or was forced


@dataclass(frozen=True)
class ImagePatches:
    """An image and its grid of patches; position 0 is the summary token, the patches follow row by row."""

    png: bytes
    rows: int
    columns: int


@dataclass(frozen=True)
class Trace:
    """All that was recorded of one input through one model."""

    kind: str  # translation, language, filling, classification, picture or alignment
    input: str
    output: str
    model: dict[str, Any]  # architecture, sizes, number of parameters
    sequences: dict[str, TokenSequence]
    attention: list[AttentionLayer]
    activations: list[Activation]
    predictions: list[TokenPrediction] = field(default_factory=list)
    labels: list[tuple[str, float]] | None = None  # classes with probabilities
    tree: list[list[BeamNode]] | None = None
    image: ImagePatches | None = None
    changes: tuple[str, ...] = ()  # interventions
    notes: tuple[str, ...] = ()
    written: tuple[int, ...] = ()  # all ids of a model that writes, including start and end tokens
    name: str = ""

    @property
    def title(self) -> str:
        return f"{self.name or self.model['architecture']}: {self.input}"

    def _repr_html_(self) -> str:
        from regard.look.page.html_page import Page

        return Page([self])._repr_html_()


# ---- the model and its input ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TraceRequest:
    """A model, its input, and what shall be traced."""

    package: ModelPackage
    name: str
    text: str
    changes: tuple[Intervention, ...]
    along: Trace | None  # the trace whose output is read, so that two models can be compared
    options: dict[str, Any]
    unchanged: Trace | None = None  # the trace of the same model and text without changes, where it is known
    requested_changes: tuple[str, ...] = ()  # the changes as they were asked for, before words were resolved

    @property
    def reader(self) -> Model:
        """The model without its classification head."""
        return body_of(self.package.model)

    @property
    def tokenizers(self) -> Tokenizers:
        if self.package.tokenizers is None:
            raise RegardError("this model has no tokenizer, so it can read no text: import it with its tokenizer.json")
        return self.package.tokenizers

    def resolve(self, texts: InputAndOutput) -> TraceRequest:
        """Return the request with positions in place of words in its interventions."""
        found = resolve_words(self.changes, texts, attention_layers(self.reader))
        return replace(self, changes=tuple(found), requested_changes=tuple(map(str, self.changes)))

    def intervene(self) -> AbstractContextManager[Any]:
        return intervene(self.reader, self.changes) if self.changes else nullcontext()

    def check_length(self, ids: list[int]) -> list[int]:
        """Return the ids if the model can read so many."""
        longest = self.package.config.max_len
        if len(ids) > longest:
            raise RegardError(f"the text has {len(ids)} tokens, but the model reads at most {longest}: shorten it")
        return ids

    def to_batch(self, ids: Sequence[int]) -> Tensor:
        """Return ids as a batch of one row, (1, T)."""
        return torch.tensor([ids], device=next(self.reader.parameters()).device)

    @torch.no_grad()
    def run(self, *inputs: Tensor) -> ForwardPass:
        """Run the model on a batch of one row, under the interventions, and record everything."""
        with self.intervene(), record(self.reader, "*", stream=True) as tape:
            result = self.package.model(*inputs)
        records = {name: tape[name][-1] for name in tape if tape[name]}
        return ForwardPass(records, {name: found[-1][0] for name, found in tape.vectors.items() if found}, result[0])

    def layers(self, done: ForwardPass, names: Names) -> dict[str, Any]:
        """Return attention and activations of a forward pass, as fields of a trace."""
        if self.reader.is_recurrent:
            (only,) = done.records.values()
            attention = attention_trace(done.records, names, alignment=True)
            return {"attention": attention, "activations": alignment_activations(only, names)}
        post_norm = self.package.config.norm == "post" and not self.package.config.parallel
        activations = activations_of(done.vectors, done.records, names, post_norm)
        return {"attention": attention_trace(done.records, names), "activations": activations}

    def trace(self, kind: str, **parts: Any) -> Trace:
        """Return a trace of this request with these fields."""
        model = {"name": self.name} if self.name else {}
        model |= describe_model(self.package.model, self.package.config)
        given = {"input": self.text, "model": model, "name": self.name, "changes": self.requested_changes}
        return Trace(kind, **(given | parts))


@dataclass(frozen=True)
class ForwardPass:
    """What was recorded of one forward pass over one row."""

    records: dict[str, AttentionRecord]
    vectors: dict[str, Tensor]  # (T, C) each, by the names of look/record.py
    logits: Tensor


def body_of(model: nn.Module) -> Model:
    """Return a model without its classification head."""
    body = model.body if isinstance(model, ClassificationModel) else model
    assert isinstance(body, Model)
    return body


def package_of(model: Any, device: str = "cpu") -> tuple[ModelPackage, str]:
    """Return the package and the name of a model: of a folder, a package, or a Translator, Generator, ... in use.

    `device` is for a folder, which is loaded.
    """
    from regard.device import pick_device
    from regard.model_folder import ModelPackage, load

    if isinstance(model, (str, Path)):
        return load(Path(model), pick_device(device)), Path(model).resolve().name
    if isinstance(model, ModelPackage):
        return model, ""
    return (model.package if hasattr(model, "package") else _rebuild_package(model)), ""


def _rebuild_package(user: Any) -> ModelPackage:
    """Return a package of what a Translator, Generator or Embedder knows of its model."""
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Generator
    from regard.inference.translator import Translator
    from regard.model_folder import ModelPackage

    if isinstance(user, Translator):
        known: dict[str, Any] = {
            "decode": user.options,
            "source": user.source,
            "target": user.target,
            "directions": user.directions,
        }
        return ModelPackage(user.model, user.tokenizers, "translation", token_template=user.token_template, **known)
    if isinstance(user, Generator):
        tokens = Tokenizers(user.tokenizer, user.tokenizer)
        return ModelPackage(user.model, tokens, "causal-lm", user.options, token_template=user.token_template)
    if isinstance(user, Embedder):
        tokens = Tokenizers(user.tokenizer, user.tokenizer)
        return ModelPackage(user.model, tokens, "masked-lm", token_template=user.token_template)
    raise RegardError(f"a {type(user).__name__} is nothing to look into: give a model folder, or what load returns")


def describe_model(model: nn.Module, config: ModelConfig) -> dict[str, Any]:
    """Return architecture, sizes and number of parameters of a model."""
    layers = {"encoder": config.n_encoder_layers, "decoder": config.n_decoder_layers}
    kind = architecture_of(config)
    table: dict[str, Any] = {"architecture": config.architecture}
    if kind.is_recurrent:
        table |= {"cell": config.cell, "attention score": config.attention_score}
        table |= {"d_hidden": config.value("recurrent.d_hidden")}
    else:
        table |= {"positions": config.positions, "norm": "parallel" if config.parallel else config.norm}
        table |= {"heads": config.n_heads, "key heads": config.n_kv_heads, "d_ff": config.d_ff}
    if kind.vocabularies:
        table["vocabulary"] = kind.output_vocabulary(config)
        table["embedding scale"] = config.d_model**0.5 if config.scale_embeddings else 1
    table |= {"d_model": config.d_model, "parameters": sum(p.numel() for p in model.parameters())}
    return table | {"layers": {side: layers[side] for side in kind.sides}}


# ---- attention and predictions ----------------------------------------------------------------------------------------


def attention_trace(
    records: Mapping[str, AttentionRecord], names: Names, alignment: bool = False
) -> list[AttentionLayer]:
    """Return the attention layers of these records; `names` are those of the sequences of encoder and decoder."""
    source, target = names
    found = []
    for name, one in records.items():
        stack, *numbers, sublayer = name.split(".")
        kind = "alignment" if alignment else "cross" if sublayer == "cross" else stack
        queries, keys = (target if stack == "decoder" else source), (source if sublayer == "cross" else None)
        layer = int(numbers[0]) if numbers else 0
        found.append(AttentionLayer(name, kind, layer, queries, keys or queries, kind == "decoder", one))
    return found


def predictions_of(
    sequence: str,
    logits: Tensor,
    chosen: Sequence[int],
    pieces: Sequence[str] | Tokenizer,
    places: Sequence[int],
    given: Container[int] = (),
) -> list[TokenPrediction]:
    """Return the most probable tokens (or tags) at each of the places, and the chosen one; logits (T, V).

    At the places in `given` the token was in the input already."""
    logits = logits.double().cpu()
    log_p = logits.log_softmax(-1)
    likeliest = log_p.topk(min(CANDIDATES, log_p.shape[-1])).indices.tolist()

    def candidate(i: int, id: int) -> Candidate:
        piece = pieces.pieces([id])[0] if isinstance(pieces, Tokenizer) else pieces[id]
        return Candidate(id, piece, float(log_p[i, id]), float(logits[i, id]))

    found = []
    for i, taken in zip(places, chosen, strict=True):
        top = tuple(candidate(i, id) for id in likeliest[i])
        found.append(TokenPrediction(sequence, i, candidate(i, taken), top, i in given))
    return found


# ---- activations ------------------------------------------------------------------------------------------------------


def activations_of(
    vectors: Mapping[str, Tensor], records: Mapping[str, AttentionRecord], names: Names, post_norm: bool
) -> list[Activation]:
    """Return all activations of a Transformer, the encoder's first; `vectors` (T, C) have the names of look/record.py."""
    stacks = [(stack, name) for stack, name in zip(("encoder", "decoder"), names, strict=True)]
    return [
        activation
        for stack, name in stacks
        if f"{stack}.input" in vectors
        for activation in stack_activations(stack, name, names[0], vectors, records, post_norm)
    ]


def stack_activations(
    stack: str,
    sequence: str,
    source: str,
    vectors: Mapping[str, Tensor],
    records: Mapping[str, AttentionRecord],
    post_norm: bool,
) -> Iterator[Activation]:
    """Yield the activations of an encoder or decoder that reads `sequence`; `source` is that of cross-attention."""
    for name in ("embedding", "position", "input"):
        if f"{stack}.{name}" in vectors:
            yield Activation(sequence, None, None, name, vectors[f"{stack}.{name}"])
    stream = vectors[f"{stack}.input"]
    outputs = [name.split(".") for name in vectors if name.startswith(f"{stack}.") and name.endswith(".output")]
    for _, layer, sublayer, _ in (parts for parts in outputs if len(parts) == 4):  # in the order in which they ran
        name = f"{stack}.{layer}.{sublayer}"
        here = (sequence, int(layer), sublayer)
        if not post_norm:
            yield Activation(*here, "norm", vectors[f"{name}.input"])
        if name in records:
            yield from attention_activations(here, source if sublayer == "cross" else sequence, records[name])
        for inside in ("mix", "inner"):
            if f"{name}.{inside}" in vectors:
                heads = records[name].q.shape[1] if inside == "mix" else None
                yield Activation(*here, inside, vectors[f"{name}.{inside}"], heads)
        output = vectors[f"{name}.output"]
        stream = stream + output
        yield Activation(*here, "output", output)
        yield Activation(*here, "residual", stream)
        if post_norm:
            stream = vectors[f"{name}.stream"]
            yield Activation(*here, "norm", stream)
    if not post_norm:
        yield Activation(sequence, None, None, "final", vectors[f"{stack}.output"])


def attention_activations(here: tuple[str, int, str], keys: str, one: AttentionRecord) -> Iterator[Activation]:
    """Yield queries, keys and values of all heads, concatenated; grouped heads have fewer keys and values."""
    for name, values in (("query", one.q), ("key", one.k), ("value", one.v)):
        sequence = here[0] if name == "query" else keys
        yield Activation(sequence, *here[1:], name, merge_heads(values)[0], values.shape[1])


def alignment_activations(one: AttentionRecord, names: Names) -> list[Activation]:
    """Return the activations of a recurrent decoder's attention: queries, keys, values and context vectors."""
    source, target = names
    here = (target, 0, "cross")
    mix = one.weights().to(one.v.dtype) @ one.v
    return [*attention_activations(here, source, one), Activation(*here, "mix", merge_heads(mix)[0], 1)]
