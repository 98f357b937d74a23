"""Who may look at whom. True = attend, everywhere.

Every mask of this package lets a query see one span of key *positions*: a causal query all up to itself, a window the last
few, a prefix its beginning too. A position of -1 marks padding (or an empty cache slot) and lies in no span, so padding,
ragged batches, windows and caches need no case of their own.

Packed rows hold several documents one after the other; positions begin again at 0 with each, so `index - position` is where
a token's document begins, and tells documents apart.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

PAD_POSITION = -1  # the position of padding


def positions_of(ids: Tensor) -> Tensor:
    """0, 1, 2, ... along each row, `NOWHERE` on padding (ids below 0), which stands at the end."""
    steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # (B, T)
    return steps.masked_fill(ids < 0, PAD_POSITION)


@dataclass(frozen=True)
class Mask:
    """A query at position p sees keys at p - back .. p + ahead, and the first `prefix` ones."""

    back: int | None = None  # None: without limit
    ahead: int | None = None
    prefix: int | Tensor = 0  # tokens that all may see, also those before them; a tensor (B, 1): of each row
    packed: bool = False  # rows hold several documents; nobody sees another one

    @property
    def causal(self) -> bool:
        return self.ahead == 0 and isinstance(self.prefix, int) and self.prefix == 0

    @property
    def triangle(self) -> bool:
        """Exactly the lower triangle, where keys and queries are the same tokens."""
        return self.causal and self.back is None and not self.packed

    def span(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """The first and the last key position that queries at q (B, T) may see; None: to the end."""
        first = torch.zeros_like(q) if self.back is None else (q - self.back).clamp(min=0)
        if self.ahead is None:
            return first, None
        last = q + self.ahead
        return first, torch.where(q > PAD_POSITION, last.clamp(min=self.prefix - 1), last)

    def __str__(self) -> str:
        kind = {None: "every key", 0: "earlier keys"}.get(self.ahead, f"{self.ahead} keys ahead")
        parts = [kind, *([f"{self.back} back"] if self.back is not None else [])]
        parts += ["the prefix"] if self.ahead == 0 and not self.causal else []
        return ", ".join(parts + (["own document"] if self.packed else []))


FULL = Mask()  # encoders and cross-attention
CAUSAL = Mask(ahead=0)  # decoders: no look-ahead


def with_window(mask: Mask, width: int) -> Mask:
    """At most `width` tokens in each direction that the mask allows, the query's own included; 0: no window."""
    if not width:
        return mask
    if mask.ahead == 0 and not mask.causal:
        raise ValueError("a window over a prefix would be two spans: windows are for causal and full masks")
    return replace(mask, back=width - 1, ahead=0 if mask.causal else width - 1)


def prefix(n: int | Tensor) -> Mask:
    """A prefix language model: the first n tokens see each other, the rest is causal. A tensor (B, 1): n of each row."""
    if isinstance(n, Tensor) and (n.dim() != 2 or n.shape[1] != 1):
        raise ValueError(f"the prefixes of B rows are a tensor (B, 1), not {tuple(n.shape)}")
    return Mask(ahead=0, prefix=n)


def document_mask(mask: Mask) -> Mask:
    """The same, within each document of a packed row."""
    return replace(mask, packed=True)


def dense_mask(mask: Mask, q: Tensor, k: Tensor, index: Tensor | None = None) -> Tensor:
    """The mask for queries at positions q (B, T) and keys at k (B, S), (B, 1, T or 1, S): it broadcasts over heads.

    `index` (T,): where the queries stand among the keys, if they are the same tokens; packed rows need to know.
    """
    seen = (k > PAD_POSITION)[:, None, :]  # (B, 1, S)
    if mask.back is not None or mask.ahead is not None:  # not `mask != FULL`, which torch cannot compile
        first, last = mask.span(q)
        seen = seen & (k[:, None, :] >= first[:, :, None])
        if last is not None:
            seen = seen & (k[:, None, :] <= last[:, :, None])  # (B, T, S)
    if mask.packed:
        assert index is not None, "packed rows cannot be read through a cache"
        start = torch.arange(k.shape[1], device=k.device) - k  # (B, S), where a token's document begins
        seen = seen & (start[:, None, :] == (index - q)[:, :, None])
    return seen[:, None]


def key_intervals(mask: Mask, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The same for the queries' own tokens, as the first and last *index* each may see, int32 (B, T); empty on padding."""
    real = positions > PAD_POSITION
    index = torch.arange(positions.shape[1], device=positions.device)
    start = torch.where(real, index - positions, 0)  # (B, T), where the token's document begins
    length = torch.zeros_like(positions).scatter_add_(1, start, real.long()).gather(1, start)
    first, last = mask.span(positions)
    last = length - 1 if last is None else last.minimum(length - 1)
    return (first + start).int(), torch.where(real, last + start, -1).int()
