"""Recurrent layers against their equations in NumPy, against torch.nn, and fused kernels against scans."""

import copy
import math
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo.utils import counters

from regard.config.registry import PARTS, find
from regard.device import autocast
from regard.kernels.cuda_graph import GraphedCallable
from regard.layers.cells import Cell
from regard.layers.lstm_variants import VARIANTS
from regard.layers.recurrent import Recurrent
from regard.models.initialization import initialize
from regard.training.training_step import compile_blocks

FUSED = ["rnn", "lstm", "gru"]
KINDS = [*PARTS["cell"], *(f"lstm-peephole/{name}" for name in VARIANTS if name != "vanilla")]
SETTINGS = [(kind, norm, wide) for kind in KINDS for norm in (False, True) for wide in (False, True)]


def layers(
    kind: str, d_in: int, widths: list[int], dtype: torch.dtype = torch.float64, noise: float = 0.3, **settings: Any
) -> Recurrent:
    """Biases and norms are not left at 0 and 1, where mistakes would hide. A variant of a cell is written cell/variant."""
    torch.manual_seed(0)
    kind, _, variant = kind.partition("/")
    if variant:
        settings["settings"] = find("cell", kind).Settings(variant=variant)
    made = Recurrent(kind, d_in, widths, **settings)
    initialize(made)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return made.to(dtype)


def by_scan(made: Recurrent) -> Recurrent:
    made.fuses = made.fuses_padded = False
    return made


def first(made: Recurrent) -> Any:
    return made.layers[0]["forward_"]


def inputs(rows: int, steps: int, d_in: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, steps, d_in, generator=generator, dtype=dtype)


def ragged(lengths: list[int], steps: int, side: str) -> Tensor:
    places, n = torch.arange(steps), torch.tensor(lengths)[:, None]
    return places < n if side == "right" else places >= steps - n


def gradients(made: Recurrent, loss: Tensor, *others: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [*made.parameters(), *others]))


def close(mine: Any, theirs: Any, tolerance: float = 1e-12) -> None:
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# ---- the equations, in NumPy -----------------------------------------------------------------------------------------


