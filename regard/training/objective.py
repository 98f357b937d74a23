"""A batch to a loss: label-smoothed cross-entropy of the next target token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.text.tokenizer import PAD


class TranslationObjective(nn.Module):
    """Sums over the scored tokens, (2,): the smoothed loss to descend, and the plain negative log-likelihood to report.

    Sums and not means, so that batches of different sizes weigh right when they are accumulated.
    Smoothing by e puts e/V of the probability on each piece of the vocabulary and the rest on the right one.
    """

    passes = 1  # through the model, for each batch

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


class RDropObjective(TranslationObjective):
    """R-Drop: read each batch twice under different dropout, and ask the two answers to agree.

    loss = mean of the two smoothed losses + weight/2 * (KL(p||q) + KL(q||p))/2. Strong medicine for small corpora, at twice
    the work a step.
    """

    passes = 2

    def __init__(self, model: nn.Module, label_smoothing: float, weight: float) -> None:
        super().__init__(model, label_smoothing)
        self.weight = weight

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        return self.losses(self.model(source.repeat(2, 1), target.repeat(2, 1)), labels.repeat(2, 1))

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums = super().losses(logits, labels) / 2
        p, q = logits.float().log_softmax(-1).chunk(2)  # (B, T, V) each
        divergence = ((p.exp() - q.exp()) * (p - q)).sum(-1)  # (B, T), KL(p||q) + KL(q||p)
        scored = (labels != PAD).chunk(2)[0]
        return sums + torch.stack([self.weight / 4 * (divergence * scored).sum(), sums.new_zeros(())])


def make_objective(model: nn.Module, config: TrainConfig) -> TranslationObjective:
    if config.r_drop > 0:
        return RDropObjective(model, config.label_smoothing, config.r_drop)
    return TranslationObjective(model, config.label_smoothing)
