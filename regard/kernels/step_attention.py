"""Attention of a decoding step, one new token per row: self-attention over a static key/value cache, and cross-attention.

Reordering beams does not move keys and values: `owner[n, j]` is the row of the cache that holds column j of row n's
past, so that a reordering changes a few integers. The position of each row is read from memory, so one CUDA graph
serves every step.

The kernels use programmatic dependent launch (kernels/step_linear.py) and prefetch keys of earlier steps: these keys,
`owner` and `position` must not be written in the same step.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from regard.kernels.attention_functions import masked_softmax, rotate, split_qkv
from regard.kernels.step_attention_triton import LOG2E, combine_kernel, cross_kernel, self_kernel
from regard.kernels.step_linear import NUM_SMS, launch_options, runs_kernels

MAX_QUERIES = 64  # of one program

# Many small programs hide each other's memory latency; where there are few programs, each must read more at once.
TILES = (  # most programs (exclusive), warps of a program, bytes of keys that a warp reads at once
    (2 * NUM_SMS, 4, 2048),
    (8 * NUM_SMS, 2, 2048),
    (math.inf, 2, 1024),
)
MULTI_QUERY_TILE = (4, 2048)  # warps and bytes where several queries share a key

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
    """Write the keys and values of new tokens into the cache and return their self-attention, (N, H*D).

    qkv (N, (H+2G)*D) is the fused projection of one new token per row, ordered as in `split_qkv`. Its key and value are
    written to keys and values (N, G, R, D) at column `position` (N,). The token attends to itself and to the columns
    before it, at most `back` of them; then the cache is a ring buffer, which holds column j at place j % R, R > back.
    owner (N, L): the row of the cache that holds each column of a row's past; None: its own row. cos, sin (L, D/2): rotary
    embeddings of each position. bias (H, L): added to the scores by distance. heads: (H, G).
    """
    if not runs_kernels(qkv):
        return self_attend_reference(
            qkv, keys, values, position, owner=owner, cos=cos, sin=sin, bias=bias, back=back,
            scale=scale, heads=heads,
        )  # fmt: skip
    (n, g, length, d), h = keys.shape, heads[0]
    assert keys.stride() == values.stride(), "keys and values must lie alike"
    assert qkv.stride(1) == keys.stride(3) == 1, "the numbers of a head must lie together"
    splits = count_splits(n, g, length, d)
    out = qkv.new_empty(n, h * d)
    part = out if splits == 1 else qkv.new_empty(n, h, splits, d, dtype=torch.float32)
    lse = None if splits == 1 else part.new_empty(n, h, splits)
    block, warps = tile_size(n * g * splits, length, head_width(d) * keys.itemsize, h // g)
    self_kernel[(n, g, splits)](
        qkv, keys, values, position, owner, cos, sin, bias, part, lse, qkv.stride(0), *keys.stride()[:3],
        0 if owner is None else owner.stride(0), 0 if bias is None else bias.stride(0),
        0 if owner is None else owner.shape[1],
        scale * LOG2E.value, 0 if back is None else back,
        H=h, G=g, D=d, D_BLOCK=head_width(d), Q_BLOCK=query_rows(h // g), BLOCK=block, SPLITS=splits,
        OWNED=owner is not None, ROTARY=cos is not None, BIAS=bias is not None, RING=0 if back is None else length,
        num_warps=warps, **launch_options(qkv),
    )  # fmt: skip
    if lse is not None:
        combine_kernel[(n * h,)](
            part, lse, out, D=d, D_BLOCK=head_width(d), SPLITS=splits, S_BLOCK=triton.next_power_of_2(splits), num_warps=4,
            **launch_options(qkv),
        )  # fmt: skip
    return out


def count_splits(n: int, g: int, length: int, d: int) -> int:
    """Return into how many splits the keys of a row are cut (split-K), so that few rows with long caches fill the GPU."""
    if n * g >= NUM_SMS or length * d <= 512 * 64:
        return 1
    return min(8, triton.cdiv(2 * NUM_SMS, n * g), triton.cdiv(length, 64))


def tile_size(programs: int, length: int, row_bytes: int, queries: int) -> tuple[int, int]:
    """Return how many keys, of `row_bytes` each, a program reads at once (and as many values), and its warps."""
    warps, warp_bytes = MULTI_QUERY_TILE if queries > 1 else next(sizes for most, *sizes in TILES if programs < most)
    return max(16, min(warps * warp_bytes // row_bytes, triton.next_power_of_2(length))), warps


def head_width(d: int) -> int:
    """Return the power of two that holds d numbers of a head, at least 16."""
    return max(16, triton.next_power_of_2(d))


def query_rows(n: int) -> int:
    """Return the rows of a tile of n queries: 1, or a power of two that tensor cores support."""
    return 1 if n == 1 else min(MAX_QUERIES, max(16, triton.next_power_of_2(n)))


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
    """Return what `self_attend` defines, in plain torch; the cache is written as well."""
    (n, g, room, d), h = keys.shape, heads[0]
    at, rows = position.long(), torch.arange(n, device=qkv.device)
    columns = torch.arange(room, device=qkv.device)[None] + (at[:, None] - room + 1).clamp(min=0)  # (N, R)
    q, k, v = split_qkv(qkv[:, None], h, g, d)  # (N, H or G, 1, D)
    if cos is not None:
        assert sin is not None
        rotation = cos[at][:, None, None], sin[at][:, None, None]  # (N, 1, 1, D/2)
        q, k = rotate(q, rotation), rotate(k, rotation)
    keys[rows, :, at % room], values[rows, :, at % room] = k[:, :, 0].to(keys.dtype), v[:, :, 0].to(values.dtype)
    source = rows[:, None].expand(n, room) if owner is None else owner.gather(1, columns).long()
    source = torch.where(columns == at[:, None], rows[:, None], source)
    past_k, past_v = keys[source, :, columns % room], values[source, :, columns % room]  # (N, R, G, D)
    distance = at[:, None] - columns  # (N, R)
    scores = dot_scores(q[:, :, 0], past_k.transpose(1, 2), scale)  # (N, H, R)
    if bias is not None:
        scores = scores + bias[:, distance.clamp(min=0)].transpose(0, 1)
    seen = (distance >= 0) & (distance <= (room if back is None else back))
    return softmax_mean(scores, seen[:, None], past_v.transpose(1, 2)).flatten(1).to(qkv.dtype)


def dot_scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Return the scores of q (N, H, D) and k (N, G, S, D): (N, H, S) in fp32; H/G query heads share a key head."""
    grouped = q.float().unflatten(1, (k.shape[1], -1))  # (N, G, H/G, D)
    return (grouped @ k.float().transpose(-2, -1)).flatten(1, 2) * scale


