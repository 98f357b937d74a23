"""What tiny models of every kind compute is what commit 0802df8 computed from the same weights (make.py).

Tolerances. Numbers are fp32, so one rounding is 2^-24 = 6e-8 of a number. Moving every weight by one rounding moves logits
by at most 2e-6 and losses by at most 5e-7 of them, at any of the ten steps; make.py measures it and takes only weights of
which that is true. Another order of the same sums does about as much. So 1e-5 is five times what logits move by, and twenty
times what losses do; over the steps the differences of the weights add up, for which losses are given 1e-5 more a step.
Scores are sums of at most 20 log-probabilities, each of which moves as the logits do: 1e-4. Tokens must be the same: changes
of the weights by 3e-4 of their size, 5,000 roundings, change none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import frozen_runs as runs
import pytest
import torch
from safetensors import safe_open
from torch import Tensor

DATA = Path(__file__).parent / "data"
CASES: dict[str, Any] = json.loads((DATA / "models.json").read_text())
every = pytest.mark.parametrize("name", CASES)
writing = pytest.mark.parametrize("name", [name for name, case in CASES.items() if case["decode"]])


def frozen(name: str) -> dict[str, Tensor]:
    """Return the tensors of a case; whole numbers as ids."""
    with safe_open(DATA / "models.safetensors", "pt") as file:
        keys = [key for key in file.keys() if key.startswith(f"{name}/")]  # noqa: SIM118
        found = {key.removeprefix(f"{name}/"): file.get_tensor(key) for key in keys}
    return {key: x.float() if x.is_floating_point() else x.long() for key, x in found.items()}


def case_of(name: str) -> tuple[Any, dict[str, Tensor], dict[str, Tensor], torch.nn.Module]:
    """Return the case, its tensors, those of them that are inputs, and the model."""
    case, tensors = CASES[name], frozen(name)
    inputs = {key.removeprefix("inputs/"): x for key, x in tensors.items() if key.startswith("inputs/")}
    weights = {key.removeprefix("weights/"): x for key, x in tensors.items() if key.startswith("weights/")}
    return case, tensors, inputs, runs.filled(case, weights)


@every
def test_logits_are_what_they_were(name: str) -> None:
    case, tensors, inputs, model = case_of(name)
    with torch.no_grad():
        torch.testing.assert_close(runs.predicted(model, case, inputs), tensors["logits"], atol=1e-5, rtol=1e-5)
        if case["packed"]:
            torch.testing.assert_close(runs.packed(model, inputs), tensors["packed"], atol=1e-5, rtol=1e-5)


@every
def test_ten_steps_have_the_losses_they_had(name: str) -> None:
    case, _, inputs, model = case_of(name)
    for step, (found, expected) in enumerate(zip(runs.losses(model, case, inputs), case["losses"], strict=True)):
        assert found == pytest.approx(expected, rel=1e-5 * (1 + step)), step


@writing
def test_what_is_written_is_what_was_written(name: str) -> None:
    case, _, inputs, model = case_of(name)
    found = runs.written(model, case, inputs)
    for way, expected in case["written"].items():
        assert [row["ids"] for row in found[way]] == [row["ids"] for row in expected], way
        for row, old in zip(found[way], expected, strict=True):
            assert row == {
                key: pytest.approx(value, abs=1e-4) if isinstance(value, float) else value for key, value in old.items()
            }, way
