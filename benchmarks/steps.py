"""Regard's training step as the training loop calls it, and its batches: random ones, or real ones that are prefetched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from common import compiled_graphs, wall
from torch import nn

from regard.config import ModelConfig, TrainConfig
from regard.data.batches import Batch, Batches, Cursor, prefetch
from regard.device import set_up_device
from regard.training.objective import make_token_objective
from regard.training.training_step import TrainingStep

FIRST = 5  # the first id after the special tokens
Step = Callable[[Batch], Any]


class RegardStep:
    """Regard's training step."""

    def __init__(self, model: nn.Module, config: TrainConfig, tiny: bool) -> None:
        device, dtype = set_up_device(replace(config, threads=int(tiny)))  # tiny models need one thread only
        objective = make_token_objective(model.to(device).train(), config)
        self.step = TrainingStep(objective, config, device, dtype)

    def __call__(self, batch: Batch) -> None:
        self.step([batch], 1e-4)

    def check(self) -> None:
        """Raise if a loss was not finite: later steps did no work, so their time means nothing."""
        if self.step.updater.first_bad_step(0) is not None:
            raise AssertionError("the loss was not finite: what was timed is no training")


def random_batch(config: ModelConfig, rows: int, length: int, device: torch.device) -> Batch:
    """Return a batch in which every position holds a token and is scored."""
    inputs = 2 if config.architecture == "gpt" else 3
    words = torch.randint(FIRST, config.target_vocab, (inputs, rows, length))
    batch = Batch(tuple(words), rows * length)
    return batch.pin() if device.type == "cuda" else batch


@dataclass(frozen=True)
class TrainingSpeed:
    """The speed of training on real batches."""

    first: float  # seconds of the warm-up
    graphs: int  # compiled during the warm-up
    updates: float  # per second, after the warm-up
    tokens: float  # scored target tokens per second


def time_batches(step: Step, batches: Batches, device: torch.device, warm: int, timed: int) -> TrainingSpeed:
    """Train on `warm` and then on `timed` batches as a run gets them, prefetched by a thread; time the latter."""
    stream, tokens = prefetch(batches.iterate_from(Cursor()), pin=device.type == "cuda"), 0

    def work(n: int) -> None:
        nonlocal tokens
        for _ in range(n):
            batch, _ = next(stream)
            tokens += batch.tokens
            step(batch)

    try:
        first, graphs, tokens = wall(lambda: work(warm), device), compiled_graphs(), 0
        clock = wall(lambda: work(timed), device)
    finally:
        stream.close()  # type: ignore[attr-defined]
    if isinstance(step, RegardStep):
        step.check()
    return TrainingSpeed(first, graphs, timed / clock, tokens / clock)
