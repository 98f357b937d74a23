"""Training steps of a recorded model: the updates are the same, and every batch leaves a record."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fused_rows import qkv_rows
from torch import Tensor

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.look.record import record
from regard.training.objective import make_token_objective
from regard.training.training_step import TrainingStep

sys.path.append(str(Path(__file__).parent))
from small import C, D, H, gpt, ids, seq2seq, transformer

MODELS: dict[str, Any] = {"transformer": transformer, "gpt": gpt, "seq2seq": seq2seq}
here = pytest.param("cpu", False, id="cpu")
there = pytest.param(
    "cuda",
    True,
    id="cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
)


def batch(kind: str, seed: int) -> Batch:
    rows = [ids(6, 4, 5, seed=seed + i) for i in range(2 if kind == "gpt" else 3)]
    return Batch(tuple(rows), 15)


def step_of(kind: str, device: str, compile: bool, accumulate: int, **changes: Any) -> TrainingStep:
    config = TrainConfig(accumulate=accumulate, compile=compile, precision="fp32", weight_decay=0.0)
    model = MODELS[kind](**changes).to(device).train()
    return TrainingStep(make_token_objective(model, config), config, torch.device(device), torch.float32)


def weights_after(step: TrainingStep, kind: str, steps: int, first: int = 0) -> list[Tensor]:
    for i in range(first, first + steps):
        step([batch(kind, 10 * i + j) for j in range(step.accumulate)], lr=1e-3)
    return [p.detach().clone() for p in step.objective.model.parameters()]


@pytest.mark.parametrize(("device", "compile"), [here, there])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_a_step_that_is_recorded_learns_the_same(kind: str, accumulate: int, device: str, compile: bool) -> None:
    """Before, during and after: on a GPU steps are replayed, run as written, and replayed again."""
    plain, recorded = (step_of(kind, device, compile, accumulate) for _ in range(2))
    near = 0.0 if device == "cpu" else 1e-2  # compiled, sums are made in another order, and Adam makes much of little
    expected = weights_after(plain, kind, 9)
    weights_after(recorded, kind, 3)
    with record(recorded.objective.model, stream=True) as tape:
        weights_after(recorded, kind, 3, first=3)
    found = weights_after(recorded, kind, 3, first=6)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=near, rtol=0)
    torch.testing.assert_close(recorded.sums, plain.sums, rtol=near, atol=0)
    assert [len(tape[name]) for name in tape] == [3 * accumulate] * len(tape)
    assert {len(kept) for kept in tape.vectors.values()} <= {3 * accumulate}


def test_a_captured_step_is_not_replayed_while_the_model_is_recorded() -> None:
    """On a GPU `graphed_step` replays a CUDA graph, which runs no Python; here a function stands in for it."""
    step, calls = step_of("gpt", "cpu", False, 1), []
    step.is_graphed, step.graphed_step = True, lambda *inputs: calls.append(1)
    model = step.objective.model
    weights_after(step, "gpt", 1)
    with record(model, "decoder.1.self") as tape:
        weights_after(step, "gpt", 2)
    weights_after(step, "gpt", 1)
    assert len(calls) == 2
    assert len(tape["decoder.1.self"]) == 2


def test_records_of_steps_are_of_the_weights_at_that_step() -> None:
    """q k^T of the layer's own matrices before each update, in float64."""
    step = step_of("gpt", "cpu", False, 1)
    model: Any = step.objective.model
    layer = model.decoder.blocks[0].sublayers["self"]
    matrices = []
    with record(model, "decoder.0.self", stream=True) as tape:
        for i in range(3):
            matrices.append([p.detach().double().numpy().copy() for p in (layer.qkv.weight, layer.qkv.bias)])
            weights_after(step, "gpt", 1, first=i)
    for (w, b), kept, x in zip(matrices, tape["decoder.0.self"], tape.vectors["decoder.0.self.input"], strict=True):
        qkv = (x[0].double().numpy() @ w.T + b)[:, qkv_rows(H, H, D)].reshape(6, 3, H, D)
        scores = np.einsum("thd,shd->hts", qkv[:, 0], qkv[:, 1]) / np.sqrt(D)
        e = np.exp(np.where(np.tri(6), scores, -np.inf) - scores.max(-1, keepdims=True))
        np.testing.assert_allclose(kept.weights()[0], e / e.sum(-1, keepdims=True), atol=1e-5)
        assert x.shape == (3, 6, C)
    assert not np.allclose(matrices[0][0], matrices[2][0])
