"""Sampling from logits on a GPU in one kernel: the exponential race of decode/sampling.py, a row of logits a program.

Token i with probability p_i and noise e_i ~ Exp(1) wins where p_i / e_i is the largest, that is, where logit_i - log(e_i)
is the largest: the race needs no normalized probabilities, so it reads the logits once. min-p needs their maximum first, and
epsilon sampling the sum of their exponentials too, each in one more pass over a row, which is then in the cache.
"""

# mypy: allow-untyped-defs, no-check-untyped-defs
from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

BEYOND: tl.constexpr = tl.constexpr(2**30)  # more than any id


def run_race(logits: Tensor, keys: Tensor, temperature: float, min_p: float = 0.0, epsilon: float = 0.0) -> Tensor:
    """Return the winner (N,) of each row of logits (N, V) at a temperature, for the keys of the rows (N,), 32 bits each.

    min_p and epsilon rule tokens out as `decode.sampling.truncate` does; 0: none."""
    n, v = logits.shape
    token = torch.empty(n, dtype=torch.int64, device=logits.device)
    assert logits.stride(1) == 1, "the logits of a row must lie together"
    race_kernel[(n,)](
        logits, keys, token, v, logits.stride(0), 1.0 / temperature,
        math.log(min_p) if min_p else 0.0, math.log(epsilon) if epsilon else 0.0,
        MIN_P=bool(min_p), EPSILON=bool(epsilon), BLOCK=2048, num_warps=8,
    )  # fmt: skip
    return token


@triton.jit
def fmix32(x):
    """Return a hash of 32 bits: MurmurHash3's finalizer, as in kernels/hashing.py."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def race_kernel(
    logits, keys, token, V, row, inverse, log_min_p, log_epsilon,
    MIN_P: tl.constexpr, EPSILON: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the winner of one row; `inverse` is 1 / temperature."""
    n, lane = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    logits += n * row
    key = tl.load(keys + n).to(tl.uint32)
    least = -float("inf")
    if MIN_P or EPSILON:
        tops = tl.full((BLOCK,), -float("inf"), tl.float32)
        for begin in range(0, V, BLOCK):
            id = begin + lane
            x = tl.load(logits + id, mask=id < V, other=-float("inf")).to(tl.float32) * inverse
            tops = tl.maximum(tops, x)
        top = tl.max(tops, 0)
        if MIN_P:
            least = top + log_min_p
        if EPSILON:
            total = tl.zeros((BLOCK,), tl.float32)
            for begin in range(0, V, BLOCK):
                id = begin + lane
                x = tl.load(logits + id, mask=id < V, other=-float("inf")).to(tl.float32) * inverse
                total += tl.where(x >= least, tl.exp(x - top), 0.0)
            least = tl.maximum(least, tl.minimum(top + tl.log(tl.sum(total, 0)) + log_epsilon, top))
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    where = tl.zeros((BLOCK,), tl.int32) + BEYOND
    for begin in range(0, V, BLOCK):
        id = begin + lane
        x = tl.load(logits + id, mask=id < V, other=-float("inf")).to(tl.float32) * inverse
        bits = fmix32(fmix32((id.to(tl.uint32) * 0x9E3779B1) ^ key) + key)
        u = ((bits >> 9).to(tl.float32) + 0.5) * (1.0 / 8388608)  # an odd multiple of 2^-24: never 0 or 1
        x = tl.where(x >= least, x - tl.log(-tl.log(u)), -float("inf"))
        better = x > best
        best, where = tl.where(better, x, best), tl.where(better, id, where)
    first = tl.min(tl.where(best == tl.max(best, 0), where, BEYOND), 0)
    tl.store(token + n, tl.minimum(first, V - 1).to(tl.int64))
