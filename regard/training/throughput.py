"""How fast training is: scored tokens a second, and the share of the device's arithmetic that does useful work (MFU)."""

from __future__ import annotations

import time
from collections import Counter

import torch

from regard.config import ModelConfig
from regard.data.batches import Batch
from regard.device import peak_flops
from regard.models.analysis.cost import Cost
from regard.models.architectures import architecture_of
from regard.text.special_tokens import PAD


class Meter:
    """Counts between two readings. The clock stands still while the loop validates and saves."""

    def __init__(self, model: ModelConfig, passes: int, device: torch.device) -> None:
        self.model, self.passes, self.peak = model, passes, peak_flops(device)
        self.cost = Cost(model)
        self.mark = time.perf_counter()
        self.tokens, self.seconds = 0, 0.0
        self.rows: Counter[tuple[int, int]] = Counter()  # of each pair of lengths, without padding

    @property
    def flops(self) -> float:
        """Of what was counted since the last reading."""
        forward = sum(rows * self.cost.fitted_flops(*at) for at, rows in self.rows.items())
        return 3 * self.passes * forward

    def count(self, batch: Batch) -> None:
        """Padding is work too, but not useful work: it does not count."""
        rows, *at = extent(self.model, batch)
        self.tokens += batch.tokens
        self.rows[at[0], at[1]] += rows * real_share(self.model, batch)  # type: ignore[assignment]

    def lap(self) -> float:
        """Seconds of training since the last lap or start; the caller has waited for the device."""
        now = time.perf_counter()
        lap, self.mark = now - self.mark, now
        self.seconds += lap
        return lap

    def start(self) -> None:
        """What was done since the last lap was not training."""
        self.mark = time.perf_counter()

    def read(self) -> dict[str, float]:
        """tokens_per_s, and mfu where the device's best is known, since the last reading."""
        seconds = max(self.seconds, 1e-9)
        speed = {"tokens_per_s": self.tokens / seconds}
        if self.peak:
            speed["mfu"] = self.flops / seconds / self.peak
        self.tokens, self.seconds = 0, 0.0
        self.rows.clear()
        return speed


def extent(model: ModelConfig, batch: Batch) -> tuple[int, int, int]:
    """Rows, and how long what is read and what is written are."""
    return len(batch.inputs[0]), *architecture_of(model).lengths(model, *batch.inputs)


def real_share(model: ModelConfig, batch: Batch) -> float:
    """How much of a batch is not padding: by what is scored where that is every token, else by what is read."""
    if architecture_of(model).sees_images:
        return 1.0
    if architecture_of(model).fills_blanks or batch.labels.dim() == 1:
        return (batch.inputs[0] != PAD).double().mean().item()
    return batch.tokens / batch.labels.numel()
