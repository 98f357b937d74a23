"""Inner loops of word2vec on CPU threads, compiled by numba: SGD on matrices that all threads share without locks (Hogwild).

As in the original program, skip-gram takes each word of a window as the input and predicts the centre. The tests
compare every step with the gradients of the losses as formulas (tests/vectors/word2vec_losses.py). mypy does not check
compiled functions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

# Sigmoid and softplus are tabulated from -TABLE_END to TABLE_END; the error of linear interpolation is below 1.2e-6.
TABLE_END, STEPS = 10.0, 2048
SCALE = STEPS / (2 * TABLE_END)
POINTS = np.linspace(-TABLE_END, TABLE_END, STEPS + 1)
SIGMOID = np.append(1 / (1 + np.exp(-POINTS)), 1).astype(np.float32)
SOFTPLUS = np.append(np.log1p(np.exp(POINTS)), TABLE_END).astype(np.float32)
MAX_SCORE = 6.0  # no update for scores of a larger absolute value
NEGATIVE, HIERARCHICAL, SOFTMAX = 0, 1, 2


@njit(inline="always")
def draw(state):
    """Advance the random generator (xorshift64*) and return its upper 32 bits."""
    x = state[0]
    x ^= x >> np.uint64(12)
    x ^= x << np.uint64(25)
    x ^= x >> np.uint64(27)
    state[0] = x
    return np.int64((x * np.uint64(2685821657736338717)) >> np.uint64(32))


@njit(inline="always")
def draw_noise(state, keep, alias):
    """Draw a word from the noise distribution by its alias table."""
    i = (draw(state) * len(keep)) >> 32
    return i if draw(state) * np.float32(2.0**-32) < keep[i] else np.int64(alias[i])


@njit(fastmath=True, inline="always")
def logistic_step(hidden, row, outputs, target, label, lr, error):
    """Take one step of a logistic regression; return the loss before it.

    The output vector is updated, and the update of the input is added to `error`. Beyond MAX_SCORE nothing is updated,
    as in the original's hierarchical softmax and in gensim.
    """
    dim = hidden.shape[1]
    score = np.float32(0)
    for d in range(dim):
        score += hidden[row, d] * outputs[target, d]
    at = (min(max(score, np.float32(-TABLE_END)), np.float32(TABLE_END)) + np.float32(TABLE_END)) * np.float32(SCALE)
    i = np.int64(at)
    part = at - np.float32(i)
    p = SIGMOID[i] + part * (SIGMOID[i + 1] - SIGMOID[i])
    loss = SOFTPLUS[i] + part * (SOFTPLUS[i + 1] - SOFTPLUS[i]) - label * score
    if score > np.float32(MAX_SCORE) or score < np.float32(-MAX_SCORE):
        return loss
    step = lr * (label - p)
    for d in range(dim):
        u = outputs[target, d]
        error[d] += step * u
        outputs[target, d] = u + step * hidden[row, d]
    return loss


@njit(fastmath=True, nogil=True, cache=True)
def learn_negative(hidden, row, outputs, target, negatives, keep, alias, lr, error, state):
    """Take a step of negative sampling; return the loss."""
    loss = logistic_step(hidden, row, outputs, target, np.float32(1), lr, error)
    for _ in range(negatives):
        noise = draw_noise(state, keep, alias)
        if noise != target:
            loss += logistic_step(hidden, row, outputs, noise, np.float32(0), lr, error)
    return loss


@njit(fastmath=True, nogil=True, cache=True)
def learn_path(hidden, row, outputs, target, start, nodes, bits, lr, error):
    """Take a step of hierarchical softmax; return the loss."""
    loss = np.float32(0)
    for j in range(start[target], start[target + 1]):
        loss += logistic_step(hidden, row, outputs, np.int64(nodes[j]), np.float32(1 - bits[j]), lr, error)
    return loss


@njit(fastmath=True, nogil=True, cache=True)
def learn_softmax(hidden, row, outputs, target, lr, error, scores):
    """Take a step of the full softmax; return the loss. `scores` (V,) is scratch memory."""
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
    """Predict `target` from a row of `hidden` and take a step; return the loss."""
    if kind == NEGATIVE:
        return learn_negative(hidden, row, outputs, target, negatives, noise[0], noise[1], lr, error, state)
    if kind == HIERARCHICAL:
        return learn_path(hidden, row, outputs, target, tree[0], tree[1], tree[2], lr, error)
    return learn_softmax(hidden, row, outputs, target, lr, error, scores)


@njit(fastmath=True, nogil=True, cache=True)
def subsample(ids, keep, kept, state):
    """Write the words of a sentence that subsampling keeps to the front of `kept`; return their number."""
    n = 0
    for word in ids:
        if keep[word] >= 1 or draw(state) * np.float32(2.0**-32) < keep[word]:
            kept[n] = word
            n += 1
    return n


@njit(nogil=True, cache=True)
def window_bounds(i, n, window, shrink, state):
    """Return the first place and the end (exclusive) of the window of place i of n; `shrink` draws its size."""
    reach = 1 + ((draw(state) * window) >> 32) if shrink else window
    return max(0, i - reach), min(n, i + reach + 1)


@njit(fastmath=True, nogil=True, cache=True)
def skipgram(kept, n, inputs, outputs, kind, window, shrink, negatives, noise, tree, lr, scores, state, totals):
    """Train skip-gram on a sentence, kept[:n]."""
    dim = inputs.shape[1]
    error = np.zeros(dim, np.float32)
    for i in range(n):
        first, last = window_bounds(i, n, window, shrink, state)
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
    """Train CBOW on a sentence, kept[:n]; `divided`: the input gradient is divided by the number of words."""
    dim = inputs.shape[1]
    error, hidden = np.zeros(dim, np.float32), np.zeros((1, dim), np.float32)
    for i in range(n):
        first, last = window_bounds(i, n, window, shrink, state)
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
    """Train on the sentences ids[offsets[s]:offsets[s + 1]]; add losses, predictions and words kept to `totals` (3,)."""
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
