# mypy: ignore-errors
"""Triton kernels of slots.py: one program does all the bookkeeping of a slot's step.

Scores are compared as integers of the same order, and equal ones by row * IDS + token: a maximum and a minimum find the best
candidate with its row and token. Lists of hypotheses are vectors of W lanes; a list is sorted by counting for each member
how many come before it and storing it at that place. A slot is read and written by the same program: all threads have read
what they need before any of them writes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from regard.config import DecodeConfig
from regard.decode.constraints import LENGTH_OFFSETS
from regard.decode.graphs.slots import IDS, Slots

ID_BITS: tl.constexpr = tl.constexpr(IDS.bit_length() - 1)
TOKEN: tl.constexpr = tl.constexpr(IDS - 1)  # the mask of these bits
NONE: tl.constexpr = tl.constexpr(-(2**31))  # below the integer of any score
LARGEST: tl.constexpr = tl.constexpr(2**31 - 1)


@triton.jit
def length_norm(length, PENALTY: tl.constexpr, OFFSET: tl.constexpr):
    """Return ((OFFSET + length) / (OFFSET + 1)) ** PENALTY, which log p(y) is divided by, computed in fp64."""
    shifted = length.to(tl.float64)
    if OFFSET != 0:
        shifted = (shifted + OFFSET) / (OFFSET + 1)
    return tl.exp(tl.full((), PENALTY, tl.float64) * tl.log(shifted)).to(tl.float32)


@triton.jit
def mirrored(bits):
    """Convert the bits of fp32 numbers to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & LARGEST)


@triton.jit
def best_extensions(
    log_prob, value, index, log_z, lane, K: tl.constexpr, C: tl.constexpr, M: tl.constexpr, W: tl.constexpr
):  # fmt: skip
    """Return log p, row and token (W,) of a slot's 2K best candidates among the C of each of its rows, best first."""
    m = tl.arange(0, M)
    real, row = m < K * C, m // C
    gained = tl.load(value + m, mask=real, other=-float("inf")) - tl.load(log_z + row, mask=real, other=0.0)
    total = tl.load(log_prob + row, mask=real, other=-float("inf")) + gained
    there = total > -float("inf")
    place = (row << ID_BITS) + tl.load(index + m, mask=real, other=0)
    score = tl.where(there, mirrored(total.to(tl.int32, bitcast=True)), NONE)
    best = tl.full((W,), NONE, tl.int32)
    where = tl.zeros((W,), tl.int32)
    for i in range(2 * K):
        top = tl.max(score, 0)
        first = tl.min(tl.where(score == top, place, LARGEST), 0)
        best = tl.where(lane == i, top, best)
        where = tl.where(lane == i, first, where)
        score = tl.where(place == first, NONE, score)
    found = best > NONE
    where = tl.where(found, where, 0)
    best = tl.where(found, mirrored(best).to(tl.float32, bitcast=True), -float("inf"))
    return best, where >> ID_BITS, where & TOKEN


@triton.jit
def ahead(x, y, lane, SHIFT: tl.constexpr):
    """Count how many of y come before each of x: larger ones, and equal ones in lanes below that of x plus SHIFT."""
    equal = (y[None, :] == x[:, None]) & (lane[None, :] < lane[:, None] + SHIFT)
    return tl.sum(((y[None, :] > x[:, None]) | equal).to(tl.int32), 1)


@triton.jit
def reorder_owners(owner, slot, parents, position, COLUMNS, K: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr):
    """Copy the owners of the columns of row parents[r] to row r; the column `position` is in the parent's own cache row."""
    r = tl.arange(0, R)
    mine = (slot * K + parents)[:, None]
    for start in range(0, tl.minimum(position + 1, COLUMNS), BLOCK):
        j = (start + tl.arange(0, BLOCK))[None, :]
        past = tl.load(owner + mine * COLUMNS + j, mask=(r < K)[:, None] & (j < position), other=0)
        past = tl.where(j == position, mine.to(tl.int32), past)
        tl.debug_barrier()
        tl.store(owner + (slot * K + r)[:, None] * COLUMNS + j, past, mask=(r < K)[:, None] & (j <= position))


