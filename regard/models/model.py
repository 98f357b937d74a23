"""The base classes of all models: what a model class declares about itself.

An architecture is one class derived from `Model`, registered under its name in models/architectures.py. Tasks, decoding,
`regard look`, `regard cost` and the exchange with other libraries read the attributes below and call the methods, so that
none of them asks for an architecture by name.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.config.registry import BLOCKS, MADE_OF, RECURRENT
from regard.errors import RegardError
from regard.models.presets import Table
from regard.models.sizes import check_parts, check_recurrent, resolve_sizes

if TYPE_CHECKING:
    from regard.layers.decoding_state import DecodingState
    from regard.layers.embedding import Embedding, Head

PREDICTION_TASKS = (
    "classification",
    "regression",
    "tagging",
)  # tasks of a ClassificationModel, with a head on top of a model

ARCHITECTURES: dict[str, type[Model]] = {}  # by name; filled by models/architectures.py


class Model(nn.Module):
    """The base class of every architecture. Its class attributes are all that other modules ask about an architecture.

    A model that learns one of `PREDICTION_TASKS` or that `embeds` has `last_hidden_state(ids, types)`;
    models that predict tokens have `head_input(...)`, which returns the input of their `head`.
    """

    name: ClassVar[str]  # set by `architectures.register`
    presets: ClassVar[Table]  # its published sizes by name; the first one has no style of its own
    tasks: ClassVar[tuple[str, ...]]  # what it can learn
    sides: ClassVar[tuple[str, ...]]  # which stacks of layers it has: encoder, decoder
    vocabularies: ClassVar[tuple[str, ...]]  # of which texts it reads or writes tokens: source, target
    made_of: ClassVar[tuple[str, ...]] = (BLOCKS,)  # decides which parts and settings it has (config/registry.py)

    translates: ClassVar[bool] = False  # writes one text while reading another: a TranslationModel
    generates: ClassVar[bool] = False  # continues a text, every token attending to those before it: a LanguageModel
    fills_blanks: ClassVar[bool] = False  # predicts masked tokens from those on both sides
    sees_images: ClassVar[bool] = False  # reads pictures cut into patches instead of text
    classifies: ClassVar[bool] = False  # its own head gives classes; others get one from a ClassificationModel
    embeds: ClassVar[bool] = False  # its last hidden state can be pooled into one vector of a text
    is_recurrent: ClassVar[bool] = False  # its layers are recurrent cells and not blocks
    carries_state: ClassVar[bool] = False  # reads texts of any length in pieces: a StatefulLanguageModel
    packs_documents: ClassVar[bool] = (
        False  # has `packed_head_input`: documents in one row that do not attend to each other
    )

    config: ModelConfig

    # ---- questions about a configuration -------------------------------------------------------------------------------

    @classmethod
    def resolve(cls, config: ModelConfig) -> ModelConfig:
        """Return the sizes that a model will have; refuse impossible ones, and settings that would do nothing."""
        if config.preset in cls.presets:  # a class may be used without architectures.py, which registers all of them
            MADE_OF.setdefault(cls.presets[config.preset]["architecture"], cls.made_of)
        config = resolve_sizes(config, cls.presets)
        if RECURRENT in cls.made_of:
            check_recurrent(config, cls.presets[config.preset])
        if BLOCKS in cls.made_of:
            check_parts(config, (*cls.sides, *(["cross"] if cls.translates else [])))
        if cls.translates and config.tie in ("inputs", "all") and config.source_vocab != config.target_vocab:
            raise RegardError(
                f"model.tie '{config.tie}' needs one vocabulary for both languages, but they have {config.source_vocab} "
                f"and {config.target_vocab} pieces: set tokenizer.joint true, or model.tie decoder"
            )
        return config

    @classmethod
    def output_vocabulary(cls, config: ModelConfig) -> int:
        """Return the size of the vocabulary of which it predicts tokens."""
        return config.target_vocab if "target" in cls.vocabularies else config.source_vocab

    @classmethod
    def gives_classes(cls, config: ModelConfig) -> bool:
        """Return whether its outputs are classes or numbers and not tokens."""
        return cls.classifies or config.prediction_head != "none"

    @classmethod
    def lengths(cls, config: ModelConfig, *inputs: Tensor) -> tuple[int, int]:
        """Return how many tokens its encoder and its decoder read in each row of a batch; 0 for a side it does not have."""
        read = dict(zip(cls.sides, (x.shape[1] for x in inputs), strict=False))
        return read.get("encoder", 0), read.get("decoder", 0)

    @classmethod
    def example_inputs(cls, config: ModelConfig, batch: int, s: int, t: int, like: Tensor) -> tuple[Tensor, ...]:
        """Return inputs of these lengths without padding, on the device of `like`."""
        lengths = {"encoder": s, "decoder": t}
        ids = tuple(torch.ones(batch, lengths[side], dtype=torch.long, device=like.device) for side in cls.sides)
        return ids if config.prediction_head == "none" else (*ids, torch.zeros_like(ids[0]))

    # ---- hidden states, for classification and for embeddings of texts -------------------------------------------------

    @property
    def width(self) -> int:
        """The size C of the vectors that `last_hidden_state` returns."""
        return self.config.d_model

    def last_hidden_state(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Return the hidden vector of each token after the last layer, (B, T) -> (B, T, C).

        `types` says which of two texts a token is in."""
        raise NotImplementedError

    def pooled(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Return one vector (B, C) for each row of hidden states: that of the last token, which depends on all tokens."""
        last = (ids >= 0).sum(1) - 1
        return hidden[torch.arange(len(ids), device=ids.device), last]


# ---- models that decode --------------------------------------------------------------------------------------------------


class TranslationModel(Model):
    """An encoder-decoder: it writes one text while reading another."""

    sides = ("encoder", "decoder")
    vocabularies = ("source", "target")
    translates = True
    head: Head

    def encode(self, source: Tensor) -> Any:
        """Run the encoder on sources (B, S) and return its output, in the form that `read_target` takes."""
        raise NotImplementedError

    def read_target(self, encoded: Any, target: Tensor) -> Tensor:
        """Run the decoder on the right target (B, T), given `encode` of the source (teacher forcing).

        Return its hidden vectors (B, T, C), before the output matrix: the input of the head for the token after each."""
        raise NotImplementedError

    def head_input(self, source: Tensor, target: Tensor) -> Tensor:
        """Run encoder and decoder on source (B, S) and the right target (B, T) (teacher forcing), and return the decoder's
        hidden vectors (B, T, C), before the output matrix."""
        return self.read_target(self.encode(source), target)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each target token."""
        return self.head(self.head_input(source, target))

    def begin(self, source: Tensor) -> DecodingState:
        """Run the encoder on sources (B, S) once and return the decoding state that `step` starts from."""
        raise NotImplementedError

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Run the decoder on one more token (N,) of each hypothesis and return the logits (N, V) of the next."""
        raise NotImplementedError

    def advance(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Run the decoder on one more token (N,) of each hypothesis and return its hidden vectors (N, C), before the output
        matrix."""
        raise NotImplementedError


class LanguageModel(Model):
    """A decoder alone: it continues a text."""

    sides = ("decoder",)
    vocabularies = ("target",)
    generates = True
    embedding: Embedding
    head: Head

    @property
    def longest(self) -> int:
        """The number of tokens that a text may have."""
        return self.config.max_len

    def head_input(self, ids: Tensor) -> Tensor:
        """Run the model on ids (B, T), padded on the right; return hidden vectors (B, T, C), before the output matrix."""
        raise NotImplementedError

    def last_hidden_state(self, ids: Tensor, types: Tensor | None = None) -> Tensor:
        """Return a hidden vector for each token, (B, T) -> (B, T, C); a language model has no token types."""
        return self.head_input(ids)

    def begin(self, prompt: Tensor) -> tuple[Tensor, DecodingState]:
        """Prefill: read prompts (B, T) of any lengths; return the logits (B, V) after each and the state to step from."""
        raise NotImplementedError

    def prefill(self, prompt: Tensor) -> tuple[Tensor, DecodingState]:
        """Read prompts (B, T) as `begin` does; return the hidden vector (B, C) after each, not logits, and the state."""
        raise NotImplementedError

    def step(self, tokens: Tensor, state: DecodingState) -> Tensor:
        """Run the model on one more token (N,) of each row and return the logits (N, V) of the next."""
        raise NotImplementedError


class StatefulLanguageModel(LanguageModel):
    """A language model with a state of fixed size, so that it reads a text of any length in pieces."""

    carries_state = True

    @property
    def longest(self) -> int:
        """The number of tokens that a text may have: there is no limit."""
        return sys.maxsize

    output_dropout: nn.Module  # between `hidden` and the head

    def start(self, rows: int) -> tuple[Tensor, ...]:
        """Return the state before the first token of a text, one row for each text."""
        raise NotImplementedError

    def hidden(self, ids: Tensor, state: tuple[Tensor, ...] | None = None) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return what the last layer gives at each token (B, T, C), continuing from a state, and the state after them."""
        raise NotImplementedError


def names_where(attribute: str) -> str:
    """Return the names of the architectures that have an attribute, as error messages list them: gpt or rnn."""
    return join_names([name for name, model in ARCHITECTURES.items() if getattr(model, attribute)])


def names_learning(task: str) -> str:
    """Return the names of the architectures that can learn a task, as error messages list them."""
    return join_names([name for name, model in ARCHITECTURES.items() if task in model.tasks])


def join_names(names: list[str]) -> str:
    """Return names as a list in English: a, b or c."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))
