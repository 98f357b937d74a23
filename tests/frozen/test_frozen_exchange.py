"""Folders of transformers come in and go out as they did at commit 0802df8 (exchange_make.py): tensors to the bit, the files
beside them, what the models compute, and what they make of texts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import exchange_runs as runs
import pytest
import torch
from safetensors.torch import load_file

DATA = Path(__file__).parent / "data"
CASES: dict[str, Any] = json.loads((DATA / "exchange.json").read_text(encoding="utf-8"))
IMPORTED, HOME = CASES["imported"], CASES["home"]
LOGITS = load_file(DATA / "exchange.safetensors")
# Ids of special tokens that a model of Regard's own is exported with; they are the tokenizer's, and here is none.
SPECIAL = {"pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}


@pytest.mark.parametrize("name", IMPORTED)
def test_a_folder_goes_out_as_it_did(name: str, tmp_path: Path) -> None:
    case = IMPORTED[name]
    tensors = runs.make_folder(tmp_path / "in", case)
    package, out, files = runs.exported(tmp_path / "in", tmp_path)
    assert out.keys() == (tensors.keys() - set(case["lost"])) | case["changed"].keys()
    for key, x in out.items():
        assert runs.digest(x) == case["changed"].get(key, runs.digest(tensors.get(key, x))), key
    assert files == {
        file: case["files"][file] if values is None else values for file, values in case["written"].items()
    }
    if name in LOGITS:
        # The largest changes by 1.5e-6 of itself when every weight changes by one rounding (exchange_make.py measures it).
        tolerance = 1e-5 * LOGITS[name].abs().max().item()
        found = runs.logits(package, bare=name.endswith("-bare"))
        torch.testing.assert_close(found, LOGITS[name], atol=tolerance, rtol=0)
    if "answers" in case:
        for found, expected in zip(runs.answers(package), case["answers"], strict=True):
            known = {key: value for key, value in expected.items() if value is not None}
            assert {key: found[key] for key in known} == close(known)


def close(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer to compare with: text and tokens exactly, numbers to 1e-4."""
    numbers = ("score", "log_prob", "log_probs", "vector")
    return {key: pytest.approx(value, abs=1e-4) if key in numbers else value for key, value in answer.items()}


@pytest.mark.parametrize("name", HOME)
def test_a_model_made_here_goes_out_as_it_did(name: str, tmp_path: Path) -> None:
    case = HOME[name]
    out, files = runs.home(case, tmp_path / "out")
    assert {key: runs.digest(x) for key, x in out.items()} == case["exported"]
    both = files["config.json"], case["config"]
    found, expected = ({key: value for key, value in config.items() if key not in SPECIAL} for config in both)
    assert found == expected
