"""One input as one model saw it: its tokens, where every head looked, the vectors on the way, what was foretold.

    see("runs/multi30k-en-de", "A man is eating an apple.")

A view is made by whoever knows the kind of model (kinds.py), and holds numbers as they are; document.py makes it small
enough for a page. Row t of a decoder is the step that wrote token t + 1: its strip holds what the decoder read.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unicodedata import category

from torch import Tensor, nn

from regard.config import ModelConfig
from regard.look.alignment import words
from regard.look.page.chain import Stage
from regard.look.record import Record
from regard.models.architectures import architecture_of
from regard.text.tokenizer import Tokenizer
from regard.text.tokenizer_training import SPACE

if TYPE_CHECKING:
    from regard.model_folder import ModelPackage

CANDIDATES = 10


@dataclass(frozen=True)
class Strip:
    """Tokens that are read together."""

    label: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]
    words: tuple[tuple[str, tuple[int, ...]], ...]  # each with the places of its pieces
    special: tuple[bool, ...]  # special tokens and punctuation: where heads look that have nothing to look for


@dataclass(frozen=True)
class Attention:
    """One layer. Weights are worked out when asked for: all of a long text together would not fit everywhere."""

    name: str
    kind: str  # encoder, decoder, cross or alignment
    layer: int
    queries: str  # the name of a strip
    keys: str
    causal: bool
    record: Record

    @property
    def heads(self) -> int:
        return self.record.q.shape[1]

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.heads, self.record.q.shape[2], self.record.k.shape[2]

    def weights(self) -> Tensor:
        """(H, T, S)"""
        return self.record.weights()[0].cpu()

    def scores(self) -> Tensor:
        """(H, T, S), what the softmax is taken of; -inf where a query may not look."""
        return self.record.scores()[0].cpu()

    def seen(self) -> Tensor:
        """(H or 1, T, S), who may look at whom under whatever was changed."""
        found = self.record.plan.seen()[0].cpu()
        return found.expand(-1, self.shape[1], -1)

    @property
    def scale(self) -> float:
        """What the product of a query and a key is multiplied by; 1 where a score is not made of it."""
        if self.kind == "alignment":
            return 1.0
        scheme = self.record.plan.scheme
        scheme = getattr(scheme, "inner", scheme)  # where changes made the scores of other heads alike
        return (scheme.scale or self.record.q.shape[-1] ** -0.5) * scheme.terms**-0.5

    def difference(self) -> float | None:
        """Between these weights times the values and what the layer's own kernel gave; None where it has none."""
        return self.record.difference()


@dataclass(frozen=True)
class Candidate:
    id: int
    piece: str
    log_prob: float
    logit: float


@dataclass(frozen=True)
class Prediction:
    strip: str
    place: int  # the row that made it
    chosen: Candidate
    top: tuple[Candidate, ...]  # likeliest first
    given: bool = False  # the model did not choose it: it stood in what was read, or was written by force


@dataclass(frozen=True)
class Twig:
    """A token of the beam tree."""

    token: int
    piece: str
    parent: int | None  # in the step before
    log_prob: float  # of the whole hypothesis so far
    ended: bool
    best: bool  # on the path that was returned


@dataclass(frozen=True)
class Patches:
    """A picture and its grid; strip place 0 is the summary, the patches follow row by row."""

    png: bytes
    rows: int
    columns: int


@dataclass(frozen=True)
class Seen:
    kind: str  # translation, language, filling, classification, picture or alignment
    input: str
    output: str
    model: dict[str, Any]  # what it is, as a table
    strips: dict[str, Strip]
    attention: list[Attention]
    chain: list[Stage]
    predictions: list[Prediction] = field(default_factory=list)
    labels: list[tuple[str, float]] | None = None  # with probabilities
    tree: list[list[Twig]] | None = None
    picture: Patches | None = None
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    written: tuple[
        int, ...
    ] = ()  # all that stands in the row of a model that writes, its first and end tokens included
    name: str = ""

    @property
    def title(self) -> str:
        return f"{self.name or self.model['architecture']}: {self.input}"

    def _repr_html_(self) -> str:
        from regard.look.page.html import Page

        return Page([self])._repr_html_()


def see(
    model: Any,
    text: str | Path,
    changes: Sequence[Any] = (),
    along: Seen | None = None,
    own: bool = False,
    **options: Any,
) -> Seen:
    """Let a model read a text, or a file with a picture, and keep all of it.

    `model` is a folder, a loaded ModelPackage, or a Translator, Writer, Labeller or Embedder. `changes` (look/change) hold
    while it runs. With `along` a model that writes also reads what another view of that kind wrote, so that the two can be
    compared token by token; its output is still its own, and with `own` what it reads is too. Options are those of
    `[decode]`, for models that write.
    """
    from regard.look.page.kinds import Sight, check_kinds, eyes_for

    package, name = package_of(model)
    if along is not None:
        check_kinds(along, package, name)
    return eyes_for(package)(Sight(package, name, str(text), tuple(changes), None if own else along, options))