@triton.jit
def beam_step(
    active, step, limit, stopped, log_prob, done_score, done_log_prob, done_length, done_parent, done_token,
    token_ids, parent, last, position, no_end, owner, value, index, log_z, min_len, ROW, COLUMNS,
    K: tl.constexpr, C: tl.constexpr, M: tl.constexpr, W: tl.constexpr, R: tl.constexpr, BLOCK: tl.constexpr,
    PENALTY: tl.constexpr, OFFSET: tl.constexpr, PROVEN: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0).to(tl.int64)
    base, row0 = slot * ROW, slot * K
    if tl.load(active + base) != 0:
        lane = tl.arange(0, W)
        mine = lane < K
        total, row, token = best_extensions(
            log_prob + base, value + row0 * C, index + row0 * C, log_z + row0, lane, K, C, M, W
        )  # fmt: skip
        written, most, column = tl.load(step + base), tl.load(limit + base), tl.load(position + row0)
        length = written + 1
        ends = (token == END) | (length >= most)

        old = tl.load(done_score + base + lane, mask=mine, other=-float("inf"))
        old_log_prob = tl.load(done_log_prob + base + lane, mask=mine, other=-float("inf"))
        old_length = tl.load(done_length + base + lane, mask=mine, other=0)
        old_parent = tl.load(done_parent + base + lane, mask=mine, other=0)
        old_token = tl.load(done_token + base + lane, mask=mine, other=0)
        new = tl.div_rn(tl.where(ends & mine, total, -float("inf")), length_norm(length, PENALTY, OFFSET))
        old_place = ahead(old, old, lane, 0) + ahead(old, new, lane, -W)
        new_place = ahead(new, old, lane, W) + ahead(new, new, lane, 0)
        stays, joins = mine & (old_place < K), (new > -float("inf")) & (new_place < K)
        worst = tl.max(tl.where(stays & (old_place == K - 1), old, -float("inf")), 0)
        worst = tl.maximum(worst, tl.max(tl.where(joins & (new_place == K - 1), new, -float("inf")), 0))

        still_open = tl.where(ends, -float("inf"), total)
        opens = still_open > -float("inf")
        before = tl.sum((opens[None, :] & (lane[None, :] < lane[:, None])).to(tl.int32), 1)
        place = tl.where(opens, before, tl.sum(opens.to(tl.int32), 0) + lane - before)
        best_open = tl.div_rn(tl.max(still_open, 0), length_norm(most if PROVEN else length, PENALTY, OFFSET))
        stops = (worst >= best_open) | (length >= most)
        r = tl.arange(0, R)
        parents = tl.max(tl.where(place[:, None] == r[None, :], row[:, None], 0), 0)  # (R,)

        tl.debug_barrier()
        tl.store(done_score + base + old_place, old, mask=stays)
        tl.store(done_log_prob + base + old_place, old_log_prob, mask=stays)
        tl.store(done_length + base + old_place, old_length, mask=stays)
        tl.store(done_parent + base + old_place, old_parent, mask=stays)
        tl.store(done_token + base + old_place, old_token, mask=stays)
        tl.store(done_score + base + new_place, new, mask=joins)
        tl.store(done_log_prob + base + new_place, total, mask=joins)
        tl.store(done_length + base + new_place, length, mask=joins)
        tl.store(done_parent + base + new_place, row, mask=joins)
        tl.store(done_token + base + new_place, token, mask=joins)
        kept = place < K
        tl.store(log_prob + base + place, still_open, mask=kept)
        tl.store(token_ids + base + written * K + place, token, mask=kept)
        tl.store(parent + base + written * K + place, row, mask=kept)
        tl.store(last + row0 + place, token.to(tl.int64), mask=kept)
        tl.store(position + row0 + lane, tl.where(stops, 0, column + 1), mask=mine)
        tl.store(no_end + row0 + lane, length < min_len, mask=mine)
        tl.store(step + base, length)
        tl.store(stopped + base, stops.to(tl.int32))
        tl.store(active + base, 1 - stops.to(tl.int32))
        reorder_owners(owner, slot, parents, column, COLUMNS, K, R, BLOCK)


