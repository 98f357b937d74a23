"""Attention of one new token in each row: over what its row remembers, and over its sentence's source.

Rows are never moved: `owner[n, j]` says in which row column j of row n's past lies, so that reordering hypotheses
changes a few integers. How far a row has come is read from memory, so one recorded kernel serves every step.

The kernels start before the one before them has ended (see step_linear.py) and read keys of earlier steps meanwhile:
those, owner and position must not be the work of the same step.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from regard.kernels.attention_functions import masked_softmax, rotate, split_qkv
from regard.kernels.step_attention_triton import LOG2E, combine_kernel, cross_kernel, self_kernel
from regard.kernels.step_linear import MACHINE, launch, runs_kernels

QUERIES = 64  # the most of one program

# Small programs hide each other's waiting; where there are few, each must read more.
TILES = (  # below so many programs: warps of one, bytes of keys that a warp reads at once
    (2 * MACHINE, 4, 2048),
    (8 * MACHINE, 2, 2048),
    (math.inf, 2, 1024),
)
SEVERAL = (4, 2048)  # the same where a key meets several queries

# ---- self-attention ----------------------------------------------------------------------------------------------------


def self_attend(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    *,
    owner: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    bias: Tensor | None = None,
    back: int | None = None,
    scale: float,
    heads: tuple[int, int],
) -> Tensor:
    """The new tokens qkv (N, (H+2G)*D) enter the keys and values (N, G, L, D) at column `position` (N,), and look at the
    columns before it, at most `back` of them, and at themselves; (N, H*D). `split_qkv` says which numbers are whose.

    cos, sin (L, D/2): how queries and keys at each position are rotated; bias (H, L): added to a score by the distance
    back.
    """
    if not runs_kernels(qkv):
        return self_attend_reference(
            qkv, keys, values, position, owner=owner, cos=cos, sin=sin, bias=bias, back=back,
            scale=scale, heads=heads,
        )  # fmt: skip
    (n, g, length, d), h = keys.shape, heads[0]
    assert keys.stride() == values.stride(), "keys and values must lie alike"
    assert qkv.stride(1) == keys.stride(3) == 1, "the numbers of a head must lie together"
    splits = pieces(n, g, length, d)
    out = qkv.new_empty(n, h * d)
    part = out if splits == 1 else qkv.new_empty(n, h, splits, d, dtype=torch.float32)
    lse = None if splits == 1 else part.new_empty(n, h, splits)
    block, warps = tile(n * g * splits, length, width(d) * keys.itemsize, h // g)
    self_kernel[(n, g, splits)](
        qkv, keys, values, position, owner, cos, sin, bias, part, lse, qkv.stride(0), *keys.stride()[:3],
        0 if owner is None else owner.stride(0), 0 if bias is None else bias.stride(0), length,
        scale * LOG2E.value, 0 if back is None else back,
        H=h, G=g, D=d, D_BLOCK=width(d), Q_BLOCK=rows_of_queries(h // g), BLOCK=block, SPLITS=splits,
        OWNED=owner is not None, TURN=cos is not None, BIAS=bias is not None, WINDOW=back is not None,
        num_warps=warps, **launch(qkv),
    )  # fmt: skip
    if lse is not None:
        combine_kernel[(n * h,)](
            part, lse, out, D=d, D_BLOCK=width(d), SPLITS=splits, S_BLOCK=triton.next_power_of_2(splits), num_warps=4,
            **launch(qkv),
        )  # fmt: skip
    return out


def pieces(n: int, g: int, length: int, d: int) -> int:
    """Into how many parts the keys of a row are cut: few rows with long caches must still fill the machine."""
    if n * g >= MACHINE or length * d <= 512 * 64:
        return 1
    return min(8, triton.cdiv(2 * MACHINE, n * g), triton.cdiv(length, 64))


def tile(programs: int, length: int, row: int, queries: int) -> tuple[int, int]:
    """(keys of `row` bytes read at once, warps). As many values are, and the next of both are on their way."""
    warps, read = SEVERAL if queries > 1 else next(how for most, *how in TILES if programs < most)
    return max(16, min(warps * read // row, triton.next_power_of_2(length))), warps


def width(d: int) -> int:
    return max(16, triton.next_power_of_2(d))


def rows_of_queries(n: int) -> int:
    """1, or what a tensor core takes."""
    return 1 if n == 1 else min(QUERIES, max(16, triton.next_power_of_2(n)))


def self_attend_reference(
    qkv: Tensor,
    keys: Tensor,
    values: Tensor,
    position: Tensor,
    *,
    owner: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    bias: Tensor | None = None,
    back: int | None = None,
    scale: float,
    heads: tuple[int, int],
) -> Tensor:
    (n, g, length, d), h = keys.shape, heads[0]
    at, rows, columns = position.long(), torch.arange(n, device=qkv.device), torch.arange(length, device=qkv.device)
    q, k, v = split_qkv(qkv[:, None], h, g, d)  # (N, H or G, 1, D)
    if cos is not None:
        assert sin is not None
        rotation = cos[at][:, None, None], sin[at][:, None, None]  # (N, 1, 1, D/2)
        q, k = rotate(q, rotation), rotate(k, rotation)
    keys[rows, :, at], values[rows, :, at] = k[:, :, 0].to(keys.dtype), v[:, :, 0].to(values.dtype)
    where = rows[:, None].expand(n, length) if owner is None else owner[:, :length].long()
    where = torch.where(columns == at[:, None], rows[:, None], where)  # (N, L)
    past, told = keys[where, :, columns], values[where, :, columns]  # (N, L, G, D)
    distance = at[:, None] - columns  # (N, L)
    scores = similarity(q[:, :, 0], past.transpose(1, 2), scale)  # (N, H, L)
    if bias is not None:
        scores = scores + bias[:, distance.clamp(min=0)].transpose(0, 1)
    seen = (distance >= 0) & (distance <= (length if back is None else back))
    return mixture(scores, seen[:, None], told.transpose(1, 2)).flatten(1).to(qkv.dtype)


def similarity(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q (N, H, D) with k (N, G, S, D), H/G heads of queries to a head of keys; (N, H, S) in fp32."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # (N, G, H/G, D)
    return (grouped @ k.float().transpose(-2, -1)).flatten(1, 2) * scale


def mixture(scores: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """softmax(scores) v, zeros where nothing is seen: (N, H, S) and (N, G, S, D) -> (N, H, D)"""
    weights = masked_softmax(scores, seen).unflatten(1, (v.shape[1], -1))
    return (weights @ torch.where(seen[..., None], v.float(), 0.0)).flatten(1, 2)


# ---- cross-attention ---------------------------------------------------------------------------------------------------


def cross_attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    scale: float,
    heads: tuple[int, int],
) -> Tensor:
    """q (N, H*D) look at the first `length` (B,) of their sentence's keys and values (B, G, S, D); (N, H*D).

    The N/B hypotheses of a sentence are read together, so its keys are read once. A sentence of length 0 gives zeros.
    """
    if not runs_kernels(q):
        return cross_attend_reference(q, keys, values, length, scale=scale, heads=heads)
    (b, g, s, d), h, n = keys.shape, heads[0], q.shape[0]
    assert keys.stride() == values.stride(), "keys and values must lie alike"
    assert q.stride(1) == keys.stride(3) == 1, "the numbers of a head must lie together"
    queries = n // b * (h // g)
    rows = rows_of_queries(queries)
    block, warps = tile(b * g, s, width(d) * keys.itemsize, queries)
    out = q.new_empty(n, h * d)
    cross_kernel[(b, g, triton.cdiv(queries, rows))](
        q, keys, values, length, out, q.stride(0), *keys.stride()[:3], n // b, scale * LOG2E.value,
        H=h, G=g, D=d, D_BLOCK=width(d), Q_BLOCK=rows, BLOCK=block, num_warps=warps, **launch(q),
    )  # fmt: skip
    return out


def cross_attend_reference(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    length: Tensor,
    *,
    scale: float,
    heads: tuple[int, int],
) -> Tensor:
    each = q.shape[0] // keys.shape[0]
    k, v, real = (x.repeat_interleave(each, dim=0) for x in (keys, values, length))
    scores = similarity(q.unflatten(1, (heads[0], -1)), k, scale)  # (N, H, S)
    seen = torch.arange(keys.shape[2], device=q.device) < real[:, None]
    return mixture(scores, seen[:, None], v).flatten(1).to(q.dtype)
