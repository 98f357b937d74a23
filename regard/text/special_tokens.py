"""Special tokens of a vocabulary, and the template that says where they stand around a text.

Special tokens begin a text, end it, or stand for what is unknown or masked. Their ids are data of a tokenizer: a vocabulary
that Regard trained has all five at the ids 0 to 4, one from elsewhere has those that its files name, at its own ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from regard.errors import RegardError

PAD = -1
"""Padding of the rows of a batch, and the label of positions without a loss. It is not a token id: no vocabulary has it, and
models mask it. A vocabulary's own padding token (`SpecialTokens.pad`) is not used as padding."""


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of a vocabulary's special tokens; None where it has no such token. One token may have several roles."""

    bos: int | None = None  # begins a text (BERT: cls)
    eos: int | None = None  # ends a text (BERT: sep)
    unk: int | None = None  # stands for what the vocabulary cannot encode
    mask: int | None = None  # stands for masked tokens
    pad: int | None = None  # the padding token of other toolkits; see PAD

    @property
    def ids(self) -> tuple[int, ...]:
        """All ids in ascending order, without repetitions."""
        return tuple(sorted({i for i in asdict(self).values() if i is not None}))

    @property
    def suppressed(self) -> tuple[int, ...]:
        """The ids that must never be generated: all special tokens but the end token."""
        return tuple(i for i in self.ids if i != self.eos)

    def model_settings(self) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that depend on the special tokens."""
        return {"eos_token_id": -1 if self.eos is None else self.eos, "suppress_tokens": self.suppressed}

    def require(self, role: str, why: str) -> int:
        """Return the id of the token with this role, or raise a RegardError that says what needs it (`why`)."""
        found: int | None = getattr(self, role)
        if found is None:
            raise RegardError(f"this vocabulary has no {role} token, which {why} needs: use another tokenizer")
        return found


# The special tokens of every vocabulary that Regard trains, in the order of their ids.
SPECIAL_TOKEN_NAMES = {"pad": "<pad>", "bos": "<sos>", "eos": "<eos>", "unk": "<unk>", "mask": "<mask>"}
DEFAULT_SPECIAL_TOKENS = SpecialTokens(**{role: i for i, role in enumerate(SPECIAL_TOKEN_NAMES)})
BOS, EOS = DEFAULT_SPECIAL_TOKENS.bos or 0, DEFAULT_SPECIAL_TOKENS.eos or 0


@dataclass(frozen=True)
class SpecialTokenTemplate:
    """The ids of the special tokens that a model was trained to see around a text.

    The defaults are for an encoder-decoder with a vocabulary that Regard trained.
    """

    before: tuple[int, ...] = ()  # before a text
    between: tuple[int, ...] = (EOS,)  # between the two texts of a pair
    after: tuple[int, ...] = (EOS,)  # after a text or a pair
    start: tuple[int, ...] = (BOS,)  # given to a decoder before its first token
    end: tuple[int, ...] = (EOS,)  # what a decoder generates after its last token

    def wrap(self, ids: Sequence[int]) -> list[int]:
        """Return the ids of a text with the special tokens around it."""
        return [*self.before, *ids, *self.after]

    def wrap_pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the ids of two texts in one row with their special tokens, and the token types (0 or 1: which text)."""
        a, b = [*self.before, *first, *self.between], [*second, *self.after]
        return a + b, [0] * len(a) + [1] * len(b)

    def with_end_tokens(self, special: SpecialTokens) -> SpecialTokenTemplate:
        """Return this template with the end token after each text where it has nothing there."""
        if self.between and self.after:
            return self
        end = (special.require("eos", "the end of a text"),)
        return replace(self, between=self.between or end, after=self.after or end)

    def to_dict(self) -> dict[str, list[int]]:
        return {name: list(ids) for name, ids in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, list[int]]) -> SpecialTokenTemplate:
        return cls(**{name: tuple(int(i) for i in ids) for name, ids in values.items()})


EOS_TEMPLATE = SpecialTokenTemplate()  # eos_template(DEFAULT_SPECIAL_TOKENS)
EMPTY_TEMPLATE = SpecialTokenTemplate((), (), (), (), ())


def eos_template(special: SpecialTokens) -> SpecialTokenTemplate:
    """Return the template of an encoder-decoder: the end token after each text.

    The decoder starts with the token that begins a text, or with the end token where the vocabulary has none.
    """
    end = (special.require("eos", "the end of a text"),)
    return SpecialTokenTemplate((), end, end, end if special.bos is None else (special.bos,), end)


def bert_template(special: SpecialTokens) -> SpecialTokenTemplate:
    """Return BERT's template: the token that begins a text before it, the end token after each text."""
    template = eos_template(special)
    return replace(template, before=template.start)
