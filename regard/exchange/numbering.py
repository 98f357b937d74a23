"""Their token ids and ours. Regard has PAD, SOS, EOS, UNK and MASK at 0 to 4 in every vocabulary; what else a vocabulary
holds follows in its old order. A special token that it lacks has a row here that comes from nowhere, or from another's."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from regard.exchange.rules import Step
from regard.text.vocabulary import PAD, SPECIALS


@dataclass(frozen=True)
class Numbering:
    size: int  # rows of their vocabulary
    special: tuple[int | None, ...]  # their id of each of our five
    copies: dict[int, int] = field(default_factory=dict)  # a special of ours that they lack -> the one it stands for

    @cached_property
    def theirs(self) -> tuple[int | None, ...]:
        """Their id of each of ours."""
        return (*self.special, *(i for i in range(self.size) if i not in self.special))

    @cached_property
    def ours(self) -> tuple[int, ...]:
        """Our id of each of theirs."""
        return tuple(i for _, i in sorted((t, i) for i, t in enumerate(self.theirs) if t is not None))

    @property
    def absent(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.special) if t is None)

    def __len__(self) -> int:
        return len(self.theirs)

    def inputs(self) -> Step:
        """Rows of an embedding. On the way back, a token that another stood for is that other: T5's padding is what its
        decoder starts with, which is SOS here and so has learned as SOS."""
        stood = {of: i for i, of in self.copies.items() if of == PAD}
        return self._step([stood.get(i, i) for i in self.ours])

    def outputs(self) -> Step:
        """Rows of an output layer."""
        return self._step(list(self.ours))

    def _step(self, back: list[int]) -> Step:
        there = [self.size if t is None else t for t in self.theirs]  # one past the end: zeros
        for i, of in self.copies.items():
            there[i] = there[of]

        def to_ours(x: Tensor) -> Tensor:
            x = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
            return x.index_select(0, torch.tensor(there, device=x.device))

        return Step("vocabulary rows", to_ours, lambda x: x.index_select(0, torch.tensor(back, device=x.device)))

    def to_dict(self) -> dict[str, Any]:
        return {"size": self.size, "special": list(self.special), "copies": {str(i): j for i, j in self.copies.items()}}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Numbering:
        return cls(values["size"], tuple(values["special"]), {int(i): j for i, j in values["copies"].items()})


def own(size: int) -> Numbering:
    """That of a vocabulary which is laid out as ours are."""
    return Numbering(size, tuple(range(len(SPECIALS))))
