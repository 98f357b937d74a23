"""The special tokens around a text: what a model read at the ends of every text it learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from regard.text.vocabulary import EOS, SOS


@dataclass(frozen=True)
class Frame:
    before: tuple[int, ...] = ()  # in front of a text
    between: tuple[int, ...] = (EOS,)  # between the two texts of a pair
    after: tuple[int, ...] = (EOS,)
    start: tuple[int, ...] = (SOS,)  # what a decoder reads before its first word

    def one(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of two texts in one row, and which of the two each belongs to."""
        a, b = [*self.before, *first, *self.between], [*second, *self.after]
        return a + b, [0] * len(a) + [1] * len(b)

    def ended(self) -> Frame:
        """The same, with an end token after each text where there was none."""
        return replace(self, between=self.between or (EOS,), after=self.after or (EOS,))

    def to_dict(self) -> dict[str, list[int]]:
        return {name: list(ids) for name, ids in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, list[int]]) -> Frame:
        return cls(**{name: tuple(int(i) for i in ids) for name, ids in values.items()})


OWN = Frame()
CLASSIC = Frame(before=(SOS,))  # BERT's: one token in front, one after each text
