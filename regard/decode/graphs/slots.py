"""Many sentences that are decoded side by side on a device, each with a step counter of its own.

What decode/beam_search.py says about beam search holds for every slot here (2K candidates, K kept, two ways to stop). Nothing is
ever moved or looked at by the host: a step writes for each of the K rows its token and which row of the step before it
continues, and `collect` walks back along these. Of a finished hypothesis its last token and that row are enough.

All that the host wants to know of a slot lies side by side in `Slots.packed`, so that it is one copy.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import Hypothesis

COUNTERS = ("active", "step", "limit", "stopped")
NUMBERS = ("log_prob", "done_score", "done_log_prob")
ROWS = ("done_length", "done_parent", "done_token")
HEAD = len(NUMBERS) + len(ROWS)  # numbers a row, before what was written
IDS = 1 << 24  # more than any vocabulary has: row * IDS + token fits 31 bits


def unpack(packed: Tensor, k: int) -> dict[str, Tensor]:
    """The fields of `packed` (B, 4 + K * (6 + 2L)) by name, as views of it."""
    first = len(COUNTERS)
    fields = {name: packed[:, i] for i, name in enumerate(COUNTERS)}
    for i, name in enumerate(NUMBERS + ROWS):
        field = packed[:, first + i * k : first + (i + 1) * k]  # (B, K)
        fields[name] = field.view(torch.float32) if name in NUMBERS else field
    written = packed[:, first + HEAD * k :]
    said, parent = written.unflatten(1, (2, written.shape[1] // (2 * k), k)).unbind(1)  # (B, L, K) each
    return fields | {"said": said, "parent": parent}


@dataclass
class Slots:
    """B slots with K rows each, L tokens of room. Row n belongs to slot n // K."""

    packed: Tensor  # (B, 4 + K * (6 + 2L)) int32: the fields from here to `parent`
    active: Tensor  # (B,) 1: being decoded
    step: Tensor  # (B,) tokens written so far
    limit: Tensor  # (B,) most tokens
    stopped: Tensor  # (B,) 1: at its end, and not entered again since
    log_prob: Tensor  # (B, K) fp32 of the open hypotheses, -inf: no such hypothesis
    done_score: Tensor  # (B, K) fp32 of the finished ones, best first, -inf: an empty place
    done_log_prob: Tensor  # (B, K) fp32
    done_length: Tensor  # (B, K) tokens, the end token included
    done_parent: Tensor  # (B, K) the row of the step before its last token that it continues
    done_token: Tensor  # (B, K) its last token
    said: Tensor  # (B, L, K) the token that was written at a step in a row
    parent: Tensor  # (B, L, K) the row of the step before that it continues
    last: Tensor  # (N,) int64, what each row reads next
    position: Tensor  # (N,) int32, the column of the cache where that token stands; 0 in slots that rest
    no_end: Tensor  # (N,) bool: the end token is not allowed yet
    owner: Tensor  # (N, columns) int32, the row of the cache that holds each column of a row's past
    fresh: Tensor  # (1, 4 + 6K) int32, what a slot begins with
    eos: int  # the token that ends a hypothesis, -1: none does

    @classmethod
    def make(cls, b: int, k: int, room: int, device: torch.device | str, offset: int = 0, eos: int = -1) -> Slots:
        """Empty slots. `offset`: columns of the cache before that of the token that is read first, at most."""
        packed = torch.zeros((b, len(COUNTERS) + k * (HEAD + 2 * room)), dtype=torch.int32, device=device)
        fresh = torch.zeros((1, len(COUNTERS) + k * HEAD), dtype=torch.int32, device=device)
        fields = unpack(fresh, k)
        fields["active"].fill_(1)
        for name in NUMBERS:
            fields[name].fill_(-torch.inf)
        fields["log_prob"][:, 0] = 0.0
        n = torch.arange(b * k, dtype=torch.int32, device=device)
        last = torch.zeros(b * k, dtype=torch.int64, device=device)  # slots that rest read token 0
        owner = n[:, None].repeat(1, offset + room)
        return cls(packed, **unpack(packed, k), last=last, position=torch.zeros_like(n),
                   no_end=torch.zeros_like(n, dtype=torch.bool), owner=owner, fresh=fresh, eos=eos)  # fmt: skip

    def enter(
        self, which: Tensor, limits: Tensor, start: int | Tensor, position: int | Tensor, options: DecodeConfig
    ) -> None:
        """Slots `which` (n,) begin anew: `start` (n,) is read first, in every row, at column `position` (n,).

        The columns before it are each row's own; what stands there is the same in all rows of a slot.
        """
        k = self.log_prob.shape[1]
        rows = (which[:, None] * k + torch.arange(k, device=which.device)).flatten()
        self.packed[:, : self.fresh.shape[1]].index_copy_(0, which, self.fresh.expand(len(which), -1))
        self.limit.index_copy_(0, which, limits.to(torch.int32).clamp(max=self.said.shape[1]))
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
    """One token more in every active slot.

    value, index (N, C): logits of the likeliest tokens of each row and their ids, with -inf where there is none; the 2K
    best of a row must be among them. log_z (N,): log p = value - log_z.
    """
    if not _in_triton(value):
        return beam_step_reference(slots, value, index, log_z, options)
    from regard.decode.graphs import slots_triton

    slots_triton.launch_beam_step(slots, value.contiguous(), index.contiguous(), log_z.contiguous(), options)


