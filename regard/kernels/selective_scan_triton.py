"""Triton kernels of kernels/selective_scan.py: the selective scan of Mamba, forward and backward.

A program has BLOCK channels, one for each lane, and keeps the N states of a channel in the registers of its lane. It walks
through time, so every state costs one exp2 a token, which is what limits the forward kernel: the inputs and outputs of a
token are a few bytes per channel. Time is divided into splits where batch and channels alone do not fill the GPU:

    1. `local_states` gives each split's end state from zeros, and its total decay;
    2. `combine` turns these into the state at the beginning of each split, one split after the other;
    3. `forward` computes the outputs of a split from there, and stores the state before each chunk of CHUNK tokens.

The backward pass does likewise with the adjoint recurrence (`local_adjoint`, `combine`, `backward`). States are computed
again, chunk by chunk: from the stored state the kernel first writes the states before each group of STEPS tokens to scratch
memory, then takes the groups from the last to the first and holds the STEPS states of a group in registers.

The decay of a token is exp2(dt A2 + off), A2 = A log2(e). `off` is -1e30 for the first token of a document, which makes
the decay exactly 0, otherwise 0. Beyond the end of a row dt is 0, which leaves the state as it is. A tile of states is
(N, BLOCK). The argument `one` is 1: as a number that the compiler does not know it keeps Triton from giving four
channels to a lane. Widths and row strides are constants, so that the addresses of a group's tokens are constant
offsets. FULL says that no group of STEPS tokens and no block of channels goes beyond an end, so that loads and stores
need no mask.
"""

# ruff: noqa: RUF005 (Triton has no starred expressions)
from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
RESET: tl.constexpr = tl.constexpr(-1e30)
NEVER: tl.constexpr = tl.constexpr(-1e4)  # softplus of it is 0


@triton.jit
def softplus(u):
    """Return log(1 + exp(u)), by its series where exp(u) is small."""
    e = tl.exp2(tl.minimum(u, 20.0) * LOG2E)
    series = e * (1.0 - e * (0.5 - e * (0.33333333333 - e * (0.25 - e * 0.2))))
    return tl.where(u > 20.0, u, tl.where(e < 0.05, series, LN2 * tl.log2(1.0 + e)))


@triton.jit
def sigmoid(u):
    return 1.0 / (1.0 + tl.exp2(-u * LOG2E))


@triton.jit
def load_channels(at, t, T, valid, ROW: tl.constexpr, i: tl.constexpr, FULL: tl.constexpr):
    """Load one number for each channel at the i-th token of a group, in fp32; `at` points at the first token, which is t."""
    if FULL:
        return tl.load(at + i * ROW).to(tl.float32)
    return tl.load(at + i * ROW, mask=tl.where(t + i < T, valid, False), other=0.0).to(tl.float32)


@triton.jit
def load_delta(at, bias, t, T, valid, ROW: tl.constexpr, i: tl.constexpr, FULL: tl.constexpr):
    """Load dt as it enters softplus, NEVER beyond the end of the row."""
    u = load_channels(at, t, T, valid, ROW, i, FULL) + bias
    return u if FULL else tl.where(t + i < T, u, NEVER)


@triton.jit
def load_vector(
    at, t, T, i: tl.constexpr, ROW: tl.constexpr, N: tl.constexpr, STATES: tl.constexpr, FULL: tl.constexpr
):
    """Load B or C of the i-th token of a group, (N, 1) in fp32."""
    n = tl.arange(0, N)
    if FULL and N == STATES:
        return tl.load(at + i * ROW + n).to(tl.float32)[:, None]
    return tl.load(at + i * ROW + n, mask=n < tl.where(t + i < T, STATES, 0), other=0.0).to(tl.float32)[:, None]


@triton.jit
def load_offset(starts, t, T, i: tl.constexpr, FULL: tl.constexpr):
    """Return RESET if a document begins at the i-th token of a group, otherwise 0."""
    start = tl.load(starts + t + i) if FULL else tl.load(starts + t + i, mask=t + i < T, other=-1)
    return tl.where(start == t + i, RESET, 0.0)


