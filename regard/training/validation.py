"""What a model loses on given data: for texts and translations, how unlikely it finds them."""

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
    """The plain loss summed over all that is scored (nats for likelihoods), and how many that are."""
    total, scored = 0.0, 0
    for batch in batches:
        with autocast(device, dtype):
            total += objective(*batch.to(device).inputs)[1].item()
        scored += batch.tokens
        poll()
    return total, scored