def beam_step_reference(slots: Slots, value: Tensor, index: Tensor, log_z: Tensor, options: DecodeConfig) -> None:
    b, k = slots.log_prob.shape
    total = slots.log_prob[:, :, None] + (value - log_z[:, None]).view(b, k, -1)  # (B, K, C)
    log_prob, row, token = _best(total, index.view(b, k, -1), 2 * k)  # (B, 2K), best first
    length = slots.step + 1
    ends = (token == slots.eos) | (length >= slots.limit)[:, None]
    new = _finished(slots, log_prob.masked_fill(~ends, -torch.inf), row, token, options)

    log_prob, place = log_prob.masked_fill(ends, -torch.inf).sort(dim=1, descending=True, stable=True)
    row, token = row.gather(1, place)[:, :k], token.gather(1, place)[:, :k]
    new["log_prob"] = log_prob[:, :k]
    bound = slots.limit if options.stop == "proven" and options.length_penalty > 0 else length
    hope = log_prob[:, 0] / _power(bound, options)
    stopped = (new["done_score"].min(1).values >= hope) | (length >= slots.limit)

    _move_past(slots, row)
    _write(slots, token, row, stopped, new, options)


def _best(total: Tensor, index: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """The n largest of each slot, with row and token; equal ones in the order of rows and ids."""
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
    """The K best of the finished hypotheses and those of the first K candidates (B, 2K) that end: above -inf."""
    k = slots.log_prob.shape[1]
    length = (slots.step + 1)[:, None].expand(-1, k)
    score = log_prob[:, :k] / _power(length, options)
    new = {"done_score": score, "done_log_prob": log_prob[:, :k], "done_length": length, "done_parent": row[:, :k]}
    new["done_token"] = token[:, :k]
    both = torch.cat([slots.done_score, score], 1)
    place = both.sort(dim=1, descending=True, stable=True).indices[:, :k]
    return {name: torch.cat([getattr(slots, name), x], 1).gather(1, place) for name, x in new.items()}


def _power(length: Tensor, options: DecodeConfig) -> Tensor:
    return length.double().pow(options.length_penalty).float()


def _write(
    slots: Slots, token: Tensor, row: Tensor, stopped: Tensor, new: dict[str, Tensor], options: DecodeConfig
) -> None:
    """What every row (B, K) wrote, which it continues, and the fields in `new`; only in slots that are active."""
    active = slots.active.bool()
    now = (torch.arange(slots.said.shape[1], device=token.device) == slots.step[:, None]) & active[:, None]  # (B, L)
    slots.said.copy_(torch.where(now[:, :, None], token[:, None], slots.said))
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


def _move_past(slots: Slots, row: Tensor) -> None:
    """A row's past becomes that of the row (B, K) it continues, in whose own cache the token just read stands."""
    b, k = row.shape
    owner, position = slots.owner.view(b, k, -1), slots.position.view(b, k, 1)
    mine = torch.arange(b, device=row.device)[:, None] * k + row  # (B, K)
    column = torch.arange(owner.shape[2], device=row.device)
    past = torch.where(column == position, mine[:, :, None], owner.gather(1, row[:, :, None].expand_as(owner)))
    moves = (column <= position) & slots.active.bool()[:, None, None]
    owner.copy_(torch.where(moves, past, owner))


# --- one hypothesis a slot ---------------------------------------------------------------------------------------------


def advance(slots: Slots, token: Tensor, log_prob: Tensor, options: DecodeConfig) -> None:
    """One token more in every active slot, where K = 1: `token` (N,), which has `log_prob` (N,)."""
    if not _in_triton(token):
        return advance_reference(slots, token, log_prob, options)
    from regard.decode.graphs import slots_triton

    slots_triton.launch_advance(slots, token.contiguous(), log_prob.contiguous(), options)


def advance_reference(slots: Slots, token: Tensor, log_prob: Tensor, options: DecodeConfig) -> None:
    token = token[:, None]  # (B, 1)
    total = slots.log_prob + log_prob[:, None]
    length = (slots.step + 1)[:, None]
    stopped = (token == slots.eos) | (length >= slots.limit[:, None])
    row = torch.zeros_like(token)
    done = {"done_score": total / _power(length, options), "done_log_prob": total, "done_length": length}
    done |= {"done_parent": row, "done_token": token}
    new = {name: torch.where(stopped, x, getattr(slots, name)) for name, x in done.items()}
    _write(slots, token, row, stopped.squeeze(1), new | {"log_prob": total}, options)


# --- what came of it ---------------------------------------------------------------------------------------------------


def collect(host: Tensor, which: Sequence[int], k: int, options: DecodeConfig, eos: int) -> list[list[Hypothesis]]:
    """The finished hypotheses of slots `which`, best first, from a copy of `Slots.packed`."""
    slots, n = np.asarray(which, dtype=np.int64), options.nbest
    fields = {name: x.numpy()[slots] for name, x in unpack(host, k).items()}
    done = {name: fields[name][:, :n] for name in NUMBERS + ROWS}
    tokens = _walk_back(fields["said"], fields["parent"], done)
    flat, (count, width, longest) = tokens.ravel().tolist(), tokens.shape
    columns = (done["done_score"], done["done_log_prob"], done["done_length"], done["done_token"] == eos)
    found: list[list[Hypothesis]] = [[] for _ in range(count)]
    for i, (score, log_prob, length, ended) in enumerate(zip(*(x.ravel().tolist() for x in columns), strict=True)):
        if length > 0 and score > -np.inf:
            ids = flat[i * longest : i * longest + length - ended]
            found[i // width].append(Hypothesis(ids, score, log_prob, ended))
    return found


def _walk_back(said: np.ndarray, parent: np.ndarray, done: dict[str, np.ndarray]) -> np.ndarray:
    """The tokens (n, nbest, longest) of the finished hypotheses; said and parent are (n, L, K)."""
    row, length = done["done_parent"], done["done_length"]
    longest = int(length.max(initial=0))
    tokens = np.empty((*row.shape, longest), dtype=said.dtype)
    for step in reversed(range(longest)):
        before = step < length - 1
        tokens[:, :, step] = np.where(before, np.take_along_axis(said[:, step], row, 1), done["done_token"])
        row = np.where(before, np.take_along_axis(parent[:, step], row, 1), row)
    return tokens
