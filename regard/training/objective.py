"""A batch to a loss. Every objective takes the inputs of a batch, labels last, and gives three sums, (3,): the loss to
descend, the plain loss to report, and how many answers they are over.

Sums and not means, so that batches of different sizes weigh right when they are accumulated.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.config import ModelConfig, TrainConfig
from regard.models.classifier import Classifier
from regard.models.gpt import GPT
from regard.text.tokenizer import PAD


class Objective(nn.Module):
    """Cross-entropy of the right token in each place, or of the right class.

    Smoothing by e puts e/V of the probability on each of the V answers and the rest on the right one.
    """

    passes = 1  # through the model, for each batch
    unscored: float = PAD  # the label of what is not

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing = model, label_smoothing
        self.absent = len(getattr(model, "config", ModelConfig()).absent)  # answers that are never given: -inf

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.losses(self.model(*inputs[:-1]), inputs[-1])

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        """logits (..., V), labels (...)"""
        logits = logits.float()
        log_z = logits.logsumexp(-1)
        scored = labels != self.unscored
        nll = log_z - logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        nll = nll.where(scored, 0)  # not `* scored`: where PAD is never said, its logit is -inf
        loss = nll.sum()
        if self.label_smoothing:
            even = (log_z - self.mean(logits)) * scored
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * even.sum()
        return torch.stack([loss, nll.sum(), scored.sum()])

    def mean(self, logits: Tensor) -> Tensor:
        """Over the answers that can be given. Nothing is picked out by a list, which a CUDA graph could not replay."""
        if not self.absent:
            return logits.mean(-1)
        return logits.masked_fill(logits == -torch.inf, 0).sum(-1) / (logits.shape[-1] - self.absent)


class RDropObjective(Objective):
    """R-Drop: read each batch twice under different dropout, and ask the two answers to agree.

    loss = mean of the two smoothed losses + weight/2 * (KL(p||q) + KL(q||p))/2. Strong medicine for small corpora, at twice
    the work a step.
    """

    passes = 2

    def __init__(self, model: nn.Module, label_smoothing: float, weight: float) -> None:
        super().__init__(model, label_smoothing)
        self.weight = weight

    def forward(self, *inputs: Tensor) -> Tensor:
        return super().forward(*(torch.cat([x, x]) for x in inputs))

    def losses(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums = super().losses(logits, labels) / 2
        p, q = logits.float().log_softmax(-1).chunk(2)  # (B, T, V) each
        apart = (p - q).masked_fill(p == -torch.inf, 0) if self.absent else p - q
        divergence = ((p.exp() - q.exp()) * apart).sum(-1)  # (B, T), KL(p||q) + KL(q||p)
        scored = (labels != self.unscored).chunk(2)[0]
        nothing = sums.new_zeros(())
        return sums + torch.stack([self.weight / 4 * (divergence * scored).sum(), nothing, nothing])


def token_objective(model: nn.Module, config: TrainConfig) -> Objective:
    if config.r_drop > 0:
        return RDropObjective(model, config.label_smoothing, config.r_drop)
    return Objective(model, config.label_smoothing)


class PackedObjective(Objective):
    """The next token, in rows of several documents that do not see each other: (ids, positions, labels)."""

    def forward(self, *inputs: Tensor) -> Tensor:
        ids, positions, labels = inputs
        assert isinstance(self.model, GPT)
        return self.losses(self.model.packed(ids, positions), labels)


class ClassObjective(Objective):
    """The right class of each row, or the right tag of each token; -1 is not scored."""

    unscored = -1

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0) -> None:
        super().__init__(model, label_smoothing)
        self.absent = 0  # a class is no token


class AuxiliaryObjective(ClassObjective):
    """GPT's fine-tuning: go on predicting the text while learning to classify it, loss = L(class) + weight * L(text), the
    latter a mean over the row's tokens."""

    def __init__(self, model: nn.Module, label_smoothing: float, weight: float) -> None:
        super().__init__(model, label_smoothing)
        self.weight = weight

    def forward(self, *inputs: Tensor) -> Tensor:
        ids, types, labels = inputs
        model = self.model
        assert isinstance(model, Classifier)
        assert isinstance(model.body, GPT)
        hidden = model.hidden(ids, types)
        text = self.text_losses(model.body.head(hidden[:, :-1]), ids[:, 1:])  # (B,)
        sums = self.losses(model.answer(hidden, ids), labels)
        nothing = sums.new_zeros(())
        scored = (labels if labels.dim() == 1 else labels.amax(1)) != self.unscored
        return sums + torch.stack([self.weight * (text * scored).sum(), nothing, nothing])

    def text_losses(self, logits: Tensor, following: Tensor) -> Tensor:
        scored = following != PAD
        logits = logits.float().transpose(1, 2)  # (B, V, T)
        nll = nn.functional.cross_entropy(logits, following, ignore_index=PAD, reduction="none")
        return nll.sum(1) / scored.sum(1).clamp(min=1)


class RegressionObjective(Objective):
    """The squared error of a number for each row; NaN is not scored."""

    def losses(self, answers: Tensor, labels: Tensor) -> Tensor:
        scored = ~labels.isnan()
        error = ((answers.float().squeeze(-1) - labels.nan_to_num()) ** 2 * scored).sum()
        return torch.stack([error, error, scored.sum()])
