"""What a cold `regard translate` on a CPU does not wait for: modules it does not need, and initial weights nobody reads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from regard import model_folder
from regard.config import TokenizerConfig
from regard.models.architectures import make_model, preset
from regard.models.weights import SkipInit, is_finite
from regard.text.tokenizer import Tokenizer, Tokenizers

HEAVY = [
    *("matplotlib", "pandas", "sacrebleu", "scipy", "sympy", "tensorboard", "transformers", "triton", "torch._dynamo"),
    *(
        "torch._inductor",
        "torch.onnx",
        "torch.utils.tensorboard",
        "regard.evaluate",
        "regard.studies",
    ),
    *(
        "regard.tasks",
        "regard.training",
        "regard.decode.graphs",
        "regard.kernels.toeplitz_attention",
    ),
]
PROGRAM = """
import json, sys
from regard.cli.main import main
try:
    main()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""
SIZES = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 64}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tokenizer = Tokenizer.train(["I ate an apple."], TokenizerConfig(kind="char", vocab_size=50))
    n = len(tokenizer)
    model = make_model(preset("transformer-tiny", source_vocab=n, target_vocab=n, **SIZES))
    package = model_folder.ModelPackage(
        model, Tokenizers(tokenizer, tokenizer), "translation", source="en", target="de"
    )
    model_folder.save(tmp_path / "model", package, "")
    return tmp_path / "model"


def test_translating_imports_nothing_heavy_but_torch(saved: Path) -> None:
    words = [sys.executable, "-c", PROGRAM, "translate", "--device", "cpu", "--model", str(saved), "I ate an apple."]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert len(done.stdout.splitlines()) == 1
    imported = set(json.loads(done.stderr.splitlines()[-1]))
    assert "torch" in imported
    assert [name for name in HEAVY if name in imported] == []
    # The loader only looks whether a folder is one of Hugging Face transformers.
    assert {name for name in imported if name.startswith("regard.exchange.")} == {"regard.exchange.loader"}


def test_loading_draws_no_random_numbers(saved: Path) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    model_folder.load(saved, torch.device("cpu"))
    assert torch.equal(torch.rand(3), expected)


def test_a_model_made_unfilled_has_all_that_is_not_drawn() -> None:
    """Zeros, ones and tables of positions are as ever."""
    config = preset("transformer-tiny", source_vocab=30, target_vocab=30, **SIZES)
    with SkipInit():
        unfilled = make_model(config)
        layer = nn.Linear(3, 2)
    drawn = make_model(config)
    assert layer.weight.shape == (2, 3)
    for mine, other in zip(unfilled.buffers(), drawn.buffers(), strict=True):
        assert torch.equal(mine, other)
    for (name, mine), other in zip(unfilled.named_parameters(), drawn.parameters(), strict=True):
        assert mine.shape == other.shape
        if "norm" in name:
            assert torch.equal(mine, other)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([3e38, 3e38], True),  # the sum is infinite, the numbers are not
        ([3e38, 3e38, float("nan")], False),
        ([float("inf"), 1.0], False),
        ([float("inf"), float("-inf")], False),
        ([0.0, float("nan")], False),
        ([], True),
    ],
)
def test_finite(values: list[float], expected: bool) -> None:
    assert is_finite(torch.tensor(values)) is expected
