"""Gradient flow against closed forms and against products of Jacobians in NumPy."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from fused_rows import qkv_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from regard.cli.study_commands import study_app
from regard.studies import gradient_flow
from regard.studies.gradient_flow import (
    ATTENTION,
    HEADS,
    LayerSetup,
    decay_factor,
    get_weights,
    make_attention,
    make_layer,
    measure,
    measure_attention_flow,
    measure_carousel,
    measure_flow,
)

WIDTH, STEPS = 6, 12


def inputs(rows: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, STEPS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def numbers(layer: gradient_flow.Recurrent, *names: str) -> list[np.ndarray]:
    return [getattr(get_weights(layer), name).detach().numpy() for name in names]


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def torchs(cell: str, layer: gradient_flow.Recurrent) -> torch.nn.LSTM | torch.nn.GRU:
    """Return torch's own layer with the same weights."""
    made = (torch.nn.LSTM if cell == "lstm" else torch.nn.GRU)(WIDTH, WIDTH, batch_first=True).double()
    w, u, b = (getattr(get_weights(layer), name).detach() for name in ("weight_ih", "weight_hh", "bias"))
    for own, mine in zip(made.parameters(), (w, u, b, torch.zeros_like(b)), strict=True):
        own.data.copy_(mine)
    return made


@settings(max_examples=20)
@given(radius=st.floats(0.05, 4.0), seed=st.integers(0, 1000))
def test_without_inputs_a_vanilla_layer_multiplies_gradients_by_its_radius(radius: float, seed: int) -> None:
    torch.manual_seed(seed)
    found = measure(LayerSetup("linear", "rnn", radius, inputs=0.0), inputs(), reach=10)
    assert found["gains"] == pytest.approx([radius**k for k in range(1, 11)], rel=1e-10)
    assert found["factor"] == pytest.approx(radius, rel=1e-10)
    assert found["expected"] == radius


def test_a_vanilla_layer_gives_the_product_of_its_jacobians() -> None:
    torch.manual_seed(1)
    layer, x = make_layer(LayerSetup("tanh", "rnn", 1.7), WIDTH), inputs()
    w, u, b = numbers(layer, "weight_ih", "weight_hh", "bias")
    squares = np.zeros(STEPS - 1)
    for row in x.numpy():
        h, steps = np.zeros(WIDTH), []
        for token in row:
            h = np.tanh(w @ token + u @ h + b)
            steps.append(np.diag(1 - h**2) @ u)  # dh_t / dh_{t-1}
        product = np.eye(WIDTH)
        for k, step in enumerate(reversed(steps[1:])):
            product = product @ step
            squares[k] += (product**2).sum()
    assert measure_flow(layer, x, STEPS - 1) == pytest.approx(np.sqrt(squares / (len(x) * WIDTH)), rel=1e-10)


def test_the_slope_of_tanh_takes_its_share_of_the_radius() -> None:
    torch.manual_seed(1)
    row, x = LayerSetup("tanh", "rnn", 1.7), inputs()
    w, u, b = numbers(make_layer(row, WIDTH), "weight_ih", "weight_hh", "bias")
    slopes = []
    for tokens in x.numpy():
        h = np.zeros(WIDTH)
        for t, token in enumerate(tokens):
            h = np.tanh(w @ token + u @ h + b)
            if t >= STEPS - 5:
                slopes.append((1 - h**2) ** 2)
    torch.manual_seed(1)
    assert measure(row, x, reach=5)["expected"] == pytest.approx(1.7 * np.sqrt(np.mean(slopes)), rel=1e-10)


def test_an_lstm_whose_gates_do_not_see_h_gives_the_product_of_its_forget_gates() -> None:
    torch.manual_seed(2)
    layer, x = make_layer(LayerSetup("lstm", "lstm", gate=0.7), WIDTH), inputs()
    with torch.no_grad():
        get_weights(layer).weight_hh.zero_()
    w, b = numbers(layer, "weight_ih", "bias")
    assert b.tolist() == [0.0] * WIDTH + [0.7] * WIDTH + [0.0] * (2 * WIDTH)
    i, f, g, o = np.split(x.numpy() @ w.T + b, 4, axis=-1)  # (N, T, H)
    i, f, g, o = sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)
    c = np.zeros_like(f[:, 0])
    for t in range(STEPS):
        c = f[:, t] * c + i[:, t] * g[:, t]
    last = o[:, -1] * (1 - np.tanh(c) ** 2)  # dh_T / dc_T
    closed = [np.sqrt(np.mean((last * f[:, -k:].prod(1)) ** 2)) for k in range(1, 8)]
    assert measure_flow(layer, x, 7) == pytest.approx(closed, rel=1e-10)