@triton.jit
def store_channels(at, value, t, T, valid, ROW: tl.constexpr, i: tl.constexpr, FULL: tl.constexpr):
    """Store one number for each channel at the i-th token of a group."""
    if FULL:
        tl.store(at + i * ROW, value.to(at.dtype.element_ty))
    else:
        tl.store(at + i * ROW, value.to(at.dtype.element_ty), mask=tl.where(t + i < T, valid, False))


@triton.jit(do_not_specialize=["one"])
def local_states(
    x, dt, b, a2, bias, starts, ends, decays, T, SPAN, one,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, BC: tl.constexpr,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the state at the end of each split that begins with zeros, and the sums of dt and of offsets."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    n, valid = tl.arange(0, N), d < W
    at, inside = n[:, None] * W + d[None, :] * one, (n < STATES)[:, None] & valid[None, :]
    a = tl.load(a2 + at, mask=inside, other=0.0)
    u = tl.load(bias + d, mask=valid, other=0.0)
    starts += row * T
    h = tl.zeros((N, BLOCK), tl.float32)
    total, offset = tl.zeros((BLOCK,), tl.float32), 0.0
    for t in range(split * SPAN, tl.minimum(split * SPAN + SPAN, T), STEPS):
        first = row * T + t
        values, steps, keys = x + first * X + d, dt + first * DT + d, b + first * BC
        for i in tl.static_range(STEPS):
            delta = softplus(load_delta(steps, u, t, T, valid, DT, i, FULL))
            off = load_offset(starts, t, T, i, FULL)
            new = delta * load_channels(values, t, T, valid, X, i, FULL)
            new = load_vector(keys, t, T, i, BC, N, STATES, FULL) * new[None, :]
            h = tl.exp2(delta[None, :] * a + off) * h + new
            total += delta
            offset += off
    which = row * splits + split
    tl.store(ends + which * STATES * W + at, h, mask=inside)
    tl.store(decays + which * 2 * W + d, total, mask=valid)
    tl.store(decays + (which * 2 + 1) * W + d, total * 0.0 + offset, mask=valid)


@triton.jit(do_not_specialize=["one"])
def combine(
    first, parts, decays, a2, SPLITS, one,
    W: tl.constexpr, N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, REVERSE: tl.constexpr,
    FIRST: tl.constexpr,
):  # fmt: skip
    """Replace each split's own end state by the state that it begins with; REVERSE goes from the last split to the first."""
    d, n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, N)
    row, valid = tl.program_id(1).to(tl.int64), d < W
    at, inside = n[:, None] * W + d[None, :] * one, (n < STATES)[:, None] & valid[None, :]
    a = tl.load(a2 + at, mask=inside, other=0.0)
    h = tl.zeros((N, BLOCK), tl.float32)
    if FIRST:
        h = tl.load(first + row * STATES * W + at, mask=inside, other=0.0)
    for i in range(SPLITS):
        which = row * SPLITS + (SPLITS - 1 - i if REVERSE else i)
        own = tl.load(parts + which * STATES * W + at, mask=inside, other=0.0)
        tl.store(parts + which * STATES * W + at, h, mask=inside)
        total = tl.load(decays + which * 2 * W + d, mask=valid, other=0.0)
        offset = tl.load(decays + (which * 2 + 1) * W + d, mask=valid, other=0.0)
        h = tl.exp2(total[None, :] * a + offset[None, :]) * h + own


