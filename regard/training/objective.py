"""A batch to a loss. Every objective takes the inputs of a batch, labels last, and gives three sums, (3,): the loss to
descend, the plain loss to report, and how many answers they are over.

Sums and not means, so that batches of different sizes weigh right when they are accumulated.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.kernels.cross_entropy import linear_cross_entropy
from regard.models.classification_model import ClassificationModel
from regard.text.special_tokens import PAD


class Objective(nn.Module):
    """Cross-entropy of the right token in each place.

    Smoothing by e puts e/V of the probability on each of the V answers and the rest on the right one; `z_loss` times
    (log Z)^2 keeps the logits near those whose exponentials sum to one.
    """

    passes = 1  # through the model, for each batch

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing, self.z_loss = model, label_smoothing, z_loss

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.score(cast(Any, self.model).read(*inputs[:-1]), inputs[-1])

    def score(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """hidden (B, T, C), labels (B, T)"""
        head = cast(Any, self.model).head
        if not hasattr(head, "weight"):  # packed for a CPU: no matrix to take apart
            return self.losses(head(hidden), labels)
        return token_losses(head, hidden, labels, smoothing=self.label_smoothing, z_loss=self.z_loss)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The same of logits (..., V) that are there as a whole, labels (...)."""
        logits = logits.float()
        log_z = logits.logsumexp(-1)
        scored = labels != PAD
        nll = log_z - logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        nll = nll.where(scored, 0)
        loss = nll.sum()
        if self.label_smoothing:
            even = (log_z - logits.mean(-1)) * scored
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * even.sum()
        if self.z_loss:
            loss = loss + self.z_loss * (log_z**2 * scored).sum()
        return torch.stack([loss, nll.sum(), scored.sum()])


class RDropObjective(Objective):
    """R-Drop: read each batch twice under different dropout, and ask the two answers to agree.

    loss = mean of the two smoothed losses + weight/2 * (KL(p||q) + KL(q||p))/2. Strong medicine for small corpora, at twice
    the work a step; and the divergence wants both distributions, so all logits are there at once.
    """

    passes = 2

    def __init__(self, model: nn.Module, label_smoothing: float, weight: float, z_loss: float = 0.0) -> None:
        super().__init__(model, label_smoothing, z_loss)
        self.weight = weight

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*(torch.cat([x, x]) for x in inputs))

    def score(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.losses(cast(Any, self.model).head(hidden), labels)

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums = super().losses(logits, labels) / 2
        p, q = logits.float().log_softmax(-1).chunk(2)  # (B, T, V) each
        divergence = ((p.exp() - q.exp()) * (p - q)).sum(-1)  # (B, T), KL(p||q) + KL(q||p)
        scored = (labels != PAD).chunk(2)[0]
        nothing = sums.new_zeros(())
        return sums + torch.stack([self.weight / 4 * (divergence * scored).sum(), nothing, nothing])


def token_objective(model: nn.Module, config: TrainConfig) -> Objective:
    if config.r_drop > 0:
        return RDropObjective(model, config.label_smoothing, config.r_drop, config.z_loss)
    return Objective(model, config.label_smoothing, config.z_loss)


def token_losses(head: Any, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Hidden vectors (B, T, C) and labels (B, T) to the three sums, by a head's matrix in chunks."""
    x = head.features(hidden).flatten(0, -2)
    return linear_cross_entropy(x, head.weight, head.bias, labels.flatten(), **options)


class PackedObjective(Objective):
    """The next token, in rows of several documents that do not see each other: (ids, positions, labels)."""

    def forward(self, *inputs: Tensor) -> Tensor:
        ids, positions, labels = inputs
        return self.score(cast(Any, self.model).read_packed(ids, positions), labels)


class AnswerObjective(Objective):
    """What a model answers in few numbers, all of them compared at once."""

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.losses(self.model(*inputs[:-1]), inputs[-1])


class ClassObjective(AnswerObjective):
    """The right class of each row, or the right tag of each token; PAD is not scored."""


class AuxiliaryObjective(ClassObjective):
    """GPT's fine-tuning: go on predicting the text while learning to classify it, loss = L(class) + weight * L(text), the
    latter a mean over the row's tokens."""

    def __init__(self, model: nn.Module, label_smoothing: float, weight: float) -> None:
        super().__init__(model, label_smoothing)
        self.weight = weight

    def forward(self, *inputs: Tensor) -> Tensor:
        ids, types, labels = inputs
        model = self.model
        assert isinstance(model, ClassificationModel)
        hidden = model.hidden(ids, types)
        sums = self.losses(model.answer(hidden, ids), labels)
        scored = (labels if labels.dim() == 1 else labels.amax(1)) != PAD
        nothing = sums.new_zeros(())
        return sums + torch.stack(
            [self.weight * self.text_loss(model.body.head, hidden, ids, scored), nothing, nothing]
        )

    def text_loss(self, head: Any, hidden: Tensor, ids: Tensor, scored: Tensor) -> Tensor:
        """Over the rows (B,) that are scored."""
        following = ids[:, 1:]
        shares = (scored / (following != PAD).sum(1).clamp(min=1))[:, None].expand_as(following)
        return token_losses(head, hidden[:, :-1], following, shares=shares.flatten())[0]


class RegressionObjective(AnswerObjective):
    """The squared error of a number for each row; NaN is not scored."""

    def losses(self, answers: Tensor, labels: Tensor) -> Tensor:
        scored = ~labels.isnan()
        error = ((answers.float().squeeze(-1) - labels.nan_to_num()) ** 2 * scored).sum()
        return torch.stack([error, error, scored.sum()])
