"""Truncated back-propagation through time (BPTT): objectives of recurrent language models.

A text of any length is read in pieces. The recurrent state is carried over from batch to batch, the gradient is not.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from regard.config import TrainConfig
from regard.models.model import StatefulLanguageModel
from regard.text.special_tokens import PAD
from regard.training.objective import Objective


class RecurrentObjective(Objective):
    """Next-token cross-entropy of (ids, labels), each row from a zero state, with the regularizers of AWD-LSTM.

    With h the output of the last layer: loss + ar_weight * mean(dropout(h)^2) + tar_weight * mean((h_t - h_t-1)^2):
    activation regularization (AR) keeps h small, temporal activation regularization (TAR) makes it change slowly.
    """

    def __init__(
        self,
        model: StatefulLanguageModel,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        ar_weight: float = 0.0,
        tar_weight: float = 0.0,
    ) -> None:
        super().__init__(model, label_smoothing, z_loss)
        self.ar_weight, self.tar_weight = ar_weight, tar_weight

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the three sums (3,) for ids and labels, (B, T) each."""
        ids, labels = inputs
        return self.regularized_loss(cast(StatefulLanguageModel, self.model).hidden(ids)[0], labels)

    def regularized_loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the three sums for hidden states (B, T, C) and labels (B, T), with AR and TAR added to the first."""
        dropped = cast(StatefulLanguageModel, self.model).output_dropout(hidden)
        sums = self.loss_from_hidden(dropped, labels)
        if not (self.ar_weight or self.tar_weight):
            return sums
        scored = labels != PAD
        size = dropped.float().square().mean(-1)  # (B, T)
        change = hidden.float().diff(dim=1).square().mean(-1)  # (B, T - 1)
        penalty = self.ar_weight * masked_mean(size, scored) + self.tar_weight * masked_mean(change, scored[:, 1:])
        nothing = sums.new_zeros(())
        return sums + torch.stack([penalty * scored.sum(), nothing, nothing])


def masked_mean(x: Tensor, counted: Tensor) -> Tensor:
    """Return the mean of x over the places that are counted."""
    return (x * counted).sum() / counted.sum().clamp(min=1)


class StatefulObjective(RecurrentObjective):
    """Truncated BPTT over (ids, fresh, labels): each stream starts from its state after the last batch.

    Streams that are `fresh` start from zeros. The states are buffers that are written in place, because a CUDA graph
    reads and writes fixed memory.
    """

    def __init__(self, model: StatefulLanguageModel, streams: int, *weights: float) -> None:
        super().__init__(model, *weights)
        for i, x in enumerate(model.start(streams)):
            self.register_buffer(f"state{i}", x)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return tuple(self.buffers(recurse=False))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the three sums (3,) for ids (B, T), fresh (B,) and labels (B, T), and store the states after the batch."""
        ids, fresh, labels = inputs
        before = tuple(x.masked_fill(fresh[:, None], 0) for x in self.state)
        hidden, after = cast(StatefulLanguageModel, self.model).hidden(ids, before)
        for place, x in zip(self.state, after, strict=True):
            place.copy_(x.detach())
        return self.regularized_loss(hidden, labels)


def make_recurrent_objective(model: StatefulLanguageModel, config: TrainConfig, streams: int) -> Objective:
    """Return the objective of a recurrent language model; it keeps states if `train.carry_state` is set."""
    weights = (config.label_smoothing, config.z_loss, config.ar_weight, config.tar_weight)
    return StatefulObjective(model, streams, *weights) if config.carry_state else RecurrentObjective(model, *weights)