def test_a_gru_whose_gates_do_not_see_h_gives_the_product_of_its_update_gates() -> None:
    torch.manual_seed(3)
    layer, x = make_layer(LayerSetup("gru", "gru", gate=1.5), WIDTH), inputs()
    with torch.no_grad():
        get_weights(layer).weight_hh.zero_()
    w, b = numbers(layer, "weight_ih", "bias")
    z = sigmoid(x.numpy() @ w.T + b)[..., WIDTH : 2 * WIDTH]
    assert measure_flow(layer, x, 7) == pytest.approx(
        [np.sqrt(np.mean(z[:, -k:].prod(1) ** 2)) for k in range(1, 8)], rel=1e-10
    )


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_a_gated_layer_gives_the_jacobians_of_torchs_by_all_of_its_state(cell: str) -> None:
    torch.manual_seed(7)
    layer, x = make_layer(LayerSetup(cell, cell), WIDTH), inputs(rows=1)
    theirs, k = torchs(cell, layer), 4
    state = theirs(x[:, :-k])[1]
    parts = state if cell == "lstm" else (state,)

    def last(*before: torch.Tensor) -> torch.Tensor:
        return theirs(x[:, -k:], before if cell == "lstm" else before[0])[0][0, -1]

    jacobians = torch.autograd.functional.jacobian(last, tuple(part.detach() for part in parts))
    expected = math.sqrt(sum(float(part.square().sum()) for part in jacobians) / WIDTH)
    assert measure_flow(layer, x, k)[-1] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("cell", ["lstm", "gru"])
def test_the_expected_factor_is_that_of_the_gates_alone(cell: str) -> None:
    row, x = LayerSetup(cell, cell, gate=2.0), inputs()
    torch.manual_seed(4)
    layer = make_layer(row, WIDTH)
    h = torchs(cell, layer)(x)[0].detach().numpy()[:, -6:-1]  # what the last five steps are handed
    w, u, b = (value[WIDTH : 2 * WIDTH] for value in numbers(layer, "weight_ih", "weight_hh", "bias"))
    gates = sigmoid(x.numpy()[:, -5:] @ w.T + h @ u.T + b)
    products = [np.sqrt(np.mean(gates[:, 5 - k :].prod(1) ** 2)) for k in range(1, 6)]
    slope = np.polyfit(range(5), np.log(products), 1)[0]
    torch.manual_seed(4)
    assert measure(row, x, reach=5)["expected"] == pytest.approx(np.exp(slope), rel=1e-10)


def test_the_carousel_turns_by_the_forget_gate_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(5)
    layer = make_layer(LayerSetup("lstm", "lstm"), WIDTH)
    found = measure_carousel(layer, inputs())
    assert found["difference"] < 1e-15
    # before the sigmoid: a bias of 1, and W x + U h, whose variance is at most 1 + 1; six deviations
    assert sigmoid(1 - 6 * math.sqrt(2)) < found["least"] < found["most"] < 1
    assert found["steps"] == 2 * STEPS
    monkeypatch.setattr(
        gradient_flow, "compute_gates", lambda *args: torch.full((2 * STEPS, WIDTH), 0.7, dtype=torch.float64)
    )
    assert measure_carousel(layer, inputs())["difference"] > 0.01


ROWS = qkv_rows(HEADS, HEADS, 2)


def test_attention_that_looks_everywhere_alike_is_flat() -> None:
    torch.manual_seed(6)
    layer = make_attention(8)
    with torch.no_grad():
        layer.qkv.weight[ROWS[:16]] = 0  # queries and keys: all scores are 0
    x = torch.randn(2, STEPS, 8, dtype=torch.float64)
    through = layer.out.weight.detach().numpy() @ layer.qkv.weight.detach().numpy()[ROWS[16:]]
    expected = np.sqrt((through**2).sum() / 8) / STEPS
    assert measure_attention_flow(layer, x) == pytest.approx([expected] * (STEPS - 1), rel=1e-10)


def test_attention_gives_the_jacobians_of_its_formula() -> None:
    torch.manual_seed(8)
    layer, x = make_attention(8), torch.randn(1, STEPS, 8, dtype=torch.float64)

    def last(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, 2)) for part in layer.qkv(x)[..., ROWS].chunk(3, -1))  # (T, H, D)
        weights = (torch.einsum("hd,shd->hs", q[-1], k) / math.sqrt(2)).softmax(-1)
        return layer.out(torch.einsum("hs,shd->hd", weights, v).flatten())

    jacobian = torch.autograd.functional.jacobian(last, x[0]).detach()  # (C, T, C)
    expected = jacobian.square().sum((0, 2)).div(8).sqrt().tolist()
    assert measure_attention_flow(layer, x) == pytest.approx(expected[-2::-1], rel=1e-10)


def test_the_factor_is_that_of_a_geometric_series() -> None:
    assert decay_factor([5 * 0.8**k for k in range(20)]) == pytest.approx(0.8)


def test_the_command_writes_table_numbers_and_picture(tmp_path: Path) -> None:
    ran = CliRunner().invoke(study_app, ["gradient-flow", "--quick", "--output", str(tmp_path)], catch_exceptions=False)
    assert ran.exit_code == 0
    assert ran.stdout.strip() == (tmp_path / "table.md").read_text().strip()
    assert (tmp_path / "gradient-flow.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((tmp_path / "results.json").read_text())
    rows = {name: row["factor"] for name, row in results["rows"].items()}
    assert all(len(row["gains"]) == results["reach"] for row in results["rows"].values())
    assert rows["RNN, linear, radius 1.5"] == pytest.approx(1.5)
    assert rows["RNN, tanh, radius 0.9"] < 0.9 < rows["LSTM, forget bias 5"] < 1.01
    assert rows["RNN, tanh, radius 3"] > 1.05
    assert abs(rows[ATTENTION] - 1) < 0.05
    assert f"| {ATTENTION} |" in ran.stdout
