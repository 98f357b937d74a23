"""Which tokens a convolution sees: made once per forward for all blocks of one dilation, outside whatever is compiled.

A token sees `kernel` tokens that stand `dilation` apart: itself and those before it under a causal mask, else as many
ahead as back. Positions say which of them there are. Before a row's beginning, in padding and in another document of a
packed row there is none: a token o columns away is the right one only if its position is o away too.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import RegardError
from regard.layers.masks import NOWHERE, Mask


@dataclass(frozen=True)
class Reach:
    """For each of the K tokens seen a tensor (B, T)."""

    columns: tuple[Tensor, ...]  # where the one that token t sees stands among the inputs; NOWHERE: there is none
    seen_by: tuple[Tensor, ...] | None = None  # where the one stands that sees token t; None: no gradients asked for


def make_reach(mask: Mask, positions: Tensor, kernel: int, dilation: int) -> Reach:
    """Return the reach of tokens at these positions (B, T); the mask says whether they see what is ahead."""
    taps = torch.arange(kernel, device=positions.device)[:, None, None]
    steps = (taps - (kernel - 1 - ahead_of(mask, kernel))) * dilation  # (K, 1, 1)
    seen_by = apart(beside(positions, -steps)) if torch.is_grad_enabled() else None
    return Reach(apart(beside(positions, steps)), seen_by)


def apart(columns: Tensor) -> tuple[Tensor, ...]:
    """(K, B, T) as K tensors: with K among the sizes, what compiles for any shape would take a B or T as large for it."""
    return tuple(x.clone() for x in columns)


def ahead_of(mask: Mask, kernel: int) -> int:
    """How many of the tokens seen stand ahead."""
    if mask.ahead == 0 and not mask.causal:
        raise RegardError("a convolution sees no prefix: read the text causally, or with a model of attention")
    return 0 if mask.causal else kernel // 2


def beside(positions: Tensor, steps: Tensor) -> Tensor:
    """(K, B, T), where the inputs are the tokens themselves in their order: a step in position is one in columns. Beyond an
    end stands the end itself, whose position is never the right one."""
    length, wanted = positions.shape[1], positions + steps  # (K, B, T)
    columns = (torch.arange(length, device=positions.device) + steps).clamp(0, length - 1).expand_as(wanted)
    places = positions.expand_as(wanted).gather(2, columns)
    return columns.where((places == wanted) & (places > NOWHERE) & (positions > NOWHERE), NOWHERE)
