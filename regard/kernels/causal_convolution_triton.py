"""Triton kernels of kernels/causal_convolution.py: the convolution, its gradients, and one decoding step.

A program is one warp with BLOCK channels, one for each lane. It walks through TILES tiles of TOKENS tokens, whose numbers it
holds in registers as tuples of vectors (BLOCK,), so that a token is loaded once for all the sums that it is part of.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.operators import dense_rows
from regard.kernels.selective_scan_triton import sigmoid

NEVER: tl.constexpr = tl.constexpr(1 << 30)  # the start of a document that sees no earlier token


@triton.jit
def load_token(at, t, T, d, valid, k: tl.constexpr, X: tl.constexpr, FULL: tl.constexpr):
    """Load the channels of token t + k in fp32, (BLOCK,), 0 if there is no such token; `at` points at token t."""
    if FULL and k >= 0:
        return tl.load(at + k * X + d).to(tl.float32)
    return tl.load(at + k * X + d, mask=tl.where((t + k >= 0) & (t + k < T), valid, False), other=0.0).to(tl.float32)


@triton.jit
def load_before(at, earlier, t, T, d, valid, k: tl.constexpr, X: tl.constexpr, C: tl.constexpr, K: tl.constexpr,
                EARLIER: tl.constexpr):  # fmt: skip
    """Load the channels of token t + k, k < 0, which may be one of the K - 1 tokens `earlier` than the row."""
    value = load_token(at, t, T, d, valid, k, X, False)
    if EARLIER:
        kept = tl.load(earlier + (t + k + K - 1) * C + d, mask=tl.where(t + k < 0, valid, False), other=0.0)
        value += kept.to(tl.float32)
    return value


@triton.jit
def store_token(at, value, t, T, d, valid, k: tl.constexpr, X: tl.constexpr, FULL: tl.constexpr):
    """Store the channels of token t + k, if there is such a token."""
    if FULL:
        tl.store(at + k * X + d, value.to(at.dtype.element_ty))
    else:
        tl.store(at + k * X + d, value.to(at.dtype.element_ty), mask=tl.where(t + k < T, valid, False))


@triton.jit
def load_start(starts, t, T, k: tl.constexpr, FULL: tl.constexpr):
    """Load the column at which the document of token t + k begins; a token that does not exist sees no other."""
    return tl.load(starts + t + k) if FULL else tl.load(starts + t + k, mask=t + k < T, other=NEVER)


@triton.jit
def load_starts(starts, t, T, TOKENS: tl.constexpr, FULL: tl.constexpr):
    """Load the starts of all tokens of a tile, as a tuple; at once, since no load is moved before a store."""
    found = ()
    for k in tl.static_range(TOKENS):
        found = found + (load_start(starts, t, T, k, FULL),)
    return found


@triton.jit
def load_weights(weight, d, valid, K: tl.constexpr):
    """Load the weights of the last K tokens, the token itself first, as a tuple of (BLOCK,)."""
    found = ()
    for i in tl.static_range(K):
        found = found + (tl.load(weight + d * K + K - 1 - i, mask=valid, other=0.0).to(tl.float32),)
    return found


@triton.jit(do_not_specialize=["one"])
def forward(
    x, weight, bias, starts, earlier, y, T, one,
    C: tl.constexpr, X: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, EARLIER: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write y of TILES tiles."""
    d, row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * one, tl.program_id(2).to(tl.int64)
    valid, w = d < C, load_weights(weight, d, d < C, K)
    shift = tl.load(bias + d, mask=valid, other=0.0).to(tl.float32) if BIAS else tl.zeros((BLOCK,), tl.float32)
    x, y, starts, earlier = x + row * T * X, y + row * T * C, starts + row * T, earlier + row * (K - 1) * C
    begin = tl.program_id(1) * TILES * TOKENS
    for first in range(begin, tl.minimum(begin + TILES * TOKENS, T), TOKENS):
        here = tl.full((), 0, tl.int64) + first
        values = ()  # from K - 1 tokens before the tile to its last token
        for k in tl.static_range(1 - K, 0):
            values = values + (load_before(x + here * X, earlier, first, T, d, valid, k, X, C, K, EARLIER),)
        for k in tl.static_range(TOKENS):
            values = values + (load_token(x + here * X, first, T, d, valid, k, X, FULL),)
        begins = load_starts(starts, first, T, TOKENS, FULL)
        results = ()
        for k in tl.static_range(TOKENS):
            total = shift + w[0] * values[k + K - 1]
            for i in tl.static_range(1, K):
                total += w[i] * tl.where(first + (k - i) >= begins[k], values[k + K - 1 - i], 0.0)
            if SILU:
                total *= sigmoid(total)
            results = results + (total,)
        for k in tl.static_range(TOKENS):
            store_token(y + here * C, results[k], first, T, d, valid, k, C, FULL)


