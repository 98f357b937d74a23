"""Feed-forward layers between recurrent layers, such as a mixture of experts between stacked LSTMs (Shazeer et al. 2017).

A recurrent layer is followed by

    x + dropout(sigmoid(f(x)))

where f is any feed-forward part, named by `model.recurrent_feedforward`. The sigmoid keeps the sum bounded however large the
outputs of the part are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from regard.config import ModelConfig, RecurrentSettings
from regard.kernels.masks import PAD_POSITION
from regard.layers.block import split_loss
from regard.layers.context import Context
from regard.layers.part import FeedForward, Place, make_part
from regard.layers.stack import LastValue
from regard.layers.variational_dropout import VariationalDropout


class RecurrentFeedForward(nn.Module):
    """A feed-forward part after a recurrent layer, with a sigmoid, dropout and a residual connection."""

    def __init__(self, part: FeedForward, dropout: VariationalDropout, place: Place) -> None:
        super().__init__()
        self.part, self.dropout, self.place = part, dropout, place
        self._auxiliary = LastValue()

    @property
    def auxiliary_loss(self) -> Tensor | None:
        """The auxiliary loss of the part in the last forward pass, or None."""
        return self._auxiliary.value

    def forward(self, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Return x + dropout(sigmoid(f(x))), (B, T, C) -> (B, T, C); `tokens` (B, T) is False at padding."""
        if tokens is None:
            positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        else:
            positions = (tokens.long().cumsum(1) - 1).masked_fill(~tokens, PAD_POSITION)
        result = self.part(x, Context(positions))
        y, self._auxiliary.value = split_loss(result, None, self.part.auxiliary, self.part)
        return x + self.dropout(torch.sigmoid(y)).to(x.dtype)


def feedforward_config(config: ModelConfig, width: int) -> ModelConfig:
    """Return the configuration that a feed-forward part between recurrent layers of this width is built from."""
    s = config.table(RecurrentSettings)
    return replace(config, d_model=width, d_ff=s.d_ff or 4 * width, activation=s.activation, ff_dropout=s.ff_dropout)


def make_feedforwards(
    config: ModelConfig, widths: Sequence[int], side: str, first: int = 0
) -> list[RecurrentFeedForward]:
    """Return a feed-forward layer for each width, numbered from `first`; none if the configuration names no part."""
    s, name = config.table(RecurrentSettings), config.recurrent_feedforward
    if not name:
        return []
    places = [Place(side, first + i, side == "decoder", first + i) for i in range(len(widths))]
    return [
        RecurrentFeedForward(
            make_part("feedforward", name, feedforward_config(config, width), place),
            VariationalDropout(s.hidden_dropout, s.variational),
            place,
        )
        for width, place in zip(widths, places, strict=True)
    ]
