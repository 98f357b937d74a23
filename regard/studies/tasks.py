"""Two tasks that are learned at one length and tested at longer ones: predict the characters of a text, and copy a string.

A task gives training batches of inputs and labels (B, T), and measures a model at n times the trained length. Ids: 0 is
padding; a label of 0 is not scored.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.data import toy
from regard.data.parallel_corpus import read_lines
from regard.device import autocast, pick_precision
from regard.errors import RegardError
from regard.models.gpt import GPT
from regard.text.special_tokens import PAD


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of the study, beside the scheme, the text and the machine."""

    length: int = 128  # L, the trained length
    multiples: tuple[int, ...] = (1, 2, 4, 8)  # of L, the tested ones
    layers: int = 4
    width: int = 256
    heads: int = 4
    d_ff: int = 1024
    lm_dropout: float = 0.1
    copy_dropout: float = 0.0
    batch: int = 64
    steps: int = 2000
    lr: float = 1e-3
    windows: int = 512  # of the test text
    strings: int = 256  # to copy, at each length
    symbols: int = 32  # a string is made of
    sentences: int = 20000  # of the embedded corpus, where no text is given
    seed: int = 0


QUICK = Settings(
    length=32, layers=2, width=64, heads=2, d_ff=128, batch=16, steps=40, windows=16, strings=16, sentences=2000
)

Batch = tuple[Tensor, Tensor]  # inputs and labels, (B, T) each


class Task(Protocol):
    vocab: int

    def batches(self, steps: int, device: torch.device) -> Iterator[Batch]:
        """The same ones every time."""

    def measure(self, model: GPT, multiple: int) -> dict[str, Any]:
        """Scores at `multiple` times the trained length."""


