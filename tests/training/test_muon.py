"""Muon against singular values and a float64 version in NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fused_rows import gate_rows, kv_rows, qkv_rows
from helpers import assert_same_run, fit, fit_until, write_corpus
from hypothesis import given, settings
from hypothesis import strategies as st
from test_optimizer import batch, set_gradients, transformer

from regard.config import TrainConfig
from regard.errors import RegardError
from regard.training.muon import WeightMatrix, find_matrices, orthogonalize
from regard.training.objective import Objective
from regard.training.optimizer import Updater, make_optimizer
from regard.training.training_step import TrainingStep


def polished(x: np.ndarray) -> np.ndarray:
    """The polynomial on the singular values themselves, five times."""
    u, s, v = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ v


@given(n=st.integers(1, 3), short=st.integers(1, 9), more=st.integers(0, 9), seed=st.integers(0, 99))
def test_the_iteration_is_a_polynomial_of_singular_values(n: int, short: int, more: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(n, short, short + more))
    found = orthogonalize(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, np.stack([polished(each) for each in x]), atol=1e-6)


@settings(max_examples=20)
@given(seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_all_directions_become_about_equally_large(seed: int, scale: float) -> None:
    x = scale * torch.randn(2, 16, 40, generator=torch.Generator().manual_seed(seed))
    values = torch.linalg.svdvals(orthogonalize(x))
    assert values.min() > 0.6
    assert values.max() < 1.25


def test_a_weight_without_a_gradient_stays() -> None:
    assert torch.equal(orthogonalize(torch.zeros(2, 3, 4)), torch.zeros(2, 3, 4))


# ---- which matrices --------------------------------------------------------------------------------------------------


def rows_of(matrix: WeightMatrix) -> list[int]:
    numbers = torch.arange(len(matrix.weight))[:, None]
    found: list[int] = matrix.view(numbers).flatten().tolist()
    return found


def test_joined_matrices_are_taken_apart() -> None:
    """8 wide, 2 heads of queries 4 wide but one of keys, 16 inner units with gates."""
    model = transformer(n_kv_heads=1, feedforward="gated", activation="silu")
    shapes = [(len(rows_of(matrix)), matrix.weight.shape[1]) for matrix in find_matrices(model)]
    attention, gated = (
        [(8, 8), (8, 8), (4, 8), (4, 8)],
        [(16, 8), (16, 8), (8, 16)],
    )  # out and q, k, v; two in and one out
    assert sorted(shapes) == sorted([*attention, *attention, *attention, *gated, *gated])
    rows: dict[int, list[int]] = {}
    for matrix in find_matrices(model):
        rows.setdefault(id(matrix.weight), []).extend(rows_of(matrix))
    one_after_another = {"qkv": qkv_rows(2, 1, 4), "kv": kv_rows(1, 4), "inner": gate_rows(16)}
    for name, p in model.named_parameters():
        if id(p) in rows:
            assert rows[id(p)] == one_after_another.get(name.split(".")[-2], list(range(len(p)))), name


@pytest.mark.parametrize("scheme", ["learned", "t5", "fire", "shaw"])
def test_all_else_is_adamws(scheme: str) -> None:
    model = transformer(positions=scheme, tie="none")
    optimizer = make_optimizer(model, TrainConfig(optimizer="muon", weight_decay=0.1))
    *others, group = optimizer.param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    ours = {names[id(p)] for p in group["params"]}
    linear = ("qkv", "q", "kv", "out", "inner", "outer")
    expected = {
        n for n in names.values() if ".blocks." in n and n.split(".")[-2:-1][0] in linear and n.endswith("weight")
    }
    assert ours == expected
    assert group["weight_decay"] == 0.1
    assert {names[id(p)] for g in others for p in g["params"]} == set(names.values()) - expected


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(RegardError, match=r"train.optimizer muon .* use adamw"):
        make_optimizer(torch.nn.Linear(3, 3), TrainConfig(optimizer="muon"))


# ---- steps ------------------------------------------------------------------------------------------------------------


def test_five_steps_of_muon() -> None:
    """Nesterov's momentum, the size of a step and the decoupled decay by hand, with clipping, in float64."""
    model = transformer(feedforward="gated", n_kv_heads=1)
    updater = Updater(model, TrainConfig(optimizer="muon", weight_decay=0.1, clip=1.0))
    names = {id(p): name for name, p in model.named_parameters()}
    pieces = [(names[id(matrix.weight)], rows_of(matrix)) for matrix in find_matrices(model)]
    x = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    m = {name: np.zeros_like(a) for name, a in x.items()}
    for t in range(1, 6):
        lr = 0.01 * t
        set_gradients(model, seed=t, scale=[0.001, 1.0][t % 2])  # below the clip, and above it
        g = {name: p.grad.double().numpy().copy() for name, p in model.named_parameters()}  # type: ignore[union-attr]
        norm = np.sqrt(sum((a**2).sum() for a in g.values()))
        updater.set_lr(lr)
        updater.step(torch.tensor(1.0))
        for name, rows in pieces:
            a = g[name][rows] * min(1.0, 1.0 / (norm + 1e-6))
            m[name][rows] = 0.95 * m[name][rows] + a  # Jordan's, whose sum differs from a mean by a factor alone
            step = polished(a + 0.95 * m[name][rows])
            x[name][rows] = x[name][rows] * (1 - lr * 0.1) - lr * 0.2 * np.sqrt(max(step.shape)) * step
    for name, rows in pieces:
        ours = dict(model.named_parameters())[name].detach().numpy()[rows]
        np.testing.assert_allclose(ours, x[name][rows], rtol=2e-4, atol=2e-5, err_msg=name)


def test_queries_do_not_depend_on_the_size_of_values() -> None:
    moved = []
    for factor in (1.0, 100.0):
        model = transformer()
        updater = Updater(model, TrainConfig(optimizer="muon", clip=0.0))
        set_gradients(model, seed=1)
        qkv = model.encoder.blocks[0].get_submodule("sublayers.self.qkv").weight
        assert isinstance(qkv, torch.Tensor)
        qkv.grad[qkv_rows(2, 2, 4)[16:]] *= factor  # type: ignore[index]
        updater.step(torch.tensor(1.0))
        moved.append(qkv.detach())
    torch.testing.assert_close(*moved, rtol=1e-4, atol=1e-6)


def losses(steps: int, lr: float, **options: Any) -> list[float]:
    """Of a small model that learns 12 rows by heart, its products in bf16."""
    model = transformer(d_model=16, d_ff=32)
    config = TrainConfig(precision="bf16", **options)
    step, found = TrainingStep(Objective(model), config, torch.device("cpu"), torch.bfloat16), []
    torch.manual_seed(0)
    for _ in range(steps):
        step([batch(12, seed=1)], lr)
        found.append((step.sums[0] / step.sums[2]).item())
        step.sums.zero_()
    return found


def test_muon_learns_at_a_rate_made_for_adamw() -> None:
    found = losses(100, lr=0.01, optimizer="muon")
    assert found[0] > 2.5
    assert found[-1] < 0.1


def test_a_resumed_run_of_muon_is_the_run_itself(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    changes = {"train.optimizer": "muon"}
    fit(tmp_path / "whole", **changes)
    for steps in (5, 2):
        fit_until(tmp_path / "parts", steps, **changes)
    fit(tmp_path / "parts", **changes)
    assert_same_run(tmp_path / "parts", tmp_path / "whole")
