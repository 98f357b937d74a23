"""Weights in bf16: rounded by chance without a bias, they learn what fp32 weights learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import fit, fit_until, metrics, write_corpus
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from test_muon import losses
from test_optimizer import OPTIONS, transformer
from torch import nn

from regard.config import TrainConfig
from regard.errors import RegardError
from regard.kernels.hashing import hash_bits
from regard.training import stochastic_rounding
from regard.training.checkpoint import Checkpoints, Progress
from regard.training.optimizer import Updater
from regard.training.stochastic_rounding import draw_seeds, random_bits, round_stochastically

EVERY = torch.arange(2**16, dtype=torch.int32)  # all that chance may say


@given(x=st.floats(-(2.0**100), 2.0**100, width=32))
def test_the_mean_of_all_roundings_is_the_number_itself(x: float) -> None:
    found = round_stochastically(torch.full((2**16,), x), EVERY)
    assert found.dtype == torch.bfloat16
    assert found.double().mean().item() == x
    neighbours = found.unique().double()
    assert len(neighbours) <= 2
    assert len(neighbours) == 1 or neighbours[0] < x < neighbours[1]


@given(x=st.floats(-(2.0**100), 2.0**100, width=32))
def test_what_bf16_can_say_is_never_changed(x: float) -> None:
    exact = torch.tensor(x).bfloat16().float()
    assert (round_stochastically(exact.expand(2**16).contiguous(), EVERY).float() == exact).all()


def test_only_the_lower_bits_of_chance_count() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    bits = torch.randint(0, 2**16, (1000,), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    assert torch.equal(round_stochastically(x, bits), round_stochastically(x, bits | -(2**16)))


# ---- the bits ---------------------------------------------------------------------------------------------------------


def test_bits_are_uniform_and_know_nothing_of_each_other() -> None:
    """Of neighbours in a tensor, of the next step's, and of the three that one weight needs: correlations of 2^16 signs are
    within five deviations of zero."""
    torch.manual_seed(0)
    like = torch.zeros(2**16)
    first, second = (random_bits(seed, like) for seed in draw_seeds(2, like.device))
    words = [first, second, first.roll(1), first >> 16, hash_bits(first)]
    signs = torch.stack([(word >> i & 1) * 2.0 - 1 for word in words for i in range(16)])  # (80, 2^16)
    correlation = signs @ signs.T / 2**16
    assert (correlation - torch.eye(80)).abs().max() < 5 / 2**8
    assert signs.mean(1).abs().max() < 5 / 2**8
    counts = torch.bincount((first & 0xFF).long(), minlength=256)
    assert ((counts - 256) ** 2 / 256).sum() < 255 + 5 * (2 * 255) ** 0.5  # chi-square


def test_mixing_is_a_permutation_and_the_published_one() -> None:
    """MurmurHash3's last step, in 32 bits that wrap around."""
    x = torch.arange(2**16) * 40503
    assert len(hash_bits(x).unique()) == len(x)
    y = x.numpy().astype(np.uint32)
    y ^= y >> np.uint32(16)
    y *= np.uint32(0x85EBCA6B)
    y ^= y >> np.uint32(13)
    y *= np.uint32(0xC2B2AE35)
    y ^= y >> np.uint32(16)
    np.testing.assert_array_equal(hash_bits(x).numpy(), y.astype(np.int64))


# ---- AdamW ------------------------------------------------------------------------------------------------------------


def pushed(steps: int, lr: float) -> torch.Tensor:
    """4,096 weights that begin at 1 and have always the same gradient, of which AdamW makes steps of lr."""
    layer = nn.Linear(64, 64, bias=False)
    nn.init.ones_(layer.weight)
    updater = Updater(layer, TrainConfig(lr=lr, param_dtype="bf16", precision="bf16", clip=0.0))
    torch.manual_seed(0)
    for _ in range(steps):
        layer.weight.grad = torch.full_like(layer.weight, 0.25)
        updater.step(torch.tensor(1.0))
    assert layer.weight.dtype == torch.bfloat16
    return layer.weight.detach().double()


def test_updates_too_small_for_bf16_arrive_on_average() -> None:
    steps, lr = 40, 1e-4
    x = torch.ones(()).bfloat16()
    assert (x - lr).bfloat16() == x  # to the nearest: never
    found = pushed(steps, lr)
    apart = (steps * lr * 2**-8) ** 0.5 / 64  # of such a mean: below 1, neighbours in bf16 are 2^-8 apart
    assert found.mean().item() == pytest.approx(1 - steps * lr, abs=5 * apart)
    assert 0.002 < 5 * apart + 0.002 < steps * lr  # which tells it from standing still


def test_moments_follow_gradients_on_average() -> None:
    """A second moment that has arrived and gradients that grow by 2 % at once: a step moves it by less than bf16 can say."""
    layer = nn.Linear(64, 64, bias=False)
    updater = Updater(layer, TrainConfig(param_dtype="bf16", precision="bf16", clip=0.0, beta2=0.98))
    state = updater.optimizer.state[layer.weight]
    low = torch.ones_like(layer.weight)
    state.update({"step": torch.tensor(1000.0), "exp_avg": low.clone(), "exp_avg_sq": low.clone()})
    torch.manual_seed(0)
    for _ in range(10):
        layer.weight.grad = torch.full_like(low, 1.0234375)  # squared: 1.0474243
        updater.step(torch.tensor(1.0))
    grown = 1 + 0.0474243 * (1 - 0.98**10)
    assert state["exp_avg_sq"].dtype == torch.bfloat16
    assert state["exp_avg_sq"].double().mean().item() == pytest.approx(grown, abs=5 * (10 * 1e-3 * 2**-7) ** 0.5 / 64)
    assert state["exp_avg"].double().mean().item() == pytest.approx(1 + 0.0234375 * (1 - 0.9**10), abs=1.5e-3)
    assert state["step"].item() == 1010


