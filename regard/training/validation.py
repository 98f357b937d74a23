"""Validation loss: the summed loss of a model over given batches (for texts, their negative log-likelihood)."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from regard.data.batches import Batch
from regard.device import autocast
from regard.training.objective import Objective

BATCH_TOKENS = 4096


@torch.inference_mode()
def total_loss(
    objective: Objective,
    batches: Iterable[Batch],
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """Return the plain loss summed over all scored labels (in nats for likelihoods), and their number."""
    total, scored = 0.0, 0
    for batch in batches:
        with autocast(device, dtype):
            total += objective(*batch.to(device).inputs)[1].item()
        scored += batch.tokens
        poll()
    return total, scored
