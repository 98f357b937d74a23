"""The tasks of `regard study long-range`, made on the fly: copying, selective copying, associative recall, and a text.

A task gives batches of inputs and labels (B, T) that are made on the device, and scores a model on sequences that it has not
seen. A label belongs to the token at its own place, and labels of PAD (-1) are not scored. Id 0 is not used, id 1 is a
blank, id 2 asks for an answer; symbols, keys and values follow.

| task              | sequence                                            | labels                            |
|-------------------|-----------------------------------------------------|-----------------------------------|
| copying           | m symbols, blanks, m times "answer"                 | the symbols, at the answers       |
| selective-copying | m symbols scattered among blanks, m times "answer"  | the symbols, in their order       |
| recall            | n pairs of key and value, then one of the keys at   | its value, where the key is asked |
|                   | every place, at random                              |                                   |
| text              | characters                                          | the next character                |

Copying is the test of Arjovsky et al. (2016), selective copying that of Gu and Dao (2023), and associative recall with
several queries (MQAR) that of Arora et al. (2024). They ask for each key once, and leave the other places blank; many
questions teach the same in fewer steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.device import autocast, pick_precision
from regard.errors import RegardError
from regard.text.special_tokens import PAD

BLANK, ANSWER, FIRST = 1, 2, 3  # ids; the first symbol, key or character is 3
Batch = tuple[Tensor, Tensor]  # inputs and labels, (B, T) each


class LongRangeTask(Protocol):
    """A task: batches of any number of rows, and scores of a model."""

    @property
    def vocab(self) -> int:
        """The number of ids."""

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        """Return a training batch on the device of the generator."""

    def measure(self, model: Any, rows: int, generator: torch.Generator) -> dict[str, float]:
        """Return the scores of a model on held-out sequences."""


def random_permutations(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Return a random permutation of 0 .. width - 1 in each row, (rows, width)."""
    return torch.rand(rows, width, generator=generator, device=generator.device).argsort(1)


def share_right(model: Any, batch: Batch) -> float:
    """Return the share of scored labels that a model predicts."""
    inputs, labels = batch
    device, right, scored = inputs.device, 0.0, 0
    model.eval()
    for x, y in zip(inputs.split(64), labels.split(64), strict=True):
        with torch.inference_mode(), autocast(device, pick_precision("auto", device)):
            found = model(x).argmax(-1)
        right += ((found == y) & (y != PAD)).sum().item()
        scored += int((y != PAD).sum())
    return right / scored


# ---- copying -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Copying:
    """Copying m symbols at the end of a sequence; they stand at its beginning, or are scattered among blanks."""

    length: int
    copied: int  # m
    symbols: int  # size of the alphabet
    scattered: bool = False

    @property
    def vocab(self) -> int:
        return FIRST + self.symbols

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        device, body = generator.device, self.length - self.copied
        symbols = torch.randint(FIRST, self.vocab, (rows, self.copied), generator=generator, device=device)
        if self.scattered:
            places = random_permutations(rows, body, generator)[:, : self.copied].sort(1).values
        else:
            places = torch.arange(self.copied, device=device).expand(rows, -1)
        inputs = torch.full((rows, self.length), BLANK, device=device).scatter(1, places, symbols)
        inputs[:, body:] = ANSWER
        labels = torch.full_like(inputs, PAD)
        labels[:, body:] = symbols
        return inputs, labels

    def measure(self, model: Any, rows: int, generator: torch.Generator) -> dict[str, float]:
        return {"accuracy": share_right(model, self.batch(rows, generator))}


# ---- associative recall --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Recall:
    """Associative recall: n pairs of key and value, then at every place one of the keys, whose value is asked."""

    length: int
    keys: int  # number of different keys, and of different values
    pairs: tuple[int, ...]  # the numbers of pairs; a row of a training batch has one of them

    @property
    def vocab(self) -> int:
        return FIRST + 2 * self.keys

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(self.pairs), (rows, 1), generator=generator, device=generator.device)
        return self.sequences(torch.tensor(self.pairs, device=generator.device)[chosen], generator)

    def sequences(self, n: Tensor, generator: torch.Generator) -> Batch:
        """Return rows with n (B, 1) pairs each."""
        rows, at = len(n), torch.arange(self.length, device=n.device)
        keys = FIRST + random_permutations(rows, self.keys, generator)  # (B, keys), all different; pair i has key i
        values = torch.randint(self.keys, (rows, self.keys), generator=generator, device=n.device) + FIRST + self.keys
        noise = torch.rand(rows, self.length, generator=generator, device=n.device)
        asked = (noise * n).long().minimum(n - 1)  # which pair; a product may be rounded to n
        asks = at >= 2 * n
        pair = torch.where(asks, asked, (at // 2).clamp(max=self.keys - 1))
        key, value = keys.gather(1, pair), values.gather(1, pair)
        return torch.where(asks | (at % 2 == 0), key, value), torch.where(asks, value, PAD)

    def measure(self, model: Any, rows: int, generator: torch.Generator) -> dict[str, float]:
        """Return the accuracy at each number of pairs."""
        each = {n: torch.full((rows, 1), n, device=generator.device) for n in self.pairs}
        return {str(n): share_right(model, self.sequences(many, generator)) for n, many in each.items()}


# ---- text ----------------------------------------------------------------------------------------------------------------


class Text:
    """A character model: the first 90% of a text for training, the rest for validation."""

    def __init__(self, text: str, length: int) -> None:
        codes = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        cut = len(codes) * 9 // 10
        if len(codes) - cut <= length:
            raise RegardError(f"the text has {len(codes):,} characters: give one of at least {10 * length + 10:,}")
        known, ids = np.unique(codes, return_inverse=True)
        self.length, self.vocab = length, FIRST + len(known)
        self.train, self.valid = torch.from_numpy(ids + FIRST).split([cut, len(codes) - cut])

    def batch(self, rows: int, generator: torch.Generator) -> Batch:
        device = generator.device
        self.train = self.train.to(device)
        begins = torch.randint(len(self.train) - self.length, (rows, 1), generator=generator, device=device)
        ids = self.train[begins + torch.arange(self.length + 1, device=device)]
        return ids[:, :-1], ids[:, 1:]

    def measure(self, model: Any, rows: int, generator: torch.Generator) -> dict[str, float]:
        """Return the mean loss, in nats a character, over the first `rows` pieces of the validation text."""
        device, n = generator.device, min(rows, (len(self.valid) - 1) // self.length)
        ids = self.valid.to(device)
        inputs, labels = (part.view(n, self.length) for part in (ids[: n * self.length], ids[1 : n * self.length + 1]))
        total = 0.0
        model.eval()
        for x, y in zip(inputs.split(64), labels.split(64), strict=True):
            with torch.inference_mode(), autocast(device, pick_precision("auto", device)):
                logits = model(x)
            total += F.cross_entropy(logits.float().flatten(0, 1), y.flatten(), reduction="sum").item()
        return {"loss": total / (n * self.length)}
