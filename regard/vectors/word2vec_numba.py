"""Word2vec on CPU threads: every pair descends at once, on matrices that all threads share without locks.

`regard.models.word2vec` says what is descended. The skip-gram order is that of the original program: each word of a window
is the input, the centre is predicted. mypy does not look into compiled functions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

REACH, STEPS = 10.0, 2048  # the sigmoid's table goes from -REACH to REACH; the error of its chords is below 1.2e-6
SCALE = STEPS / (2 * REACH)
POINTS = np.linspace(-REACH, REACH, STEPS + 1)
SIGMOID = np.append(1 / (1 + np.exp(-POINTS)), 1).astype(np.float32)
SOFTPLUS = np.append(np.log1p(np.exp(POINTS)), REACH).astype(np.float32)
SURE = 6.0  # scores beyond teach nothing
NEGATIVE, HIERARCHICAL, SOFTMAX = 0, 1, 2


@njit(inline="always")
def draw(state):
    """xorshift64*: the next state's upper 32 bits."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(32))


@njit(inline="always")
def draw_noise(state, share, other):
    i = (draw(state) * len(share)) >> 32
    return i if draw(state) * np.float32(2.0**-32) < share[i] else np.int64(other[i])


@njit(fastmath=True, inline="always")
def descend(hidden, row, outputs, target, label, lr, error):
    """One logistic decision: moves the output vector, adds to the input's `error` what it gets; the loss.

    What is decided beyond doubt is left as it is, as in the original's hierarchical softmax and in gensim."""
    dim = hidden.shape[1]
    score = np.float32(0)
    for d in range(dim):
        score += hidden[row, d] * outputs[target, d]
    place = (min(max(score, np.float32(-REACH)), np.float32(REACH)) + np.float32(REACH)) * np.float32(SCALE)
    i = np.int64(place)
    part = place - np.float32(i)
    p = SIGMOID[i] + part * (SIGMOID[i + 1] - SIGMOID[i])
    loss = SOFTPLUS[i] + part * (SOFTPLUS[i + 1] - SOFTPLUS[i]) - label * score
    if score > np.float32(SURE) or score < np.float32(-SURE):
        return loss
    step = lr * (label - p)
    for d in range(dim):
        u = outputs[target, d]
        error[d] += step * u
        outputs[target, d] = u + step * hidden[row, d]
    return loss


@njit(fastmath=True, nogil=True, cache=True)
def learn_negative(hidden, row, outputs, target, negatives, share, other, lr, error, state):
    loss = descend(hidden, row, outputs, target, np.float32(1), lr, error)
    for _ in range(negatives):
        noise = draw_noise(state, share, other)
        if noise != target:
            loss += descend(hidden, row, outputs, noise, np.float32(0), lr, error)
    return loss


@njit(fastmath=True, nogil=True, cache=True)
def learn_path(hidden, row, outputs, target, start, nodes, bits, lr, error):
    loss = np.float32(0)
    for j in range(start[target], start[target + 1]):
        loss += descend(hidden, row, outputs, np.int64(nodes[j]), np.float32(1 - bits[j]), lr, error)
    return loss


@njit(fastmath=True, nogil=True, cache=True)
def learn_softmax(hidden, row, outputs, target, lr, error, scores):
    size, dim = outputs.shape
    for v in range(size):
        score = np.float32(0)
        for d in range(dim):
            score += hidden[row, d] * outputs[v, d]
        scores[v] = score
    top = scores.max()
    total = np.float32(0)
    for v in range(size):
        total += np.exp(scores[v] - top)
    loss = np.log(total) + top - scores[target]
    for v in range(size):
        step = lr * (np.float32(v == target) - np.exp(scores[v] - top) / total)
        for d in range(dim):
            u = outputs[v, d]
            error[d] += step * u
            outputs[v, d] = u + step * hidden[row, d]
    return loss


