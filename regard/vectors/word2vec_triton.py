"""Word2vec on a GPU (Triton): programs that work like the CPU's threads, some hundred of them on shared matrices.

A program goes through its part of the text word by word. For one centre it loads the vectors of the window, and one output
vector after the other: the centre's and the negatives', which all words of the window share, or the nodes on the way
to the centre. Updates are atomic sums that nobody waits for, so frequent words are behind by no more than what the programs
have in hand, and need no care of their own.

Vectors are read past the first cache (.cg), which does not hear of what other processors add.
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _decide(h, active, outputs, target, label, lr, d, dim, stride):
    """One logistic decision for all rows of h: what they get, their loss; moves the output vector."""
    here = outputs + target.to(tl.int64) * stride + d
    u = tl.load(here, mask=d < dim, other=0.0, cache_modifier=".cg")  # (D,)
    score = tl.sum(h * u[None, :], 1)  # (R,)
    p = 1 / (1 + tl.exp(-score))
    step = tl.where(active & (tl.abs(score) <= 6.0), lr * (label - p), 0.0)  # 6: kernels_numba.SURE
    tl.atomic_add(here, tl.sum(step[:, None] * h, 0), mask=d < dim, sem="relaxed")
    signed = (1.0 - 2.0 * label) * score
    loss = tl.maximum(signed, 0.0) + tl.log(1 + tl.exp(-tl.abs(signed)))
    return step[:, None] * u[None, :], tl.sum(tl.where(active, loss, 0.0), 0)


@triton.jit
def _draw_noise(seed, counter, share, other, size):
    """One word, by the alias method."""
    place, coin, _, _ = tl.randint4x(seed, counter)
    i = ((place.to(tl.uint32, bitcast=True).to(tl.uint64) * size) >> 32).to(tl.int32)
    kept = tl.uint_to_uniform_float(coin) < tl.load(share + i)
    return tl.where(kept, i, tl.load(other + i))


@triton.jit(do_not_specialize=["n", "begin", "end", "seed"])
def train_part(
    ids, sentence, n, begin, end, inputs, outputs, share, other, start, nodes, bits, totals, seed, lr, size,
    dim, stride, window, negatives,
    CBOW: tl.constexpr, TREE: tl.constexpr, SHRINK: tl.constexpr, DIVIDED: tl.constexpr, D: tl.constexpr, W: tl.constexpr,
):  # fmt: skip
    """Places begin to end of a text of n kept words; a program has an equal run of them."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    length = (end - begin + programs - 1) // programs
    first = begin + program * length
    d, w = tl.arange(0, D), tl.arange(0, W)
    apart = tl.where(w < window, w - window, w - window + 1)  # -window..-1, 1..window
    losses, predictions = tl.full((), 0.0, tl.float32), tl.full((), 0, tl.int32)
    for i in range(first, tl.minimum(first + length, end)):
        counter = (i - begin) * (negatives + 1)
        reach = window
        if SHRINK:
            reach = 1 + (tl.rand(seed, counter) * window).to(tl.int32)
            reach = tl.minimum(reach, window)
        centre, own = tl.load(ids + i), tl.load(sentence + i)
        inside = (tl.abs(apart) <= reach) & (i + apart >= 0) & (i + apart < n)
        inside = inside & (tl.load(sentence + i + apart, mask=inside, other=-1) == own)
        words = tl.load(ids + i + apart, mask=inside, other=0)
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
                    more, loss = _decide(h, active, outputs, tl.load(nodes + j), label, lr, d, dim, stride)
                    error += more
                    losses += loss
            else:
                error, loss = _decide(h, active, outputs, centre, 1.0, lr, d, dim, stride)
                losses += loss
                for k in range(negatives):
                    noise = _draw_noise(seed, counter + 1 + k, share, other, size)
                    if noise != centre:
                        more, loss = _decide(h, active, outputs, noise, 0.0, lr, d, dim, stride)
                        error += more
                        losses += loss
            if DIVIDED:
                error = error / count
            tl.atomic_add(here, tl.broadcast_to(error, (W, D)), mask=known, sem="relaxed")
    tl.atomic_add(totals, losses.to(tl.float64), sem="relaxed")
    tl.atomic_add(totals + 1, predictions.to(tl.float64), sem="relaxed")
