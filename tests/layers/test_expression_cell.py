"""Cells written as text: parsing, the built-in cells as texts, and printed Python that computes the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.config.registry import PARTS
from regard.errors import RegardError
from regard.layers.expression_cell import (
    GRU_TEXT,
    LSTM_TEXT,
    Expression,
    canonical,
    parse,
    simplify,
    to_python,
    to_text,
)
from regard.layers.recurrent import Recurrent
from regard.models.architectures import preset, resolve
from regard.models.initialization import initialize
from regard.studies.cell_mutation import mutate

CHO = "r = sigmoid(W(x) + U(h)); z = sigmoid(W(x) + U(h)); n = tanh(W(x) + U(r * h)); h = z * h + (1 - z) * n"
MUT2 = "z = sigmoid(W(x) + U(h)); r = sigmoid(x + U(h)); h = tanh(U(r * h) + W(x)) * z + h * (1 - z)"
MUT3 = "r = sigmoid(W(x) + U(h)); z = sigmoid(W(x) + U(tanh(h))); h = tanh(U(r * h) + W(x)) * z + h * (1 - z)"
STRANGE = "a = relu(W(x, -1) - 0.9 * x) * U(c, 0.9); c = identity(h) - U(a, 1); h = tanh(c * c - (a - h)) + U(a)"
NO_PRODUCT_WITH_H = "c = tanh(W(x) + U(c)); h = tanh(U(c) + h)"
NAS = (
    "c = tanh(tanh(sigmoid(W(x) + U(h)) * relu(W(x) + U(h))) + c) * tanh(sigmoid(W(x) + U(h)) + relu(W(x) * U(h))); "
    "h = tanh(c * tanh(tanh(tanh(W(x) + U(h)) * sigmoid(W(x) + U(h))) + sigmoid(tanh(W(x) + U(h)) + sigmoid(W(x) + U(h)))))"
)
TEXTS = {"gru": GRU_TEXT, "lstm": LSTM_TEXT, "gru-cho": CHO, "rnn": "h = tanh(W(x) + U(h))", "mut3": MUT3, "nas": NAS}


def made(kind: str, d_in: int, width: int, text: str = "", **more: Any) -> Recurrent:
    torch.manual_seed(0)
    layer = Recurrent(kind, d_in, [width], settings=Expression.Settings(text) if text else None, **more)
    initialize(layer, 5)
    layer = layer.double()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return layer


def results(layer: Recurrent, x: Tensor, real: Tensor | None = None) -> list[Tensor]:
    out, end = layer(x, None, real)
    loss = (out * out.detach().cos()).sum() + sum(state.square().sum() for state in end)
    return [out, *end, *torch.autograd.grad(loss, [x, *layer.parameters()])]


def sample(d_in: int) -> Tensor:
    return torch.randn(3, 6, d_in, generator=torch.Generator().manual_seed(1), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_built_in_cell_written_as_text_is_that_cell(kind: str, norm: bool) -> None:
    """Names, shapes and order of the parameters are those of the built-in cell. An LSTM's text has no norm on c."""
    if norm and kind == "lstm":
        pytest.skip("the text of an LSTM has no norm on c")
    x = sample(5)
    layers = [made(kind, 5, 4, norm=norm), made("expression", 5, 4, TEXTS[kind], norm=norm)]
    layers[1].load_state_dict(layers[0].state_dict())
    torch.testing.assert_close(*(results(layer, x) for layer in layers), rtol=1e-12, atol=1e-12)


def test_mut2_as_text_reads_the_input_itself() -> None:
    """Its text has the bias of x after those of W(x), the built-in cell before them."""
    x, given, text = sample(5), made("mut2", 5, 4), made("expression", 5, 4, MUT2)
    values = {name: value.clone() for name, value in given.state_dict().items()}
    at = "layers.0.forward_."
    r, z, n = values[at + "bias"].split(4)
    values[at + "bias"] = torch.cat([z, n, r])
    r, z, n = values[at + "weight_hh"].split(4)
    values[at + "weight_hh"] = torch.cat([z, r, n])
    text.load_state_dict(values)
    torch.testing.assert_close(text(x)[0], given(x)[0], rtol=1e-12, atol=1e-12)


def test_the_numbers_in_a_text_are_initial_values() -> None:
    layer = Recurrent("expression", 5, [40], settings=Expression.Settings("h = tanh(W(x, -2) + U(h, 0.9))"))
    initialize(layer)
    cell: Any = layer.layers[0]["forward_"]  # type: ignore[index]
    assert (cell.bias == -2).all()
    rest = cell.weight_hh - 0.9 * torch.eye(40)
    assert 0.08 < rest.std() * 40**0.5 < 0.12
    lstm = Recurrent("expression", 5, [4], settings=Expression.Settings(LSTM_TEXT))
    initialize(lstm)
    assert lstm.layers[0]["forward_"].bias.tolist() == [0] * 4 + [1] * 4 + [0] * 8  # type: ignore[index]


