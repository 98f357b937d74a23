"""The slots of continuous batching: sentences that are decoded side by side on a device, each with its own step counter.

Beam search in a slot follows decode/beam_search.py (2K candidates, K kept, two ways to stop). No hypothesis is ever moved,
and the host reads nothing during a step. A step writes for each of the K rows its token and its parent, the row of the
step before that it continues; `collect` walks back along the parents. A finished hypothesis is its last token and parent.

All that the host reads of a slot is adjacent in `Slots.packed`, so that it is one copy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import Hypothesis, length_normalizer

COUNTERS = ("active", "step", "limit", "stopped")
NUMBERS = ("log_prob", "done_score", "done_log_prob")
ROWS = ("done_length", "done_parent", "done_token")
HEAD = len(NUMBERS) + len(ROWS)  # fields of a row, before its tokens and parents
IDS = 1 << 24  # more than any vocabulary has: row * IDS + token fits 31 bits, and orders ties by row and token


def unpack(packed: Tensor, k: int) -> dict[str, Tensor]:
    """Return the fields of `packed` (B, 4 + K * (6 + 2L)) by name, as views of it."""
    first = len(COUNTERS)
    fields = {name: packed[:, i] for i, name in enumerate(COUNTERS)}
    for i, name in enumerate(NUMBERS + ROWS):
        field = packed[:, first + i * k : first + (i + 1) * k]  # (B, K)
        fields[name] = field.view(torch.float32) if name in NUMBERS else field
    written = packed[:, first + HEAD * k :]
    token_ids, parent = written.unflatten(1, (2, written.shape[1] // (2 * k), k)).unbind(1)  # (B, L, K) each
    return fields | {"token_ids": token_ids, "parent": parent}


@dataclass
class Slots:
    """B slots with K rows (hypotheses) each and up to L new tokens; row n belongs to slot n // K."""

    packed: Tensor  # (B, 4 + K * (6 + 2L)) int32: the fields from here to `parent`
    active: Tensor  # (B,) 1: being decoded
    step: Tensor  # (B,) tokens written so far
    limit: Tensor  # (B,) at most this many tokens
    stopped: Tensor  # (B,) 1: has ended, and no other sentence has entered since
    log_prob: Tensor  # (B, K) fp32 of the open hypotheses, -inf: there is none in this row
    done_score: Tensor  # (B, K) fp32 of the finished ones, best first, -inf: there is none in this place
    done_log_prob: Tensor  # (B, K) fp32
    done_length: Tensor  # (B, K) tokens, the end token included
    done_parent: Tensor  # (B, K) the row of the step before that its last token continues
    done_token: Tensor  # (B, K) its last token
    token_ids: Tensor  # (B, L, K) the token that a row wrote at a step
    parent: Tensor  # (B, L, K) the row of the step before that this token continues
    last: Tensor  # (N,) int64, the token that each row reads next
    position: Tensor  # (N,) int32, the column of the cache for that token; 0 in inactive slots
    no_end: Tensor  # (N,) bool: the end token is not allowed yet
    owner: (
        Tensor  # (N, columns) int32, the row of the cache that holds each column of a row's past; 0 columns: no cache
    )
    fresh: Tensor  # (1, 4 + 6K) int32, the counters and fields with which a sentence enters
    eos: int  # the token that ends a hypothesis, -1: none does

    @classmethod
    def make(
        cls,
        b: int,
        k: int,
        room: int,
        device: torch.device | str,
        offset: int = 0,
        eos: int = -1,
        cached: bool = True,  # rows may find columns of their past in the KV cache of other rows
    ) -> Slots:
        """Return empty slots; `offset` is the largest number of cache columns before the first token that is read."""
        packed = torch.zeros((b, len(COUNTERS) + k * (HEAD + 2 * room)), dtype=torch.int32, device=device)
        fresh = torch.zeros((1, len(COUNTERS) + k * HEAD), dtype=torch.int32, device=device)
        fields = unpack(fresh, k)
        fields["active"].fill_(1)
        for name in NUMBERS:
            fields[name].fill_(-torch.inf)
        fields["log_prob"][:, 0] = 0.0
        n = torch.arange(b * k, dtype=torch.int32, device=device)
        last = torch.zeros(b * k, dtype=torch.int64, device=device)  # inactive slots read token 0
        owner = n[:, None].repeat(1, offset + room if cached else 0)
        return cls(packed, **unpack(packed, k), last=last, position=torch.zeros_like(n),
                   no_end=torch.zeros_like(n, dtype=torch.bool), owner=owner, fresh=fresh, eos=eos)  # fmt: skip

    def enter(
        self, which: Tensor, limits: Tensor, start: int | Tensor, position: int | Tensor, options: DecodeConfig
    ) -> None:
        """Reset slots `which` (n,) for new sentences: every row reads `start` (n,) first, at column `position` (n,).

        Each row owns the columns before that; their contents are the same in all rows of a slot.
        """
        k = self.log_prob.shape[1]
        rows = (which[:, None] * k + torch.arange(k, device=which.device)).flatten()
        self.packed[:, : self.fresh.shape[1]].index_copy_(0, which, self.fresh.expand(len(which), -1))
        self.limit.index_copy_(0, which, limits.to(torch.int32).clamp(max=self.token_ids.shape[1]))
        self.owner.index_copy_(0, rows, rows[:, None].to(torch.int32).expand(-1, self.owner.shape[1]))
        self.no_end.index_fill_(0, rows, options.min_len > 0)
        for field, value in ((self.last, start), (self.position, position)):
            if isinstance(value, Tensor):
                field.index_copy_(0, rows, value.to(field.dtype).repeat_interleave(k))
            else:
                field.index_fill_(0, rows, value)


