"""Recurrent language models learn from a text of any length in pieces: the state goes on from batch to batch, the gradient
does not (truncated back-propagation through time)."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from regard.config import TrainConfig
from regard.models.model import StatefulLanguageModel
from regard.text.special_tokens import PAD
from regard.training.objective import Objective


class RecurrentObjective(Objective):
    """(ids, labels), each row from a state of zeros. What the last layer gives, h, may be asked to be small and to change
    slowly: loss + ar_weight * mean(dropped h^2) + tar_weight * mean((h_t - h_t-1)^2), AR and TAR of AWD-LSTM."""

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
        ids, labels = inputs
        return self.regularised(cast(StatefulLanguageModel, self.model).hidden(ids)[0], labels)

    def regularised(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """hidden (B, T, C), labels (B, T)"""
        dropped = cast(StatefulLanguageModel, self.model).output_dropout(hidden)
        sums = self.score(dropped, labels)
        if not (self.ar_weight or self.tar_weight):
            return sums
        scored = labels != PAD
        size = dropped.float().square().mean(-1)  # (B, T)
        change = hidden.float().diff(dim=1).square().mean(-1)  # (B, T - 1)
        asked = self.ar_weight * mean(size, scored) + self.tar_weight * mean(change, scored[:, 1:])
        nothing = sums.new_zeros(())
        return sums + torch.stack([asked * scored.sum(), nothing, nothing])


def mean(x: Tensor, counted: Tensor) -> Tensor:
    return (x * counted).sum() / counted.sum().clamp(min=1)


class StatefulObjective(RecurrentObjective):
    """(ids, fresh, labels): each stream goes on from the state that its last batch left, or from zeros where it is fresh.

    The states are buffers that are written in place, so that a recorded step finds them where they were."""

    def __init__(self, model: StatefulLanguageModel, streams: int, *weights: float) -> None:
        super().__init__(model, *weights)
        for i, x in enumerate(model.start(streams)):
            self.register_buffer(f"state{i}", x)

    @property
    def state(self) -> tuple[Tensor, ...]:
        return tuple(self.buffers(recurse=False))

    def forward(self, *inputs: Tensor) -> Tensor:
        ids, fresh, labels = inputs
        before = tuple(x.masked_fill(fresh[:, None], 0) for x in self.state)
        hidden, after = cast(StatefulLanguageModel, self.model).hidden(ids, before)
        for place, x in zip(self.state, after, strict=True):
            place.copy_(x.detach())
        return self.regularised(hidden, labels)


def recurrent_objective(model: StatefulLanguageModel, config: TrainConfig, streams: int) -> Objective:
    weights = (config.label_smoothing, config.z_loss, config.ar_weight, config.tar_weight)
    return StatefulObjective(model, streams, *weights) if config.carry_state else RecurrentObjective(model, *weights)
