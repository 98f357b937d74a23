"""Who may look at whom: masks as functions of absolute positions. True = attend, everywhere.

A position of -1 marks padding (or an empty cache slot), so padding, ragged batches and caches need no case of their own.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

NOWHERE = -1  # the position of padding


def positions_of(ids: Tensor, pad: int) -> Tensor:
    """0, 1, 2, ... along each row, `NOWHERE` on padding."""
    steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # (B, T)
    return steps.masked_fill(ids == pad, NOWHERE)


class Mask(Protocol):
    """`allows(q, k)` compares query positions (B, T, 1) with key positions (B, 1, S)."""

    causal: bool

    def allows(self, q: Tensor, k: Tensor) -> Tensor: ...


class Full:
    """Every query sees every key: encoders and cross-attention."""

    causal = False

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return k > NOWHERE  # (B, 1, S)


class Causal:
    """A query sees its own position and the ones before: no look-ahead."""

    causal = True

    def allows(self, q: Tensor, k: Tensor) -> Tensor:
        return (k > NOWHERE) & (k <= q)  # (B, T, S)


def dense(mask: Mask, q: Tensor, k: Tensor) -> Tensor:
    """The mask as a tensor that broadcasts over heads: (B, 1, T or 1, S)."""
    return mask.allows(q[:, :, None], k[:, None, :])[:, None]
