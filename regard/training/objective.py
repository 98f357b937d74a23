"""Objectives: the training losses, with label smoothing, z-loss, R-Drop and auxiliary language modelling.

Every objective takes the inputs of a batch, labels last, and returns three sums, (3,): the loss to minimize, the plain loss
to report (negative log-likelihood or squared error), and the number of labels they are over. Sums, not means: with gradient
accumulation over batches of different sizes every label then has the same weight. An objective may return more sums behind
these, which are added up over batches and processes like them, and say what they mean (`describe_sums`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.kernels.cross_entropy import linear_cross_entropy
from regard.models.classification_model import ClassificationModel
from regard.text.special_tokens import PAD


class Objective(nn.Module):
    """Cross-entropy of the right token at each position; labels that are PAD are not scored.

    Label smoothing by e moves a share e of the target probability evenly onto all V tokens. The z-loss, `z_loss` times
    (log Z)^2, keeps the softmax normalizer Z near 1.
    """

    passes = 1  # forward passes through the model for each batch; 0: their number is not known before
    can_capture = True  # the forward pass can be captured in a CUDA graph: it does not wait for the host
    more_sums = 0  # how many sums are returned behind the three

    def __init__(self, model: nn.Module, label_smoothing: float = 0.0, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model, self.label_smoothing, self.z_loss = model, label_smoothing, z_loss

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the model on all inputs but the last, which are the labels, and return the three sums (3,)."""
        return self.loss_from_hidden(cast(Any, self.model).head_input(*inputs[:-1]), inputs[-1])

    def describe_sums(self, sums: Sequence[float]) -> dict[str, float]:
        """Return what the sums behind the three, over some steps, say: values by name, for the log."""
        return {}

    def loss_from_hidden(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the three sums for hidden states (B, T, C) and labels (B, T)."""
        head = cast(Any, self.model).head
        if not hasattr(head, "weight"):  # a head quantized for the CPU has no matrix to multiply with in chunks
            return self.loss_from_outputs(head(hidden), labels)
        return chunked_token_losses(head, hidden, labels, label_smoothing=self.label_smoothing, z_loss=self.z_loss)

    def loss_from_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the three sums for the model's outputs, here logits (..., V), and labels (...).

        Most losses do not come here: with a head that is a matrix, kernels/cross_entropy.py computes them from hidden
        vectors, label smoothing included.
        """
        logits = logits.float()
        log_z = logits.logsumexp(-1)
        scored = labels != PAD
        nll = log_z - logits.gather(-1, labels.clamp(min=0)[..., None]).squeeze(-1)
        nll = nll.where(scored, 0)
        loss = nll.sum()
        if self.label_smoothing:
            uniform = (log_z - logits.mean(-1)) * scored
            loss = (1 - self.label_smoothing) * loss + self.label_smoothing * uniform.sum()
        if self.z_loss:
            loss = loss + self.z_loss * (log_z**2 * scored).sum()
        return torch.stack([loss, nll.sum(), scored.sum()])


class RDropObjective(Objective):
    """R-Drop: each batch passes twice under different dropout, and the two output distributions are pulled together.

    loss = mean of the two smoothed losses + weight/2 * (KL(p||q) + KL(q||p))/2. It regularizes strongly, which helps on
    small corpora, and doubles the time of a step. The divergence needs both distributions, so all logits are in memory.
    """

    passes = 2

    def __init__(self, model: nn.Module, label_smoothing: float, weight: float, z_loss: float = 0.0) -> None:
        super().__init__(model, label_smoothing, z_loss)
        self.weight = weight

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run every row of the batch twice, (B, ...) -> (2B, ...), and return the three sums (3,)."""
        return super().forward(*(torch.cat([x, x]) for x in inputs))

    def loss_from_hidden(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.loss_from_outputs(cast(Any, self.model).head(hidden), labels)

    def loss_from_outputs(self, logits: Tensor, labels: Tensor) -> Tensor:
        sums = super().loss_from_outputs(logits, labels) / 2
        p, q = logits.float().log_softmax(-1).chunk(2)  # (B, T, V) each
        divergence = ((p.exp() - q.exp()) * (p - q)).sum(-1)  # (B, T), KL(p||q) + KL(q||p)
        scored = (labels != PAD).chunk(2)[0]
        nothing = sums.new_zeros(())
        return sums + torch.stack([self.weight / 4 * (divergence * scored).sum(), nothing, nothing])


def make_token_objective(model: nn.Module, config: TrainConfig) -> Objective:
    """Return the objective of a model that predicts tokens: with R-Drop if `train.r_drop` is set."""
    if config.r_drop > 0:
        return RDropObjective(model, config.label_smoothing, config.r_drop, config.z_loss)
    return Objective(model, config.label_smoothing, config.z_loss)


def chunked_token_losses(head: Any, hidden: Tensor, labels: Tensor, **options: Any) -> Tensor:
    """Return the three sums for hidden states (B, T, C) and labels (B, T), without all logits in memory at once."""
    x = head.features(hidden).flatten(0, -2)
    return linear_cross_entropy(x, head.weight, head.bias, labels.flatten(), **options)


class PackedObjective(Objective):
    """Next-token cross-entropy of (ids, positions, labels), rows of several documents that do not see each other."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the three sums (3,) for ids, positions and labels, (B, T) each."""
        ids, positions, labels = inputs
        return self.loss_from_hidden(cast(Any, self.model).packed_head_input(ids, positions), labels)


class OutputObjective(Objective):
    """An objective on the outputs of the model (few numbers a row or token) instead of on its hidden states."""

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the three sums (3,) for the model's outputs on all inputs but the last, which are the labels."""
        return self.loss_from_outputs(self.model(*inputs[:-1]), inputs[-1])


class ClassificationObjective(OutputObjective):
    """Cross-entropy of the right class of each row, or of the right tag of each token; PAD is not scored."""


class LanguageModelAuxiliaryObjective(ClassificationObjective):
    """GPT's fine-tuning with an auxiliary language-model loss: loss = L(class) + weight * L(text).

    L(text) is the mean next-token cross-entropy over the tokens of a row.
    """

    def __init__(self, model: nn.Module, label_smoothing: float, weight: float) -> None:
        super().__init__(model, label_smoothing)
        self.weight = weight

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the three sums (3,) for ids and types (B, T) and labels (B,) or (B, T)."""
        ids, types, labels = inputs
        model = self.model
        assert isinstance(model, ClassificationModel)
        hidden = model.hidden(ids, types)
        sums = self.loss_from_outputs(model.predict(hidden, ids), labels)
        scored = (labels if labels.dim() == 1 else labels.amax(1)) != PAD
        nothing = sums.new_zeros(())
        return sums + torch.stack(
            [self.weight * self.text_loss(model.body.head, hidden, ids, scored), nothing, nothing]
        )

    def text_loss(self, head: Any, hidden: Tensor, ids: Tensor, scored: Tensor) -> Tensor:
        """Return the language-model loss summed over the rows that are `scored`, (B,): for each a mean over its tokens."""
        following = ids[:, 1:]
        shares = (scored / (following != PAD).sum(1).clamp(min=1))[:, None].expand_as(following)
        return chunked_token_losses(head, hidden[:, :-1], following, shares=shares.flatten())[0]


class RegressionObjective(OutputObjective):
    """Squared error of one number for each row; labels that are NaN are not scored."""

    def loss_from_outputs(self, outputs: Tensor, labels: Tensor) -> Tensor:
        scored = ~labels.isnan()
        error = ((outputs.float().squeeze(-1) - labels.nan_to_num()) ** 2 * scored).sum()
        return torch.stack([error, error, scored.sum()])
