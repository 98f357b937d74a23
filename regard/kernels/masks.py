"""Attention masks, causal masks and padding masks: which keys a query may attend to; in a boolean mask, True = attend.

Every mask of this package lets a query see one interval of key *positions*: a causal mask all positions up to the
query's own, a sliding window the last few of them, a prefix mask the prefix as well. Position -1 marks padding (or an
empty slot of a KV cache) and lies in no interval, so there is no separate padding mask, and ragged batches, windows and
caches need no special cases.

A packed row holds several documents, one after the other. Positions start at 0 in each document, so `index - position`
is the index at which a token's document begins; two tokens belong to the same document if these numbers are equal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

PAD_POSITION = -1  # the position of padding


def positions_of(ids: Tensor) -> Tensor:
    """Return the positions of tokens ids (B, T): 0, 1, 2, ... along each row, and PAD_POSITION on padding (ids below 0).

    Padding must be at the end of a row.
    """
    steps = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)  # (B, T)
    return steps.masked_fill(ids < 0, PAD_POSITION)


@dataclass(frozen=True)
class Mask:
    """An attention mask: a query at position p sees the keys at p - back .. p + ahead, and the first `prefix` keys."""

    back: int | None = None  # None: no limit
    ahead: int | None = None  # None: no limit; 0: causal
    prefix: int | Tensor = 0  # leading tokens that every query sees, even from before them; (B, 1): one number a row
    packed: bool = False  # rows hold several documents; a query sees its own document only

    @property
    def causal(self) -> bool:
        """Whether a query sees neither later keys nor a prefix."""
        return self.ahead == 0 and isinstance(self.prefix, int) and self.prefix == 0

    @property
    def triangle(self) -> bool:
        """Whether the dense mask is exactly the lower triangle, keys and queries being the same tokens."""
        return self.causal and self.back is None and not self.packed

    def span(self, q: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return the first and the last key position that queries at positions q (B, T) see, (B, T) each; None: no last."""
        first = torch.zeros_like(q) if self.back is None else (q - self.back).clamp(min=0)
        if self.ahead is None:
            return first, None
        last = q + self.ahead
        # Every token sees the whole prefix; padding sees nothing.
        return first, torch.where(q > PAD_POSITION, last.clamp(min=self.prefix - 1), last)

    def __str__(self) -> str:
        kind = {None: "every key", 0: "earlier keys"}.get(self.ahead, f"{self.ahead} keys ahead")
        parts = [kind, *([f"{self.back} back"] if self.back is not None else [])]
        parts += ["the prefix"] if self.ahead == 0 and not self.causal else []
        return ", ".join(parts + (["own document"] if self.packed else []))


FULL = Mask()  # the mask of encoders and cross-attention, which only masks padding
CAUSAL = Mask(ahead=0)  # the causal mask (causal_mask, is_causal) of decoders


def with_window(mask: Mask, width: int) -> Mask:
    """Return `mask` limited to a sliding window of `width` tokens in each direction it allows; 0: no window.

    The width includes the query's own token.
    """
    if not width:
        return mask
    if mask.ahead == 0 and not mask.causal:
        raise ValueError("a window over a prefix would be two spans: windows are for causal and full masks")
    return replace(mask, back=width - 1, ahead=0 if mask.causal else width - 1)


def prefix(n: int | Tensor) -> Mask:
    """Return the mask of a prefix language model: the first n tokens see each other, the rest is causal.

    A tensor n (B, 1) gives every row a prefix of its own.
    """
    if isinstance(n, Tensor) and (n.dim() != 2 or n.shape[1] != 1):
        raise ValueError(f"the prefixes of B rows are a tensor (B, 1), not {tuple(n.shape)}")
    return Mask(ahead=0, prefix=n)


def document_mask(mask: Mask) -> Mask:
    """Return `mask` for packed rows: each query sees tokens of its own document only."""
    return replace(mask, packed=True)


def document_starts(positions: Tensor) -> Tensor:
    """Return the column at which the document of each token begins, for tokens at positions (B, T): int32 (B, T).

    Where the document began before the first column, as in a prompt that continues a text, the result is below 0: such a
    token also sees what a decoding state kept. Padding counts as part of the document before it."""
    index = torch.arange(positions.shape[1], device=positions.device).expand_as(positions)
    begins = torch.where(positions > PAD_POSITION, index - positions, torch.iinfo(torch.int32).min)
    return begins.cummax(1).values.int()


def dense_mask(mask: Mask, q: Tensor, k: Tensor, index: Tensor | None = None) -> Tensor:
    """Return the attention mask of queries at positions q (B, T) and keys at k (B, S): (B, 1, T or 1, S), True = attend.

    The second dimension broadcasts over heads, the third is 1 where every query of a row sees the same keys. `index`
    (T,) is the index of each query among the keys, if they are the same tokens; packed rows need it to tell documents
    apart.
    """
    seen = (k > PAD_POSITION)[:, None, :]  # (B, 1, S), the padding mask
    if mask.back is not None or mask.ahead is not None:  # not `mask != FULL`, which torch cannot compile
        first, last = mask.span(q)
        seen = seen & (k[:, None, :] >= first[:, :, None])
        if last is not None:
            seen = seen & (k[:, None, :] <= last[:, :, None])  # (B, T, S), the causal mask
    if mask.packed:
        assert index is not None, "packed rows cannot be read through a cache"
        start = torch.arange(k.shape[1], device=k.device) - k  # (B, S), the index at which a token's document begins
        seen = seen & (start[:, None, :] == (index - q)[:, :, None])
    return seen[:, None]


def key_intervals(mask: Mask, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first and the last key *index* that each query sees in self-attention, int32 (B, T) each.

    It is the mask of `dense_mask` for keys that are the queries' own tokens, without ever storing (T, T) numbers. For
    padding the interval is empty: its last index is -1.
    """
    real = positions > PAD_POSITION
    index = torch.arange(positions.shape[1], device=positions.device)
    start = torch.where(real, index - positions, 0)  # (B, T), the index at which the token's document begins
    length = torch.zeros_like(positions).scatter_add_(1, start, real.long()).gather(1, start)
    first, last = mask.span(positions)
    last = length - 1 if last is None else last.minimum(length - 1)
    return (first + start).int(), torch.where(real, last + start, -1).int()
