"""A batch to a loss: label-smoothed cross-entropy of the next target token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.data.batches import Batch
from regard.text.tokenizer import PAD


class TranslationObjective(nn.Module):
    """Sums over the scored tokens, (2,): the smoothed loss to descend, and the plain negative log-likelihood to report.

    Sums and not means, so that batches of different sizes weigh right when they are accumulated.
    Smoothing by e puts e/V of the probability on each piece of the vocabulary and the rest on the right one.
    """

    def __init__(self, model: nn.Module, label_smoothing: float) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        return self.losses(self.model(source, target), labels)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (B, T, V), labels (B, T)"""
        logits = logits.float()
        log_z = logits.logsumexp(-1)  # (B, T)
        scored = labels != PAD
        nll = (log_z - logits.gather(-1, labels[..., None]).squeeze(-1)) * scored
        even = (log_z - logits.mean(-1)) * scored  # cross-entropy against the uniform distribution
        loss = (1 - self.label_smoothing) * nll.sum() + self.label_smoothing * even.sum()
        return torch.stack([loss, nll.sum()])

    def of(self, batch: Batch) -> Tensor:
        return self(batch.source, batch.target, batch.labels)