def softmax_mean(scores: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    """Return softmax(scores) v for scores (N, H, S) and v (N, G, S, D): (N, H, D); zeros where no key is seen."""
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
    """Return the cross-attention of q (N, H*D) over the first `length` (B,) keys of its source: (N, H*D).

    keys and values are (B, G, S, D). The N/B consecutive rows of a source (the hypotheses of a beam) share its keys,
    which are read once. A source of length 0 gives zeros. heads: (H, G).
    """
    if not runs_kernels(q):
        return cross_attend_reference(q, keys, values, length, scale=scale, heads=heads)
    (b, g, s, d), h, n = keys.shape, heads[0], q.shape[0]
    assert keys.stride() == values.stride(), "keys and values must lie alike"
    assert q.stride(1) == keys.stride(3) == 1, "the numbers of a head must lie together"
    queries = n // b * (h // g)
    rows = query_rows(queries)
    block, warps = tile_size(b * g, s, head_width(d) * keys.itemsize, queries)
    out = q.new_empty(n, h * d)
    cross_kernel[(b, g, triton.cdiv(queries, rows))](
        q, keys, values, length, out, q.stride(0), *keys.stride()[:3], n // b, scale * LOG2E.value,
        H=h, G=g, D=d, D_BLOCK=head_width(d), Q_BLOCK=rows, BLOCK=block, num_warps=warps, **launch_options(q),
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
    """Return what `cross_attend` defines, in plain torch."""
    each = q.shape[0] // keys.shape[0]
    k, v, real = (x.repeat_interleave(each, dim=0) for x in (keys, values, length))
    scores = dot_scores(q.unflatten(1, (heads[0], -1)), k, scale)  # (N, H, S)
    seen = torch.arange(keys.shape[2], device=q.device) < real[:, None]
    return softmax_mean(scores, seen[:, None], v).flatten(1).to(q.dtype)