def some_graphs() -> list[str]:
    """Texts of the built-in cells and of random mutations of them."""
    rng, texts = random.Random(3), [*TEXTS.values(), MUT2, STRANGE, NO_PRODUCT_WITH_H]
    for _ in range(40):
        texts.append(to_text(mutate(parse(rng.choice(texts)), rng)))
    return texts


@pytest.mark.parametrize("text", some_graphs())
def test_printed_python_computes_what_the_text_does(text: str, tmp_path: Path) -> None:
    graph = parse(text)
    (tmp_path / "found_cell.py").write_text(to_python(graph, "found-for-a-test"))
    try:
        exec(compile((tmp_path / "found_cell.py").read_text(), "found_cell.py", "exec"), {})
        x, real = sample(5), torch.tensor([[1] * 6, [0] * 2 + [1] * 4, [0] * 5 + [1]]).bool()
        ours, theirs = made("expression", 5, 4, text), made("found-for-a-test", 5, 4)
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.equal(a, b)  # the same initial values too
        torch.testing.assert_close(results(ours, x, real), results(theirs, x, real), rtol=1e-12, atol=1e-12)
    finally:
        PARTS["cell"].pop("found-for-a-test", None)


@pytest.mark.parametrize("text", some_graphs())
def test_a_text_is_read_as_it_was_written(text: str) -> None:
    graph = canonical(parse(text))
    assert parse(to_text(graph)) == graph
    assert to_text(graph) == to_text(parse(text))
    x = sample(4)
    ours, theirs = (made("expression", 4, 4, each) for each in (to_text(graph), to_text(canonical(graph))))
    torch.testing.assert_close(ours(x)[0], theirs(x)[0])


def test_products_with_one_are_left_out() -> None:
    graph = parse("z = 1 * sigmoid(W(x) + U(h) * 1); h = z * h + 1 * (1 - z) * tanh(1 * W(x) * 1)")
    assert to_text(simplify(graph)) == "v1 = sigmoid(W(x) + U(h)); h = v1 * h + (1 - v1) * tanh(W(x))"
    assert simplify(parse(GRU_TEXT)) == canonical(parse(GRU_TEXT))


@pytest.mark.parametrize("text", [STRANGE, NO_PRODUCT_WITH_H, *TEXTS.values()])
def test_gradients_are_those_of_finite_differences(text: str) -> None:
    layer = made("expression", 3, 3, text.replace("relu", "tanh"))
    x = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in layer.named_parameters()]

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))[0]

    assert torch.autograd.gradcheck(run, (x, *layer.parameters()), atol=1e-7)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "assigns no new state"),
        ("h = ", "no list of assignments"),
        ("h = tanh(W(x) + U(h)", "no list of assignments"),
        ("print(h)", "must be an assignment"),
        ("h = exp(W(x) + U(h))", 'cannot read "exp'),
        ("h = W(h) + U(h)", 'cannot read "W\\(h\\)'),
        ("h = W(x) + U(h) / 2", "cannot read"),
        ("h = W(x) + U(h) + y", 'cannot read "y"'),
        ("h = tanh(U(h))", r"it has no W\(x\)"),
        ("h = tanh(W(x)) + h", "no product U"),
        ("h = W(x) + U(h) + c", "reads c, but does not assign it"),
        ("h = W(x) + U(h); c = 1 + 1", "numbers alone"),
        ("c = W(x) + U(h); h = 1", "a state is a number"),
        ("x = W(x); h = x + U(h)", "x cannot be assigned"),
        ("h.y = W(x) + U(h)", "only names can be assigned"),
        ("h = " + " + ".join(["W(x) + U(h)"] * 200), "more than 100 nodes"),
        ("h = W(x, y) + U(h)", "a number is expected"),
        ("h = W(x, 1e400) + U(h)", "not finite"),
        ("h = W(x) + U(h) * 1" + 400 * "0", "int too large"),
        ("h = W(x) + U(h)" + 5000 * " + x", "recursion|more than 100 nodes"),
    ],
)
def test_what_is_no_cell_is_refused(text: str, complaint: str) -> None:
    with pytest.raises(RegardError, match=complaint):
        parse(text)


def test_what_is_no_cell_is_refused_before_anything_is_built() -> None:
    with pytest.raises(RegardError, match=r"it has no product U\(v\)"):
        resolve(preset("lstm-small", target_vocab=9, cell="expression", expression={"graph": "h = W(x)"}))
