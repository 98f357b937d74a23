"""Triton kernels of kernels/selective_scan.py: the selective scan of Mamba, forward and backward.

A program is one warp with BLOCK = 32 channels, one for each lane. Tiles are (tokens, channels), so that a lane has all
tokens of its channel in registers, and lanes exchange nothing but the sums over channels for the gradients of B and C.

The forward pass goes from token to token with all states of its channels, up to N of them, in registers. The states of a
token do not depend on each other, which hides the latency of the exponentials. It stores the states before each chunk of
TOKENS tokens for the backward pass.

The backward pass goes from chunk to chunk, and in each of them from one pair of states to the next: it computes the decays
of the chunk, the states after each token from the stored ones, then their gradients from the last token to the first. The
gradient of the states before the chunk waits in memory (`carry`) for the chunk before it.

Time is divided into splits where batch and channels alone do not fill the GPU:

    1. `forward` with LOCAL gives the end state of each split from zeros, and the sum of its steps;
    2. `combine` turns these into the state at the beginning of each split, one split after the other;
    3. `forward` computes the outputs of a split from there.

The backward pass does likewise with the adjoint recurrence (`local_adjoint`, `combine`, `backward`).

The decay of a token is exp2(dt A2), A2 = A log2(e). The first token of a document has the step RESET instead, with which
the decay is exactly 0, since A is negative, while it adds its own dt B x. Beyond the end of a row dt is 0, which leaves the
state as it is. Widths and row strides are constants, so that the addresses of a tile are constant offsets from one pointer.
FULL says that no tile goes beyond an end, so that loads and stores need no mask.

The gradients of B and C are sums over channels, which lie in different lanes: sums on the tensor cores, rounded to bf16
(lane_sums_triton.py), or, if EXACT, sums of fp32 by shuffles.

Triton gives lanes to the last axis of a tile, and as many neighbours to a lane as it knows to be aligned. A lane must have
one channel, so kernels are not told how the pointers to tiles are aligned (tests/kernels/test_compiled_kernels.py looks at
the result).

Registers leave room for eight warps on a multiprocessor, which is few to hide the latency of memory. So what the next
chunk needs is loaded into registers a chunk ahead, or at least into the L1 cache: `touch_row`, `touch_tile` and
`touch_vectors` load one number of each 32 bytes, if there are 16 states. Triton has no instruction for that, so the bits of
these numbers are gathered and stored at the end (`sink`), where nobody reads them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from regard.kernels.lane_sums_triton import sum_lanes, sum_quads

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
RESET: tl.constexpr = tl.constexpr(1e30)
# Neither the interpreter nor AMD's GPUs have NVIDIA's instructions.
NVIDIA: tl.constexpr = tl.constexpr(not triton.knobs.runtime.interpret and not torch.version.hip)


@triton.jit
def reciprocal(u):
    """Return 1 / u, on NVIDIA's GPUs by one instruction, which is off by one rounding."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [u], dtype=tl.float32, is_pure=True, pack=1
        )
    return 1.0 / u


@triton.jit
def softplus_and_slope(u):
    """Return log(1 + exp(u)), by its series where exp(u) is small, and its slope.

    NVIDIA's logarithm in one instruction is wrong by 2^-22, up to 3e-6 of the result."""
    e = tl.exp2(u * LOG2E)
    series = e * (1.0 - e * (0.5 - e * (0.33333333333 - e * (0.25 - e * 0.2))))
    log = libdevice.fast_log2f(1.0 + e) if NVIDIA else tl.log2(1.0 + e)
    value = tl.where(u > 20.0, u, tl.where(e < 0.05, series, LN2 * log))
    return value, tl.where(u > 20.0, 1.0, e * reciprocal(1.0 + e))


@triton.jit
def sigmoid(u):
    return reciprocal(1.0 + tl.exp2(-u * LOG2E))


# ---- tiles -------------------------------------------------------------------------------------------------------------


@triton.jit
def in_width(d, W: tl.constexpr, BLOCK: tl.constexpr):
    """Return which channels exist, a constant where all do."""
    return d < W if W % BLOCK else tl.full((BLOCK,), True, tl.int1)


