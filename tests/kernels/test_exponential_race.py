"""The exponential race on a GPU (interpreted on a CPU), against the definition in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from regard.decode.sampling import exponential_noise, row_keys, truncate

CUDA = torch.cuda.is_available()
DEVICES = [pytest.param("cpu"), *([pytest.param("cuda", marks=pytest.mark.gpu)] if CUDA else [])]


@pytest.fixture
def race(device: str):
    """Return the kernel's module, run by a GPU or by Triton's interpreter."""
    triton = pytest.importorskip("triton")
    if device == "cpu" and not triton.knobs.runtime.interpret:
        pytest.skip("Triton has neither a GPU nor its interpreter")
    from regard.kernels import exponential_race_triton

    return exponential_race_triton


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("v", [7, 2048, 5000])
@pytest.mark.parametrize("options", [{}, {"min_p": 0.1}, {"epsilon": 0.02}, {"min_p": 0.01, "epsilon": 0.003}], ids=str)
def test_kernel_picks_the_winner_of_the_definition(race, device: str, v: int, options: dict[str, float]) -> None:
    torch.manual_seed(v)
    n, temperature = 16, 0.7
    logits = (4 * torch.randn(n, v)).to(device)
    logits[:, 0] = -torch.inf  # a token that is never generated
    seeds, steps = torch.arange(n, device=device) + 11, torch.arange(n, device=device) % 3
    found = race.run_race(logits, row_keys(seeds, steps), temperature, **options).cpu()
    kept = truncate(logits.cpu().double() / temperature, 0, 1.0, options.get("min_p", 0), options.get("epsilon", 0))
    noise = exponential_noise(seeds, steps, v).cpu().double()
    ratio = (kept.softmax(-1) / noise).numpy()
    best = ratio.max(1)
    # Two tokens whose ratios differ by less than the rounding of logit - log(e) in fp32 may change places.
    assert (ratio[np.arange(n), found.numpy()] >= best * (1 - 1e-4)).all()
