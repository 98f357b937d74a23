"""Decoding steps of mixtures of experts: definitions and kernels (interpreted on a CPU) against the layer in float64."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from configured import model_config
from torch import Tensor

from regard.kernels import expert_step
from regard.layers.context import Context
from regard.layers.part import Place, make_part

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
N, C, F, E = 7, 40, 24, 5
FORMS = {"noisy-experts": 2, "switch": 1, "mixtral": 3}


@pytest.fixture
def kernels() -> Any:
    pytest.importorskip("triton")
    if not CUDA and not os.environ.get("TRITON_INTERPRET"):
        pytest.skip("Triton has neither a GPU nor its interpreter")
    from regard.kernels import expert_step_triton

    return expert_step_triton


def layer(name: str, activation: str) -> Any:
    torch.manual_seed(0)
    settings = {f"{name}.experts": E} | ({} if name == "switch" else {f"{name}.top_k": FORMS[name]})
    settings |= {"switch.eval_capacity_factor": 0.0} if name == "switch" else {}
    part = make_part(
        "feedforward", name, model_config(d_model=C, d_ff=F, activation=activation, **settings), Place("decoder")
    )
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return part.to(DEVICE).eval()


def inputs() -> Tensor:
    return torch.randn(N, C, generator=torch.Generator().manual_seed(1)).to(DEVICE)


@pytest.mark.parametrize("activation", ["relu", "silu"])
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("way", ["definition", "kernels"])
def test_a_step_equals_the_layer(
    name: str, activation: str, way: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """In fp32; sums of F and C products of numbers of about 1 differ by some 1e-6."""
    part, x = layer(name, activation), inputs()
    if way == "kernels" or CUDA:
        kernels = request.getfixturevalue("kernels")
        monkeypatch.setattr(expert_step, "top_k_gates", kernels.run_gates)
        monkeypatch.setattr(expert_step, "sum_experts", kernels.run_sum)
        block = 8 if part.gated else 0
        monkeypatch.setattr(
            expert_step,
            "weighted_activation",
            lambda hidden, gates, f, activation, gated: kernels.run_activation(hidden, gates, f, activation, block),
        )
    gates = expert_step.top_k_gates(x, part.router, part.top_k, part.renormalizes)
    found = expert_step.expert_step(x, gates, part.inner, part.outer, activation, part.gated)
    whole = part.double()
    wanted, _ = whole(x[None].double(), Context(torch.arange(N, device=DEVICE)[None]))
    assert ((gates > 0).sum(1) == part.top_k).all()
    torch.testing.assert_close(found.double(), wanted[0], atol=1e-4, rtol=1e-4)
