"""LSTM, convolution and attention layers: FLOPs, saved memory, path lengths, and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from regard.cli.study_commands import study_app
from regard.studies import layer_comparison
from regard.studies.layer_comparison import (
    KERNEL,
    LAYER_TYPES,
    ComparisonSizes,
    count_flops,
    count_saved_bytes,
    find_crossing,
    format_table,
    make_forward,
    make_layer,
    measure_paths,
)

CPU = torch.device("cpu")


@given(st.integers(1, 4096))
def test_attention_costs_as_much_as_a_convolution_at_n_equal_d_and_as_an_lstm_at_twice_that(d: int) -> None:
    assert count_flops("attention", d, d) == count_flops("convolution", d, d)
    assert count_flops("attention", 2 * d, d) == count_flops("LSTM", 2 * d, d)
    assert count_flops("attention", 2 * d + 1, d) > count_flops("LSTM", 2 * d + 1, d)


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_the_formula_counts_what_torch_counts(layer_type: str) -> None:
    n, d, rows = 12, 64, 3
    layer = make_layer(layer_type, d)
    if layer_type == "LSTM":  # torch does not count inside its fused kernels; these are the products of its weights
        weights = [p for p in layer.parameters() if p.ndim == 2]
        assert count_flops(layer_type, n, d) == n * sum(2 * p.numel() for p in weights)
        return
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        make_forward(layer, rows, n, CPU)(torch.randn(rows, n, d))
    assert counter.get_total_flops() == rows * count_flops(layer_type, n, d)


def test_crossings_are_found_between_lengths() -> None:
    lengths = [16, 64, 256, 1024]
    square, linear = [n * n for n in lengths], [100 * n for n in lengths]
    assert find_crossing(lengths, square, linear) == "100"
    assert find_crossing(lengths, linear, square) == "> 1,024"  # above at first, but not for good
    assert find_crossing(lengths, square, [1] * 4) == "< 16"  # above from the beginning
    assert find_crossing(lengths, [0.5, 2, 0.5, 2], [1] * 4) == "512"  # the last time counts
    assert find_crossing(lengths, square, [64 * n for n in lengths]) == "64"


@settings(max_examples=15)
@given(st.integers(2, 100))
def test_paths_are_as_long_as_their_formulas_say(n: int) -> None:
    reach = next(layers for layers in range(1, n + 1) if 3**layers >= n)  # (k - 1)(1 + k + k^2 + ...) = k^layers - 1
    assert measure_paths(n) == {"LSTM": n - 1, "convolution": math.ceil((n - 1) / 2), "dilated": reach, "attention": 1}


@pytest.mark.parametrize("layer_type", LAYER_TYPES)
def test_a_layer_passes_gradients_as_far_as_its_path_says(layer_type: str) -> None:
    n = 8
    x = torch.randn(1, n, 8, requires_grad=True)
    gradient = torch.autograd.grad(make_forward(make_layer(layer_type, 8), 1, n, CPU)(x)[0, -1].sum(), x)[0]
    seen = gradient[0].abs().amax(-1) > 0
    first = {"LSTM": 0, "convolution": n - KERNEL, "attention": 0}[layer_type]
    assert seen.tolist() == [i >= first for i in range(n)]


def test_what_is_kept_is_counted_once_and_without_what_is_there_anyway() -> None:
    x = torch.randn(10, requires_grad=True)
    assert count_saved_bytes(lambda: torch.autograd.grad((x * x).sum(), x)) == 0
    assert count_saved_bytes(lambda: torch.autograd.grad(x.exp().sum(), x)) == 40
    assert count_saved_bytes(lambda: torch.autograd.grad(x.exp().view(2, 5).tanh().sum(), x)) == 80

    def twice() -> None:
        y = x.exp()
        torch.autograd.grad((y * y.view(10)).sum(), x)

    assert count_saved_bytes(twice) == 40


def test_the_command_writes_table_numbers_and_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ComparisonSizes((8, 16, 32), (8, 16), tokens=64, repeats=2, paths=(4, 9))
    monkeypatch.setattr(layer_comparison, "QUICK", sizes)
    monkeypatch.setattr("regard.device.cpu_cores", lambda: 1)
    words = ["three-ways", "--quick", "--device", "cpu", "--output", str(tmp_path)]
    ran = CliRunner().invoke(study_app, words, catch_exceptions=False)
    assert ran.exit_code == 0
    assert ran.stdout.strip() == (tmp_path / "table.md").read_text().strip()
    assert (tmp_path / "three-ways.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    assert len(results["cells"]) == 2 * 3 * 3
    for cell in results["cells"]:
        assert cell["rows"] * cell["length"] == 64
        assert cell["flops"] == 3 * cell["rows"] * count_flops(cell["way"], cell["length"], cell["width"])
        assert cell["seconds"] > 0
        assert cell["bytes"] > 64 * cell["width"] * 4  # more than its result
    assert results["paths"]["9"] == {"LSTM": 8, "convolution": 4, "dilated": 2, "attention": 1}
    assert ran.stdout.count("**8**") == ran.stdout.count("**16**") == 1
    assert format_table(results).count("\n| 8 | ") == 3 + 1  # its lengths, and where attention crosses