@triton.jit
def load_tile(at, i, left, d, valid, ROW: tl.constexpr, FULL: tl.constexpr):
    """Load a tile (tokens, BLOCK); `at` points at its first token, and `left` tokens are left in the row."""
    if FULL:
        return tl.load(at + (i * ROW)[:, None] + d[None, :])
    return tl.load(at + (i * ROW)[:, None] + d[None, :], mask=(i < left)[:, None] & valid[None, :], other=0.0)


@triton.jit
def store_tile(at, tile, i, left, d, valid, ROW: tl.constexpr, FULL: tl.constexpr):
    """Store a tile (tokens, BLOCK) where `load_tile` would load it."""
    at = at + (i * ROW)[:, None] + d[None, :]
    if FULL:
        tl.store(at, tile.to(at.dtype.element_ty))
    else:
        tl.store(at, tile.to(at.dtype.element_ty), mask=(i < left)[:, None] & valid[None, :])


@triton.jit
def step_sizes(raw, shift, i, left, FULL: tl.constexpr):
    """Return the step sizes dt of a tile and their slopes, 0 beyond the end of the row."""
    delta, slope = softplus_and_slope(raw.to(tl.float32) + shift[None, :])
    if FULL:
        return delta, slope
    return tl.where((i < left)[:, None], delta, 0.0), tl.where((i < left)[:, None], slope, 0.0)


@triton.jit
def with_resets(delta, starts, t, i, left, FULL: tl.constexpr):
    """Return the step sizes of a tile, RESET for each token with which a document begins."""
    start = tl.load(starts + t + i) if FULL else tl.load(starts + t + i, mask=i < left, other=-1)
    return tl.where((start == t + i)[:, None], RESET, delta)


@triton.jit
def load_vector(at, n, states, EVEN: tl.constexpr):
    """Load B or C of one token, (N,), 0 beyond the last of the states."""
    return tl.load(at + n) if EVEN else tl.load(at + n, mask=n < states, other=0.0)


@triton.jit
def pick(tile, hit, axis: tl.constexpr = 0):
    """Return the part of a tile at which `hit` is true, on one place of an axis: registers, since xor with 0 is no work."""
    bits = tl.where(hit, tile.to(tl.int32, bitcast=True), 0)
    return tl.xor_sum(bits, axis).to(tl.float32, bitcast=True)


