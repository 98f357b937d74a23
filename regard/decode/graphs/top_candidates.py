"""The candidates of beam search and greedy decoding: the top logits of each row and their log-sum-exp, in one pass.

Where there are few rows, a row is cut into P parts, so that all multiprocessors are busy. A program reads its part block by
block and keeps the best so far. It sorts new values in only while the maximum of a block is better than the worst that is
kept, which hardly happens after the first few blocks. The log-sum-exp of all logits is accumulated meanwhile.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs
from __future__ import annotations

import math

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.step_linear import NUM_SMS, launch_dependents, launch_options, runs_kernels, wait_for_previous

LOG2E: tl.constexpr = tl.constexpr(1 / math.log(2))
BEYOND: tl.constexpr = tl.constexpr(2**30)  # more than any id


def top_candidates(
    logits: Tensor, best: int, no_end: Tensor, forbidden: tuple[int, ...], end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the `best` largest logits of each of P parts of the vocabulary (N, P*best), best first, their ids, and the
    log-sum-exp of all logits (N,), so that log p = value - log_z. The logits are (N, V).

    Forbidden ids, the token `end` in rows where `no_end` (N,), and logits of -inf are no candidates. Places that remain
    empty have -inf and id 0. Of equal logits the lower id comes first.
    """
    value, index, part_z = best_of_parts(logits, best, no_end, forbidden, end)
    return value, index, log_sum_exp(part_z)


def greedy_token(logits: Tensor, no_end: Tensor, forbidden: tuple[int, ...], end: int) -> tuple[Tensor, Tensor]:
    """Return the likeliest allowed token (N,) and its log p (N,): a step of greedy decoding."""
    return best_candidate(*best_of_parts(logits, 1, no_end, forbidden, end))


