"""The learning rate at each step, as a factor of its peak: linear warm-up, then one of four ways down."""

from __future__ import annotations

import math

from regard.config import TrainConfig


def learning_rate(config: TrainConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 1."""
    warmup = max(1, config.warmup)
    if step <= warmup:
        return config.lr * step / warmup
    done = min(1.0, (step - warmup) / max(1, config.steps - warmup))  # 0 .. 1 after warm-up
    factor = {
        "inverse-sqrt": math.sqrt(warmup / step),
        "cosine": 0.5 * (1 + math.cos(math.pi * done)),
        "linear": 1 - done,
        "constant": 1.0,
    }[config.schedule]
    return config.lr * factor