@triton.jit
def touch_tile(at, left, first, W, ROW: tl.constexpr, BLOCK: tl.constexpr):
    """Load two channels of each of 16 tokens of a tile, (32,) as bits; `first` is the tile's first channel."""
    k = tl.arange(0, 32)
    d = first + (k % 2) * (BLOCK // 2)
    found = tl.load(at + (k // 2) * ROW + d, mask=(k // 2 < left) & (d < W), other=0.0)
    return found.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def touch_vectors(at, T, left, STATES: tl.constexpr):
    """Load one token of each state of B and C of a chunk, (32,) as bits."""
    k = tl.arange(0, 32)
    return tl.load(at + k * T, mask=k < tl.where(left > 0, 2 * STATES, 0), other=0.0).to(tl.int32, bitcast=True)


@triton.jit
def touch_row(at, t, T, TOKENS: tl.constexpr, STATES: tl.constexpr):
    """Load one of some neighbouring numbers of B and C (T, 2 states) of the tokens from t on, (32,) as bits."""
    APART: tl.constexpr = max(1, TOKENS * 2 * STATES // 32)
    k = tl.arange(0, 32) * APART
    token = t + k // (2 * STATES)
    mask = (token >= 0) & (token < T) & (k < TOKENS * 2 * STATES)
    return tl.load(at + t * 2 * STATES + k, mask=mask, other=0.0).to(tl.int32, bitcast=True)


# ---- forward -----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["x", "dt", "gate", "a2", "carry", "y", "states"])
def forward(
    x, dt, gate, vectors, a2, skip, bias, starts, carry, totals, y, states, sink, T, SPAN,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, STATES: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATE: tl.constexpr, FULL: tl.constexpr, LOCAL: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a split and the state before each chunk of TOKENS tokens.

    `carry` (states, W) of a split is the state before it at the beginning, and the state after it at the end. LOCAL writes
    nothing else but the sum of the split's steps to `totals`; `carry` are zeros at the beginning then. `vectors`
    (T, 2 states) are B and C."""
    block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    d, i, n = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS), tl.arange(0, N)
    valid = in_width(d, W, BLOCK)
    EVEN: tl.constexpr = FULL and STATES % N == 0
    SINGLE: tl.constexpr = STATES <= N  # all states of a channel are in registers at once
    own = row * (tl.num_programs(2) + LOCAL) + split  # LOCAL has no program for the last split
    carry += own * STATES * W
    states += row * tl.cdiv(T, TOKENS) * STATES * W
    vectors += row * T * 2 * STATES
    at = n[:, None] * W + d[None, :]
    inside = (n < STATES)[:, None] & valid[None, :]
    shift = tl.load(bias + d, mask=valid, other=0.0)
    direct = tl.load(skip + d, mask=valid, other=0.0)
    rates = tl.load(a2 + at, mask=inside, other=0.0)  # (N, BLOCK), as are the states h
    h = tl.load(carry + at, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float32)
    touched, ahead = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    begin, first = split * SPAN, row * T + split * SPAN
    value = load_tile(x + first * X, i, T - begin, d, valid, X, FULL)
    raw = load_tile(dt + first * DT, i, T - begin, d, valid, DT, FULL)
    z = load_tile(gate + first * Z, i, T - begin, d, valid, Z, FULL)
    for t in range(begin, tl.minimum(begin + SPAN, T), TOKENS):
        left, first = T - t, row * T + t
        delta, _ = step_sizes(raw, shift, i, left, FULL)
        new, out = delta * value.to(tl.float32), direct[None, :] * value.to(tl.float32)
        delta = with_resets(delta, starts + row * T, t, i, left, FULL)
        now = z.to(tl.float32)
        touched ^= ahead
        ahead = touch_row(vectors, t + 2 * TOKENS, T, TOKENS, STATES)
        value = load_tile(x + (first + TOKENS) * X, i, left - TOKENS, d, valid, X, False)
        raw = load_tile(dt + (first + TOKENS) * DT, i, left - TOKENS, d, valid, DT, False)
        if GATE and not LOCAL:
            z = load_tile(gate + (first + TOKENS) * Z, i, left - TOKENS, d, valid, Z, False)
        before = states + (row * 0 + t // TOKENS) * STATES * W  # 64 bits, as those of the row
        for group in range(0, STATES, N):
            if not SINGLE:
                inside = (group + n < STATES)[:, None] & valid[None, :]
                rates = tl.load(a2 + group * W + at, mask=inside, other=0.0)
                h = tl.load(carry + group * W + at, mask=inside, other=0.0)
            if not LOCAL:
                tl.store(before + group * W + at, h.to(states.dtype.element_ty), mask=inside)
            for k in tl.static_range(TOKENS):
                hit = (i == k)[:, None]
                b = vectors + (t + k) * 2 * STATES + group
                real = tl.where(k < left, STATES - group, 0)
                h = tl.exp2(pick(delta, hit)[None, :] * rates) * h
                h += pick(new, hit)[None, :] * load_vector(b, n, real, EVEN)[:, None]
                if not LOCAL:
                    read = tl.sum(h * load_vector(b + STATES, n, real, EVEN)[:, None], 0)
                    out = tl.where(hit, out + read[None, :], out)
            if not SINGLE:
                tl.store(carry + group * W + at, h, mask=inside)
        if LOCAL:
            total += tl.sum(delta, 0)
        else:
            if GATE:
                out *= now * sigmoid(now)
            store_tile(y + first * W, out, i, left, d, valid, W, FULL)
    if SINGLE:
        tl.store(carry + at, h, mask=inside)
    if LOCAL:
        tl.store(totals + own * W + d, total, mask=valid)
    tl.store(sink + block * 32 + tl.arange(0, 32), touched ^ ahead)


@triton.jit
def combine(
    first, parts, totals, a2, SPLITS,
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
        h = tl.exp2(tl.load(totals + which * W + d, mask=valid, other=0.0) * a) * h + own


# ---- backward ----------------------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize_on_alignment=["dt", "gate", "grad", "a2", "carry"])
def local_adjoint(
    dt, gate, vectors, grad, a2, bias, starts, carry, totals, sink, T, SPAN, SPLITS,
    W: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, G: tl.constexpr, STATES: tl.constexpr, N: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr, GATE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state before each split but the first, by the split's own tokens, to `carry`, and the sum of
    the split's steps to `totals`.

    `carry` are zeros at the beginning. `vectors` (T, 2 states) are B and C."""
    block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2) + 1
    d, i, n = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, TOKENS), tl.arange(0, N)
    valid = in_width(d, W, BLOCK)
    EVEN: tl.constexpr = FULL and STATES % N == 0
    SINGLE: tl.constexpr = STATES <= N
    own = row * SPLITS + split
    carry += own * STATES * W
    vectors += row * T * 2 * STATES
    at = n[:, None] * W + d[None, :]
    inside = (n < STATES)[:, None] & valid[None, :]
    shift = tl.load(bias + d, mask=valid, other=0.0)
    rates = tl.load(a2 + at, mask=inside, other=0.0)
    g = tl.zeros((N, BLOCK), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    touched, ahead = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    begin = split * SPAN
    chunks = tl.cdiv(tl.minimum(SPAN, T - begin), TOKENS)
    last = begin + (chunks - 1) * TOKENS
    raw = load_tile(dt + (row * T + last) * DT, i, T - last, d, valid, DT, FULL)
    z = load_tile(gate + (row * T + last) * Z, i, T - last, d, valid, Z, FULL)
    dy = load_tile(grad + (row * T + last) * G, i, T - last, d, valid, G, FULL)
    for back in range(0, chunks):
        t = last - back * TOKENS
        left, first = T - t, row * T + t - TOKENS  # a split but the first has tokens before it
        delta = with_resets(step_sizes(raw, shift, i, left, FULL)[0], starts + row * T, t, i, left, FULL)
        by_read = dy.to(tl.float32)
        touched ^= ahead
        ahead = touch_row(vectors, t - 2 * TOKENS, T, TOKENS, STATES)
        if GATE:
            now = z.to(tl.float32)
            by_read *= now * sigmoid(now)
            z = load_tile(gate + first * Z, i, left + TOKENS, d, valid, Z, FULL)
        raw = load_tile(dt + first * DT, i, left + TOKENS, d, valid, DT, FULL)
        dy = load_tile(grad + first * G, i, left + TOKENS, d, valid, G, FULL)
        for group in range(0, STATES, N):
            if not SINGLE:
                inside = (group + n < STATES)[:, None] & valid[None, :]
                rates = tl.load(a2 + group * W + at, mask=inside, other=0.0)
                g = tl.load(carry + group * W + at, mask=inside, other=0.0)
            for k in tl.static_range(TOKENS):
                hit = (i == TOKENS - 1 - k)[:, None]
                c = vectors + (t + TOKENS - 1 - k) * 2 * STATES + STATES + group
                real = tl.where(TOKENS - 1 - k < left, STATES - group, 0)
                g += pick(by_read, hit)[None, :] * load_vector(c, n, real, EVEN)[:, None]
                g *= tl.exp2(pick(delta, hit)[None, :] * rates)
            if not SINGLE:
                tl.store(carry + group * W + at, g, mask=inside)
        total += tl.sum(delta, 0)
    if SINGLE:
        tl.store(carry + at, g, mask=inside)
    tl.store(totals + own * W + d, total, mask=valid)
    tl.store(sink + block * 32 + tl.arange(0, 32), touched ^ ahead)


@triton.jit
def load_states(at, n, pair, d, valid, W: tl.constexpr, STATES: tl.constexpr):
    """Load two states of all channels from a table (states, W), (2, BLOCK), 0 beyond the last one."""
    inside = valid[None, :] if STATES % 2 == 0 else (n + pair < STATES) & valid[None, :]
    return tl.load(at + n * W + pair * W + d[None, :], mask=inside, other=0.0)


@triton.jit
def store_states(at, tile, n, pair, d, valid, W: tl.constexpr, STATES: tl.constexpr):
    """Store two states of all channels where `load_states` would load them."""
    inside = valid[None, :] if STATES % 2 == 0 else (n + pair < STATES) & valid[None, :]
    tl.store(at + n * W + pair * W + d[None, :], tile, mask=inside)


@triton.jit
def load_pair(at, T, i, left, two, FULL: tl.constexpr):
    """Load B or C of two states for the tokens of a chunk, (TOKENS,) each; the second is 0 unless `two`."""
    if FULL:
        return tl.load(at + i), tl.load(at + T + i)
    return tl.load(at + i, mask=i < left, other=0.0), tl.load(at + T + i, mask=i < tl.where(two, left, 0), other=0.0)


@triton.jit
def times_pair(tile, pair, first):
    """Return a tile (TOKENS, BLOCK) times each of a pair of vectors (TOKENS,), (TOKENS, 2, BLOCK); `first` is (1, 2, 1)."""
    return tl.where(first, (tile * pair[0][:, None])[:, None, :], (tile * pair[1][:, None])[:, None, :])


@triton.jit
def add_products(total, tile, pair, first):
    """Return total + a tile (TOKENS, 2, BLOCK) times a pair, summed over the pair, (TOKENS, BLOCK)."""
    total += pick(tile, first, 1) * pair[0]
    return total + pick(tile, first == 0, 1) * pair[1]


@triton.jit
def states_of(h, decay, added, i, TOKENS: tl.constexpr):
    """Return the states after and before each token of a chunk, (TOKENS, 2, BLOCK), from those before it, (2, BLOCK)."""
    after, before = added, decay
    for k in tl.static_range(TOKENS):
        hit = (i == k)[:, None, None]
        before = tl.where(hit, h[None, :, :], before)
        h = pick(decay, hit) * h + pick(added, hit)
        after = tl.where(hit, h[None, :, :], after)
    return after, before


@triton.jit
def gradients_of(g, decay, own, i, TOKENS: tl.constexpr):
    """Return the gradients of the states after each token of a chunk, the same times the token's decay, (TOKENS, 2, BLOCK),
    and the gradient of the states before the chunk, (2, BLOCK)."""
    gs, decayed = own, decay
    for k in tl.static_range(TOKENS):
        hit = (i == TOKENS - 1 - k)[:, None, None]
        g += pick(own, hit)
        gs = tl.where(hit, g[None, :, :], gs)
        g *= pick(decay, hit)
        decayed = tl.where(hit, g[None, :, :], decayed)
    return gs, decayed, g


@triton.jit(
    do_not_specialize_on_alignment=[
        "x", "dt", "gate", "grad", "a2", "states", "carry", "dx", "ddt", "dgate", "da", "matrices",
    ]
)  # fmt: skip
def backward(
    x, dt, gate, vectors, grad, a2, skip, bias, starts, states, carry,
    dx, ddt, dgate, dvectors, da, dskip, dbias, sink, matrices, T, SPAN,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, G: tl.constexpr, STATES: tl.constexpr,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    GATE: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write all gradients of a split; those of B and C as sums over the program's channels, those of A, D and the bias of dt
    as sums over the split's tokens.

    `carry` (states, W) of a split is the gradient of the state after it at the beginning, and of the state before it at the
    end. `da` are zeros at the beginning. `vectors` (2 states, T) are B and C, `dvectors` (T, 2 states) their gradients."""
    block, row, split = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    lane, i, pair = tl.arange(0, BLOCK), tl.arange(0, TOKENS), tl.arange(0, 2)[:, None]
    is_first = (tl.arange(0, 2) == 0)[None, :, None]
    d = block * BLOCK + lane
    which, valid = row * tl.num_programs(2) + split, in_width(d, W, BLOCK)
    EVEN: tl.constexpr = FULL and STATES % 2 == 0
    shift = tl.load(bias + d, mask=valid, other=0.0)
    direct = tl.load(skip + d, mask=valid, other=0.0)
    carry += which * STATES * W
    da += which * STATES * W
    states += row * tl.cdiv(T, TOKENS) * STATES * W
    vectors += row * T * 2 * STATES
    dvectors += (block * tl.num_programs(1).to(tl.int64) + row) * T * (2 * STATES if EXACT else STATES)
    sum_skip, sum_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    touched, ahead = tl.zeros((32,), tl.int32), tl.zeros((32,), tl.int32)
    if not EXACT:
        factors = tl.load(matrices + tl.arange(0, 16)[:, None] * 32 + lane[None, :])
    chunks = tl.cdiv(tl.minimum(SPAN, T - split * SPAN), TOKENS)
    for back in range(0, chunks):
        t = split * SPAN + (chunks - 1 - back) * TOKENS
        first, left = row * T + t, T - t
        value = load_tile(x + first * X, i, left, d, valid, X, FULL).to(tl.float32)
        raw = load_tile(dt + first * DT, i, left, d, valid, DT, FULL)
        dy = load_tile(grad + first * G, i, left, d, valid, G, FULL).to(tl.float32)
        size, slope = step_sizes(raw, shift, i, left, FULL)
        new, delta = size * value, with_resets(size, starts + row * T, t, i, left, FULL)
        if GATE:
            z = load_tile(gate + first * Z, i, left, d, valid, Z, FULL).to(tl.float32)
            opened = sigmoid(z)
            by_gate, dy = dy * opened * (1.0 + z * (1.0 - opened)), dy * z * opened
        sum_skip += tl.sum(dy * value, 0)
        before = states + (row * 0 + t // TOKENS) * STATES * W  # 64 bits, as those of the row
        touched ^= ahead
        earlier = tl.minimum(t, TOKENS)  # tokens of the chunk before this one: none before the first
        ahead = touch_tile(before - STATES * W, tl.where(t > 0, STATES, 0), block * BLOCK, W, W, BLOCK)
        ahead ^= touch_vectors(vectors + t - TOKENS, T, earlier, STATES)
        ahead ^= touch_tile(x + (first - TOKENS) * X, earlier, block * BLOCK, W, X, BLOCK)
        ahead ^= touch_tile(dt + (first - TOKENS) * DT, earlier, block * BLOCK, W, DT, BLOCK)
        if GATE:
            ahead ^= touch_tile(gate + (first - TOKENS) * Z, earlier, block * BLOCK, W, Z, BLOCK)
        ahead ^= touch_tile(grad + (first - TOKENS) * G, earlier, block * BLOCK, W, G, BLOCK)
        out = direct[None, :] * value
        by_new, by_delta = tl.zeros((TOKENS, BLOCK), tl.float32), tl.zeros((TOKENS, BLOCK), tl.float32)
        next_a = load_states(a2, 0, pair, d, valid, W, STATES)
        next_h = load_states(before, 0, pair, d, valid, W, STATES)
        next_g = load_states(carry, 0, pair, d, valid, W, STATES)
        next_sum = load_states(da, 0, pair, d, valid, W, STATES)
        for n in tl.range(0, STATES, 2, loop_unroll_factor=2):
            b = load_pair(vectors + n * T + t, T, i, left, n + 1 < STATES, EVEN)
            c = load_pair(vectors + (STATES + n) * T + t, T, i, left, n + 1 < STATES, EVEN)
            a, h, g, sum_a = next_a, next_h.to(tl.float32), next_g, next_sum  # (2, BLOCK)
            following = tl.where(n + 2 < STATES, n + 2, n)
            next_a = load_states(a2, following, pair, d, valid, W, STATES)
            next_h = load_states(before, following, pair, d, valid, W, STATES)
            next_g = load_states(carry, following, pair, d, valid, W, STATES)
            next_sum = load_states(da, following, pair, d, valid, W, STATES)
            decay = tl.exp2(delta[:, None, :] * a[None, :, :])
            hs, earlier_hs = states_of(h, decay, times_pair(new, b, is_first), i, TOKENS)
            if GATE:
                out = add_products(out, hs, (c[0][:, None], c[1][:, None]), is_first)
            by_c = hs * dy[:, None, :]
            gs, decayed, g = gradients_of(g, decay, times_pair(dy, c, is_first), i, TOKENS)
            store_states(carry, g, n, pair, d, valid, W, STATES)
            by_new = add_products(by_new, gs, (b[0][:, None], b[1][:, None]), is_first)
            by_b = gs * new[:, None, :]
            if EXACT:
                place = dvectors + (t + i)[:, None] * 2 * STATES + n + tl.arange(0, 2)[None, :]
                real = (i < left)[:, None] & (n + tl.arange(0, 2) < STATES)[None, :]
                tl.store(place, tl.sum(by_b, 2), mask=real)
                tl.store(place + STATES, tl.sum(by_c, 2), mask=real)
            else:
                # a lane gets the two states of one token; `dvectors` are words of two numbers
                words, kept = dvectors + (t + lane) * STATES + n // 2, lane < tl.minimum(left, TOKENS)
                quads = sum_quads(tl.reshape(by_c, (2 * TOKENS, BLOCK)), factors)
                tl.store(words + STATES // 2, sum_lanes(quads, factors), mask=kept)
                quads = sum_quads(tl.reshape(by_b, (2 * TOKENS, BLOCK)), factors)
                tl.store(words, sum_lanes(quads, factors), mask=kept)
            by_exponent = decayed * earlier_hs
            rates = pick(a, pair == 0)[None, :], pick(a, pair == 1)[None, :]
            by_delta = add_products(by_delta, by_exponent, rates, is_first)
            sum_a += tl.sum(by_exponent * delta[:, None, :], 0)
            store_states(da, sum_a, n, pair, d, valid, W, STATES)
        by_raw = (value * by_new + LN2 * by_delta) * slope
        sum_bias += tl.sum(by_raw, 0)
        store_tile(dx + first * W, dy * direct[None, :] + size * by_new, i, left, d, valid, W, FULL)
        store_tile(ddt + first * W, by_raw, i, left, d, valid, W, FULL)
        if GATE:
            store_tile(dgate + first * W, by_gate * out, i, left, d, valid, W, FULL)
        tl.debug_barrier()
    tl.store(sink + block * 32 + tl.arange(0, 32), touched ^ ahead)
    tl.store(dskip + which * W + d, sum_skip, mask=valid)
    tl.store(dbias + which * W + d, sum_bias, mask=valid)


# ---- decoding ----------------------------------------------------------------------------------------------------------


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
    delta, _ = softplus_and_slope(tl.load(u + row * U + d, mask=valid, other=0.0).to(tl.float32) + shift)
    rates = -tl.exp2(tl.load(a_log + at, mask=inside, other=0.0).to(tl.float32) * LOG2E)
    key = tl.load(b + row * BC + n, mask=n < STATES, other=0.0).to(tl.float32)
    query = tl.load(c + row * BC + n, mask=n < STATES, other=0.0).to(tl.float32)
    h = tl.load(state + row * W * STATES + at, mask=inside, other=0.0)
    h = tl.exp2(delta[:, None] * rates * LOG2E) * h + (delta * value)[:, None] * key[None, :]
    tl.store(state + row * W * STATES + at, h, mask=inside)
    out = tl.sum(h * query[None, :], 1) + tl.load(skip + d, mask=valid, other=0.0).to(tl.float32) * value
    z = tl.load(gate + row * Z + d, mask=valid, other=0.0).to(tl.float32)
    tl.store(y + row * W + d, (out * z * sigmoid(z)).to(y.dtype.element_ty), mask=valid)
