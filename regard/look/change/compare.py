"""What a change does to what a model writes: before and after, side by side.

    compare(translator, "a man eats an apple", [parse("forbid", "Apfel>apple")])

Log-probabilities are those of a forced forward through the model that wrote the tokens. Beside those of the old output stand
the ones that the changed model gives it: they tell which words a change concerns, even where none becomes another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest
from typing import Any, Protocol

import torch
from torch import nn

from regard.decode.batch_decoding import decode
from regard.decode.generation import generate, max_length_of, token_log_probs
from regard.errors import RegardError
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.look.alignment import words
from regard.look.change.changes import positions
from regard.look.change.intervene import (
    Change,
    Forbid,
    Force,
    Pin,
    Replace,
    Strips,
    changed,
    forced_target,
    other_source,
    resolved,
)
from regard.look.record import layers_of
from regard.text.tokenizer import Tokenizer

HEAD = ("before", "log p", "changed", "after", "log p")


@dataclass(frozen=True)
class Output:
    text: str
    ids: tuple[int, ...]  # what was written, the end token included where there is one
    pieces: tuple[str, ...]
    log_probs: tuple[float, ...]  # of each, given those before

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    def numbers(self) -> dict[str, Any]:
        tokens = {"tokens": [*self.pieces], "ids": [*self.ids], "log_probs": [*self.log_probs]}
        return {"text": self.text, "log_prob": self.log_prob, **tokens}


@dataclass(frozen=True)
class Difference:
    """A text, what was made of it, and what is made of it under the changes."""

    input: str
    changes: tuple[str, ...]
    before: Output
    after: Output
    kept: tuple[
        float, ...
    ]  # log-probabilities of the old output's tokens in the changed model, as many as it has room for

    @property
    def kept_log_prob(self) -> float:
        """log p of the old output in the changed model."""
        return math.fsum(self.kept)

    @property
    def changed(self) -> tuple[int, ...]:
        """Which tokens of the new output are none of the old."""
        return tuple(new for _, new, same in self.rows() if new is not None and not same)

    @property
    def lost(self) -> tuple[int, ...]:
        """Which tokens of the old output are none of the new."""
        return tuple(old for old, _, same in self.rows() if old is not None and not same)

    def rows(self) -> list[tuple[int | None, int | None, bool]]:
        """Tokens of the old and the new output side by side, and whether they are the same."""
        found: list[tuple[int | None, int | None, bool]] = []
        matcher = SequenceMatcher(None, self.before.ids, self.after.ids, autojunk=False)
        for kind, i, to_i, j, to_j in matcher.get_opcodes():
            found += [(old, new, kind == "equal") for old, new in zip_longest(range(i, to_i), range(j, to_j))]
        return found

    def cells(self, old: int | None, new: int | None) -> tuple[str, ...]:
        """A line under HEAD."""
        b, a, left, right = self.before, self.after, ("", "", ""), ("", "")
        if old is not None:
            kept = f"{self.kept[old]:.3f}" if old < len(self.kept) else ""
            left = (b.pieces[old], f"{b.log_probs[old]:.3f}", kept)
        if new is not None:
            right = (a.pieces[new], f"{a.log_probs[new]:.3f}")
        return (*left, *right)

    def summary(self) -> list[str]:
        n, of = len(self.kept), len(self.before.ids)
        what = f"the first {n} of the {of} tokens that stood before have" if n < of else "what stood before has"
        why = ": there is no room for more" if n < of else ""
        return [
            *(f"change  {change}" for change in self.changes),
            f"before  {self.before.text}   (log p {self.before.log_prob:.3f})",
            f"after   {self.after.text}   (log p {self.after.log_prob:.3f})",
            f"{what} log p {self.kept_log_prob:.3f} after the change{why}",
        ]

    def __str__(self) -> str:
        lines = [(" ", HEAD), *(("* "[same], self.cells(old, new)) for old, new, same in self.rows())]
        wide = [max(len(cells[i]) for _, cells in lines) for i in range(len(HEAD))]
        table = [
            f"{sign} {a:<{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}   {d:<{wide[3]}}  {e:>{wide[4]}}".rstrip()
            for sign, (a, b, c, d, e) in lines
        ]
        return "\n".join([*self.summary(), "", *table])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in HEAD)
        rows = "".join(html_row(self.cells(old, new), same) for old, new, same in self.rows())
        said = "<br>".join(f"<bdi>{escape(line)}</bdi>" for line in self.summary())
        return f"<p>{said}</p><table><tr>{head}</tr>{rows}</table>"

    def numbers(self) -> dict[str, Any]:
        """Ready for JSON."""
        kept = {"log_prob": self.kept_log_prob, "log_probs": [*self.kept]}
        sides = {"before": self.before.numbers(), "after": self.after.numbers(), "before_in_changed_model": kept}
        others = {"changed": [*self.changed], "lost": [*self.lost]}
        return {"input": self.input, "changes": [*self.changes], **sides, **others}


def html_row(cells: tuple[str, ...], same: bool) -> str:
    inside = "".join(f"<td><bdi>{escape(cell)}</bdi></td>" for cell in cells)
    return f"<tr>{inside}</tr>" if same else f'<tr style="font-weight: bold">{inside}</tr>'


def compare(user: Translator | Generator, text: str, changes: Sequence[Change], **options: Any) -> Difference:
    """What a translator makes of a sentence, or a writer of a prompt, before and after the changes. Options are those of
    `[decode]`; words in changes are those of the unchanged input and output."""
    if not text.strip():
        raise RegardError("there is nothing to read: give a sentence")
    hand: Hand = Translating(user, **options) if isinstance(user, Translator) else Writing(user, **options)
    source = hand.read(text)
    first = hand.write(source, [])
    before = hand.output(source, first)
    chosen = resolved(changes, hand.strips(source, first), layers_of(user.model))
    other, begun = other_source(chosen, source, hand.reads.encode), hand.begun(source)
    check_places(chosen, hand.reads, hand.writes, len(begun))
    forced = forced_target(chosen, [*begun, *first], hand.writes.encode)[len(begun) :]
    check_room(user.model, [*begun, *forced])
    with changed(user.model, chosen):
        after = hand.output(other, [*forced, *hand.write(other, forced)])
        kept = hand.log_probs(other, first)
    return Difference(text, tuple(map(str, changes)), before, after, tuple(kept))


def check_places(changes: Sequence[Change], reads: Tokenizer, writes: Tokenizer, begun: int) -> None:
    """Places are those of the unchanged input and output: what is replaced must have been written, and leave the others
    where they were."""
    placed = [change for change in changes if isinstance(change, (Forbid, Force, Pin))]
    for change in changes:
        if not isinstance(change, Replace):
            continue
        places, coder = positions(change.place), writes if change.strip == "target" else reads
        if change.strip == "target" and min(places) < begun:
            raise RegardError(f"{change}: that was given, not written; places of the output begin at {begun}")
        pieces, before = len(coder.encode(change.text)), max(places) + 1 - min(places)
        if placed and pieces != before:
            raise RegardError(
                f"{change}: {pieces} pieces in the place of {before} would move what comes after them, and "
                f"'{placed[0]}' goes by places: replace it by a text of {before} pieces, or make that change alone"
            )


def check_room(model: nn.Module, read: list[int]) -> None:
    if len(read) >= (most := max_length_of(model)):
        raise RegardError(
            f"with that text the output begins with {len(read)} tokens, and the model was built for at most {most} "
            f"(model.max_len): replace it by a shorter one"
        )


# ---- those who write --------------------------------------------------------------------------------------------------


class Hand(Protocol):
    """A model that writes, in ids."""

    reads: Tokenizer
    writes: Tokenizer

    def read(self, text: str) -> list[int]: ...
    def begun(self, source: list[int]) -> list[int]:
        """What a decoder has read before it writes its first token."""
        ...

    def write(self, source: list[int], forced: list[int]) -> list[int]:
        """What comes after `forced`, with the end token if there is one."""
        ...

    def log_probs(self, source: list[int], written: list[int]) -> list[float]: ...
    def strips(self, source: list[int], written: list[int]) -> Strips: ...
    def output(self, source: list[int], written: list[int]) -> Output: ...


class Writes:
    writes: Tokenizer

    def output(self, source: list[int], written: list[int]) -> Output:
        pieces, scored = self.writes.pieces(written), self.log_probs(source, written)  # type: ignore[attr-defined]
        return Output(self.writes.decode(written).strip(), tuple(written), tuple(pieces), tuple(scored))


class Translating(Writes):
    def __init__(self, user: Translator, to: str | None = None, **options: Any) -> None:
        self.user, self.to, self.options = user, to, user.decode_options(**{**options, "nbest": 1})
        self.reads, self.writes = user.tokenizers.source, user.tokenizers.target
        self.device = next(user.model.parameters()).device

    def read(self, text: str) -> list[int]:
        return self.user.read(text, self.to)

    def begun(self, source: list[int]) -> list[int]:
        return [*self.user.token_template.start]

    def write(self, source: list[int], forced: list[int]) -> list[int]:
        token_template = replace(
            self.user.token_template, before=(), after=(), start=(*self.user.token_template.start, *forced)
        )
        model, longest = self.user.model, self.user.model.config.max_len
        ((best, *_),) = decode(model, [source], self.options, longest, self.device, token_template=token_template)
        return [*best.tokens, *([model.config.eos_token_id] if best.ended else [])]

    @torch.inference_mode()
    def log_probs(self, source: list[int], written: list[int]) -> list[float]:
        start = self.begun(source)
        read, wanted = (torch.tensor([ids], device=self.device) for ids in ([*start, *written][:-1], written))
        logits = self.user.model(torch.tensor([source], device=self.device), read)[:, len(start) - 1 :]
        return logits.float().log_softmax(-1).gather(2, wanted[..., None])[0, :, 0].tolist()

    def strips(self, source: list[int], written: list[int]) -> Strips:
        return Strips(words(self.reads, source), words(self.writes, [*self.begun(source), *written]))


class Writing(Writes):
    def __init__(self, user: Generator, to: str | None = None, **options: Any) -> None:
        if to is not None:
            raise RegardError(f"this model writes on and has no languages to translate to: leave out --to {to}")
        self.user, self.options = user, user.decode_options(**{**options, "n": 1})
        self.reads = self.writes = user.tokenizer

    def read(self, text: str) -> list[int]:
        return self.user.framed(text)

    def begun(self, source: list[int]) -> list[int]:
        return source

    def write(self, source: list[int], forced: list[int]) -> list[int]:
        prompt = [*source, *forced]
        teller = self.user._teller(prompt, self.options)

        def hear(row: int, token: int) -> bool:
            teller.push(token)
            return teller.stopped

        (row,) = generate(self.user.model, [prompt], self.options, hear)
        return [*row.tokens, *([self.user.model.config.eos_token_id] if row.end == "end" else [])]

    def log_probs(self, source: list[int], written: list[int]) -> list[float]:
        """Of as many as there is room for: what was written after a short prompt may not fit after a longer one."""
        read = [*source, *written][: max_length_of(self.user.model)]
        (scored,) = token_log_probs(self.user.model, [read], self.options)
        return scored[len(source) - 1 :]

    def strips(self, source: list[int], written: list[int]) -> Strips:
        return Strips(words(self.reads, source), words(self.writes, [*source, *written]))
