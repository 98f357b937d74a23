"""Triton kernel of word2vec: some hundred programs that work like CPU threads, on shared matrices (Hogwild).

A program trains on its part of the text word by word. For each centre it loads the vectors of the window, and one
output vector after the other: with negative sampling those of the centre and of the negatives, which all words of the
window share; with hierarchical softmax those of the nodes on the path to the centre. Updates are relaxed atomic
additions, so even the vectors of frequent words lack only the updates that other programs are computing at the moment.

Vectors are loaded past the L1 cache (.cg), which does not see the updates of other multiprocessors.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _logistic_step(h, active, outputs, target, label, lr, d, dim, stride):
    """Take one step of a logistic regression for all rows of h (R, D); return their updates and the sum of their losses.

    The output vector is updated in memory.
    """
    here = outputs + target.to(tl.int64) * stride + d
    u = tl.load(here, mask=d < dim, other=0.0, cache_modifier=".cg")  # (D,)
    score = tl.sum(h * u[None, :], 1)  # (R,)
    p = 1 / (1 + tl.exp(-score))
    step = tl.where(active & (tl.abs(score) <= 6.0), lr * (label - p), 0.0)  # 6: word2vec_numba.MAX_SCORE
    tl.atomic_add(here, tl.sum(step[:, None] * h, 0), mask=d < dim, sem="relaxed")
    signed = (1.0 - 2.0 * label) * score
    loss = tl.maximum(signed, 0.0) + tl.log(1 + tl.exp(-tl.abs(signed)))
    return step[:, None] * u[None, :], tl.sum(tl.where(active, loss, 0.0), 0)


@triton.jit
def _draw_noise(seed, counter, keep, alias, size):
    """Draw a negative sample, a word from the noise distribution, by its alias table."""
    index, coin, _, _ = tl.randint4x(seed, counter)
    i = ((index.to(tl.uint32, bitcast=True).to(tl.uint64) * size) >> 32).to(tl.int32)
    kept = tl.uint_to_uniform_float(coin) < tl.load(keep + i)
    return tl.where(kept, i, tl.load(alias + i))


@triton.jit(do_not_specialize=["n", "begin", "end", "seed"])
def train_part(
    ids, sentence, n, begin, end, inputs, outputs, keep, alias, start, nodes, bits, totals, seed, lr, size,
    dim, stride, window, negatives,
    CBOW: tl.constexpr, TREE: tl.constexpr, SHRINK: tl.constexpr, DIVIDED: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Train on the words begin to end (exclusive) of a subsampled text of n words; each program has an equal part."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    length = (end - begin + programs - 1) // programs
    first = begin + program * length
    d, w = tl.arange(0, D), tl.arange(0, W)
    offset = tl.where(w < window, w - window, w - window + 1)  # -window..-1, 1..window
    losses, predictions = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    for i in range(first, tl.minimum(first + length, end)):
        counter = (i - begin) * (negatives + 1)
        radius = window
        if SHRINK:
            radius = 1 + (tl.rand(seed, counter) * window).to(tl.int32)
            radius = tl.minimum(radius, window)
        centre, own = tl.load(ids + i), tl.load(sentence + i)
        inside = (tl.abs(offset) <= radius) & (i + offset >= 0) & (i + offset < n)
        inside = inside & (tl.load(sentence + i + offset, mask=inside, other=-1) == own)
        words = tl.load(ids + i + offset, mask=inside, other=0)
        count = tl.sum(inside.to(tl.int32), 0)
        if count > 0:
            here = inputs + words.to(tl.int64)[:, None] * stride + d[None, :]
            known = inside[:, None] & (d < dim)[None, :]
            x = tl.load(here, mask=known, other=0.0, cache_modifier=".cg")  # (W, D)
            if CBOW:
                h = (tl.sum(x, 0) / count)[None, :]  # (1, D)
                active = tl.full((1,), 1, tl.int1)
                predictions += 1
            else:
                h, active = x, inside
                predictions += count
            if TREE:
                error = tl.zeros_like(h)
                for j in range(tl.load(start + centre), tl.load(start + centre + 1)):
                    label = 1.0 - tl.load(bits + j).to(tl.float32)
                    more, loss = _logistic_step(h, active, outputs, tl.load(nodes + j), label, lr, d, dim, stride)
                    error += more
                    losses += loss
            else:
                error, loss = _logistic_step(h, active, outputs, centre, 1.0, lr, d, dim, stride)
                losses += loss
                for k in range(negatives):  # negative sampling
                    noise = _draw_noise(seed, counter + 1 + k, keep, alias, size)
                    if noise != centre:
                        more, loss = _logistic_step(h, active, outputs, noise, 0.0, lr, d, dim, stride)
                        error += more
                        losses += loss
            if DIVIDED:
                error = error / count
            tl.atomic_add(here, tl.broadcast_to(error, (W, D)), mask=known, sem="relaxed")
    tl.atomic_add(totals, losses.to(tl.float64), sem="relaxed")
    tl.atomic_add(totals + 1, predictions.to(tl.float64), sem="relaxed")
