"""Special tokens: which ids of a vocabulary begin a text, end it, stand for what is unknown or hidden, or do nothing.

They are data of a tokenizer: a vocabulary that Regard learned has all five (text/tokenizer_training.py), one from elsewhere has
those that its files name, at the ids where they stand there.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from regard.errors import RegardError

PAD = -1
"""Fills up the rows of a batch, and labels that are not scored. It is no token: no vocabulary has this id, models neither
look at it nor learn from it, and a token that a vocabulary calls padding means nothing to them."""


@dataclass(frozen=True)
class SpecialTokens:
    """The ids of a vocabulary's special tokens; None: it has no such token. One token may have several roles."""

    bos: int | None = None  # begins a text (BERT: cls)
    eos: int | None = None  # ends it (BERT: sep)
    unk: int | None = None  # stands for what the vocabulary cannot write
    mask: int | None = None  # stands for what is hidden
    pad: int | None = None  # what others fill rows with

    @property
    def ids(self) -> tuple[int, ...]:
        """All of them, in order and each once."""
        return tuple(sorted({i for i in asdict(self).values() if i is not None}))

    @property
    def suppressed(self) -> tuple[int, ...]:
        """Those that no text holds, so that none is ever generated: all but the end token."""
        return tuple(i for i in self.ids if i != self.eos)

    def settings(self) -> dict[str, Any]:
        """What a model is told about them: fields of `ModelConfig`."""
        return {"eos_token_id": -1 if self.eos is None else self.eos, "suppress_tokens": self.suppressed}

    def need(self, role: str, why: str) -> int:
        """The id of a role, which `why` cannot do without."""
        found: int | None = getattr(self, role)
        if found is None:
            raise RegardError(f"this vocabulary has no {role} token, which {why} needs: use another tokenizer")
        return found
