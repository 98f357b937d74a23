"""The selective scan of Mamba on a CPU in fp32, compiled by numba: what kernels/selective_scan.py does with tensors.

There every token's states of a whole batch pass through memory several times. Here a block of BLOCK channels of one row
walks through time with its N states in the cache. Channels lie beside each other, so the compiler computes several at once;
the exponential is a polynomial for the same reason. Rows and blocks are shared among torch's threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

BLOCK = 64  # channels
LOG2E, LN2 = np.float32(1.4426950408889634), np.float32(0.6931471805599453)
SUMS = {"reassoc", "contract", "nsz", "arcp"}  # sums may be vectorized; infinities and NaNs are kept


def scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, begins: Tensor, h: Tensor, chunk: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return C . h (B, T, D), the last state (B, D, N), and the state before each chunk (B, chunks, N, D)."""
    (batch, length, width), n = x.shape, a.shape[1]
    states = h.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    y, kept = (
        torch.empty_like(dt, memory_format=torch.contiguous_format),
        x.new_empty(batch, -(-length // chunk), n, width),
    )
    given = arrays(x, dt, rates(a), b, c, begins, states, y, kept)
    share_among_threads(batch * blocks_of(width), lambda first, last, _: scan_blocks(*given, chunk, first, last))
    return y, states.transpose(1, 2).contiguous(), kept


def scan_backward(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, begins: Tensor, kept: Tensor, dy: Tensor, carry: Tensor,
    chunk: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return C . h again, the gradients of x, dt, A, B, C, and that of the first state; `carry` is that of the last one."""
    (batch, length, width), n = x.shape, a.shape[1]
    y, dx, ddt = (x.new_empty(x.shape) for _ in range(3))
    db, dc = x.new_zeros(2, blocks_of(width), batch, length, n)
    threads = torch.get_num_threads()
    da, later = x.new_zeros(threads, n, width), carry.transpose(1, 2).clone(memory_format=torch.contiguous_format)
    given = arrays(x, dt, rates(a), b, c, begins, kept, dy, later, y, dx, ddt, db, dc)
    partial = da.numpy()
    share_among_threads(
        batch * blocks_of(width),
        lambda first, last, thread: scan_blocks_backward(*given, partial[thread], chunk, first, last),
    )
    return y, dx, ddt, da.sum(0).t().contiguous(), db.sum(0), dc.sum(0), later.transpose(1, 2).contiguous()


def rates(a: Tensor) -> Tensor:
    """Return A log2(e) as rows of channels, (D, N) -> (N, D)."""
    return a.t() * LOG2E.item()


def blocks_of(width: int) -> int:
    return -(-width // BLOCK)


def arrays(*tensors: Tensor) -> list[np.ndarray[Any, Any]]:
    """Return tensors as arrays; only contiguous ones share their memory."""
    return [x.detach().contiguous().numpy() for x in tensors]


def share_among_threads(n: int, work: Callable[[int, int, int], None]) -> None:
    """Call work(first, last, thread) for parts of 0 .. n - 1 in as many threads as torch has."""
    threads = min(n, torch.get_num_threads())
    if threads <= 1:
        return work(0, n, 0)
    borders = [n * i // threads for i in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(work, borders[:-1], borders[1:], range(threads)))


@njit(cache=True, fastmath=SUMS, inline="always")
def exp2(x):
    """Return 2^x for x <= 0, with an error of some 1e-7 of it."""
    x = max(x, np.float32(-126.0))
    whole = np.float32(math.floor(x + np.float32(0.5)))
    f = x - whole  # -0.5 to 0.5
    p = np.float32(1.5403530393e-4)
    p = p * f + np.float32(1.3333558146e-3)
    p = p * f + np.float32(9.6181291076e-3)
    p = p * f + np.float32(5.5504108665e-2)
    p = p * f + np.float32(2.4022650696e-1)
    p = p * f + np.float32(6.9314718056e-1)
    p = p * f + np.float32(1.0)
    return p * np.int32((np.int32(whole) + 127) << 23).view(np.float32)


@njit(cache=True, nogil=True, fastmath=SUMS)
def scan_blocks(x, dt, a2, b, c, begins, h, y, kept, chunk, first, last):
    """Fill y and kept and update h for the blocks of channels `first` to `last`, counted over all rows."""
    length, width, states = x.shape[1], x.shape[2], a2.shape[0]
    blocks = (width + BLOCK - 1) // BLOCK
    new = np.empty(BLOCK, np.float32)
    for index in range(first, last):
        row, begin = index // blocks, index % blocks * BLOCK
        n_channels = min(BLOCK, width - begin)
        end = begin + n_channels
        for t in range(length):
            if t % chunk == 0:
                kept[row, t // chunk, :, begin:end] = h[row, :, begin:end]
            if begins[row, t]:
                h[row, :, begin:end] = np.float32(0.0)
            steps, out = dt[row, t, begin:end], y[row, t, begin:end]
            for d in range(n_channels):
                new[d] = steps[d] * x[row, t, begin + d]
                out[d] = np.float32(0.0)
            for n in range(states):
                key, query = b[row, t, n], c[row, t, n]
                state, rate = h[row, n, begin:end], a2[n, begin:end]
                for d in range(n_channels):
                    value = exp2(steps[d] * rate[d]) * state[d] + key * new[d]
                    state[d] = value
                    out[d] += query * value


@njit(cache=True, nogil=True, fastmath=SUMS)
def scan_blocks_backward(x, dt, a2, b, c, begins, kept, dy, g, y, dx, ddt, db, dc, da, chunk, first, last):
    """Fill y, dx, ddt, the sums db and dc of each block, and update da and g, for the blocks `first` to `last`.

    The states and decays of a chunk are computed again from the state before it, then read from its end to its beginning.
    """
    length, width, states = x.shape[1], x.shape[2], a2.shape[0]
    blocks = (width + BLOCK - 1) // BLOCK
    hs, decays = np.empty((chunk + 1, states, BLOCK), np.float32), np.empty((chunk, states, BLOCK), np.float32)
    new, each, by_rate = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
    for index in range(first, last):
        row, block = index // blocks, index % blocks
        begin = block * BLOCK
        n_channels = min(BLOCK, width - begin)
        end = begin + n_channels
        for which in range((length + chunk - 1) // chunk - 1, -1, -1):
            start = which * chunk
            count = min(chunk, length - start)
            hs[0, :, :n_channels] = kept[row, which, :, begin:end]
            for i in range(count):
                t = start + i
                keeps = np.float32(0.0) if begins[row, t] else np.float32(1.0)
                steps, out = dt[row, t, begin:end], y[row, t, begin:end]
                for d in range(n_channels):
                    new[d] = steps[d] * x[row, t, begin + d]
                    out[d] = np.float32(0.0)
                for n in range(states):
                    key, query, rate = b[row, t, n], c[row, t, n], a2[n, begin:end]
                    before, after, decay = hs[i, n], hs[i + 1, n], decays[i, n]
                    for d in range(n_channels):
                        kept_share = keeps * exp2(steps[d] * rate[d])
                        value = kept_share * before[d] + key * new[d]
                        decay[d] = kept_share
                        after[d] = value
                        out[d] += query * value
            for i in range(count - 1, -1, -1):
                t = start + i
                steps, grads = dt[row, t, begin:end], dy[row, t, begin:end]
                for d in range(n_channels):
                    new[d] = steps[d] * x[row, t, begin + d]
                    each[d] = np.float32(0.0)
                    by_rate[d] = np.float32(0.0)
                for n in range(states):
                    key, query, rate = b[row, t, n], c[row, t, n], a2[n, begin:end]
                    before, after, decay, carry = hs[i, n], hs[i + 1, n], decays[i, n], g[row, n, begin:end]
                    sums = da[n, begin:end]
                    by_key, by_query = np.float32(0.0), np.float32(0.0)
                    for d in range(n_channels):
                        total = carry[d] + query * grads[d]
                        by_query += grads[d] * after[d]
                        by_key += new[d] * total
                        each[d] += key * total
                        total *= decay[d]
                        carry[d] = total
                        total *= before[d]  # the gradient of dt A
                        by_rate[d] += total * rate[d]
                        sums[d] += total * steps[d]
                    db[block, row, t, n] = by_key
                    dc[block, row, t, n] = by_query
                for d in range(n_channels):
                    dx[row, t, begin + d] = steps[d] * each[d]
                    ddt[row, t, begin + d] = x[row, t, begin + d] * each[d] + LN2 * by_rate[d]