def package_of(model: Any) -> tuple[ModelPackage, str]:
    """Whatever stands for a model, and its name."""
    from regard.device import pick_device
    from regard.model_folder import ModelPackage, load

    if isinstance(model, (str, Path)):
        return load(Path(model), pick_device("cpu")), Path(model).resolve().name
    if isinstance(model, ModelPackage):
        return model, ""
    return (model.package if hasattr(model, "package") else rebuilt(model)), ""


def rebuilt(user: Any) -> ModelPackage:
    """Of a Translator, Writer or Embedder, as much as looking asks for."""
    from regard.errors import RegardError
    from regard.inference.embedder import Embedder
    from regard.inference.generator import Generator
    from regard.inference.translator import Translator
    from regard.model_folder import ModelPackage
    from regard.text.tokenizer import Tokenizers

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
        return ModelPackage(
            user.model, Tokenizers(user.tokenizer, user.tokenizer), "masked-lm", token_template=user.token_template
        )
    raise RegardError(f"a {type(user).__name__} is nothing to look into: give a model folder, or what load returns")


# ---- parts of a view --------------------------------------------------------------------------------------------------


def strip_of(label: str, tokenizer: Tokenizer, ids: Sequence[int]) -> Strip:
    pieces = tokenizer.pieces(ids)
    special = (id in tokenizer.special_ids or is_mark(piece) for id, piece in zip(ids, pieces, strict=True))
    grouped = tuple((word, tuple(places)) for word, places in words(tokenizer, ids))
    return Strip(label, tuple(ids), tuple(pieces), grouped, tuple(special))


def is_mark(piece: str) -> bool:
    """Punctuation, or nothing but a space."""
    return all(category(char)[0] in "PZC" for char in piece.replace(SPACE, " "))


def attention_of(records: dict[str, Record], strips: tuple[str, str], alignment: bool = False) -> list[Attention]:
    """`strips` are the names of what an encoder and what a decoder reads."""
    source, target = strips
    found = []
    for name, record in records.items():
        stack, *numbers, sublayer = name.split(".")
        kind = "alignment" if alignment else "cross" if sublayer == "cross" else stack
        queries, keys = (target if stack == "decoder" else source), (source if sublayer == "cross" else None)
        layer = int(numbers[0]) if numbers else 0
        found.append(Attention(name, kind, layer, queries, keys or queries, kind == "decoder", record))
    return found


def predictions_of(
    strip: str,
    logits: Tensor,
    chosen: Sequence[int],
    pieces: Sequence[str] | Tokenizer,
    places: Sequence[int],
    given: Container[int] = (),
) -> list[Prediction]:
    """logits (T, V): of each place the likeliest tokens (or tags), and the one that was chosen, or where places are `given`
    stood there already."""
    logits = logits.double().cpu()
    log_p = logits.log_softmax(-1)
    likeliest = log_p.topk(min(CANDIDATES, log_p.shape[-1])).indices.tolist()

    def candidate(i: int, id: int) -> Candidate:
        piece = pieces.pieces([id])[0] if isinstance(pieces, Tokenizer) else pieces[id]
        return Candidate(id, piece, float(log_p[i, id]), float(logits[i, id]))

    found = []
    for i, taken in zip(places, chosen, strict=True):
        top = tuple(candidate(i, id) for id in likeliest[i])
        found.append(Prediction(strip, i, candidate(i, taken), top, i in given))
    return found


def described(model: nn.Module, config: ModelConfig) -> dict[str, Any]:
    """What a model is, in a few words and numbers."""
    layers = {"encoder": config.n_encoder_layers, "decoder": config.n_decoder_layers}
    kind = architecture_of(config)
    table: dict[str, Any] = {"architecture": config.architecture}
    if kind.is_recurrent:
        table |= {"cell": config.cell, "score": config.score, "d_hidden": config.value("recurrent.d_hidden")}
    else:
        table |= {"positions": config.positions, "norm": "parallel" if config.parallel else config.norm}
        table |= {"heads": config.n_heads, "key heads": config.n_kv_heads, "d_ff": config.d_ff}
    if kind.vocabularies:
        table["vocabulary"] = kind.output_vocabulary(config)
        table["embedding scale"] = config.d_model**0.5 if config.scale_embeddings else 1
    table |= {"d_model": config.d_model, "parameters": sum(p.numel() for p in model.parameters())}
    return table | {"layers": {side: layers[side] for side in kind.sides}}