@njit(fastmath=True, nogil=True, cache=True)
def learn(kind, hidden, row, outputs, target, negatives, noise, tree, lr, error, scores, state):
    """One prediction of `target` from a row of `hidden`."""
    if kind == NEGATIVE:
        return learn_negative(hidden, row, outputs, target, negatives, noise[0], noise[1], lr, error, state)
    if kind == HIERARCHICAL:
        return learn_path(hidden, row, outputs, target, tree[0], tree[1], tree[2], lr, error)
    return learn_softmax(hidden, row, outputs, target, lr, error, scores)


@njit(fastmath=True, nogil=True, cache=True)
def subsample(ids, keep, kept, state):
    """The words of a sentence that stay, to the front of `kept`; how many."""
    n = 0
    for word in ids:
        if keep[word] >= 1 or draw(state) * np.float32(2.0**-32) < keep[word]:
            kept[n] = word
            n += 1
    return n


@njit(nogil=True, cache=True)
def span(i, n, window, shrink, state):
    """From where to where the window of place i of n reaches, the end not included."""
    reach = 1 + ((draw(state) * window) >> 32) if shrink else window
    return max(0, i - reach), min(n, i + reach + 1)


@njit(fastmath=True, nogil=True, cache=True)
def skipgram(kept, n, inputs, outputs, kind, window, shrink, negatives, noise, tree, lr, scores, state, totals):
    dim = inputs.shape[1]
    error = np.zeros(dim, np.float32)
    for i in range(n):
        first, last = span(i, n, window, shrink, state)
        for j in range(first, last):
            if j == i:
                continue
            word = np.int64(kept[j])
            error[:] = 0
            totals[0] += learn(
                kind, inputs, word, outputs, np.int64(kept[i]), negatives, noise, tree, lr, error, scores, state
            )
            for d in range(dim):
                inputs[word, d] += error[d]
        totals[1] += last - first - 1


@njit(fastmath=True, nogil=True, cache=True)
def cbow(kept, n, inputs, outputs, kind, window, shrink, negatives, noise, tree, lr, scores, state, totals, divided):
    dim = inputs.shape[1]
    error, hidden = np.zeros(dim, np.float32), np.zeros((1, dim), np.float32)
    for i in range(n):
        first, last = span(i, n, window, shrink, state)
        count = last - first - 1
        if count == 0:
            continue
        error[:] = 0
        hidden[:] = 0
        share = np.float32(1) / np.float32(count)
        for j in range(first, last):
            if j != i:
                word = np.int64(kept[j])
                for d in range(dim):
                    hidden[0, d] += share * inputs[word, d]
        totals[0] += learn(
            kind, hidden, 0, outputs, np.int64(kept[i]), negatives, noise, tree, lr, error, scores, state
        )
        totals[1] += 1
        weight = share if divided else np.float32(1)
        for j in range(first, last):
            if j != i:
                word = np.int64(kept[j])
                for d in range(dim):
                    inputs[word, d] += weight * error[d]


@njit(nogil=True, cache=True)
def train_block(
    ids,
    offsets,
    inputs,
    outputs,
    is_cbow,
    kind,
    window,
    shrink,
    negatives,
    keep,
    noise,
    tree,
    lr,
    divided,
    state,
    totals,
):
    """Sentences, ids[offsets[s]:offsets[s + 1]]; `totals` grows by the losses, the predictions and the words kept."""
    kept = np.empty(len(ids), np.int32)
    scores = np.empty(outputs.shape[0] if kind == SOFTMAX else 0, np.float32)
    for s in range(len(offsets) - 1):
        n = subsample(ids[offsets[s] : offsets[s + 1]], keep, kept, state)
        totals[2] += n
        if is_cbow:
            cbow(
                kept,
                n,
                inputs,
                outputs,
                kind,
                window,
                shrink,
                negatives,
                noise,
                tree,
                lr,
                scores,
                state,
                totals,
                divided,
            )
        else:
            skipgram(kept, n, inputs, outputs, kind, window, shrink, negatives, noise, tree, lr, scores, state, totals)