def _in_triton(x: Tensor) -> bool:
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


# --- beam search -------------------------------------------------------------------------------------------------------


def beam_step(slots: Slots, value: Tensor, index: Tensor, log_z: Tensor, options: DecodeConfig) -> None:
    """Extend the beams of every active slot by one token.

    value, index (N, C): logits of the likeliest tokens of each row and their ids, with -inf where there is none; the 2K
    best of a row must be among them. log_z (N,): log p = value - log_z.
    """
    if not _in_triton(value):
        return beam_step_reference(slots, value, index, log_z, options)
    from regard.decode.graphs import slots_triton

    slots_triton.launch_beam_step(slots, value.contiguous(), index.contiguous(), log_z.contiguous(), options)


def beam_step_reference(slots: Slots, value: Tensor, index: Tensor, log_z: Tensor, options: DecodeConfig) -> None:
    """Compute `beam_step` with torch operations: the definition of what the kernel does."""
    b, k = slots.log_prob.shape
    total = slots.log_prob[:, :, None] + (value - log_z[:, None]).view(b, k, -1)  # (B, K, C)
    log_prob, row, token = _best(total, index.view(b, k, -1), 2 * k)  # (B, 2K), best first
    length = slots.step + 1
    ends = (token == slots.eos) | (length >= slots.limit)[:, None]
    new = _finished(slots, log_prob.masked_fill(~ends, -torch.inf), row, token, options)

    log_prob, place = log_prob.masked_fill(ends, -torch.inf).sort(dim=1, descending=True, stable=True)
    row, token = row.gather(1, place)[:, :k], token.gather(1, place)[:, :k]
    new["log_prob"] = log_prob[:, :k]
    bound = slots.limit if options.beam_stop == "proven" and options.length_penalty > 0 else length
    best_open = log_prob[:, 0] / length_norm(bound, options)
    stopped = (new["done_score"].min(1).values >= best_open) | (length >= slots.limit)

    _reorder_owners(slots, row)
    _write(slots, token, row, stopped, new, options)


