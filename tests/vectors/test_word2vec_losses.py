"""The losses of word2vec against formulas in NumPy, and one step of every kernel against their gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import word2vec_losses
from torch import Tensor

from regard.config import VectorsConfig
from regard.data.token_cache import TokenStore
from regard.vectors import word2vec, word2vec_gpu
from regard.vectors.huffman import HuffmanTree, huffman_tree
from regard.vectors.word_counts import Vocabulary

V, D = 7, 9
COUNTS = np.array([40, 20, 12, 9, 7, 6, 5])
NOISE = 4  # the only word that is drawn as noise
LR = 0.1
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")  # there in Triton's interpreter


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def matrices(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return input and output vectors with scores small enough that none is beyond MAX_SCORE."""
    rng = np.random.default_rng(3)
    return rng.normal(size=(V, D), scale=0.7), rng.normal(size=(rows, D), scale=0.7)


def way(tree: HuffmanTree, word: int) -> tuple[np.ndarray, np.ndarray]:
    place = slice(tree.start[word], tree.start[word + 1])
    return tree.nodes[place].astype(np.int64), tree.bits[place]


def by_hand(kind: str, h: np.ndarray, outputs: np.ndarray, target: int, negatives: list[int]) -> tuple[float, Any, Any]:
    """Return the loss and its gradients with respect to h and the outputs, differentiated by hand."""
    by_outputs = np.zeros_like(outputs)
    if kind == "softmax":
        p = np.exp(outputs @ h) / np.exp(outputs @ h).sum()
        wrong = p - np.eye(len(p))[target]
        return -np.log(p[target]), wrong @ outputs, np.outer(wrong, h)
    if kind == "hierarchical":
        nodes, bits = way(huffman_tree(COUNTS), target)
        decisions = [(int(node), 1 - int(bit)) for node, bit in zip(nodes, bits, strict=True)]
    else:
        decisions = [(target, 1), *((n, 0) for n in negatives if n != target)]
    loss, by_h = 0.0, np.zeros_like(h)
    for row, label in decisions:
        p = sigmoid(outputs[row] @ h)
        loss -= np.log(p if label else 1 - p)
        by_h += (p - label) * outputs[row]
        by_outputs[row] += (p - label) * h
    return loss, by_h, by_outputs


def defined(kind: str, h: Tensor, outputs: Tensor, target: int, negatives: list[int]) -> Tensor:
    if kind == "softmax":
        return word2vec_losses.full_softmax(h, outputs, target)
    if kind == "hierarchical":
        nodes, bits = (torch.from_numpy(x) for x in way(huffman_tree(COUNTS), target))
        return word2vec_losses.hierarchical_softmax(h, outputs, nodes, bits)
    return word2vec_losses.negative_sampling(h, outputs, target, torch.tensor(negatives))


@pytest.mark.parametrize("kind", ["negative", "hierarchical", "softmax"])
@pytest.mark.parametrize("context", [[2], [0, 3, 3, 5]])
def test_the_definitions_have_the_gradients_of_the_paper(kind: str, context: list[int]) -> None:
    v, u = (torch.from_numpy(x).requires_grad_() for x in matrices(V - (kind == "hierarchical")))
    negatives = [4, 1, 4, 2]  # 1 is the target: it does not count
    loss = defined(kind, word2vec_losses.hidden(v, torch.tensor(context)), u, 1, negatives)
    loss.backward()
    expected, by_h, by_outputs = by_hand(kind, v.detach().numpy()[context].mean(0), u.detach().numpy(), 1, negatives)
    by_inputs = np.zeros((V, D))
    np.add.at(by_inputs, context, by_h / len(context))
    assert v.grad is not None
    assert u.grad is not None
    np.testing.assert_allclose(loss.item(), expected, rtol=1e-12)
    np.testing.assert_allclose(v.grad.numpy(), by_inputs, atol=1e-12)
    np.testing.assert_allclose(u.grad.numpy(), by_outputs, atol=1e-12)


def started(ids: list[int], config: VectorsConfig) -> word2vec.TrainingState:
    """Return the state of a training run on one sentence that draws no random choices, with vectors that are not small."""
    work = word2vec.initial_state(TokenStore(np.array(ids, np.uint16), np.array([0, len(ids)])), vocabulary(), config)
    inputs, outputs = matrices(len(work.outputs))
    work.inputs[:], work.outputs[:] = inputs, outputs
    share, other = np.zeros(V, np.float32), np.full(V, NOISE, np.int32)
    work.noise = (share, other)
    return work


def vocabulary() -> Vocabulary:
    return Vocabulary(list("abcdefg"), COUNTS)


def settings(**changes: Any) -> VectorsConfig:
    plain = {"dim": D, "window": 2, "shrink_windows": False, "subsample": 0.0, "epochs": 1, "lr": LR, "threads": 1}
    return VectorsConfig(**{**plain, "negatives": 3, **changes})