@triton.jit
def advance(
    active, step, limit, stopped, log_prob, done_score, done_log_prob, done_length, done_token, token_ids, last,
    position, no_end, token, gained, min_len, ROW, N,
    PENALTY: tl.constexpr, OFFSET: tl.constexpr, BLOCK: tl.constexpr, END: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    base = n.to(tl.int64) * ROW
    going = tl.load(active + base, mask=n < N, other=0) != 0
    written = tl.load(step + base, mask=going, other=0)
    chosen = tl.load(token + n, mask=going, other=0)
    total = tl.load(log_prob + base, mask=going, other=0.0) + tl.load(gained + n, mask=going, other=0.0)
    length = written + 1
    stops = (chosen == END) | (length >= tl.load(limit + base, mask=going, other=0))
    column = tl.load(position + n, mask=going, other=0)
    ended = going & stops
    tl.debug_barrier()
    tl.store(log_prob + base, total, mask=going)
    tl.store(token_ids + base + written, chosen.to(tl.int32), mask=going)
    tl.store(last + n, chosen, mask=going)
    tl.store(position + n, tl.where(stops, 0, column + 1), mask=going)
    tl.store(no_end + n, length < min_len, mask=going)
    tl.store(step + base, length, mask=going)
    tl.store(done_score + base, tl.div_rn(total, length_norm(length, PENALTY, OFFSET)), mask=ended)
    tl.store(done_log_prob + base, total, mask=ended)
    tl.store(done_length + base, length, mask=ended)
    tl.store(done_token + base, chosen.to(tl.int32), mask=ended)
    tl.store(stopped + base, stops.to(tl.int32), mask=going)
    tl.store(active + base, 1 - stops.to(tl.int32), mask=going)


def launch_beam_step(slots: Slots, value: Tensor, index: Tensor, log_z: Tensor, options: DecodeConfig) -> None:
    """Launch one program for each slot."""
    s, (b, k), c = slots, slots.log_prob.shape, value.shape[1]
    m, r = triton.next_power_of_2(k * c), triton.next_power_of_2(k)
    columns = s.owner.shape[1]
    block = min(triton.next_power_of_2(max(1, columns)), max(32, 512 // r))
    beam_step[(b,)](
        s.active, s.step, s.limit, s.stopped, s.log_prob, s.done_score, s.done_log_prob, s.done_length, s.done_parent,
        s.done_token, s.token_ids, s.parent, s.last, s.position, s.no_end, s.owner, value, index, log_z,
        options.min_len, s.packed.stride(0), columns, K=k, C=c, M=m, W=2 * r, R=r, BLOCK=block,
        PENALTY=float(options.length_penalty), OFFSET=LENGTH_OFFSETS[options.length_norm],
        PROVEN=options.beam_stop == "proven" and options.length_penalty > 0, END=s.eos, num_warps=warps(m),
    )  # fmt: skip


def launch_advance(slots: Slots, token: Tensor, log_prob: Tensor, options: DecodeConfig) -> None:
    s, n, block = slots, len(token), 128
    advance[(triton.cdiv(n, block),)](
        s.active, s.step, s.limit, s.stopped, s.log_prob, s.done_score, s.done_log_prob, s.done_length, s.done_token,
        s.token_ids, s.last, s.position, s.no_end, token, log_prob,
        options.min_len, s.packed.stride(0), n, PENALTY=float(options.length_penalty),
        OFFSET=LENGTH_OFFSETS[options.length_norm], BLOCK=block, END=s.eos,
    )  # fmt: skip


def warps(candidates: int) -> int:
    """Return the number of warps: one for a few hundred candidates, since a maximum within a warp needs no barrier."""
    return min(16, max(1, candidates // 512))
