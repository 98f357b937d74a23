"""The output of a model before and after an intervention, side by side.

    compare(translator, "a man eats an apple", [parse("forbid", "Apfel>apple")])

Log-probabilities are those of a teacher-forced forward pass through the model that wrote the tokens. The old output
also has the log-probabilities that the changed model gives to it: they show which words an intervention concerns, even
where no word becomes another.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from html import escape
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from regard.decode.batch_decoding import decode
from regard.decode.generation import generate, max_length_of, token_log_probs
from regard.errors import RegardError
from regard.inference.arguments import decode_config
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.look.intervention_hooks import intervene
from regard.look.interventions import (
    Forbid,
    Force,
    InputAndOutput,
    Intervention,
    Pin,
    Replace,
    forced_prefix,
    positions,
    replace_in_source,
    resolve_words,
)
from regard.look.record import attention_layers
from regard.look.token_sequence import group_words
from regard.text.tokenizer import Tokenizer

HEADER = ("before", "log p", "changed", "after", "log p")


@dataclass(frozen=True)
class Output:
    """A text that a model wrote, with its tokens and their log-probabilities."""

    text: str
    ids: tuple[int, ...]  # including the end token where there is one
    pieces: tuple[str, ...]
    log_probs: tuple[float, ...]  # of each token, given those before

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    def numbers(self) -> dict[str, Any]:
        tokens = {"tokens": [*self.pieces], "ids": [*self.ids], "log_probs": [*self.log_probs]}
        return {"text": self.text, "log_prob": self.log_prob, **tokens}


@dataclass(frozen=True)
class Difference:
    """An input, and the outputs of a model before and after interventions."""

    input: str
    changes: tuple[str, ...]
    before: Output
    after: Output
    kept: tuple[float, ...]  # log-probabilities of the old output in the changed model, of as many tokens as fit

    @property
    def kept_log_prob(self) -> float:
        """The log-probability of the old output in the changed model."""
        return math.fsum(self.kept)

    @property
    def changed(self) -> tuple[int, ...]:
        """The indices of tokens of the new output that are not in the old one."""
        return tuple(new for _, new, same in self.rows() if new is not None and not same)

    @property
    def lost(self) -> tuple[int, ...]:
        """The indices of tokens of the old output that are not in the new one."""
        return tuple(old for old, _, same in self.rows() if old is not None and not same)

    def rows(self) -> list[tuple[int | None, int | None, bool]]:
        """Return indices of the old and the new output side by side, and whether the tokens are the same."""
        found: list[tuple[int | None, int | None, bool]] = []
        matcher = SequenceMatcher(None, self.before.ids, self.after.ids, autojunk=False)
        for kind, i, to_i, j, to_j in matcher.get_opcodes():
            found += [(old, new, kind == "equal") for old, new in zip_longest(range(i, to_i), range(j, to_j))]
        return found

    def cells(self, old: int | None, new: int | None) -> tuple[str, ...]:
        """Return the cells of one row of the table, under HEADER."""
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
        lines = [(" ", HEADER), *(("* "[same], self.cells(old, new)) for old, new, same in self.rows())]
        wide = [max(len(cells[i]) for _, cells in lines) for i in range(len(HEADER))]
        table = [
            f"{sign} {a:<{wide[0]}}  {b:>{wide[1]}}  {c:>{wide[2]}}   {d:<{wide[3]}}  {e:>{wide[4]}}".rstrip()
            for sign, (a, b, c, d, e) in lines
        ]
        return "\n".join([*self.summary(), "", *table])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{name}</th>" for name in HEADER)
        rows = "".join(html_row(self.cells(old, new), same) for old, new, same in self.rows())
        said = "<br>".join(f"<bdi>{escape(line)}</bdi>" for line in self.summary())
        return f"<p>{said}</p><table><tr>{head}</tr>{rows}</table>"

    def numbers(self) -> dict[str, Any]:
        """Return the comparison as values for JSON."""
        kept = {"log_prob": self.kept_log_prob, "log_probs": [*self.kept]}
        sides = {"before": self.before.numbers(), "after": self.after.numbers(), "before_in_changed_model": kept}
        others = {"changed": [*self.changed], "lost": [*self.lost]}
        return {"input": self.input, "changes": [*self.changes], **sides, **others}


def html_row(cells: tuple[str, ...], same: bool) -> str:
    inside = "".join(f"<td><bdi>{escape(cell)}</bdi></td>" for cell in cells)
    return f"<tr>{inside}</tr>" if same else f'<tr style="font-weight: bold">{inside}</tr>'


def compare(user: Translator | Generator, text: str, changes: Sequence[Intervention], **options: Any) -> Difference:
    """Compare the output for a sentence or a prompt before and after interventions.

    Options are those of `[decode]`; words in interventions are those of the unchanged input and output."""
    if not text.strip():
        raise RegardError("there is nothing to read: give a sentence")
    decoder = TranslationDecoder(user, **options) if isinstance(user, Translator) else TextDecoder(user, **options)
    source = decoder.encode(text)
    first = decoder.decode(source, [])
    before = decoder.output(source, first)
    chosen = resolve_words(changes, decoder.words(source, first), attention_layers(user.model))
    other, forced = decoder.replace_tokens(chosen, source, first)
    with intervene(user.model, chosen):
        after = decoder.output(other, [*forced, *decoder.decode(other, forced)])
        kept = decoder.log_probs(other, first)
    return Difference(text, tuple(map(str, changes)), before, after, tuple(kept))


def check_places(
    changes: Sequence[Intervention], source_tokenizer: Tokenizer, target_tokenizer: Tokenizer, n_start: int
) -> None:
    """Check that replaced tokens of the target were written by the model, and that replacing moves no other place.

    Places are those of the unchanged input and output; the first `n_start` of the target were given."""
    placed = [change for change in changes if isinstance(change, (Forbid, Force, Pin))]
    for change in changes:
        if not isinstance(change, Replace):
            continue
        places, is_target = positions(change.place), change.side == "target"
        if is_target and min(places) < n_start:
            raise RegardError(f"{change}: that was given, not written; places of the output begin at {n_start}")
        tokenizer = target_tokenizer if is_target else source_tokenizer
        pieces, before = len(tokenizer.encode(change.text)), max(places) + 1 - min(places)
        if placed and pieces != before:
            raise RegardError(
                f"{change}: {pieces} pieces in the place of {before} would move what comes after them, and "
                f"'{placed[0]}' goes by places: replace it by a text of {before} pieces, or make that change alone"
            )


def check_length(model: nn.Module, read: list[int]) -> None:
    """Check that a model can generate a token after these."""
    if len(read) >= (most := max_length_of(model)):
        raise RegardError(
            f"with that text the output begins with {len(read)} tokens, and the model was built for at most {most} "
            f"(model.max_len): replace it by a shorter one"
        )


# ---- decoding in token ids --------------------------------------------------------------------------------------------


class TokenDecoder(ABC):
    """A model that writes text, with inputs and outputs in token ids."""

    model: nn.Module
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids that the model reads, including special tokens."""

    @abstractmethod
    def start(self, source: list[int]) -> list[int]:
        """Return the ids that the decoder reads before it writes its first token."""

    @abstractmethod
    def decode(self, source: list[int], forced: list[int]) -> list[int]:
        """Return the ids that follow `start` and `forced`, including the end token if there is one."""

    @abstractmethod
    def log_probs(self, source: list[int], written: list[int]) -> list[float]:
        """Return the log-probability of each of the tokens that were written."""

    @abstractmethod
    def words(self, source: list[int], written: list[int]) -> InputAndOutput:
        """Return the words of the input and the output."""

    def output(self, source: list[int], written: list[int]) -> Output:
        pieces, scored = self.target_tokenizer.pieces(written), self.log_probs(source, written)
        return Output(self.target_tokenizer.decode(written).strip(), tuple(written), tuple(pieces), tuple(scored))

    def replace_tokens(
        self, changes: Sequence[Intervention], source: list[int], written: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return the source and the forced beginning of the output under interventions that replace tokens."""
        other, start = replace_in_source(changes, source, self.source_tokenizer.encode), self.start(source)
        check_places(changes, self.source_tokenizer, self.target_tokenizer, len(start))
        forced = forced_prefix(changes, [*start, *written], self.target_tokenizer.encode)[len(start) :]
        check_length(self.model, [*start, *forced])
        return other, forced


class TranslationDecoder(TokenDecoder):
    """A translator in token ids."""

    def __init__(self, translator: Translator, to: str | None = None, **options: Any) -> None:
        self.translator, self.to = translator, to
        self.options = decode_config(translator.options, {**options, "nbest": 1})
        self.model: Any = translator.model
        self.source_tokenizer, self.target_tokenizer = translator.tokenizers.source, translator.tokenizers.target
        self.device = next(translator.model.parameters()).device

    def encode(self, text: str) -> list[int]:
        return self.translator.read(text, self.to)

    def start(self, source: list[int]) -> list[int]:
        return [*self.translator.token_template.start]

    def decode(self, source: list[int], forced: list[int]) -> list[int]:
        template = replace(self.translator.token_template, before=(), after=(), start=(*self.start(source), *forced))
        longest = self.model.config.max_len
        ((best, *_),) = decode(self.model, [source], self.options, longest, self.device, token_template=template)
        return [*best.tokens, *([self.model.config.eos_token_id] if best.ended else [])]

    @torch.inference_mode()
    def log_probs(self, source: list[int], written: list[int]) -> list[float]:
        start = self.start(source)
        read, wanted = (torch.tensor([ids], device=self.device) for ids in ([*start, *written][:-1], written))
        logits = self.model(torch.tensor([source], device=self.device), read)[:, len(start) - 1 :]
        return logits.float().log_softmax(-1).gather(2, wanted[..., None])[0, :, 0].tolist()

    def words(self, source: list[int], written: list[int]) -> InputAndOutput:
        target = group_words(self.target_tokenizer, [*self.start(source), *written])
        return InputAndOutput(group_words(self.source_tokenizer, source), target)


class TextDecoder(TokenDecoder):
    """A language model in token ids; its source is the prompt."""

    def __init__(self, generator: Generator, to: str | None = None, **options: Any) -> None:
        if to is not None:
            raise RegardError(f"this model writes on and has no languages to translate to: leave out --to {to}")
        self.generator, self.options = generator, generator.decode_options(**{**options, "n": 1})
        self.model = generator.model
        self.source_tokenizer = self.target_tokenizer = generator.tokenizer

    def encode(self, text: str) -> list[int]:
        return self.generator.framed(text)

    def start(self, source: list[int]) -> list[int]:
        return source

    def decode(self, source: list[int], forced: list[int]) -> list[int]:
        prompt = [*source, *forced]
        streamer = self.generator._teller(prompt, self.options)

        def receive(row: int, token: int) -> bool:
            streamer.push(token)
            return streamer.stopped

        (row,) = generate(self.generator.model, [prompt], self.options, receive)
        return [*row.tokens, *([self.generator.model.config.eos_token_id] if row.end == "end" else [])]

    def log_probs(self, source: list[int], written: list[int]) -> list[float]:
        """Return the log-probabilities of as many tokens as fit: after a longer prompt, fewer may."""
        read = [*source, *written][: max_length_of(self.generator.model)]
        (scored,) = token_log_probs(self.generator.model, [read], self.options)
        return scored[len(source) - 1 :]

    def words(self, source: list[int], written: list[int]) -> InputAndOutput:
        both = group_words(self.target_tokenizer, [*source, *written])
        return InputAndOutput(group_words(self.source_tokenizer, source), both)