@triton.jit(do_not_specialize=["one"])
def backward(
    grad, x, weight, bias, starts, dx, sums, T, one,
    C: tl.constexpr, X: tl.constexpr, G: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, TILES: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write dx of TILES tiles, the last one first, and the gradients of weight and bias as sums over them, (K + 1, C)."""
    d, row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)) * one, tl.program_id(2).to(tl.int64)
    valid, w = d < C, load_weights(weight, d, d < C, K)
    shift = tl.load(bias + d, mask=valid, other=0.0).to(tl.float32) if BIAS else tl.zeros((BLOCK,), tl.float32)
    x, grad, dx, starts = x + row * T * X, grad + row * T * G, dx + row * T * C, starts + row * T
    begin = tl.program_id(1) * TILES * TOKENS
    tiles = tl.cdiv(tl.minimum(TILES * TOKENS, T - begin), TOKENS)
    by_bias = tl.zeros((BLOCK,), tl.float32)
    by_weight = ()
    for _ in tl.static_range(K):
        by_weight = by_weight + (tl.zeros((BLOCK,), tl.float32),)
    # Tokens after these tiles see their last ones: `tail` is that many tokens, of which no other sum is made here.
    tail: tl.constexpr = K - 1
    later, later_starts = (), ()
    end = begin + tiles * TOKENS
    for k in tl.static_range(tail):
        start, before = load_start(starts, end, T, k, False), shift
        for i in tl.static_range(K):
            value = load_token(x + end.to(tl.int64) * X, end, T, d, valid, k - i, X, False)
            before += w[i] * tl.where(end + k - i >= start, value, 0.0)
        by_sum = load_token(grad + end.to(tl.int64) * G, end, T, d, valid, k, G, False)
        if SILU:
            opened = sigmoid(before)
            by_sum *= opened * (1.0 + before * (1.0 - opened))
        later, later_starts = later + (by_sum,), later_starts + (start,)
    for back in range(0, tiles):
        first = begin + (tiles - 1 - back) * TOKENS
        here = tl.full((), 0, tl.int64) + first
        values = ()  # from K - 1 tokens before the tile to its last token
        for k in tl.static_range(TOKENS + K - 1):
            values = values + (load_token(x + here * X, first, T, d, valid, k - (K - 1), X, FULL),)
        grads = ()
        for k in tl.static_range(TOKENS):
            grads = grads + (load_token(grad + here * G, first, T, d, valid, k, G, FULL),)
        begins, by_sums = load_starts(starts, first, T, TOKENS, FULL), ()
        for k in tl.static_range(TOKENS):
            seen = (values[k + K - 1],)
            before = shift + w[0] * values[k + K - 1]
            for i in tl.static_range(1, K):
                seen = seen + (tl.where(first + (k - i) >= begins[k], values[k + K - 1 - i], 0.0),)
                before += w[i] * seen[i]
            by_sum = grads[k]
            if SILU:
                opened = sigmoid(before)
                by_sum *= opened * (1.0 + before * (1.0 - opened))
            by_bias += by_sum
            gathered = ()
            for i in tl.static_range(K):
                gathered = gathered + (by_weight[i] + by_sum * seen[i],)
            by_weight, by_sums = gathered, by_sums + (by_sum,)
        by_sums, begins = by_sums + later, begins + later_starts
        for k in tl.static_range(TOKENS):
            total = w[0] * by_sums[k]
            for j in tl.static_range(1, K):  # the token at first + k + j sees the one at first + k
                total += w[j] * tl.where(first + k >= begins[k + j], by_sums[k + j], 0.0)
            store_token(dx + here * C, total, first, T, d, valid, k, C, FULL)
        kept, kept_starts = (), ()
        for k in tl.static_range(tail):
            kept, kept_starts = kept + (by_sums[k],), kept_starts + (begins[k],)
        later, later_starts = kept, kept_starts
    sums += (row * tl.num_programs(1) + tl.program_id(1)) * (K + 1) * C + d
    for i in tl.static_range(K):
        tl.store(sums + (K - 1 - i) * C, by_weight[i], mask=valid)
    tl.store(sums + K * C, by_bias, mask=valid)


@triton.jit
def step(
    x, weight, bias, inputs, y, X,
    C: tl.constexpr, K: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    """Write y of one more token of a row, and move its inputs on by one."""
    c, row = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS), tl.program_id(1).to(tl.int64)
    valid = c < C
    total = tl.zeros((CHANNELS,), tl.float32)
    if BIAS:
        total += tl.load(bias + c, mask=valid, other=0.0).to(tl.float32)
    last = tl.load(x + row * X + c, mask=valid, other=0.0).to(tl.float32)
    kept = inputs + row * (K - 1) * C + c
    for i in tl.static_range(K - 1):
        value = tl.load(kept + i * C, mask=valid, other=0.0).to(tl.float32)
        total += tl.load(weight + c * K + i, mask=valid, other=0.0).to(tl.float32) * value
        if i > 0:
            tl.store(kept + (i - 1) * C, value.to(inputs.dtype.element_ty), mask=valid)
    if K > 1:
        tl.store(kept + (K - 2) * C, last.to(inputs.dtype.element_ty), mask=valid)
    total += tl.load(weight + c * K + K - 1, mask=valid, other=0.0).to(tl.float32) * last
    if SILU:
        total *= sigmoid(total)
    tl.store(y + row * C + c, total.to(y.dtype.element_ty), mask=valid)


def settings_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, tiles: dict[str, int]
) -> dict[str, int | bool]:
    """Return the constants that both kernels share; FULL: no tile goes beyond an end, so that few loads need a mask."""
    full = x.shape[1] % tiles["TOKENS"] == 0 and x.shape[2] % tiles["BLOCK"] == 0
    sizes = {"C": weight.shape[0], "K": weight.shape[1], "BIAS": bias is not None, "SILU": silu}
    return {**sizes, **tiles, "X": x.stride(1), "FULL": full, "num_warps": 1}


def run_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool, earlier: Tensor | None,
    tiles: dict[str, int],
) -> Tensor:  # fmt: skip
    """Return y (B, T, C); `tiles` are BLOCK, TOKENS and TILES."""
    x, (batch, length, width) = dense_rows(x), x.shape
    y = torch.empty(batch, length, width, device=x.device, dtype=x.dtype)
    forward[(triton.cdiv(width, tiles["BLOCK"]), triton.cdiv(length, tiles["TOKENS"] * tiles["TILES"]), batch)](
        *(x, weight.contiguous(), weight if bias is None else bias, starts.contiguous()),
        *(weight if earlier is None else earlier.contiguous(), y, length, 1), EARLIER=earlier is not None,
        **settings_of(x, weight, bias, silu, tiles),
    )  # fmt: skip
    return y


def run_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, starts: Tensor, silu: bool, tiles: dict[str, int]
) -> list[Tensor]:  # fmt: skip
    """Return the gradients of x and weight, and that of the bias where there is one; `tiles` as in `run_forward`."""
    grad, x, (batch, length, width), k = dense_rows(grad), dense_rows(x), x.shape, weight.shape[1]
    parts = triton.cdiv(length, tiles["TOKENS"] * tiles["TILES"])
    dx = torch.empty(batch, length, width, device=x.device, dtype=x.dtype)
    sums = torch.empty(batch * parts, k + 1, width, device=x.device, dtype=torch.float32)
    backward[(triton.cdiv(width, tiles["BLOCK"]), parts, batch)](
        *(grad, x, weight.contiguous(), weight if bias is None else bias, starts.contiguous(), dx, sums, length, 1),
        G=grad.stride(1), **settings_of(x, weight, bias, silu, tiles),
    )  # fmt: skip
    found = [dx, sums[:, :k].sum(0).t().to(weight.dtype).contiguous()]
    return found if bias is None else [*found, sums[:, k].sum(0).to(bias.dtype)]


def run_step(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool, inputs: Tensor) -> Tensor:
    """Return y (N, C) of one more token of each row, and move `inputs` (N, K - 1, C) on by one, in place."""
    rows, width = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    y = torch.empty(rows, width, device=x.device, dtype=x.dtype)
    step[(triton.cdiv(width, 256), rows)](
        *(x, weight.contiguous(), weight if bias is None else bias, inputs, y, x.stride(0)),
        C=width, K=weight.shape[1], BIAS=bias is not None, SILU=silu, CHANNELS=256,
    )  # fmt: skip
    return y
