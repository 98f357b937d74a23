"""Parameters that parts keep in fp32 where a model's weights are rounded: dynamics of state spaces, routers of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard import model_folder
from regard.decode.graphs.step_model import StepModel
from regard.layers.mixers.state_space_layer import StateSpaceLayer
from regard.layers.part import full_precision_parameters
from regard.layers.quantization import convert_weights
from regard.model_folder import ModelPackage
from regard.models.architectures import make_model, preset
from regard.training.stochastic_rounding import weights_to_bf16

MODELS: dict[str, dict[str, Any]] = {
    "s4": {"preset": "s4-tiny"},
    "s4d": {"preset": "s4d-tiny"},
    "mixtral": {"preset": "gpt-tiny", "feedforward": "mixtral", "activation": "silu"},
    "noisy-experts": {"preset": "gpt-tiny", "feedforward": "noisy-experts"},
}
DYNAMICS = {"log_dt", "log_decay", "frequency"}
EXACT = {
    **{"s4": {*DYNAMICS, "rank_one", "inputs"}, "s4d": DYNAMICS},
    **{"mixtral": {"router"}, "noisy-experts": {"router", "noise"}},
}


def make(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {"n_decoder_layers": 2, "d_model": 32, "d_ff": 32, "target_vocab": 20, "max_len": 64}
    settings = dict(MODELS[name])
    return make_model(preset(settings.pop("preset"), **sizes, **settings))


def names_in(model: nn.Module, dtype: torch.dtype) -> set[str]:
    return {path.rpartition(".")[2] for path, p in model.named_parameters() if p.dtype == dtype}


def to_bf16_for_a_gpu(model: nn.Module) -> None:
    convert_weights(model, "bf16", torch.device("cuda"))  # the device says where the weights are going to be


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("convert", [to_bf16_for_a_gpu, weights_to_bf16])
def test_they_stay_in_fp32_where_others_are_in_bf16(name: str, convert: Any) -> None:
    model, before = make(name), make(name).state_dict()
    convert(model)
    assert EXACT[name] <= names_in(model, torch.float32)
    assert not EXACT[name] & names_in(model, torch.bfloat16)
    assert names_in(model, torch.bfloat16)
    for path, p in model.named_parameters():
        if path.rpartition(".")[2] in EXACT[name]:
            assert torch.equal(p, before[path])


@pytest.mark.parametrize("name", ["s4", "s4d"])
def test_the_convolution_of_a_state_space_in_bf16_is_that_of_rounded_outputs(name: str) -> None:
    """The kernel is linear in C, which alone is rounded. Rounded step sizes would make another one after 200 tokens."""
    low, exact = make(name), make(name)
    to_bf16_for_a_gpu(low)
    for found, wanted in zip(low.modules(), exact.modules(), strict=True):
        if isinstance(wanted, StateSpaceLayer) and isinstance(found, StateSpaceLayer):
            with torch.no_grad():
                wanted.outputs.copy_(wanted.outputs.bfloat16())
                kernels = [part.system(torch.float32).kernel(256) for part in (found, wanted)]
            torch.testing.assert_close(*kernels, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_captured_steps_need_no_autocast_for_them(name: str) -> None:
    model = make(name)
    to_bf16_for_a_gpu(model)
    step_model = StepModel(model, torch.bfloat16)
    assert not step_model.autocast
    assert full_precision_parameters(step_model.model) == full_precision_parameters(model)


@pytest.mark.parametrize("name", MODELS)
def test_a_small_folder_keeps_them_exactly(name: str, tmp_path: Path) -> None:
    model = make(name)
    model_folder.save(tmp_path / "m", ModelPackage(model, None, "causal-lm"), "", small=True)
    back = model_folder.load(tmp_path / "m", torch.device("cpu")).model
    assert sum(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True)) >= len(
        EXACT[name]
    )
    for (path, a), b in zip(model.named_parameters(), back.parameters(), strict=True):
        if path.rpartition(".")[2] in EXACT[name]:
            assert torch.equal(a, b), path