def logits_of(model: GPT, inputs: Tensor, labels: Tensor, batch_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(logits (b, T, V) in fp32, labels (b, T)) of a few rows at a time, in the precision of training, without dropout."""
    device = next(model.parameters()).device
    rows = max(1, batch_tokens // inputs.shape[1])
    model.eval()
    for x, y in zip(inputs.split(rows), labels.split(rows), strict=True):
        with torch.inference_mode(), autocast(device, pick_precision("auto", device)):
            logits = model(x.to(device)).float()
        yield logits, y.to(device)


# ---- predict characters -----------------------------------------------------------------------------------------------

UNKNOWN, FIRST = 1, 2  # a character that the training text does not have, and the first of those it has


def read_text(data: Path | None, sentences: int) -> str:
    """A text file (which may be compressed), or English sentences of the embedded corpus."""
    lines = read_lines(data) if data else (english for english, _ in toy.pairs(sentences))
    return "\n".join(lines)


class Text:
    """The first 90% of the text are for training, 5% for validation, 5% for the test.

    Tested lengths all predict the same characters, from more or fewer characters before them: windows of every length end
    at the same places, and the blocks of L characters at their ends do not overlap.
    """

    def __init__(self, text: str, s: Settings) -> None:
        self.s, self.sha256 = s, hashlib.sha256(text.encode()).hexdigest()
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        cuts = [len(codes) * 90 // 100, len(codes) * 95 // 100]
        longest = max(s.multiples) * s.length
        if min(np.diff([*cuts, len(codes)])) <= longest:
            least = 20 * (longest + 1)  # of which 5% are a window and the character after it
            raise RegardError(f"the text has {len(codes):,} characters: give one of at least {least:,}")
        known = np.unique(codes[: cuts[0]])
        place = np.searchsorted(known, codes).clip(max=len(known) - 1)
        ids = np.where(known[place] == codes, place + FIRST, UNKNOWN)
        self.vocab = len(known) + FIRST
        self.train, self.valid, self.test = (torch.from_numpy(part) for part in np.split(ids, cuts))

    def batches(self, steps: int, device: torch.device) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.s.seed)
        begins = torch.randint(len(self.train) - self.s.length, (steps, self.s.batch, 1), generator=generator).to(
            device
        )
        text, within = self.train.to(device), torch.arange(self.s.length + 1, device=device)
        for begin in begins:
            ids = text[begin + within]  # (B, L + 1)
            yield ids[:, :-1], ids[:, 1:]

    def windows(self, text: Tensor, multiple: int) -> Batch:
        """Inputs and labels (W, multiple * L) of windows that end at the same places whatever the multiple."""
        length, longest = self.s.length, max(self.s.multiples) * self.s.length
        fit = (len(text) - 1 - longest) // length + 1
        chosen = torch.linspace(0, fit - 1, min(fit, self.s.windows)).round().long()
        within = torch.arange(-multiple * length, 1)
        ids = text[(longest + chosen * length)[:, None] + within]
        return ids[:, :-1], ids[:, 1:]

    def measure(self, model: GPT, multiple: int) -> dict[str, Any]:
        """Bits per character: over whole windows, over their last L characters, and along the window in steps of L/4."""
        bits = self.bits(model, self.test, multiple)
        along = bits.mean(0).view(-1, self.s.length // 4).mean(1)
        return {"last": bits[:, -self.s.length :].mean().item(), "whole": bits.mean().item(), "along": along.tolist()}

    def bits(self, model: GPT, text: Tensor, multiple: int) -> Tensor:
        """-log2 p of each character of each window, (W, multiple * L) fp64."""
        inputs, labels = self.windows(text, multiple)
        parts = [
            F.cross_entropy(logits.transpose(1, 2), y, reduction="none").double().cpu()
            for logits, y in logits_of(model, inputs, labels, self.s.batch * self.s.length)
        ]
        return torch.cat(parts) / math.log(2)


# ---- copy -------------------------------------------------------------------------------------------------------------

SEPARATOR, FIRST_SYMBOL = 1, 2


def copies(lengths: Tensor, width: int, symbols: int, generator: torch.Generator) -> Batch:
    """m random symbols, a separator, the same m symbols, padding to `width`; only the second m are scored. lengths (B,)."""
    m, at = lengths[:, None], torch.arange(width + 1)
    string = torch.randint(FIRST_SYMBOL, FIRST_SYMBOL + symbols, (len(lengths), width + 1), generator=generator)
    ids = string.gather(1, torch.where(at < m, at, at - m - 1).clamp(min=0))  # at the separator: any
    ids = ids.masked_fill(at == m, SEPARATOR).masked_fill(at > 2 * m, PAD)
    return ids[:, :-1], ids[:, 1:].masked_fill(at[:-1] < m, PAD)


class Copy:
    """Strings of 4 to L/2 - 1 symbols in training, of half the tested length less one in the test: 2m + 1 ids in all."""

    def __init__(self, s: Settings) -> None:
        self.s, self.vocab = s, FIRST_SYMBOL + s.symbols

    def batches(self, steps: int, device: torch.device) -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(self.s.seed)
        for _ in range(steps):
            lengths = torch.randint(4, self.s.length // 2, (self.s.batch,), generator=generator)
            inputs, labels = copies(lengths, self.s.length, self.s.symbols, generator)
            yield inputs.to(device, non_blocking=True), labels.to(device, non_blocking=True)

    def measure(self, model: GPT, multiple: int) -> dict[str, Any]:
        """The shares of symbols and of whole strings that are right, each symbol after the true ones before it."""
        width, generator = multiple * self.s.length, torch.Generator().manual_seed(self.s.seed + 1)
        lengths = torch.full((self.s.strings,), width // 2 - 1)
        inputs, labels = copies(lengths, width, self.s.symbols, generator)
        right = torch.cat(
            [
                (logits.argmax(-1) == y)[y != PAD].view(len(y), -1).cpu()
                for logits, y in logits_of(model, inputs, labels, self.s.batch * self.s.length)
            ]
        )  # (strings, m)
        return {"symbols": right.double().mean().item(), "strings": right.all(1).double().mean().item()}
