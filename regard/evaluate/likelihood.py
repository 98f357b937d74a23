"""How likely a model finds given translations."""

from __future__ import annotations

from collections.abc import Callable

import torch

from regard.data.batches import Batches
from regard.data.shards import PairStore
from regard.device import autocast
from regard.models.transformer import Transformer
from regard.training.objective import TranslationObjective

BATCH_TOKENS = 4096


@torch.inference_mode()
def negative_log_likelihood(
    model: Transformer,
    pairs: PairStore,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    poll: Callable[[], None] = lambda: None,
) -> tuple[float, int]:
    """-log p of all targets given their sources (nats), and the number of target tokens, end tokens included."""
    objective = TranslationObjective(model, label_smoothing=0.0)
    batches = Batches(pairs, BATCH_TOKENS, seed=0)
    total, tokens = 0.0, 0
    for width, rows in batches.plan(0):
        batch = batches.collate(width, rows)
        with autocast(device, dtype):
            total += objective.of(batch.to(device))[1].item()
        tokens += batch.tokens
        poll()
    return total, tokens