def sigma(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def relu(x: Any) -> Any:
    return x * (x.real > 0)


def normal(x: Any, gain: Any, bias: Any = 0) -> Any:
    """Over the last axis, and right for complex numbers too."""
    away = x - x.mean(-1, keepdims=True)
    return away / np.sqrt((away * away).mean(-1, keepdims=True) + 1e-5) * gain + bias


class Equations:
    """One direction of one layer, gate by gate, as the papers write it; w: its parameters by name."""

    def __init__(self, kind: str, w: dict[str, Any]) -> None:
        self.kind, self.w, self.h = kind, w, w["weight_hh"].shape[1]
        self.norm = "input_norm.weight" in w

    def b(self, i: int) -> Any:
        return self.w["bias"][i * self.h : (i + 1) * self.h]

    def from_input(self, x: Any) -> list[Any]:
        y = x @ self.w["weight_ih"].T
        y = normal(y, self.w["input_norm.weight"]) if self.norm else y
        return np.split(y, y.shape[-1] // self.h, -1)

    def product(self, which: int, first: int, n: int, v: Any) -> list[Any]:
        """`which` counts products, `first` and `n` the gates whose rows of weight_hh make it."""
        y = v @ self.w["weight_hh"][first * self.h : (first + n) * self.h].T
        y = normal(y, self.w[f"hidden_norms.{which}.weight"]) if self.norm else y
        return np.split(y, n, -1)

    def step(self, x: Any, h: Any, *rest: Any) -> tuple[Any, ...]:
        """Take and return h, then further states; cells with one state pass c = None through."""
        if "weight_in" in self.w:
            x = x @ self.w["weight_in"].T
        kind, _, variant = self.kind.partition("/")
        if kind == "lstm-peephole":
            return self.lstm_peephole(variant or "vanilla", x, h, *rest)
        return getattr(self, kind.replace("-", "_"))(x, h, *rest)

    def nas(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        from_x, from_h = self.from_input(x), self.product(0, 0, 8, h)
        xs = [from_x[k] + self.b(k) for k in range(8)]
        leaf = [
            sigma(xs[0] + from_h[0]), relu(xs[1] + from_h[1]), sigma(xs[2] + from_h[2]), relu(xs[3] * from_h[3]),
            np.tanh(xs[4] + from_h[4]), sigma(xs[5] + from_h[5]), np.tanh(xs[6] + from_h[6]), sigma(xs[7] + from_h[7]),
        ]  # fmt: skip
        first, second = np.tanh(leaf[0] * leaf[1]), np.tanh(leaf[2] + leaf[3])
        third, fourth = np.tanh(leaf[4] * leaf[5]), sigma(leaf[6] + leaf[7])
        new = np.tanh(first + c) * second
        return np.tanh(new * np.tanh(third + fourth)), new

    def expression(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        return self.gru(x, h, c)  # its default

    def lstm_peephole(self, variant: str, x: Any, h: Any, c: Any, *before: Any) -> tuple[Any, ...]:
        """Greff et al. (2017), equation by equation; `before` are the gates i, f, o of the last step, for FGR."""
        lacks = {"no-input-gate": "i", "no-forget-gate": "f", "no-output-gate": "o", "coupled": "f"}.get(variant, "")
        names = [name for name in "ifgo" if name != lacks]
        from_x, from_h = self.from_input(x), self.product(0, 0, len(names), h)
        total = {name: from_x[k] + from_h[k] + self.b(k) for k, name in enumerate(names)}
        if variant == "gate-recurrence":
            for k, gate in enumerate(before):
                for name, part in zip("ifo", self.product(k + 1, 4 + 3 * k, 3, gate), strict=True):
                    total[name] = total[name] + part
        peep = dict.fromkeys("ifo", 0)
        if variant != "no-peepholes":
            own = [name for name in names if name != "g"]
            peep |= zip(own, np.split(self.w["peephole"], len(own)), strict=True)
        i = 1 if lacks == "i" else sigma(total["i"] + peep["i"] * c)
        f = 1 if lacks == "f" else sigma(total["f"] + peep["f"] * c)
        f = 1 - i if variant == "coupled" else f
        z = total["g"] if variant == "no-input-activation" else np.tanh(total["g"])
        new = z * i + c * f
        o = 1 if lacks == "o" else sigma(total["o"] + peep["o"] * new)
        shown = normal(new, self.w["cell_norm.weight"], self.w["cell_norm.bias"]) if self.norm else new
        y = (shown if variant == "no-output-activation" else np.tanh(shown)) * o
        return (y, new, i, f, o) if before else (y, new)

    def rnn(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        return np.tanh(self.from_input(x)[0] + self.product(0, 0, 1, h)[0] + self.b(0)), c

    def lstm(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        from_x, from_h = self.from_input(x), self.product(0, 0, 4, h)
        i, f, g, o = (from_x[k] + from_h[k] + self.b(k) for k in range(4))
        c = sigma(f) * c + sigma(i) * np.tanh(g)
        shown = normal(c, self.w["cell_norm.weight"], self.w["cell_norm.bias"]) if self.norm else c
        return sigma(o) * np.tanh(shown), c

    def gru(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        (xr, xz, xn), (hr, hz, hn) = self.from_input(x), self.product(0, 0, 3, h)
        r, z = sigma(xr + hr + self.b(0)), sigma(xz + hz + self.b(1))
        return z * h + (1 - z) * np.tanh(xn + r * hn + self.b(2)), c

    def gru_cho(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        (xr, xz, xn), (hr, hz) = self.from_input(x), self.product(0, 0, 2, h)
        r, z = sigma(xr + hr + self.b(0)), sigma(xz + hz + self.b(1))
        return z * h + (1 - z) * np.tanh(xn + self.product(1, 2, 1, r * h)[0] + self.b(2)), c

    def mut1(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        xr, xz = self.from_input(x)
        z, r = sigma(xz + self.b(1)), sigma(xr + self.product(0, 0, 1, h)[0] + self.b(0))
        return np.tanh(self.product(1, 1, 1, r * h)[0] + np.tanh(x) + self.b(2)) * z + h * (1 - z), c

    def mut2(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        (xz, xn), (hr, hz) = self.from_input(x), self.product(0, 0, 2, h)
        z, r = sigma(xz + hz + self.b(1)), sigma(x + hr + self.b(0))
        return np.tanh(self.product(1, 2, 1, r * h)[0] + xn + self.b(2)) * z + h * (1 - z), c

    def mut3(self, x: Any, h: Any, c: Any) -> tuple[Any, Any]:
        xr, xz, xn = self.from_input(x)
        z = sigma(xz + self.product(1, 1, 1, np.tanh(h))[0] + self.b(1))
        r = sigma(xr + self.product(0, 0, 1, h)[0] + self.b(0))
        return np.tanh(self.product(2, 2, 1, r * h)[0] + xn + self.b(2)) * z + h * (1 - z), c


def unrolled(kind: str, w: dict[str, Any], x: Any, *state: Any) -> tuple[Any, ...]:
    """Return the outputs of all steps, and the states after the last; a cell with one state has None beside it."""
    equations, outs, n = Equations(kind, w), [], len(state)
    state = state if n > 1 else (*state, None)
    for t in range(x.shape[1]):
        state = equations.step(x[:, t], *state)
        outs.append(state[0])
    return np.stack(outs, 1), *state[:n]


def complex_step(loss: Callable[[dict[str, Any]], Any], values: dict[str, Any]) -> dict[str, Any]:
    """The gradient of a real function, exact to rounding: Im f(x + i d) / d."""
    found = {}
    for name, value in values.items():
        found[name] = np.zeros_like(value)
        for place in np.ndindex(value.shape):
            moved = value.astype(complex)
            moved[place] += 1e-30j
            found[name][place] = loss(values | {name: moved}).imag / 1e-30
    return found


@pytest.mark.parametrize(("kind", "norm", "wide"), SETTINGS)
def test_a_cell_and_all_its_gradients_are_those_of_its_equations(kind: str, norm: bool, wide: bool) -> None:
    """The loss weighs every output and the last state; `wide`: the input has another width than the state."""
    made, rows, steps, d_in, width = by_scan(layers(kind, 4 if wide else 3, [3], norm=norm)), 2, 3, 4 if wide else 3, 3
    n = first(made).states
    x, weigh = inputs(rows, steps, d_in), inputs(rows, steps + n, width)
    state = tuple(0.5 * each for each in inputs(rows, n, width).unbind(1))
    leaves = [t.requires_grad_() for t in (x, *state)]
    out, end = made(x, state)
    loss = (out * weigh[:, :steps]).sum() + sum((e * weigh[:, steps + i]).sum() for i, e in enumerate(end))

    names = [name.removeprefix("layers.0.forward_.") for name, _ in made.named_parameters()]
    given_names = ["x", *(f"state {i}" for i in range(n))]
    values = {name: p.detach().numpy() for name, p in zip(names, made.parameters(), strict=True)}
    values |= {name: p.detach().numpy() for name, p in zip(given_names, leaves, strict=True)}
    v = weigh.numpy()

    def formula(given: dict[str, Any]) -> Any:
        out, *end = unrolled(kind, {k: given[k] for k in names}, *(given[k] for k in given_names))
        return (out * v[:, :steps]).sum() + sum((e * v[:, steps + i]).sum() for i, e in enumerate(end))

    theirs = unrolled(kind, values, *(values[name] for name in given_names))
    close([out, *end], [torch.from_numpy(a) for a in theirs])
    assert loss.item() == pytest.approx(formula(values), rel=1e-12)
    found = complex_step(formula, values)
    for name, mine in zip((*names, *given_names), gradients(made, loss, *leaves), strict=True):
        np.testing.assert_allclose(mine.numpy(), found[name], rtol=1e-9, atol=1e-11, err_msg=name)


# ---- torch.nn --------------------------------------------------------------------------------------------------------


def torchs(kind: str, made: Recurrent, d_in: int, width: int, depth: int, bidirectional: bool) -> nn.RNNBase:
    """The same weights. Torch has two biases, whose sum is ours, but for a GRU's candidate, where the second is 0."""
    maker = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}[kind]
    theirs = maker(d_in, width, depth, batch_first=True, bidirectional=bidirectional, dtype=torch.float64)
    with torch.no_grad():
        for i, layer in enumerate(made.layers):
            for end, cell in zip(("", "_reverse"), layer.values(), strict=False):
                second = 0.1 * torch.ones_like(cell.bias)
                second[-width if kind == "gru" else len(second) :] = 0
                values = cell.weight_ih, cell.weight_hh, cell.bias - second, second
                for name, value in zip(("weight_ih", "weight_hh", "bias_ih", "bias_hh"), values, strict=True):
                    getattr(theirs, f"{name}_l{i}{end}").copy_(value)
    return theirs


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", FUSED)
def test_layers_say_what_torchs_say(kind: str, bidirectional: bool, scanned: bool) -> None:
    made = layers(kind, 5, [4, 4, 4], bidirectional=bidirectional)
    theirs = torchs(kind, made, 5, 4, 3, bidirectional)
    x = inputs(3, 6, 5).requires_grad_()
    out, end = (by_scan(made) if scanned else made)(x)
    other, last = theirs(x)
    close([out], [other])
    n = len(last) if kind == "lstm" else 1
    for i, whole in enumerate(last if kind == "lstm" else (last,)):
        close(end[i::n], whole)
    weigh = inputs(3, 6, out.shape[-1])
    close(gradients(made, (out * weigh).sum(), x)[-1:], torch.autograd.grad((other * weigh).sum(), x))


# ---- one kernel or a scan, padding or none ---------------------------------------------------------------------------


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", FUSED)
def test_a_fused_layer_does_what_its_scan_does(kind: str, dtype: torch.dtype, side: str, bidirectional: bool) -> None:
    real = None if side == "none" else ragged([6, 2, 5], 6, side)
    x = inputs(3, 6, 5, dtype).requires_grad_()
    results = []
    for change in (lambda made: made, by_scan):
        made = change(layers(kind, 5, [4, 3], dtype, bidirectional=bidirectional))
        out, end = made(x, None, real)
        out = out if real is None else out * real[..., None]
        ends = end[: first(made).states] if side != "right" else ()
        results.append([out, *ends, *gradients(made, (out * out).sum(), x)])
    close(*results, 1e-12 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("kind", FUSED)
def test_layers_that_are_read_at_once_do_what_they_do_one_by_one(kind: str) -> None:
    made, x = layers(kind, 5, [4, 4, 4], dropout=0.1, bidirectional=True).eval(), inputs(3, 6, 5)
    out, end = made(x)
    made._fusable_groups = made.cells_by_layer  # type: ignore[method-assign]
    close([out, *end], [(one := made(x))[0], *one[1]])


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("kind", FUSED)
def test_rows_longer_than_a_fused_kernel_takes_are_read_in_pieces(
    kind: str, bidirectional: bool, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cuDNN refuses rows of 65,536 steps."""
    longest = 0
    fused = {name: getattr(torch._VF, name) for name in ("rnn_tanh", "lstm", "gru")}

    def record(name: str) -> Callable[..., Any]:
        def call(x: Tensor, *args: Any) -> Any:
            nonlocal longest
            longest = max(longest, x.shape[1])
            return fused[name](x, *args)

        return call

    for name in fused:
        monkeypatch.setattr(torch._VF, name, record(name))
    made, x = layers(kind, 5, [4, 4], bidirectional=bidirectional), inputs(3, 8, 5).requires_grad_()
    real = None if side == "none" else ragged([8, 2, 7], 8, side)
    results = []
    for size in (8, 3):
        monkeypatch.setattr("regard.layers.recurrent.LONGEST", size)
        longest = 0
        out, end = made(x, None, real)
        assert longest <= size
        assert longest or (bidirectional and size == 3) or (kind == "rnn" and real is not None)
        out = out if real is None else out * real[..., None]
        ends = end if side == "none" or (side == "left" and not bidirectional) else ()
        results.append([out, *ends, *gradients(made, (out * out).sum(), x)])
    close(*results)


@settings(max_examples=60)
@given(
    st.sampled_from(KINDS),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(1, 4),
    st.lists(st.integers(1, 7), min_size=1, max_size=4),
    st.sampled_from(["left", "right"]),
    st.booleans(),
    st.booleans(),
)
def test_rows_among_others_are_read_as_if_they_were_alone(
    kind: str, widths: list[int], d_in: int, lengths: list[int], side: str, bidirectional: bool, norm: bool
) -> None:
    made, steps = layers(kind, d_in, widths, bidirectional=bidirectional, norm=norm), max(lengths) + 1
    x, real = 3 * inputs(len(lengths), steps, d_in), ragged(lengths, steps, side)
    with torch.no_grad():
        out, end = made(x, None, real)
        for i in range(len(lengths)):
            alone, last = made(x[i : i + 1, real[i]])
            close([out[i, real[i]]], alone)
            if side == "left" and not bidirectional:
                close([e[i] for e in end], [e[0] for e in last])


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_padding_before_a_row_leaves_a_fused_state_at_exactly_zero(kind: str) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        made = layers(kind, 5, [4], dtype)
        out, _ = made(100 * inputs(3, 6, 5, dtype), None, ragged([1, 1, 1], 6, "left"))
        assert not out[:, :5].any()
        assert out[:, 5].any()


@pytest.mark.parametrize("kind", KINDS)
def test_padding_gets_no_gradient(kind: str) -> None:
    made, real = layers(kind, 5, [4, 4], bidirectional=True), ragged([6, 2, 5], 6, "left")
    x = inputs(3, 6, 5).requires_grad_()
    out, _ = made(x, None, real)
    (found,) = torch.autograd.grad((out * real[..., None]).sum(), x)
    assert not found[~real].any()
    assert found[real].all()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_steps_one_by_one_are_the_whole(kind: str, norm: bool) -> None:
    made, x = layers(kind, 5, [4, 3], norm=norm), inputs(3, 6, 5)
    out, end = made(x)
    state = made.zero_state(3, x)
    for t in range(6):
        now, state = made.step(x[:, t], state)
        close([now], [out[:, t]])
    close(state, end)


@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_two_halves_with_the_state_handed_over_are_one_long_row(kind: str, scanned: bool) -> None:
    made, x = layers(kind, 5, [4, 3]), inputs(3, 8, 5).requires_grad_()
    made = by_scan(made) if scanned else made
    out, end = made(x)
    first, state = made(x[:, :3])
    second, last = made(x[:, 3:], state)
    halves = torch.cat([first, second], 1)
    close([halves, *last], [out, *end])
    weigh = inputs(3, 8, 3)
    close(gradients(made, (halves * weigh).sum(), x), gradients(made, (out * weigh).sum(), x))


def test_what_an_lstm_remembers_fades_as_fast_as_its_forget_gate_says() -> None:
    """dc_t / dc_{t-1} = f_t, with f_t worked out here."""
    made, x = layers("lstm", 5, [4]), inputs(1, 1, 5)
    cell = first(made)
    h, c = inputs(1, 2, 4).unbind(1)
    _, (_, new) = by_scan(made)(x, (h, c.requires_grad_()))
    measured = torch.stack([torch.autograd.grad(new[0, i], c, retain_graph=True)[0][0] for i in range(4)])
    f = (x[:, 0] @ cell.weight_ih[4:8].T + h @ cell.weight_hh[4:8].T + cell.bias[4:8]).sigmoid()
    close([measured], [torch.diag(f[0])])


def test_a_state_of_zeros_is_flat_and_of_its_inputs_kind() -> None:
    made = Recurrent("lstm", 5, [4, 3], bidirectional=True)
    state = made.zero_state(2, torch.empty(1, dtype=torch.bfloat16))
    assert [tuple(s.shape) for s in state] == [(2, 4)] * 4 + [(2, 3)] * 4
    assert all(s.dtype == torch.bfloat16 and not s.any() for s in state)
    assert (made.d_out, Recurrent("gru", 5, [4, 3]).d_out) == (6, 3)


def test_parameters_have_the_names_and_shapes_that_are_promised() -> None:
    def shapes(kind: str, d_in: int) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in Recurrent(kind, d_in, [4]).named_parameters()}

    at, gates = "layers.0.forward_.", {"rnn": 1, "lstm": 4, "gru": 3, "gru-cho": 3, "mut3": 3}
    for kind, n in gates.items():
        assert shapes(kind, 5) == {at + "weight_ih": (4 * n, 5), at + "weight_hh": (4 * n, 4), at + "bias": (4 * n,)}
    assert shapes("mut1", 4) == {at + "weight_ih": (8, 4), at + "weight_hh": (8, 4), at + "bias": (12,)}
    assert shapes("mut2", 4) == {at + "weight_ih": (8, 4), at + "weight_hh": (12, 4), at + "bias": (12,)}
    assert shapes("mut1", 5) == shapes("mut1", 4) | {at + "weight_in": (4, 5)}


@pytest.mark.parametrize("kind", KINDS)
def test_weights_start_gate_by_gate(kind: str) -> None:
    made = layers(kind, 40, [32], torch.float32, 0.0, norm=True)
    cell = first(made)
    for weight in cell.weight_hh.split(32):
        torch.testing.assert_close(weight @ weight.T, torch.eye(32), atol=1e-5, rtol=0)
    for weight in cell.weight_ih.split(32):
        bound = math.sqrt(6 / (32 + weight.shape[1]))
        assert 0.9 * bound < weight.abs().max() <= bound
    expected = torch.zeros(cell.gates, 32)
    if kind == "lstm" or kind.startswith("lstm-peephole"):  # a forget gate that is open at first
        without_f = {"lstm-peephole/no-forget-gate", "lstm-peephole/coupled"}
        expected[0 if kind.endswith(("no-input-gate", "coupled")) else 1] = 0.0 if kind in without_f else 1.0
        if kind.endswith("coupled"):
            expected[0] = -1.0
    assert torch.equal(cell.bias.view(-1, 32), expected)
    assert (cell.input_norm.weight == 1).all()


# ---- dropout ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scanned", [False, True])
def test_weight_drop_takes_numbers_of_the_matrix_between_steps_and_of_no_other(scanned: bool) -> None:
    """The forward pass with dropped weights equals that of a layer with these weights."""
    made, x = layers("lstm", 5, [4], weight_dropout=0.5), inputs(3, 6, 5)
    made = by_scan(made) if scanned else made
    cell = first(made)
    torch.manual_seed(3)
    out, _ = made(x)
    torch.manual_seed(3)
    dropped = nn.functional.dropout(cell.weight_hh, 0.5)
    assert 0 < (dropped == 0).sum() < dropped.numel()
    with torch.no_grad():
        cell.weight_hh.copy_(dropped)
    close([out], [made.eval()(x)[0]])


def test_weight_drop_is_one_mask_for_all_steps_another_each_time_and_off_in_evaluation() -> None:
    made, x = layers("lstm", 5, [4], weight_dropout=0.5), inputs(1, 1, 5).expand(1, 2, 5)
    state = made.zero_state(1, x)
    assert not torch.equal(made(x)[0], made(x)[0])
    (by_weight,) = torch.autograd.grad(made(x)[0].sum(), first(made).weight_hh)
    assert 0.2 < (by_weight == 0).double().mean() < 0.8  # dropped weights get no gradient
    made.eval()
    close([made(x)[0]], [layers("lstm", 5, [4])(x)[0]])
    close(made.step(x[:, 0], state)[0], layers("lstm", 5, [4])(x)[0][:, 0])


def test_weight_drop_keeps_the_mean() -> None:
    made, h = layers("rnn", 2, [16], weight_dropout=0.3), inputs(1, 1, 16)[:, 0]
    means = torch.stack([made._drop_weights(first(made)) @ h[0] for _ in range(4000)]).mean(0)
    torch.testing.assert_close(means, first(made).weight_hh @ h[0], atol=0.15, rtol=0)


def test_dropout_between_layers_is_not_before_the_first_nor_after_the_last() -> None:
    made, x = layers("gru", 5, [4], dropout=0.9), inputs(3, 6, 5)
    close([made(x)[0]], [made.eval()(x)[0]])
    made = layers("gru", 5, [16, 16], dropout=0.9)
    out = made(x)[0]
    assert not torch.equal(out, made.eval()(x)[0])
    assert out.all()


# ---- precision, compiling, devices -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("norm", [False, True])
def test_under_autocast_products_are_in_bf16(kind: str, norm: bool) -> None:
    made, x = layers(kind, 32, [32, 32], torch.float32, 0.03, norm=norm), inputs(4, 6, 32, torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = made(x)
        state = made.zero_state(4, x)
        for t in range(6):
            now, state = made.step(x[:, t], state)
    assert low.dtype == now.dtype == torch.bfloat16
    full = made(x)[0]
    torch.testing.assert_close(low.float(), full, atol=0.15, rtol=0)
    torch.testing.assert_close(now.float(), full[:, -1], atol=0.15, rtol=0)
    (low.float() ** 2).sum().backward()
    found = [p.grad for p in made.parameters()]
    for mine, theirs in zip(found, gradients(made, (full**2).sum()), strict=True):
        assert mine is not None
        assert mine.dtype == torch.float32
        allowed = 0.25 if kind == "nas" else 0.1  # the slope of a ReLU jumps at 0, where rounding decides
        assert (mine - theirs).norm() < allowed * theirs.norm()


@pytest.mark.parametrize("kind", ["lstm", "mut3", "nas", "lstm-peephole/gate-recurrence", "expression"])
def test_a_compiled_step_is_the_plain_one_and_is_compiled_few_times(kind: str) -> None:
    """There are two graphs, the first step, whose state needs no gradient, and all others; all widths share them."""
    torch._dynamo.reset()
    x = inputs(3, 7, 6).requires_grad_()
    plain, made = (by_scan(layers(kind, 6, [8, 5])) for _ in range(2))
    for module in made.modules():
        if isinstance(module, Cell):
            module.compile(dynamic=True, backend="aot_eager")
    before, results = counters["stats"]["unique_graphs"], []
    for each in (plain, made):
        out, end = each(x)
        results.append([out, *end, *gradients(each, (out**2).sum(), x)])
    assert counters["stats"]["unique_graphs"] - before <= (4 if "recurrence" in kind else 3)  # it has five states
    close(*results)
    torch._dynamo.reset()


def test_training_compiles_the_steps_of_scans() -> None:
    objective: Any = nn.ModuleList([Recurrent("mut1", 5, [4], bidirectional=True)])
    objective.loss_from_outputs = lambda: None
    compile_blocks(objective)
    cells = [module for module in objective.modules() if isinstance(module, Cell)]
    assert len(cells) == 2
    assert all(cell._compiled_call_impl is not None for cell in cells)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGPU:
    """cuDNN in bf16 and inside a CUDA graph."""

    @pytest.mark.parametrize("side", ["none", "left", "right"])
    @pytest.mark.parametrize("bidirectional", [False, True])
    @pytest.mark.parametrize("kind", FUSED)
    def test_fused_in_bf16_is_near_fp32_and_says_nothing(self, kind: str, bidirectional: bool, side: str) -> None:
        made = layers(kind, 64, [64, 64], torch.float32, 0.03, bidirectional=bidirectional)
        x, real = inputs(8, 12, 64, torch.float32), ragged([12, 5, 1, 7] * 2, 12, "left" if side == "none" else side)
        counted = torch.ones_like(real) if side == "none" else real
        found = []
        for device, dtype in (("cuda", torch.bfloat16), ("cpu", torch.float32)):
            copied, mask = copy.deepcopy(made).to(device), None if side == "none" else real.to(device)
            with warnings.catch_warnings(), autocast(torch.device(device), dtype):
                warnings.simplefilter("error")
                out, _ = copied(x.to(device), None, mask)
            assert out.dtype == dtype
            out = out.float() * counted.to(device)[..., None]
            found.append([t.cpu() for t in (out, *gradients(copied, (out**2).sum()))])
        (low, *by_low), (full, *by_full) = found
        torch.testing.assert_close(low, full, atol=0.1, rtol=0)
        for mine, theirs in zip(by_low, by_full, strict=True):
            assert (mine - theirs).norm() < 0.1 * theirs.norm()

    @pytest.mark.parametrize("kind", KINDS)
    def test_a_recorded_forward_and_backward_is_the_plain_one(self, kind: str) -> None:
        """Compiled too, where it is a scan."""
        torch.set_float32_matmul_precision("highest")
        made = layers(kind, 32, [32, 32], torch.float32, 0.03, bidirectional=True).cuda()
        compiled: Any = SimpleNamespace(modules=made.modules, loss_from_outputs=lambda: None)
        x, real = inputs(8, 12, 32, torch.float32).cuda(), ragged([12, 5, 1, 7] * 2, 12, "left").cuda()

        def work(x: Tensor) -> None:
            out, _ = made(x, None, real)
            ((out * real[..., None]) ** 2).sum().backward()

        def learned() -> list[Tensor]:
            found = [p.grad.clone() for p in made.parameters() if p.grad is not None]
            made.zero_grad(set_to_none=False)
            return found

        work(x)
        plain = learned()
        compile_blocks(compiled)
        recorded = GraphedCallable(work)
        for _ in range(4):
            recorded(x)
            torch.cuda.synchronize()
            close(learned(), plain, 2e-3)

    def test_weight_drop_differs_between_replays(self) -> None:
        made, kept = layers("lstm", 32, [32], torch.float32, weight_dropout=0.5).cuda(), torch.zeros(8, 12, 32).cuda()
        x = inputs(8, 12, 32, torch.float32).cuda()

        def work(x: Tensor) -> None:
            kept.copy_(made(x)[0].detach())

        recorded, seen = GraphedCallable(work), []
        for _ in range(5):
            recorded(x)
            seen.append(kept.clone())
        assert not any(torch.equal(a, b) for a, b in pairwise(seen))
