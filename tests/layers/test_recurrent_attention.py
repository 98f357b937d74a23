"""Scores against NumPy, deferred gradients against finite differences, hypotheses against separate sentences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from configured import model_config
from torch import Tensor

from regard.config.registry import PARTS, find
from regard.errors import RegardError
from regard.layers.recurrent import CellState
from regard.layers.recurrent_attention import Alignment, AttentionCell, SourceAnnotations
from regard.models.initialization import initialize

H, M, C = 4, 6, 3
every_score = pytest.mark.parametrize("score", ["additive", "dot", "general"])


def in_numpy(score: str, layer: torch.nn.Module, s: np.ndarray, h: np.ndarray) -> np.ndarray:
    """Return the scores e_ij, computed one by one."""
    p = {name: x.detach().numpy() for name, x in layer.named_parameters()}
    e = np.zeros((len(s), len(h)))
    for i, state in enumerate(s):
        for j, annotation in enumerate(h):
            if score == "additive":
                e[i, j] = p["v"] @ np.tanh(p["W.weight"] @ state + p["U.weight"] @ annotation)
            else:
                e[i, j] = state @ (p["U.weight"] @ annotation if score == "general" else annotation)
    return e


def attentive(cell: str, score: str = "additive", norm: bool = False) -> AttentionCell:
    torch.manual_seed(0)
    step = AttentionCell(model_config(attention_score=score, cell=cell, **{"recurrent.norm": norm}), C, H, M).double()
    initialize(step)
    with torch.no_grad():
        for p in step.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return step


def start(step: AttentionCell, rows: int) -> CellState:
    return tuple((0.5 * torch.randn(rows, H).double()).requires_grad_() for _ in range(step.cell.states))


SHORT = torch.tensor([[False] * 5, [False, False, False, True, True]])


# ---- scores ----------------------------------------------------------------------------------------------------------


@every_score
def test_scores_are_the_formula(score: str) -> None:
    torch.manual_seed(0)
    layer = find("attention_score", score)(None, H, H if score == "dot" else M).double()
    states, annotations = torch.randn(2, 7, H).double(), torch.randn(2, 5, H if score == "dot" else M).double()
    q, k = layer.queries(states), layer.keys(annotations)
    found = layer(q, k)
    assert found.shape == (2, 7, 5)
    for b in range(2):
        expected = in_numpy(score, layer, states[b].numpy(), annotations[b].numpy())
        np.testing.assert_allclose(found[b].detach(), expected, atol=1e-12)
    torch.testing.assert_close(layer(q[:, None], k[:, None])[:, 0], found)  # with heads, as a record has it


def test_a_dot_product_of_two_widths_is_refused() -> None:
    with pytest.raises(RegardError, match=r"4 numbers and those of the encoder 6.*general"):
        Alignment(model_config(attention_score="dot"), H, M)


@every_score
def test_weights_sum_to_one_over_what_is_no_padding(score: str) -> None:
    torch.manual_seed(0)
    layer = Alignment(model_config(attention_score=score), M, M)
    states, keys = torch.randn(6, M), layer.score.keys(torch.randn(2, 5, M))
    weights = layer(states, keys, SHORT)
    assert weights.shape == (2, 3, 5)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3))
    assert (weights[1, :, 3:] == 0).all()
    assert (
        layer(states, keys, torch.ones(2, 5, dtype=torch.bool)).isfinite().all()
    )  # a row of padding alone gives no NaN


# ---- cells -----------------------------------------------------------------------------------------------------------

CASES = [(cell, False) for cell in PARTS["cell"]] + [("lstm", True), ("mut1", True)]
every_cell = pytest.mark.parametrize(("cell", "norm"), CASES)


@every_cell
def test_all_steps_are_the_equations_one_by_one(cell: str, norm: bool) -> None:
    """Compare with a loop that computes c_i from s_{i-1}, and s_i from s_{i-1}, y_{i-1} and c_i, all inside the step."""
    step = attentive(cell, norm=norm)
    y, annotations, state = torch.randn(2, 4, C).double(), torch.randn(2, 5, M).double(), start(step, 2)
    states, end, weights = step.run_steps(y, step.prepare_source(annotations, SHORT), state)
    for b, n in enumerate((5, 3)):
        now: CellState = tuple(x[b : b + 1] for x in state)
        for t in range(4):
            e = in_numpy("additive", step.cross.score, now[0].detach().numpy(), annotations[b, :n].numpy())[0]
            a = np.exp(e) / np.exp(e).sum()
            np.testing.assert_allclose(weights[b, t, :n].detach(), a, atol=1e-12)
            x = torch.cat([y[b, t], torch.tensor(a) @ annotations[b, :n]])[None]
            now, _ = step.cell(step.cell.project(x), step.cell.weight_hh, None, None, *now)
            torch.testing.assert_close(states[b, t], now[0][0], atol=1e-12, rtol=0)
        for x, expected in zip(end, now, strict=True):
            torch.testing.assert_close(x[b], expected[0], atol=1e-12, rtol=0)


@every_cell
def test_gradients_are_those_of_finite_differences(cell: str, norm: bool) -> None:
    step = attentive(cell, norm=norm)
    y, annotations = torch.randn(2, 3, C).double(), torch.randn(2, 5, M).double()
    given = [y, annotations, *start(step, 2)]
    leaves = [x.requires_grad_() for x in given] + list(step.parameters())

    def loss(*_: Tensor) -> Tensor:
        states, end, weights = step.run_steps(given[0], step.prepare_source(given[1], SHORT), tuple(given[2:]))
        mixed = torch.cos(torch.arange(states.numel())).view_as(states)
        return (states * mixed).sum() + (weights @ given[1]).sin().sum() + sum(x.square().sum() for x in end)

    assert torch.autograd.gradcheck(loss, leaves, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("score", ["additive", "general"])
def test_hypotheses_of_a_sentence_read_its_one_row(score: str) -> None:
    step = attentive("gru", score)
    annotations, y, state = torch.randn(2, 5, M).double(), torch.randn(6, 1, C).double(), start(step, 6)
    states, _, weights = step.run_steps(y, step.prepare_source(annotations, SHORT), state)
    copies = step.prepare_source(annotations.repeat_interleave(3, 0), SHORT.repeat_interleave(3, 0))
    expected, _, their_weights = step.run_steps(y, copies, state)
    torch.testing.assert_close(states, expected)
    assert weights.shape == (2, 3, 5)
    torch.testing.assert_close(weights.flatten(0, 1), their_weights[:, 0])
    by_one, by_copies = (torch.autograd.grad(x.sum(), step.cell.weight_ih)[0] for x in (states, expected))
    torch.testing.assert_close(by_one, by_copies)


@pytest.mark.parametrize("cell", ["gru", "lstm", "mut2"])
def test_a_compiled_step_of_any_shape_is_the_same(cell: str) -> None:
    """Traced as training does it, the cell inside compiled too; one graph for all shapes, and gradients through it."""
    plain, compiled = attentive(cell), attentive(cell)
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled.cell.compile(backend=backend, dynamic=True)
    compiled.compile(backend=backend, dynamic=True)
    for rows, columns, steps in ((3, 5, 4), (4, 7, 3), (2, 6, 5)):
        torch.manual_seed(1)
        y, annotations = torch.randn(rows, steps, C).double(), torch.randn(rows, columns, M).double()
        padding, state = torch.zeros(rows, columns, dtype=torch.bool), start(plain, rows)
        results = []
        for step in (plain, compiled):
            states, _, weights = step.run_steps(y, step.prepare_source(annotations, padding), state)
            step.zero_grad()
            (states.sum() + weights.square().sum()).backward()
            results.append([states, weights, *(p.grad for p in step.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) == 1


def test_weight_dropout_takes_the_same_numbers_at_all_steps_and_only_in_training() -> None:
    step = attentive("rnn")
    step.weight_dropout = 0.5
    y, source = torch.zeros(1, 6, C).double(), step.prepare_source(torch.zeros(1, 2, M).double(), SHORT[:1, :2])
    quiet = [step.eval().run_steps(y, source, (torch.ones(1, H).double(),))[0] for _ in range(2)]
    assert torch.equal(*quiet)
    torch.manual_seed(5)
    states = step.train().run_steps(y, source, (torch.ones(1, H).double(),))[0][0]  # (T, H)
    torch.manual_seed(5)
    dropped = torch.nn.functional.dropout(step.cell.weight_hh, 0.5)
    before = torch.ones(H).double()
    for t in range(6):
        before = torch.tanh(dropped @ before + step.cell.bias)
        torch.testing.assert_close(states[t], before)


def test_what_was_prepared_is_one_row_a_sentence() -> None:
    step = attentive("gru")
    source = step.prepare_source(torch.randn(2, 5, M).double(), SHORT)
    assert isinstance(source, SourceAnnotations)
    assert [tuple(x.shape) for x in source] == [(2, 5, H), (2, 5, 3 * H), (2, 5)]
