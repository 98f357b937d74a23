"""Regard's training step as the training loop calls it, and batches for it: random ones, or real ones prepared ahead."""

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

FIRST = 5  # the first id that is a word
Step = Callable[[Batch], Any]


class OwnStep:
    def __init__(self, model: nn.Module, config: TrainConfig, tiny: bool) -> None:
        """Tiny models have no work for more than one thread."""
        device, dtype = set_up_device(replace(config, threads=int(tiny)))
        objective = make_token_objective(model.to(device).train(), config)
        self.step = TrainingStep(objective, config, device, dtype)

    def __call__(self, batch: Batch) -> None:
        self.step([batch], 1e-4)

    def check(self) -> None:
        """A step after a loss that was not finite does no work, and its time means nothing."""
        if self.step.updater.first_bad_step(0) is not None:
            raise AssertionError("the loss was not finite: what was timed is no training")


def random_batch(config: ModelConfig, rows: int, length: int, device: torch.device) -> Batch:
    """Every position holds a word and is scored."""
    inputs = 2 if config.architecture == "gpt" else 3
    words = torch.randint(FIRST, config.target_vocab, (inputs, rows, length))
    batch = Batch(tuple(words), rows * length)
    return batch.pin() if device.type == "cuda" else batch


@dataclass(frozen=True)
class Ran:
    first: float  # seconds of the warm-up
    graphs: int  # compiled in it
    updates: float  # a second, from then on
    tokens: float  # of the target, scored, a second


def run_through(step: Step, batches: Batches, device: torch.device, warm: int, timed: int) -> Ran:
    """`warm` and then `timed` batches as a run gets them: prepared ahead by a thread, whole epochs for the clock."""
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
    if isinstance(step, OwnStep):
        step.check()
    return Ran(first, graphs, timed / clock, tokens / clock)