def test_five_steps_of_rounded_adamw() -> None:
    """In float64 by hand, with decay and clipping: every weight is a few of bf16's steps from there, on average none."""
    torch.manual_seed(0)
    layer = nn.Linear(128, 128, bias=False)
    config = TrainConfig(param_dtype="bf16", precision="bf16", weight_decay=0.1, clip=3.0)
    updater = Updater(layer, config)
    x = layer.weight.detach().double().numpy().copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t in range(1, 6):
        lr = 0.01 * t
        layer.weight.grad = ([0.001, 1.0][t % 2] * torch.randn(x.shape)).to(
            torch.bfloat16
        )  # below the clip, and above it
        g = layer.weight.grad.double().numpy()
        g = g * min(1.0, 3.0 / np.sqrt((g**2).sum()))
        m, v = 0.9 * m + 0.1 * g, 0.98 * v + 0.02 * g**2
        x = x * (1 - lr * 0.1) - lr * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.98**t)) + 1e-9)
        updater.set_lr(lr)
        updater.step(torch.tensor(1.0))
    error = layer.weight.detach().double().numpy() - x
    assert np.abs(error).max() < 8 * 2**-8
    assert abs(error.mean()) < 5 * np.abs(error).max() / 128
    assert np.abs(error).mean() < 2**-9


# ---- models -----------------------------------------------------------------------------------------------------------


def test_norms_and_positions_stay_exact() -> None:
    model = transformer(positions="learned")
    Updater(model, TrainConfig(param_dtype="bf16", precision="bf16"))
    exact = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert exact == {name for name, _ in model.named_parameters() if "norm" in name or "schemes" in name}
    assert model.source_embedding.weight is model.head.weight
    assert {p.dtype for p in model.parameters()} == {torch.float32, torch.bfloat16}


def test_a_parameter_takes_eight_bytes() -> None:
    model = nn.Linear(64, 64, bias=False)
    updater = Updater(model, TrainConfig(param_dtype="bf16", precision="bf16"))
    model(torch.randn(2, 64).bfloat16()).sum().backward()
    tensors = [model.weight, model.weight.grad]
    updater.step(torch.tensor(1.0))
    tensors += [x for x in updater.optimizer.state[model.weight].values() if x.dim()]
    assert sum(x.nbytes for x in tensors if x is not None) == 8 * model.weight.numel()


@pytest.mark.parametrize("precision", ["fp32", "auto"])
def test_products_in_fp32_are_refused(precision: str) -> None:
    model = transformer()
    with pytest.raises(RegardError, match=r"set train\.precision to bf16"):
        Updater(model, TrainConfig(param_dtype="bf16", precision=precision))
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_bf16_weights_learn_what_fp32_weights_learn(optimizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a rate so low that weights rounded to the nearest are left behind: the mean loss over the whole way."""
    way: dict[str, Any] = {"steps": 100, "lr": 2.5e-4, "optimizer": optimizer}
    full, low = np.mean(losses(**way)), np.mean(losses(**way, param_dtype="bf16"))
    monkeypatch.setattr(stochastic_rounding, "round_stochastically", lambda x, bits: x.bfloat16())
    nearest = np.mean(losses(**way, param_dtype="bf16"))
    assert low == pytest.approx(full, rel=0.005)
    assert nearest > 1.03 * full


# ---- runs -------------------------------------------------------------------------------------------------------------


def content(run: Path) -> dict[str, bytes]:
    files = [*sorted(run.glob("checkpoints/*/*.safetensors")), run / "model" / "model.safetensors"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


@pytest.mark.parametrize("options", OPTIONS[2:], ids=str)
def test_a_resumed_run_in_bf16_is_the_run_itself(tmp_path: Path, options: dict[str, Any]) -> None:
    write_corpus(tmp_path)
    changes = {"train.precision": "bf16", **{f"train.{name}": value for name, value in options.items()}}
    fit(tmp_path / "whole", **changes)
    for steps in (5, 2):
        fit_until(tmp_path / "parts", steps, **changes)
    fit(tmp_path / "parts", **changes)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert content(tmp_path / "parts") == content(tmp_path / "whole")
    tensors = load_file(next((tmp_path / "whole").glob("checkpoints/*/model.safetensors")))
    assert tensors["source_embedding.weight"].dtype == torch.bfloat16


def test_the_mean_of_checkpoints_in_bf16_is_exact(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    values = [1.0, 1.0078125, 1.015625, 1.0]
    for step, value in enumerate(values):
        layer = nn.Linear(2, 2, bias=False).bfloat16()
        nn.init.constant_(layer.weight, value)
        checkpoints.save(layer, torch.optim.SGD(layer.parameters()), Progress(step=step))
    mean = checkpoints.average([0, 1, 2, 3])["weight"]
    assert mean.dtype == torch.float32
    assert (mean == np.mean(values)).all()