def best_candidate(value: Tensor, index: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
    """Return the likeliest of the candidates (N,) int64 and its log p (N,); log_z is (N,), or (N, P) for the parts."""
    log_z = log_z.view(len(value), -1)
    if not runs_kernels(value):
        return best_candidate_reference(value, index, log_z)
    n, c = value.shape
    token, log_prob = index.new_empty(n, dtype=torch.int64), torch.empty_like(value[:, 0])
    width = triton.next_power_of_2(max(c, log_z.shape[1]))
    best_candidate_kernel[(n,)](
        value, index, log_z, token, log_prob, C=c, P=log_z.shape[1], BLOCK=width, num_warps=1, **launch_options(value)
    )
    return token, log_prob


def best_of_parts(
    logits: Tensor, best: int, no_end: Tensor, forbidden: tuple[int, ...], end: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return values and ids as `top_candidates` does, and the log-sum-exp of each part (N, P)."""
    assert 1 <= best <= 32
    (n, v), block = logits.shape, 2048 if len(logits) >= 64 else 1024
    width = part_width(n, v, block)
    if not runs_kernels(logits):
        return best_of_parts_reference(logits, best, no_end, forbidden, end, width)
    parts, ids = triton.cdiv(v, width), [i for i in (*forbidden, end) if i >= 0]
    value = logits.new_empty(n, parts * best, dtype=torch.float32)
    index, part_z = torch.empty_like(value, dtype=torch.int32), value.new_empty(n, parts)
    assert logits.stride(1) == 1, "the logits of a row must lie together"
    best_of_parts_kernel[(n, parts)](
        logits, no_end.view(torch.uint8), value, index, part_z, v, logits.stride(0), width,
        NEVER=forbidden, NEVERS=len(forbidden), LOW=min(ids, default=v), HIGH=max(ids, default=-1), END=end,
        BEST=best, PLACES=triton.next_power_of_2(max(best, 2)), BLOCK=block, num_warps=4, **launch_options(logits),
    )  # fmt: skip
    return value, index, part_z


def part_width(n: int, v: int, block: int) -> int:
    """Return how many columns of the vocabulary one program reads: whole blocks, with enough parts to fill the GPU."""
    blocks = triton.cdiv(v, block)
    return triton.cdiv(blocks, min(blocks, triton.cdiv(4 * NUM_SMS, n))) * block


def log_sum_exp(part_z: Tensor) -> Tensor:
    """Return the log-sum-exp over the parts, (N, P) -> (N,)."""
    (n, parts), out = part_z.shape, torch.empty_like(part_z[:, 0])
    if parts == 1:
        return part_z[:, 0]
    if not runs_kernels(part_z):
        return part_z.logsumexp(1)
    log_sum_exp_kernel[(n,)](
        part_z, out, P=parts, BLOCK=triton.next_power_of_2(parts), num_warps=1, **launch_options(part_z)
    )
    return out


# ---- references --------------------------------------------------------------------------------------------------------


def best_of_parts_reference(
    logits: Tensor, best: int, no_end: Tensor, forbidden: tuple[int, ...], end: int, width: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `best_of_parts` with torch operations."""
    x = F.pad(logits.float(), (0, -logits.shape[1] % width), value=-torch.inf)
    part_z = x.unflatten(1, (-1, width)).logsumexp(2)
    ids = torch.arange(x.shape[1], device=x.device)
    hidden = torch.isin(ids, torch.tensor(forbidden, dtype=ids.dtype, device=x.device)) | (
        (ids == end) & no_end[:, None]
    )
    ranked, place = (
        x.masked_fill(hidden, -torch.inf).unflatten(1, (-1, width)).sort(dim=2, descending=True, stable=True)
    )
    value, index = (
        ranked[:, :, :best],
        place[:, :, :best] + torch.arange(0, x.shape[1], width, device=x.device)[:, None],
    )
    return value.flatten(1), index.masked_fill(value == -torch.inf, 0).flatten(1).int(), part_z


def best_candidate_reference(value: Tensor, index: Tensor, log_z: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `best_candidate` with torch operations."""
    top = value.amax(1)
    token = index.long().masked_fill(value < top[:, None], BEYOND.value).amin(1)
    return token, top - log_z.logsumexp(1)


# ---- kernels -----------------------------------------------------------------------------------------------------------


@triton.jit
def insert(kept, ids, worst, value, id):
    """Replace the worst of the list, of equal ones the last, by a better value; return the list and its new worst."""
    last = tl.max(tl.where(kept == worst, ids, -BEYOND), 0)
    here = (kept == worst) & (ids == last)
    kept, ids = tl.where(here, value, kept), tl.where(here, id, ids)
    return kept, ids, tl.min(kept, 0)


@triton.jit
def best_of_parts_kernel(
    logits, no_end, value, index, part_z, V, row, width,
    NEVER: tl.constexpr, NEVERS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, END: tl.constexpr,
    BEST: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Find the candidates of one part of one row.

    NEVER are the forbidden ids; they and END lie between LOW and HIGH, so that most blocks need not compare with them."""
    launch_dependents(PDL)
    wait_for_previous(PDL)
    n, part, parts = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    early = tl.load(no_end + n) != 0
    begin = part * width
    end = tl.minimum(begin + width, V)
    lane, place = tl.arange(0, BLOCK), tl.arange(0, PLACES)
    logits += n * row
    kept = tl.where(place < BEST, -float("inf"), float("inf"))  # places beyond BEST are never replaced
    ids = -1 - place
    worst = tl.min(kept, 0)
    top = -1e30
    total = tl.zeros((BLOCK,), tl.float32)
    ahead = tl.load(logits + begin + lane, mask=begin + lane < end, other=-float("inf"))
    for start in range(begin, end, BLOCK):
        id = start + lane
        x = ahead.to(tl.float32)
        ahead = tl.load(logits + id + BLOCK, mask=id + BLOCK < end, other=-float("inf"))
        most = tl.max(x, 0)
        new = tl.maximum(most, top)
        total = total * tl.exp2((top - new) * LOG2E) + tl.exp2((x - new) * LOG2E)
        top = new
        if (start <= HIGH) & (start + BLOCK > LOW):
            hidden = (id == END) & early
            for i in tl.static_range(NEVERS):
                hidden |= id == NEVER[i]
            x = tl.where(hidden, -float("inf"), x)
            most = tl.max(x, 0)
        while most > worst:
            first = tl.min(tl.where(x == most, id, BEYOND), 0)
            kept, ids, worst = insert(kept, ids, worst, most, first)
            x = tl.where(id == first, -float("inf"), x)
            most = tl.max(x, 0)
    tl.store(part_z + n * parts + part, top + tl.log(tl.sum(total, 0)))
    # Each candidate is stored at its rank; places beyond BEST rank last.
    kept = tl.where(place < BEST, kept, -float("inf"))
    ids = tl.where(place < BEST, ids, BEYOND + place)
    mine, other = kept[:, None], kept[None, :]
    before = (other > mine) | ((other == mine) & (ids[None, :] < ids[:, None]))
    to = (n * parts + part) * BEST + tl.sum(before.to(tl.int32), 1)
    tl.store(value + to, kept, mask=place < BEST)
    tl.store(index + to, tl.maximum(ids, 0), mask=place < BEST)


@triton.jit
def total_of(part_z, P: tl.constexpr, BLOCK: tl.constexpr):
    """Return log(sum(exp(z))) of P numbers."""
    p = tl.arange(0, BLOCK)
    z = tl.load(part_z + p, mask=p < P, other=-float("inf"))
    top = tl.max(z, 0)
    return top + tl.log(tl.sum(tl.exp(z - top), 0))


@triton.jit
def log_sum_exp_kernel(part_z, out, P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    n = tl.program_id(0)
    tl.store(out + n, total_of(part_z + n * P, P, BLOCK))


@triton.jit
def best_candidate_kernel(
    value, index, log_z, token, log_prob, C: tl.constexpr, P: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    launch_dependents(PDL)
    wait_for_previous(PDL)
    n, c = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(value + n * C + c, mask=c < C, other=-float("inf"))
    ids = tl.load(index + n * C + c, mask=c < C, other=BEYOND)
    top = tl.max(x, 0)
    tl.store(token + n, tl.min(tl.where(x == top, ids, BEYOND), 0).to(tl.int64))
    tl.store(log_prob + n, top - total_of(log_z + n * P, P, BLOCK))
