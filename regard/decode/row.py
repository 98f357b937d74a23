"""One text that a language model goes on with: its prompt, its limit, what was written, and why it ended."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import nn

from regard.config import DecodeConfig
from regard.errors import RegardError
from regard.models.model import StreamModel


@dataclass
class Row:
    """One continuation being written."""

    prompt: list[int]
    limit: int  # most tokens
    at_limit: str  # why it would end there
    seed: int
    eos: int = -1  # the token that ends it
    hear: Callable[[int], bool] = lambda token: False  # told every token; True: enough
    ids: list[int] = field(default_factory=list)  # the prompt and what was written, without the end token
    log_probs: list[float] = field(default_factory=list)  # of what was written, the end token included
    end: str = ""  # why it ended: end (token), stop (`hear` had enough), length (max_new_tokens), context (max_len)

    def __post_init__(self) -> None:
        self.ids = list(self.prompt)

    @property
    def tokens(self) -> list[int]:
        return self.ids[len(self.prompt) :]

    def add(self, token: int, log_prob: float) -> None:
        self.log_probs.append(log_prob)
        if token == self.eos:
            self.end = "end"
            return
        self.ids.append(token)
        if self.hear(token):
            self.end = "stop"
        elif len(self.log_probs) == self.limit:
            self.end = self.at_limit


def longest(model: nn.Module) -> int:
    """The most tokens that a text may have; for a recurrent model, whose state does not grow, there is no most."""
    return sys.maxsize if isinstance(model, StreamModel) else model.config.max_len  # type: ignore[union-attr,return-value]


def make_row(
    prompt: Sequence[int], seed: int, options: DecodeConfig, model: nn.Module, name: str = "the prompt"
) -> Row:
    """Refuses a prompt that leaves no room for a single token."""
    max_len = longest(model)
    room = max_len - len(prompt)
    if not prompt:
        raise RegardError(f"{name} is empty, and this model has no token that begins a text: give it a word")
    if room < 1:
        raise RegardError(
            f"{name} has {len(prompt)} tokens, but the model was built for at most {max_len} (model.max_len), "
            f"those it writes included: shorten it to {max_len - 1} at most"
        )
    new = options.max_new_tokens
    eos: int = model.config.eos_token_id  # type: ignore[union-attr,assignment]
    return Row(list(prompt), min(new, room), "length" if new <= room else "context", seed, eos)


def distinct(rows: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Rows without those that repeat the one before, and which of them each row is: samples of a text are read once."""
    different: list[list[int]] = []
    which = []
    for ids in rows:
        if not different or ids != different[-1]:
            different.append(ids)
        which.append(len(different) - 1)
    return different, which