@triton.jit(do_not_specialize=["one"])
def forward(
    x, dt, gate, b, c, a2, skip, bias, starts, begins, y, states, final, T, SPAN, one,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, BC: tl.constexpr,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
    GATE: tl.constexpr, BEGIN: tl.constexpr, KEEP: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the outputs of a split, the state before each of its chunks if KEEP, and the state after the last split."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    n, valid = tl.arange(0, N), d < W
    at, inside = n[:, None] * W + d[None, :] * one, (n < STATES)[:, None] & valid[None, :]
    a = tl.load(a2 + at, mask=inside, other=0.0)
    u = tl.load(bias + d, mask=valid, other=0.0)
    direct = tl.load(skip + d, mask=valid, other=0.0)
    h = tl.zeros((N, BLOCK), tl.float32)
    if BEGIN:
        h = tl.load(begins + (row * splits + split) * STATES * W + at, mask=inside, other=0.0)
    starts += row * T
    states += row * ((T + CHUNK - 1) // CHUNK) * STATES * W
    for t in range(split * SPAN, tl.minimum(split * SPAN + SPAN, T), STEPS):
        if KEEP:  # noqa: SIM102 (decided when the kernel is compiled)
            if t % CHUNK == 0:
                tl.store(states + (t // CHUNK) * STATES * W + at, h, mask=inside)
        first = row * T + t
        values, steps, gates = x + first * X + d, dt + first * DT + d, gate + first * Z + d
        keys, queries = b + first * BC, c + first * BC
        outputs = ()
        for i in tl.static_range(STEPS):
            delta = softplus(load_delta(steps, u, t, T, valid, DT, i, FULL))
            value = load_channels(values, t, T, valid, X, i, FULL)
            off = load_offset(starts, t, T, i, FULL)
            new = load_vector(keys, t, T, i, BC, N, STATES, FULL) * (delta * value)[None, :]
            h = tl.exp2(delta[None, :] * a + off) * h + new
            out = tl.sum(h * load_vector(queries, t, T, i, BC, N, STATES, FULL), 0) + direct * value
            if GATE:
                z = load_channels(gates, t, T, valid, Z, i, FULL)
                out *= z * sigmoid(z)
            outputs = outputs + (out,)
        for i in tl.static_range(STEPS):  # after all loads, which the compiler does not move across a store
            store_channels(y + first * W + d, outputs[i], t, T, valid, W, i, FULL)
    if split == splits - 1:
        tl.store(final + row * STATES * W + at, h, mask=inside)


@triton.jit(do_not_specialize=["one"])
def local_adjoint(
    dt, gate, c, grad, a2, bias, starts, carries, decays, T, SPAN, one,
    W: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, BC: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
    GATE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write the gradient of each split's initial state by its own outputs, and the sums of dt and of offsets."""
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row, split, splits = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.num_programs(2)
    n, valid = tl.arange(0, N), d < W
    at, inside = n[:, None] * W + d[None, :] * one, (n < STATES)[:, None] & valid[None, :]
    a = tl.load(a2 + at, mask=inside, other=0.0)
    u = tl.load(bias + d, mask=valid, other=0.0)
    starts += row * T
    g = tl.zeros((N, BLOCK), tl.float32)
    total, offset = tl.zeros((BLOCK,), tl.float32), 0.0
    groups = tl.cdiv(tl.minimum(SPAN, T - split * SPAN), STEPS)
    for back in range(0, groups):
        t = split * SPAN + (groups - 1 - back) * STEPS
        first = row * T + t
        steps, queries = dt + first * DT + d, c + first * BC
        gates, grads = gate + first * Z + d, grad + first * G + d
        for j in tl.static_range(STEPS):
            delta = softplus(load_delta(steps, u, t, T, valid, DT, STEPS - 1 - j, FULL))
            off = load_offset(starts, t, T, STEPS - 1 - j, FULL)
            dy = load_channels(grads, t, T, valid, G, STEPS - 1 - j, FULL)
            if GATE:
                z = load_channels(gates, t, T, valid, Z, STEPS - 1 - j, FULL)
                dy *= z * sigmoid(z)
            g += load_vector(queries, t, T, STEPS - 1 - j, BC, N, STATES, FULL) * dy[None, :]
            g *= tl.exp2(delta[None, :] * a + off)
            total += delta
            offset += off
    which = row * splits + split
    tl.store(carries + which * STATES * W + at, g, mask=inside)
    tl.store(decays + which * 2 * W + d, total, mask=valid)
    tl.store(decays + (which * 2 + 1) * W + d, total * 0.0 + offset, mask=valid)


@triton.jit
def store_channel_sums(to, p, t, T, i: tl.constexpr, N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr,
                       EXACT: tl.constexpr):  # fmt: skip
    """Store the sums over the channels of p (N, BLOCK) for the i-th token of a group.

    The channels are in different lanes, where a sum takes five exchanges for each of the N numbers; a product with ones on
    the tensor cores takes a few instructions. It rounds its addends to bf16, as the gradient will be."""
    n = tl.arange(0, N)
    if EXACT:
        tl.store(to + i * STATES + n, tl.sum(p, 1), mask=n < tl.where(t + i < T, STATES, 0))
    else:
        column = tl.arange(0, 16)[None, :]
        sums = tl.dot(p.to(tl.bfloat16), tl.full((BLOCK, 16), 1.0, tl.bfloat16))
        mask = (n < tl.where(t + i < T, STATES, 0))[:, None] & (column == 0)
        tl.store(to + i * STATES + n[:, None] + column * 0, sums, mask=mask)


@triton.jit(do_not_specialize=["one"])
def backward(
    x, dt, gate, b, c, grad, a2, skip, bias, starts, states, carries, scratch,
    dx, ddt, dgate, db, dc, da, dskip, dbias, dinitial, T, SPAN, one,
    W: tl.constexpr, X: tl.constexpr, DT: tl.constexpr, Z: tl.constexpr, BC: tl.constexpr, G: tl.constexpr,
    N: tl.constexpr, STATES: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, STEPS: tl.constexpr,
    GATE: tl.constexpr, CARRY: tl.constexpr, EXACT: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """Write all gradients of a split; those of B and C as sums over the program's channels, those of A, D and the bias of dt
    as sums over the split's tokens, and those of the initial state by the first split."""
    block, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    split, splits = tl.program_id(2), tl.num_programs(2)
    d = block * BLOCK + tl.arange(0, BLOCK)
    n, valid = tl.arange(0, N), d < W
    at, inside = n[:, None] * W + d[None, :] * one, (n < STATES)[:, None] & valid[None, :]
    a = tl.load(a2 + at, mask=inside, other=0.0)
    u = tl.load(bias + d, mask=valid, other=0.0)
    direct = tl.load(skip + d, mask=valid, other=0.0)
    which, unit = row * splits + split, one.to(tl.float32)
    g = tl.zeros((N, BLOCK), tl.float32)  # the gradient of the state after the token, by later tokens
    if CARRY:
        g = tl.load(carries + which * STATES * W + at, mask=inside, other=0.0)
    sum_a = tl.zeros((N, BLOCK), tl.float32)
    sum_skip, sum_bias = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    partial = (block * tl.num_programs(1).to(tl.int64) + row) * T * STATES
    scratch += which * (CHUNK // STEPS) * STATES * W
    starts += row * T
    chunks = (T + CHUNK - 1) // CHUNK
    states += row * chunks * STATES * W
    last = tl.minimum((split + 1) * (SPAN // CHUNK), chunks)
    for back in range(0, last - split * (SPAN // CHUNK)):
        begin = (last - 1 - back) * CHUNK
        groups = tl.cdiv(tl.minimum(CHUNK, T - begin), STEPS)
        h = tl.load(states + (last - 1 - back) * STATES * W + at, mask=inside, other=0.0)
        for group in range(0, groups):
            tl.store(scratch + group * STATES * W + at, h, mask=inside)
            t = begin + group * STEPS
            first = row * T + t
            values, steps, keys = x + first * X + d, dt + first * DT + d, b + first * BC
            for i in tl.static_range(STEPS):
                delta = softplus(load_delta(steps, u, t, T, valid, DT, i, FULL))
                off = load_offset(starts, t, T, i, FULL)
                new = delta * load_channels(values, t, T, valid, X, i, FULL)
                new = load_vector(keys, t, T, i, BC, N, STATES, FULL) * new[None, :]
                h = tl.exp2(delta[None, :] * a + off) * h + new
        tl.debug_barrier()
        for backwards in range(0, groups):
            group = groups - 1 - backwards
            t = begin + group * STEPS
            first = row * T + t
            values, steps, gates = x + first * X + d, dt + first * DT + d, gate + first * Z + d
            keys, queries, grads = b + first * BC, c + first * BC, grad + first * G + d
            h = tl.load(scratch + group * STATES * W + at, mask=inside, other=0.0)
            kept = (h,)  # the state before each token of the group, and after the last
            inputs, deltas, numbers, offsets = (), (), (), ()
            for i in tl.static_range(STEPS):
                raw = load_delta(steps, u, t, T, valid, DT, i, FULL)
                delta = softplus(raw)
                off = load_offset(starts, t, T, i, FULL)
                value = load_channels(values, t, T, valid, X, i, FULL)
                new = load_vector(keys, t, T, i, BC, N, STATES, FULL) * (delta * value)[None, :]
                h = tl.exp2(delta[None, :] * a + off) * h + new
                kept, numbers, offsets = kept + (h,), numbers + (value,), offsets + (off,)
                inputs, deltas = inputs + (raw,), deltas + (delta,)
            for j in tl.static_range(STEPS):
                value, delta = numbers[STEPS - 1 - j], deltas[STEPS - 1 - j]
                after, before = kept[STEPS - j], kept[STEPS - 1 - j]
                key = load_vector(keys, t, T, STEPS - 1 - j, BC, N, STATES, FULL)
                query = load_vector(queries, t, T, STEPS - 1 - j, BC, N, STATES, FULL)
                dy = load_channels(grads, t, T, valid, G, STEPS - 1 - j, FULL)
                if GATE:
                    z = load_channels(gates, t, T, valid, Z, STEPS - 1 - j, FULL)
                    opened = sigmoid(z)
                    y = tl.sum(after * query, 0) + direct * value
                    dz = dy * y * opened * (1.0 + z * (1.0 - opened))
                    store_channels(dgate + first * W + d, dz, t, T, valid, W, STEPS - 1 - j, FULL)
                    dy *= z * opened
                sum_skip += dy * value
                to = partial + t * STATES
                store_channel_sums(dc + to, after * dy[None, :], t, T, STEPS - 1 - j, N, STATES, BLOCK, EXACT)
                g += query * dy[None, :]
                new = g * (delta * value)[None, :]
                store_channel_sums(db + to, new, t, T, STEPS - 1 - j, N, STATES, BLOCK, EXACT)
                dvalue = tl.sum(g * key, 0)
                # Times 1: the decay is computed again, since with those of all STEPS tokens the registers would not suffice.
                g *= tl.exp2((delta * unit)[None, :] * a + offsets[STEPS - 1 - j])  # of the state before the token
                decayed = g * before  # the gradient of dt A
                sum_a += decayed * delta[None, :]
                draw = (value * dvalue + LN2 * tl.sum(decayed * a, 0)) * sigmoid(inputs[STEPS - 1 - j])
                sum_bias += draw
                dvalue = dy * direct + delta * dvalue
                store_channels(dx + first * W + d, dvalue, t, T, valid, W, STEPS - 1 - j, FULL)
                store_channels(ddt + first * W + d, draw, t, T, valid, W, STEPS - 1 - j, FULL)
        tl.debug_barrier()
    tl.store(da + which * STATES * W + at, sum_a, mask=inside)
    tl.store(dskip + which * W + d, sum_skip, mask=valid)
    tl.store(dbias + which * W + d, sum_bias, mask=valid)
    if split == 0:
        tl.store(dinitial + row * STATES * W + at, g, mask=inside)
