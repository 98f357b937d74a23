"""Training throughput: scored tokens per second, and model FLOPs utilization (MFU).

MFU is the share of the device's peak arithmetic that the model's own FLOPs take, without padding.
"""

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


class ThroughputMeter:
    """A counter of tokens, FLOPs and training time between two readings; validating and saving are not timed."""

    def __init__(self, model: ModelConfig, passes: int, device: torch.device, devices: int = 1) -> None:
        peak = peak_flops(device)
        self.model, self.passes, self.peak = model, passes, peak * devices if peak else None
        self.cost = Cost(model)
        self.mark = time.perf_counter()
        self.tokens, self.seconds = 0, 0.0
        self.rows: Counter[tuple[int, int]] = Counter()  # rows without padding, by source and target length

    @property
    def flops(self) -> float:
        """FLOPs of the batches since the last reading; the backward pass costs twice the forward pass."""
        forward = sum(rows * self.cost.fitted_flops(*at) for at, rows in self.rows.items())
        return 3 * self.passes * forward

    def count(self, batch: Batch) -> None:
        """Count a batch, without its padding, which is no useful work."""
        rows, *at = batch_extent(self.model, batch)
        self.tokens += batch.tokens
        self.rows[at[0], at[1]] += rows * non_padding_share(self.model, batch)  # type: ignore[assignment]

    def lap(self) -> float:
        """Return the seconds of training since the last lap or start; the caller has synchronized with the device."""
        now = time.perf_counter()
        lap, self.mark = now - self.mark, now
        self.seconds += lap
        return lap

    def start(self) -> None:
        """Start the clock again: the time since the last lap was not training."""
        self.mark = time.perf_counter()

    def read(self) -> dict[str, float]:
        """Return tokens_per_s, and mfu where the device's peak is known, since the last reading."""
        seconds = max(self.seconds, 1e-9)
        speed = {"tokens_per_s": self.tokens / seconds}
        if self.peak and self.passes:
            speed["mfu"] = self.flops / seconds / self.peak
        self.tokens, self.seconds = 0, 0.0
        self.rows.clear()
        return speed


def batch_extent(model: ModelConfig, batch: Batch) -> tuple[int, int, int]:
    """Return the number of rows of a batch, and the lengths of its source and target."""
    return len(batch.inputs[0]), *architecture_of(model).lengths(model, *batch.inputs)


def non_padding_share(model: ModelConfig, batch: Batch) -> float:
    """Return the share of a batch that is not padding: by the labels where every token is scored, else by the inputs."""
    if architecture_of(model).sees_images:
        return 1.0
    if architecture_of(model).fills_blanks or batch.labels.dim() == 1:
        return (batch.inputs[0] != PAD).double().mean().item()
    return batch.tokens / batch.labels.numel()
