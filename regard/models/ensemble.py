"""An ensemble: several translation models of any architectures that choose every next token together.

The probability of a token is the mean of the members' probabilities (`decode.ensemble` "mean"), or proportional to the
geometric mean, which is the mean of their log-probabilities ("log"). All members write with one target vocabulary. A member
whose source vocabulary is another one than the first member's reads the same text in its own tokens (`SourceReader`).

An `Ensemble` is decoded like any model: its state holds the members' states, and each is reordered, joined and shortened
like all others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from regard.errors import RegardError
from regard.models.model import TranslationModel
from regard.text.special_tokens import PAD, SpecialTokenTemplate
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class SourceReader:
    """Converts sources from the tokens of the first member to those of another, by their text.

    A character that the vocabulary of the first member does not have is lost to the others too."""

    first: Tokenizer
    first_template: SpecialTokenTemplate
    own: Tokenizer
    own_template: SpecialTokenTemplate

    def convert(self, source: Tensor, max_len: int) -> Tensor:
        """Return sources (B, S) in the member's own tokens, (B, S')."""
        rows = [[id for id in row if id != PAD] for row in source.tolist()]
        made = [self.convert_row(row) for row in rows]
        width = max(map(len, made))
        if width > max_len:
            raise RegardError(
                f"a sentence has {width} tokens in the vocabulary of one member of the ensemble, which reads at most "
                f"{max_len} (model.max_len): split it into shorter sentences"
            )
        return torch.tensor([[*row, *[PAD] * (width - len(row))] for row in made], device=source.device)

    def convert_row(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of one source, with its special tokens, in the member's own tokens."""
        inner = ids[len(self.first_template.before) : len(ids) - len(self.first_template.after)]
        names = {id: language for language, id in self.first.language_tokens().items()}
        tags = [self.own.language_tokens()[names[id]] for id in inner[:1] if id in names]
        return self.own_template.wrap([*tags, *self.own.encode(self.first.decode(inner[len(tags) :]))])


class EnsembleState:
    """The decoding states of the members of an ensemble, with the interface of `DecodingState`."""

    static: ClassVar[bool] = False

    def __init__(self, states: Sequence[Any], average: str = "mean") -> None:
        self.states, self.average = list(states), average

    @property
    def length(self) -> int:
        """An upper bound of the tokens of a hypothesis."""
        return max(state.length for state in self.states)

    def select(self, sentences: Tensor) -> None:
        """Keep only these sentences, with all of their hypotheses, in this order."""
        for state in self.states:
            state.select(sentences)

    def join(self, other: EnsembleState) -> None:
        """Append the sentences of another state of the same ensemble (continuous batching)."""
        for state, theirs in zip(self.states, other.states, strict=True):
            state.join(theirs)

    def shorten(self) -> None:
        """Drop what the remaining sentences do not use, after others have left."""
        for state in self.states:
            state.shorten()

    def reorder(self, parents: Tensor) -> None:
        """Reorder beams by parent: hypothesis i of each sentence continues hypothesis parents[:, i]; parents (B, K)."""
        for state in self.states:
            state.reorder(parents)

    def nbytes(self) -> int:
        return sum(state.nbytes() for state in self.states)


class Ensemble(TranslationModel):
    """Several translation models with one target vocabulary that are decoded as one.

    `readers` has, for each member, None where it reads the tokens of the first member."""

    def __init__(
        self, members: Sequence[TranslationModel], readers: Sequence[SourceReader | None] | None = None
    ) -> None:
        super().__init__()
        configs = [member.config for member in members]
        for i, config in enumerate(configs):
            if (config.target_vocab, config.eos_token_id) != (configs[0].target_vocab, configs[0].eos_token_id):
                raise RegardError(
                    f"the members of an ensemble need one target vocabulary, but model {i + 1} has {config.target_vocab} "
                    f"tokens and the end token {config.eos_token_id}, the first {configs[0].target_vocab} and "
                    f"{configs[0].eos_token_id}: train them with the same tokenizer (tokenizer.file)"
                )
        self.members = nn.ModuleList(members)
        self.readers = tuple(readers or [None] * len(members))
        suppressed = sorted({id for config in configs for id in config.suppress_tokens})
        longest = min(config.max_len for config in configs)
        self.config = replace(configs[0], max_len=longest, suppress_tokens=tuple(suppressed))
        self.eval()

    @property
    def same_source(self) -> list[TranslationModel]:
        """The members that read the tokens of the first member, which is one of them."""
        pairs = zip(cast(Any, self.members), self.readers, strict=True)
        return [member for member, reader in pairs if reader is None]

    def find_overlong(self, source: Sequence[int], spare: int = 0) -> tuple[int, int] | None:
        """Return how many tokens a source has for a member that reads fewer, and how many that reads; None if all read it.

        `source` has the tokens of the first member, with special tokens; `spare` tokens more may be added to it. Members
        with these tokens are left out: what they read is known from the length of `source` and `config.max_len`."""
        for member, reader in zip(self.members, self.readers, strict=True):
            most = cast(Any, member).config.max_len
            if reader is not None and (n := len(reader.convert_row(source))) + spare > most:
                return n, most
        return None

    def sources(self, source: Tensor) -> list[Tensor]:
        """Return sources (B, S) as each member reads them."""
        return [
            source if reader is None else reader.convert(source, cast(Any, member).config.max_len)
            for member, reader in zip(self.members, self.readers, strict=True)
        ]

    def begin(self, source: Tensor) -> EnsembleState:  # type: ignore[override]
        """Run all encoders on sources (B, S) and return the decoding state."""
        pairs = zip(cast(Any, self.members), self.sources(source), strict=True)
        return EnsembleState([member.begin(own) for member, own in pairs])

    def step(self, tokens: Tensor, state: EnsembleState) -> Tensor:  # type: ignore[override]
        """Return the log-probabilities (N, V), up to a constant, after one more token (N,) of each hypothesis."""
        pairs = zip(cast(Any, self.members), state.states, strict=True)
        return average_log_probs([member.step(tokens, own) for member, own in pairs], state.average)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return the logarithm (B, T, V) of the mean probability of the token after each target token."""
        pairs = zip(cast(Any, self.members), self.sources(source), strict=True)
        return average_log_probs([member(own, target) for member, own in pairs], "mean")


def average_log_probs(logits: Sequence[Tensor], average: str) -> Tensor:
    """Return the logarithm of the mean probabilities ("mean"), or the mean log-probabilities ("log"), of logits (..., V).

    The mean of log-probabilities is a log-probability up to a constant."""
    precise = [one.to(torch.promote_types(one.dtype, torch.float32)).log_softmax(-1) for one in logits]
    if average == "log":
        return torch.stack(precise).mean(0)
    total = precise[0]
    for log_p in precise[1:]:
        total = torch.logaddexp(total, log_p)
    return total - math.log(len(logits))