def step_by_hand(ids: list[int], config: VectorsConfig, shared: bool) -> tuple[np.ndarray, np.ndarray, float]:
    """Train on every window of a sentence in float64; skip-gram pair by pair, or all pairs of a window at once."""
    v, u = matrices(V - (config.loss == "hierarchical"))
    v, u = v.astype(np.float32).astype(np.float64), u.astype(np.float32).astype(np.float64)
    losses, n = 0.0, 0
    for i, target in enumerate(ids):
        context = [ids[j] for j in range(max(0, i - 2), min(len(ids), i + 3)) if j != i]
        groups = [context] if config.model == "cbow" else [[word] for word in context]
        old_v, old_u = v.copy(), u.copy()
        for words in groups:
            before_v, before_u = (old_v, old_u) if shared else (v.copy(), u.copy())
            h = before_v[words].mean(0)
            noise = [NOISE] * config.negatives
            loss, by_h, by_u = sequential(config.loss, h, before_u, target, noise)
            share = len(words) if config.cbow_gradient == "divided" else 1
            np.add.at(v, words, -LR * by_h / share)
            u -= LR * by_u
            losses, n = losses + loss, n + 1
    return v, u, losses / n


def sequential(kind: str, h: np.ndarray, u: np.ndarray, target: int, noise: list[int]) -> tuple[float, Any, Any]:
    """Do what `by_hand` does, but a noise word that is drawn twice is updated in between."""
    if kind != "negative":
        return by_hand(kind, h, u, target, noise)
    now, loss, by_h = u.copy(), 0.0, np.zeros_like(h)
    for row, label in [(target, 1), *((word, 0) for word in noise if word != target)]:
        p = sigmoid(now[row] @ h)
        loss -= np.log(p if label else 1 - p)
        by_h += (p - label) * now[row]
        now[row] -= LR * (p - label) * h
    return loss, by_h, (u - now) / LR


@pytest.mark.parametrize("model", ["skipgram", "cbow"])
@pytest.mark.parametrize("loss", ["negative", "hierarchical", "softmax"])
@pytest.mark.parametrize("gradient", ["whole", "divided"])
def test_a_step_of_the_threads_is_the_learning_rate_times_the_gradient(model: str, loss: str, gradient: str) -> None:
    ids = [3, 1, 4, 1, 6, 0]
    config = settings(model=model, loss=loss, cbow_gradient=gradient)
    work = started(ids, config)
    word2vec.run_threads(work)
    v, u, mean = step_by_hand(ids, config, shared=False)
    np.testing.assert_allclose(work.inputs, v, atol=3e-6)
    np.testing.assert_allclose(work.outputs, u, atol=3e-6)
    np.testing.assert_allclose(work.loss(0), mean, rtol=1e-5)


def put(ids: list[int]) -> Tensor:
    return torch.tensor(ids, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("model", ["skipgram", "cbow"])
@pytest.mark.parametrize("loss", ["negative", "hierarchical"])
def test_a_step_of_the_gpu_is_that_of_all_pairs_of_a_window(model: str, loss: str) -> None:
    """With one noise word, since all words of a window use its vector from before the step."""
    ids = [3, NOISE, 6]
    config = settings(model=model, loss=loss, cbow_gradient="divided", negatives=1, batch=1)
    work = started(ids, config)
    held = word2vec_gpu.DeviceState.of(work, DEVICE)
    for i in range(3):
        word2vec_gpu.launch(held, config, put(ids), put([0, 0, 0]), i, i + 1, LR, seed=1)
    v, u, mean = step_by_hand(ids, config, shared=True)
    np.testing.assert_allclose(held.inputs.cpu(), v, atol=3e-6)
    np.testing.assert_allclose(held.outputs.cpu(), u, atol=3e-6)
    np.testing.assert_allclose(held.totals[0].item() / held.totals[1].item(), mean, rtol=1e-5)


def test_windows_on_the_gpu_end_with_their_sentence() -> None:
    config = settings(batch=1, negatives=1)
    work = started([3, 1, 6], config)
    held = word2vec_gpu.DeviceState.of(work, DEVICE)
    word2vec_gpu.launch(held, config, put([3, 1, 6]), put([0, 1, 1]), 0, 2, LR, seed=1)
    assert held.totals[1] == 1  # of the first two centres one has a neighbour, and it is one
    assert torch.equal(held.inputs[3].cpu(), torch.from_numpy(work.inputs[3]))


@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize(("size", "moves"), [(5.9, True), (6.1, False)])
def test_what_is_decided_beyond_doubt_teaches_nothing(on_gpu: bool, size: float, moves: bool) -> None:
    """Scores from -6 to 6 cause updates; others count in the loss only."""
    ids, config = [3, 1], settings(negatives=1, batch=1)
    work = started(ids, config)
    work.inputs[:], work.outputs[:] = 1.0, size / D
    before = work.outputs.copy()
    if on_gpu:
        held = word2vec_gpu.DeviceState.of(work, DEVICE)
        word2vec_gpu.launch(held, config, put(ids), put([0, 0]), 0, 1, LR, seed=1)
        after, loss = held.outputs.cpu().numpy(), held.totals[0].item()
    else:
        word2vec.run_threads(work)
        after, loss = work.outputs, work.loss(0)
    assert (not np.array_equal(after, before)) == moves
    assert loss > 5  # the noise is thought likely
