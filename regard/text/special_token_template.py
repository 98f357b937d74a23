"""The special tokens around a text: what a model read at the ends of every text it learned from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from regard.text.special_tokens import SpecialTokens
from regard.text.tokenizer_training import LEARNED

BOS, EOS = LEARNED.bos or 0, LEARNED.eos or 0


@dataclass(frozen=True)
class SpecialTokenTemplate:
    """The ids of those tokens; by default those of a vocabulary that Regard learned, for an encoder-decoder."""

    before: tuple[int, ...] = ()  # in front of a text
    between: tuple[int, ...] = (EOS,)  # between the two texts of a pair
    after: tuple[int, ...] = (EOS,)
    start: tuple[int, ...] = (BOS,)  # what a decoder reads before its first word
    end: tuple[int, ...] = (EOS,)  # what a decoder says after its last word

    def one(self, ids: Sequence[int]) -> list[int]:
        return [*self.before, *ids, *self.after]

    def pair(self, first: Sequence[int], second: Sequence[int]) -> tuple[list[int], list[int]]:
        """The tokens of two texts in one row, and which of the two each belongs to."""
        a, b = [*self.before, *first, *self.between], [*second, *self.after]
        return a + b, [0] * len(a) + [1] * len(b)

    def ended(self, special: SpecialTokens) -> SpecialTokenTemplate:
        """The same, with an end token after each text where there was none."""
        if self.between and self.after:
            return self
        end = (special.need("eos", "the end of a text"),)
        return replace(self, between=self.between or end, after=self.after or end)

    def to_dict(self) -> dict[str, list[int]]:
        return {name: list(ids) for name, ids in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, list[int]]) -> SpecialTokenTemplate:
        return cls(**{name: tuple(int(i) for i in ids) for name, ids in values.items()})


OWN = SpecialTokenTemplate()
CLASSIC = SpecialTokenTemplate(before=(BOS,))  # BERT's: one token in front, one after each text
NOTHING = SpecialTokenTemplate((), (), (), (), ())


def plain(special: SpecialTokens) -> SpecialTokenTemplate:
    """An encoder-decoder's: the end token after every text; its decoder starts with the token that begins a text, or
    with the end token where there is none."""
    end = (special.need("eos", "the end of a text"),)
    return SpecialTokenTemplate((), end, end, end if special.bos is None else (special.bos,), end)


def classic(special: SpecialTokens) -> SpecialTokenTemplate:
    """BERT's: the token that begins a text in front, the end token after each text."""
    token_template = plain(special)
    return replace(token_template, before=token_template.start)