def _best(total: Tensor, index: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the n largest of each slot, with row and token; equal ones in the order of rows and ids."""
    k, c = total.shape[1:]
    there = total > -torch.inf
    place = torch.where(there, torch.arange(k, device=total.device)[:, None] * IDS + index, 0).flatten(1)
    total = total.masked_fill(~there, -torch.inf).flatten(1)
    if k * c < n:
        total = torch.nn.functional.pad(total, (0, n - k * c), value=-torch.inf)
        place = torch.nn.functional.pad(place, (0, n - k * c))
    place, order = place.sort(dim=1)
    total, order = total.gather(1, order).sort(dim=1, descending=True, stable=True)
    place = place.gather(1, order)[:, :n]
    return total[:, :n], place // IDS, place % IDS


def _finished(slots: Slots, log_prob: Tensor, row: Tensor, token: Tensor, options: DecodeConfig) -> dict[str, Tensor]:
    """Return the fields of the K best finished hypotheses: those of the slots and those of the first K candidates that end.

    log_prob (B, 2K) is -inf for candidates that do not end."""
    k = slots.log_prob.shape[1]
    length = (slots.step + 1)[:, None].expand(-1, k)
    score = log_prob[:, :k] / length_norm(length, options)
    new = {"done_score": score, "done_log_prob": log_prob[:, :k], "done_length": length, "done_parent": row[:, :k]}
    new["done_token"] = token[:, :k]
    both = torch.cat([slots.done_score, score], 1)
    place = both.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return {name: torch.cat([getattr(slots, name), x], 1).gather(1, place) for name, x in new.items()}


def length_norm(length: Tensor, options: DecodeConfig) -> Tensor:
    """Return what log p(y) is divided by for each length, by `decode.length_norm` and `decode.length_penalty`."""
    found: Tensor = length_normalizer(length.double(), options).float()
    return found


def _write(
    slots: Slots, token: Tensor, row: Tensor, stopped: Tensor, new: dict[str, Tensor], options: DecodeConfig
) -> None:
    """Store token and parent of every row (B, K) and the fields in `new`, only in active slots."""
    active = slots.active.bool()
    now = (torch.arange(slots.token_ids.shape[1], device=token.device) == slots.step[:, None]) & active[
        :, None
    ]  # (B, L)
    slots.token_ids.copy_(torch.where(now[:, :, None], token[:, None], slots.token_ids))
    slots.parent.copy_(torch.where(now[:, :, None], row[:, None], slots.parent))
    new["step"], new["stopped"], new["active"] = slots.step + 1, stopped, ~stopped
    for name, x in new.items():
        field = getattr(slots, name)
        field.copy_(torch.where(active.view(-1, *[1] * (x.dim() - 1)), x, field))
    rows = active[:, None].expand_as(token)
    slots.last.copy_(torch.where(rows, token, slots.last.view_as(token)).flatten())
    moved = slots.position.view_as(token) + 1
    slots.position.copy_(torch.where(rows, moved.masked_fill(stopped[:, None], 0), moved - 1).flatten())
    early = (slots.step < options.min_len)[:, None]
    slots.no_end.copy_(torch.where(rows, early, slots.no_end.view_as(token)).flatten())


def _reorder_owners(slots: Slots, row: Tensor) -> None:
    """Reorder beams by parent `row` (B, K) without moving the cache: only the owner of each column is copied.

    The token that was just read is in the parent's own row of the cache."""
    b, k = row.shape
    owner, position = slots.owner.view(b, k, slots.owner.shape[1]), slots.position.view(b, k, 1)
    mine = torch.arange(b, device=row.device)[:, None] * k + row  # (B, K)
    column = torch.arange(owner.shape[2], device=row.device)
    past = torch.where(column == position, mine[:, :, None], owner.gather(1, row[:, :, None].expand_as(owner)))
    moves = (column <= position) & slots.active.bool()[:, None, None]
    owner.copy_(torch.where(moves, past, owner))


# --- greedy decoding and sampling: one hypothesis per slot -------------------------------------------------------------


def advance(slots: Slots, token: Tensor, log_prob: Tensor, options: DecodeConfig) -> None:
    """Add `token` (N,), which has `log_prob` (N,), to every active slot; K is 1."""
    if not _in_triton(token):
        return advance_reference(slots, token, log_prob, options)
    from regard.decode.graphs import slots_triton

    slots_triton.launch_advance(slots, token.contiguous(), log_prob.contiguous(), options)


def advance_reference(slots: Slots, token: Tensor, log_prob: Tensor, options: DecodeConfig) -> None:
    """Compute `advance` with torch operations: the definition of what the kernel does."""
    token = token[:, None]  # (B, 1)
    total = slots.log_prob + log_prob[:, None]
    length = (slots.step + 1)[:, None]
    stopped = (token == slots.eos) | (length >= slots.limit[:, None])
    row = torch.zeros_like(token)
    done = {"done_score": total / length_norm(length, options), "done_log_prob": total, "done_length": length}
    done |= {"done_parent": row, "done_token": token}
    new = {name: torch.where(stopped, x, getattr(slots, name)) for name, x in done.items()}
    _write(slots, token, row, stopped.squeeze(1), new | {"log_prob": total}, options)


# --- results -----------------------------------------------------------------------------------------------------------


def collect(host: Tensor, which: Sequence[int], k: int, options: DecodeConfig, eos: int) -> list[list[Hypothesis]]:
    """Return the finished hypotheses of slots `which`, best first, from a copy of `Slots.packed` on the host."""
    slots, n = np.asarray(which, dtype=np.int64), options.nbest
    fields = {name: x.numpy()[slots] for name, x in unpack(host, k).items()}
    done = {name: fields[name][:, :n] for name in NUMBERS + ROWS}
    tokens = _walk_back(fields["token_ids"], fields["parent"], done)
    flat, (count, width, longest) = tokens.ravel().tolist(), tokens.shape
    columns = (done["done_score"], done["done_log_prob"], done["done_length"], done["done_token"] == eos)
    found: list[list[Hypothesis]] = [[] for _ in range(count)]
    for i, (score, log_prob, length, ended) in enumerate(zip(*(x.ravel().tolist() for x in columns), strict=True)):
        if length > 0 and score > -np.inf:
            ids = flat[i * longest : i * longest + length - ended]
            found[i // width].append(Hypothesis(ids, score, log_prob, ended))
    return found


def _walk_back(token_ids: np.ndarray, parent: np.ndarray, done: dict[str, np.ndarray]) -> np.ndarray:
    """Return the tokens (n, nbest, longest) of the finished hypotheses; token_ids and parent are (n, L, K)."""
    row, length, last = (done[name].astype(np.int64) for name in ("done_parent", "done_length", "done_token"))
    n, room, k = token_ids.shape
    longest = int(length.max(initial=0))
    tokens = np.empty((longest, *row.shape), dtype=np.int64)
    # Plain indices into flat arrays: `take_along_axis` would take ten times as long for a few sentences.
    flat_tokens, flat_parents = token_ids.reshape(-1), parent.reshape(-1)
    first = np.arange(n)[:, None] * (room * k)  # where each sentence begins
    for step in reversed(range(longest)):
        before = step < length - 1
        at = first + step * k + row
        tokens[step] = np.where(before, flat_tokens[at], last)
        row = np.where(before, flat_parents[at], row)
    return tokens.transpose(1, 2, 0)
