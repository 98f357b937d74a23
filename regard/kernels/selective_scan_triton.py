"""Triton kernels of kernels/selective_scan.py: the selective scan of Mamba, forward and backward.

A program is one warp. It has BLOCK channels, one for each lane, and walks through time in tiles of TOKENS tokens, which it
holds in registers: a tile is (BLOCK, TOKENS). For each of the N states in turn it computes the decays of the tile, one exp2
a token, and runs through the tokens of its lane. The state after the last token waits in memory (`carry`) for the next tile.

Time is divided into splits where batch and channels alone do not fill the GPU:

    1. `local_states` gives each split's end state from zeros, and its total decay;
    2. `combine` turns these into the state at the beginning of each split, one split after the other;
    3. `forward` computes the outputs of a split from there, and stores the state before each tile for the backward pass.

The backward pass does likewise with the adjoint recurrence (`local_adjoint`, `combine`, `backward`); it computes the states
of a tile again from the stored one. The gradients of B and C are sums over channels, which lie in different lanes: unless
EXACT, a product with ones on the tensor cores makes these sums, in TF32.

The decay of a token is exp2(dt A2 + off), A2 = A log2(e). `off` is -1e30 for the first token of a document, which makes
the decay exactly 0, otherwise 0. Beyond the end of a row dt is 0, which leaves the state as it is. Widths and row strides
are constants, so that the addresses of a tile are constant offsets from one pointer. FULL says that no tile goes beyond an
end, so that loads and stores need no mask.

Triton gives lanes to the axis of a tile that is contiguous in memory, the channels, and as many neighbours to a lane as it
knows to be aligned. A lane must have one channel, so kernels are not told how the pointers to tiles are aligned
(tests/kernels/test_compiled_kernels.py looks at the result).

A multiprocessor holds only eight of these warps, which is few to hide the latency of memory. So what the next tile needs is
brought into the L1 cache a tile ahead: `touch_tile` and `touch_vectors` load one number of each 32 bytes. Triton has no
instruction for that, so the bits of these numbers are gathered and stored at the end (`sink`), where nobody reads them.
States are loaded UNROLL at a time, since no load is moved before a store; the backward kernel has no registers for that, and
loads what is small one state ahead.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
RESET: tl.constexpr = tl.constexpr(-1e30)


@triton.jit
def softplus(u):
    """Return log(1 + exp(u)), by its series where exp(u) is small."""
    e = tl.exp2(u * LOG2E)
    series = e * (1.0 - e * (0.5 - e * (0.33333333333 - e * (0.25 - e * 0.2))))
    return tl.where(u > 20.0, u, tl.where(e < 0.05, series, LN2 * tl.log2(1.0 + e)))


@triton.jit
def sigmoid(u):
    return 1.0 / (1.0 + tl.exp2(-u * LOG2E))


@triton.jit
def load_tile(at, i, left, d, valid, ROW: tl.constexpr, FULL: tl.constexpr):
    """Load a tile (BLOCK, TOKENS) in fp32; `at` points at its first token, and `left` tokens are left in the row."""
    if FULL:
        return tl.load(at + (i * ROW)[None, :] + d[:, None]).to(tl.float32)
    mask = (i < left)[None, :] & valid[:, None]
    return tl.load(at + (i * ROW)[None, :] + d[:, None], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def store_tile(at, tile, i, left, d, valid, ROW: tl.constexpr, FULL: tl.constexpr):
    """Store a tile (BLOCK, TOKENS) where `load_tile` would load it."""
    at += (i * ROW)[None, :] + d[:, None]
    if FULL:
        tl.store(at, tile.to(at.dtype.element_ty))
    else:
        tl.store(at, tile.to(at.dtype.element_ty), mask=(i < left)[None, :] & valid[:, None])


@triton.jit
def load_steps(at, bias, i, left, d, valid, ROW: tl.constexpr, FULL: tl.constexpr):
    """Load a tile of step sizes dt, 0 beyond the end of the row."""
    dt = softplus(load_tile(at, i, left, d, valid, ROW, FULL) + bias[:, None])
    return dt if FULL else tl.where((i < left)[None, :], dt, 0.0)


@triton.jit
def load_tokens(at, i, left, FULL: tl.constexpr):
    """Load one number for each token of a tile, (TOKENS,): one state of B or C."""
    return tl.load(at + i) if FULL else tl.load(at + i, mask=i < left, other=0.0)


@triton.jit
def load_offsets(starts, t, i, left, FULL: tl.constexpr):
    """Return RESET for each token of a tile with which a document begins, otherwise 0, (TOKENS,)."""
    start = tl.load(starts + t + i) if FULL else tl.load(starts + t + i, mask=i < left, other=-1)
    return tl.where(start == t + i, RESET, 0.0)


@triton.jit
def pick(tile, hit):
    """Return the token of a tile at which `hit` (1, TOKENS) is true, (BLOCK,): a register, since xor with 0 is no work."""
    bits = tl.where(hit, tile.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(bits, 1).to(tl.float32, bitcast=True)


@triton.jit
def touch_tile(at, left, first, W, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Load two channels of each of 16 tokens of a tile, (32,) as bits; `first` is the tile's first channel."""
    k = tl.arange(0, 32)
    d = first + (k % 2) * (BLOCK // 2)
    found = tl.load(at + (k // 2) * ROW + d, mask=(k // 2 < left) & (d < W), other=0.0)
    return found.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def touch_vectors(at, T, left, STATES: tl.constexpr):
    """Load two tokens of each state of B and C of a tile, (32,) as bits."""
    k = tl.arange(0, 32)
    found = tl.load(at + k * T, mask=k < tl.where(left > 0, 2 * STATES, 0), other=0.0)
    more = tl.load(at + k * T + 8, mask=k < tl.where(left > 8, 2 * STATES, 0), other=0.0)
    return found.to(tl.int32, bitcast=True) ^ more.to(tl.int32, bitcast=True)


@triton.jit(do_not_specialize_on_alignment=["x", "dt"])
def local_states(
    x, dt, vectors, a2, bias, starts, ends, decays, sink, T, SPAN, SPLITS,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the state at the end of each split but the last, from zeros, and the sums of dt and of offsets.

    `ends` are zeros at the beginning."""
    block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, i = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    which, valid = row * SPLITS + split, d < W
    shift = tl.load(bias + d, mask=valid, other=0.0)
    ends += which * STATES * W
    vectors += row * 2 * STATES * T
    total, offset = tl.zeros((BLOCK,), tl.float32), 0.0
    touched, ahead = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    for t in range(split * SPAN, tl.minimum(split * SPAN + SPAN, T), TOKENS):
        first, left = row * T + t, T - t
        delta = load_steps(dt + first * DT, shift, i, left, d, valid, DT, FULL)
        off = load_offsets(starts + row * T, t, i, left, FULL)
        new = delta * load_tile(x + first * X, i, left, d, valid, X, FULL)
        touched ^= ahead
        ahead = touch_vectors(vectors + t + TOKENS, T, left - TOKENS, STATES)
        ahead ^= touch_tile(x + (first + TOKENS) * X, left - TOKENS, block * BLOCK, W, X, BLOCK)
        ahead ^= touch_tile(dt + (first + TOKENS) * DT, left - TOKENS, block * BLOCK, W, DT, BLOCK)
        for n in range(0, STATES, UNROLL):
            rates, keys, states = (), (), ()
            for j in tl.static_range(UNROLL):
                rates = rates + (tl.load(a2 + (n + j) * W + d, mask=valid, other=0.0),)
                keys = keys + (load_tokens(vectors + (n + j) * T + t, i, left, FULL),)
                states = states + (tl.load(ends + (n + j) * W + d, mask=valid, other=0.0),)
            for j in tl.static_range(UNROLL):
                decay = tl.exp2(delta * rates[j][:, None] + off[None, :])
                added, h = new * keys[j][None, :], states[j]
                for k in tl.static_range(TOKENS):
                    hit = (i == k)[None, :]
                    h = pick(decay, hit) * h + pick(added, hit)
                tl.store(ends + (n + j) * W + d, h, mask=valid)
        total += tl.sum(delta, 1)
        offset += tl.sum(off, 0)
        tl.debug_barrier()
    tl.store(decays + which * 2 * W + d, total, mask=valid)
    tl.store(decays + (which * 2 + 1) * W + d, total * 0.0 + offset, mask=valid)
    tl.store(sink + block * 32 + tl.arange(0, 32), touched ^ ahead)


@triton.jit(do_not_specialize_on_alignment=["dt", "gate", "grad"])
def local_adjoint(
    dt, gate, vectors, grad, a2, bias, starts, ends, decays, sink, T, SPAN, SPLITS,
    W: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, G: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr, GATE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state before each split but the first, by the split's own tokens, and the sums of dt and of
    offsets.

    `ends` are zeros at the beginning."""
    block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) + 1
    d, i = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    which, valid = row * SPLITS + split, d < W
    shift = tl.load(bias + d, mask=valid, other=0.0)
    ends += which * STATES * W
    vectors += row * 2 * STATES * T
    total, offset = tl.zeros((BLOCK,), tl.float32), 0.0
    touched, ahead = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    tiles = tl.cdiv(tl.minimum(SPAN, T - split * SPAN), TOKENS)
    for back in range(0, tiles):
        t = split * SPAN + (tiles - 1 - back) * TOKENS
        first, left = row * T + t, T - t
        delta = load_steps(dt + first * DT, shift, i, left, d, valid, DT, FULL)
        off = load_offsets(starts + row * T, t, i, left, FULL)
        dy = load_tile(grad + first * G, i, left, d, valid, G, FULL)
        if GATE:
            z = load_tile(gate + first * Z, i, left, d, valid, Z, FULL)
            dy *= z * sigmoid(z)
        touched ^= ahead  # a split but the first has tokens before it
        ahead = touch_vectors(vectors + t - TOKENS, T, TOKENS, STATES)
        ahead ^= touch_tile(dt + (first - TOKENS) * DT, TOKENS, block * BLOCK, W, DT, BLOCK)
        ahead ^= touch_tile(grad + (first - TOKENS) * G, TOKENS, block * BLOCK, W, G, BLOCK)
        ahead ^= touch_tile(gate + (first - TOKENS) * Z, TOKENS, block * BLOCK, W, Z, BLOCK)
        for n in range(0, STATES, UNROLL):
            rates, queries, grads = (), (), ()
            for j in tl.static_range(UNROLL):
                rates = rates + (tl.load(a2 + (n + j) * W + d, mask=valid, other=0.0),)
                queries = queries + (load_tokens(vectors + (STATES + n + j) * T + t, i, left, FULL),)
                grads = grads + (tl.load(ends + (n + j) * W + d, mask=valid, other=0.0),)
            for j in tl.static_range(UNROLL):
                decay = tl.exp2(delta * rates[j][:, None] + off[None, :])
                own, g = dy * queries[j][None, :], grads[j]
                for k in tl.static_range(TOKENS):
                    hit = (i == TOKENS - 1 - k)[None, :]
                    g = pick(decay, hit) * (g + pick(own, hit))
                tl.store(ends + (n + j) * W + d, g, mask=valid)
        total += tl.sum(delta, 1)
        offset += tl.sum(off, 0)
        tl.debug_barrier()
    tl.store(decays + which * 2 * W + d, total, mask=valid)
    tl.store(decays + (which * 2 + 1) * W + d, total * 0.0 + offset, mask=valid)
    tl.store(sink + block * 32 + tl.arange(0, 32), touched ^ ahead)


@triton.jit
def combine(
    first, parts, decays, a2, SPLITS,
    W: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Replace each split's own end state by the state that it begins with; REVERSE goes from the last split to the first."""
    d, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.program_id(2)
    row, valid = tl.program_id(1).to(tl.int64), d < W
    a = tl.load(a2 + n * W + d, mask=valid, other=0.0)
    h = tl.zeros((BLOCK,), tl.float32)
    if FIRST:
        h = tl.load(first + (row * STATES + n) * W + d, mask=valid, other=0.0)
    for i in range(SPLITS):
        which = row * SPLITS + (SPLITS - 1 - i if REVERSE else i)
        own = tl.load(parts + (which * STATES + n) * W + d, mask=valid, other=0.0)
        tl.store(parts + (which * STATES + n) * W + d, h, mask=valid)
        total = tl.load(decays + which * 2 * W + d, mask=valid, other=0.0)
        offset = tl.load(decays + (which * 2 + 1) * W + d, mask=valid, other=0.0)
        h = tl.exp2(total * a + offset) * h + own


@triton.jit(do_not_specialize_on_alignment=["x", "dt", "gate", "y"])
def forward(
    x, dt, gate, vectors, a2, skip, bias, starts, carry, y, states, sink, T, SPAN,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, UNROLL: tl.constexpr, GATE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a split and the state before each of its tiles.

    `carry` (N, W) of a split is the state before it at the beginning, and the state after it at the end."""
    block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, i = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    valid = d < W
    shift = tl.load(bias + d, mask=valid, other=0.0)
    direct = tl.load(skip + d, mask=valid, other=0.0)
    carry += (row * tl.num_programs(2) + split) * STATES * W
    states += row * tl.cdiv(T, TOKENS) * STATES * W
    vectors += row * 2 * STATES * T
    touched, ahead = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    for t in range(split * SPAN, tl.minimum(split * SPAN + SPAN, T), TOKENS):
        first, left = row * T + t, T - t
        value = load_tile(x + first * X, i, left, d, valid, X, FULL)
        delta = load_steps(dt + first * DT, shift, i, left, d, valid, DT, FULL)
        off = load_offsets(starts + row * T, t, i, left, FULL)
        new, out = delta * value, direct[:, None] * value
        touched ^= ahead
        ahead = touch_tile(gate + first * Z, left, block * BLOCK, W, Z, BLOCK)
        ahead ^= touch_vectors(vectors + t + TOKENS, T, left - TOKENS, STATES)
        ahead ^= touch_tile(x + (first + TOKENS) * X, left - TOKENS, block * BLOCK, W, X, BLOCK)
        ahead ^= touch_tile(dt + (first + TOKENS) * DT, left - TOKENS, block * BLOCK, W, DT, BLOCK)
        before = states + (row * 0 + t // TOKENS) * STATES * W  # 64 bits, as those of the row
        for n in range(0, STATES, UNROLL):
            rates, keys, queries, old = (), (), (), ()
            for j in tl.static_range(UNROLL):
                rates = rates + (tl.load(a2 + (n + j) * W + d, mask=valid, other=0.0),)
                keys = keys + (load_tokens(vectors + (n + j) * T + t, i, left, FULL),)
                queries = queries + (load_tokens(vectors + (STATES + n + j) * T + t, i, left, FULL),)
                old = old + (tl.load(carry + (n + j) * W + d, mask=valid, other=0.0),)
            for j in tl.static_range(UNROLL):
                h = old[j]
                tl.store(before + (n + j) * W + d, h.to(states.dtype.element_ty), mask=valid)
                decay = tl.exp2(delta * rates[j][:, None] + off[None, :])
                hs = new * keys[j][None, :]  # what is added to the state, then the state after each token
                for k in tl.static_range(TOKENS):
                    hit = (i == k)[None, :]
                    h = pick(decay, hit) * h + pick(hs, hit)
                    hs = tl.where(hit, h[:, None], hs)
                out += hs * queries[j][None, :]
                tl.store(carry + (n + j) * W + d, h, mask=valid)
        if GATE:
            z = load_tile(gate + first * Z, i, left, d, valid, Z, FULL)
            out *= z * sigmoid(z)
        store_tile(y + first * W, out, i, left, d, valid, W, FULL)
        tl.debug_barrier()
    tl.store(sink + block * 32 + tl.arange(0, 32), touched ^ ahead)


@triton.jit(do_not_specialize_on_alignment=["x", "dt", "gate", "grad", "dx", "ddt", "dgate"])
def backward(
    x, dt, gate, vectors, grad, a2, skip, bias, starts, states, carry,
    dx, ddt, dgate, dvectors, da, dskip, dbias, sink, T, SPAN,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, G: tl.constexpr, STATES: tl.constexpr,
    N: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    GATE: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write all gradients of a split; those of B and C as sums over the program's channels, those of A, D and the bias of dt
    as sums over the split's tokens.

    `carry` (N, W) of a split is the gradient of the state after it at the beginning, and of the state before it at the end.
    `da` are zeros at the beginning."""
    block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, i = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS)
    which, valid, column = row * tl.num_programs(2) + split, d < W, tl.arange(0, N)
    shift = tl.load(bias + d, mask=valid, other=0.0)
    direct = tl.load(skip + d, mask=valid, other=0.0)
    carry += which * STATES * W
    da += which * STATES * W
    states += row * tl.cdiv(T, TOKENS) * STATES * W
    vectors += row * 2 * STATES * T
    dvectors += (block * tl.num_programs(1).to(tl.int64) + row) * 2 * STATES * T
    sum_skip, sum_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    touched, ahead = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    tiles = tl.cdiv(tl.minimum(SPAN, T - split * SPAN), TOKENS)
    for back in range(0, tiles):
        t = split * SPAN + (tiles - 1 - back) * TOKENS
        first, left = row * T + t, T - t
        value = load_tile(x + first * X, i, left, d, valid, X, FULL)
        delta = load_steps(dt + first * DT, shift, i, left, d, valid, DT, FULL)
        off = load_offsets(starts + row * T, t, i, left, FULL)
        new, out = delta * value, direct[:, None] * value
        dy = load_tile(grad + first * G, i, left, d, valid, G, FULL)
        if GATE:
            z = load_tile(gate + first * Z, i, left, d, valid, Z, FULL)
            dy *= z * sigmoid(z)
        by_new, by_delta = tl.zeros((BLOCK, TOKENS), tl.float32), tl.zeros((BLOCK, TOKENS), tl.float32)
        before = states + (row * 0 + t // TOKENS) * STATES * W  # 64 bits, as those of the row
        touched ^= ahead
        earlier = tl.minimum(t, TOKENS)  # tokens of the tile before this one: none before the first
        ahead = touch_tile(before - STATES * W, tl.where(t > 0, STATES, 0), block * BLOCK, W, W, BLOCK)
        ahead ^= touch_vectors(vectors + t - TOKENS, T, earlier, STATES)
        ahead ^= touch_tile(x + (first - TOKENS) * X, earlier, block * BLOCK, W, X, BLOCK)
        ahead ^= touch_tile(dt + (first - TOKENS) * DT, earlier, block * BLOCK, W, DT, BLOCK)
        ahead ^= touch_tile(gate + (first - TOKENS) * Z, earlier, block * BLOCK, W, Z, BLOCK)
        ahead ^= touch_tile(grad + (first - TOKENS) * G, earlier, block * BLOCK, W, G, BLOCK)
        for group in range(0, STATES, N):  # gradients of B and C of N states are gathered before they are stored
            by_b, by_c = tl.zeros((N, TOKENS), tl.float32), tl.zeros((N, TOKENS), tl.float32)
            a = tl.load(a2 + group * W + d, mask=valid, other=0.0)
            h = tl.load(before + group * W + d, mask=valid, other=0.0)
            g = tl.load(carry + group * W + d, mask=valid, other=0.0)
            sum_a = tl.load(da + group * W + d, mask=valid, other=0.0)
            for n in range(group, tl.minimum(group + N, STATES)):
                b = load_tokens(vectors + n * T + t, i, left, FULL)
                c = load_tokens(vectors + (STATES + n) * T + t, i, left, FULL)
                after = tl.minimum(n + 1, STATES - 1)
                next_a = tl.load(a2 + after * W + d, mask=valid, other=0.0)
                next_h = tl.load(before + after * W + d, mask=valid, other=0.0)
                next_g = tl.load(carry + after * W + d, mask=valid, other=0.0)
                next_sum = tl.load(da + after * W + d, mask=valid, other=0.0)
                h = h.to(tl.float32)
                decay = tl.exp2(delta * a[:, None] + off[None, :])
                hs, hs_before = new * b[None, :], decay  # the states after and before each token
                for k in tl.static_range(TOKENS):
                    hit = (i == k)[None, :]
                    hs_before = tl.where(hit, h[:, None], hs_before)
                    h = pick(decay, hit) * h + pick(hs, hit)
                    hs = tl.where(hit, h[:, None], hs)
                gs, later = dy * c[None, :], decay  # the gradient of the state after each token, and times its decay
                for k in tl.static_range(TOKENS):
                    hit = (i == TOKENS - 1 - k)[None, :]
                    g += pick(gs, hit)
                    gs = tl.where(hit, g[:, None], gs)
                    g *= pick(decay, hit)
                    later = tl.where(hit, g[:, None], later)
                tl.store(carry + n * W + d, g, mask=valid)
                if GATE:
                    out += hs * c[None, :]
                by_new += gs * b[None, :]
                by_exponent = later * hs_before
                by_delta += by_exponent * a[:, None]
                tl.store(da + n * W + d, sum_a + tl.sum(by_exponent * delta, 1), mask=valid)
                here = (column == n - group)[:, None]
                if EXACT:
                    by_b = tl.where(here, tl.sum(gs * new, 0)[None, :], by_b)
                    by_c = tl.where(here, tl.sum(hs * dy, 0)[None, :], by_c)
                else:
                    ones = tl.full((N, BLOCK), 1.0, tl.float32)
                    by_b = tl.where(here, tl.dot(ones, gs * new, input_precision="tf32"), by_b)
                    by_c = tl.where(here, tl.dot(ones, hs * dy, input_precision="tf32"), by_c)
                a, h, g, sum_a = next_a, next_h, next_g, next_sum
            at = dvectors + group * T + t + (column * T)[:, None] + i[None, :]
            keep = (i < left)[None, :] & (column < STATES - group)[:, None]
            tl.store(at, by_b, mask=keep)
            tl.store(at + STATES * T, by_c, mask=keep)
        value = load_tile(x + first * X, i, left, d, valid, X, FULL)
        raw = load_tile(dt + first * DT, i, left, d, valid, DT, FULL) + shift[:, None]
        by_raw = (value * by_new + LN2 * by_delta) * sigmoid(raw)
        if not FULL:
            by_raw = tl.where((i < left)[None, :], by_raw, 0.0)
        sum_skip += tl.sum(dy * value, 1)
        sum_bias += tl.sum(by_raw, 1)
        store_tile(dx + first * W, dy * direct[:, None] + delta * by_new, i, left, d, valid, W, FULL)
        store_tile(ddt + first * W, by_raw, i, left, d, valid, W, FULL)
        if GATE:
            z = load_tile(gate + first * Z, i, left, d, valid, Z, FULL)
            opened = sigmoid(z)
            by_gate = load_tile(grad + first * G, i, left, d, valid, G, FULL) * out * opened
            store_tile(dgate + first * W, by_gate * (1.0 + z * (1.0 - opened)), i, left, d, valid, W, FULL)
        tl.debug_barrier()
    tl.store(sink + block * 32 + tl.arange(0, 32), touched ^ ahead)
    tl.store(dskip + which * W + d, sum_skip, mask=valid)
    tl.store(dbias + which * W + d, sum_bias, mask=valid)


@triton.jit
def step(
    state, x, u, a_log, b, c, skip, bias, gate, y, X, U, BC, Z,
    W: tl.constexpr, STATES: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Update the states of one row and BLOCK channels by one token, and write its output."""
    d, n, row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N), tl.program_id(1).to(tl.int64)
    valid = d < W
    at, inside = d[:, None] * STATES + n[None, :], valid[:, None] & (n < STATES)[None, :]
    value = tl.load(x + row * X + d, mask=valid, other=0.0).to(tl.float32)
    shift = tl.load(bias + d, mask=valid, other=0.0).to(tl.float32)
    delta = softplus(tl.load(u + row * U + d, mask=valid, other=0.0).to(tl.float32) + shift)
    rates = -tl.exp2(tl.load(a_log + at, mask=inside, other=0.0).to(tl.float32) * LOG2E)
    key = tl.load(b + row * BC + n, mask=n < STATES, other=0.0).to(tl.float32)
    query = tl.load(c + row * BC + n, mask=n < STATES, other=0.0).to(tl.float32)
    h = tl.load(state + row * W * STATES + at, mask=inside, other=0.0)
    h = tl.exp2(delta[:, None] * rates * LOG2E) * h + (delta * value)[:, None] * key[None, :]
    tl.store(state + row * W * STATES + at, h, mask=inside)
    out = tl.sum(h * query[None, :], 1) + tl.load(skip + d, mask=valid, other=0.0).to(tl.float32) * value
    z = tl.load(gate + row * Z + d, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + row * W + d, (out * z * sigmoid(z)).to(y.dtype.element_ty), mask=valid)
