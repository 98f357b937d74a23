"""`regard study gradient-flow`: what is left of a gradient k steps back in time.

A loss at the last step pulls at h_T with a vector of length 1. Of that, G(k) = |d h_T / d s_{T-k}|_F / sqrt(H) arrives at
the state s that was there k steps before: the root mean square over all directions of the pull. s is all that one step hands
to the next: h, and c in an LSTM. For attention, s_{T-k} is the token k places back, and there are no steps between.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.config import ModelConfig
from regard.config.registry import find
from regard.files import write_text
from regard.kernels.masks import CAUSAL
from regard.layers.context import Context, Request
from regard.layers.part import Mixer, Place, make_part
from regard.layers.recurrent import CellState, Recurrent
from regard.look.figures import Lines, draw, save
from regard.look.gradient_figure import decay_factor
from regard.models.initialization import initialize
from regard.studies.finetuning import setting

HEADS, WARM_UP = 4, 50


@dataclass(frozen=True)
class Row:
    """A recurrent layer as it starts, but for what is said here."""

    name: str
    cell: str
    radius: float = 1.0  # all eigenvalues of W_hh have this modulus
    inputs: float = 1.0  # their standard deviation; at 0 the state stays 0, where tanh is the identity
    gate: float = 1.0  # bias of what keeps the old state: an LSTM's forget gate, a GRU's update gate


VANILLA = (
    *(Row(f"RNN, linear, radius {radius:g}", "rnn", radius, inputs=0.0) for radius in (0.5, 0.9, 1.5)),
    *(Row(f"RNN, tanh, radius {radius:g}", "rnn", radius) for radius in (0.9, 1.5, 3.0)),
)
GATED = (
    *(Row(f"LSTM, forget bias {bias:g}", "lstm", gate=bias) for bias in (1.0, 3.0, 5.0)),
    *(Row(f"GRU, update bias {bias:g}", "gru", gate=bias) for bias in (0.0, 3.0, 5.0)),
)
ATTENTION = "self-attention"


def study(out: Path, quick: bool = False) -> Path:
    """Write results.json, table.md and gradient-flow.png into `out`, which is returned. On a CPU, in float64."""
    width, reach = (16, 30) if quick else (64, 200)
    results = {"setting": setting("cpu", quick), "width": width, "reach": reach, **run(width, reach)}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", table(results))
    save(picture(results), out / "gradient-flow.png")
    return out


def run(width: int, reach: int, seed: int = 0) -> dict[str, Any]:
    """Of each row: G(1) to G(reach), the factor per step that fits them, and the one that theory expects."""
    torch.manual_seed(seed)
    x = torch.randn(2, WARM_UP + reach, width, dtype=torch.float64)  # (N, T, C), the same for all
    rows = {row.name: measure(row, x, reach) for row in (*VANILLA, *GATED)}
    rows[ATTENTION] = measured(attention_flow(attention(width), x[:, -reach - 1 :]), 1.0)
    return {"rows": rows, "carousel": carousel(make_layer(GATED[0], width), x)}


def measure(row: Row, x: Tensor, reach: int) -> dict[str, Any]:
    layer = make_layer(row, x.shape[-1])
    return measured(flow(layer, x * row.inputs, reach), expected(row, layer, x * row.inputs, reach))


def measured(gains: Sequence[float], expected: float) -> dict[str, Any]:
    return {"gains": list(gains), "factor": decay_factor(gains), "expected": expected}


# ---- recurrent layers -------------------------------------------------------------------------------------------------


def make_layer(row: Row, width: int) -> Recurrent:
    layer = Recurrent(row.cell, width, [width]).double()
    initialize(layer)
    with torch.no_grad():
        if row.cell == "rnn":
            weights(layer).weight_hh.mul_(row.radius)
        else:
            gate(layer, "bias").fill_(row.gate)
    return layer


def weights(layer: Recurrent) -> Any:
    """Those of its one layer and direction."""
    return layer.layers[0].forward_


def gate(layer: Recurrent, name: str) -> Tensor:
    """Weights of what keeps the old state: the second of an LSTM's gates i f g o, and of a GRU's r z n."""
    return getattr(weights(layer), name)[layer.d_out : 2 * layer.d_out]


def unroll(layer: Recurrent, x: Tensor) -> list[CellState]:
    """What each step is handed by the one before it, and what the last one leaves: T + 1 states of x (B, T, C)."""
    states = [layer.zero_state(len(x), x)]
    for t in range(x.shape[1]):
        state = layer.step(x[:, t], states[-1])[1]
        # Copies, so that the gradient of c is that of the next step's reading it, without the way through its own h.
        states.append(tuple(part.clone() for part in state))
    return states


def flow(layer: Recurrent, x: Tensor, reach: int) -> list[float]:
    """G(1) to G(reach). Every row of x (N, T, C) is read once for each number of h_T: one backward pass is all Jacobians."""
    width = layer.d_out
    states = unroll(layer, x.repeat_interleave(width, 0))
    pulled = states[-1][0].view(len(x), width, width).diagonal(dim1=1, dim2=2)  # (N, H): number i of copy i
    handed = states[-1 - reach : -1][::-1]
    gradients = torch.autograd.grad(pulled.sum(), [part for state in handed for part in state])
    squares = [float(gradient.square().sum()) for gradient in gradients]
    parts = len(handed[0])
    return [math.sqrt(sum(squares[i * parts : (i + 1) * parts]) / pulled.numel()) for i in range(reach)]


@torch.no_grad()
def expected(row: Row, layer: Recurrent, x: Tensor, reach: int) -> float:
    """What theory has a step multiply a gradient by: the radius times the slope of tanh (root mean square), or what gates
    let through in k steps, without the ways through h."""
    h = torch.stack([state[0] for state in unroll(layer, x)], 1)  # (N, T + 1, H)
    if row.cell == "rnn":
        return row.radius * float((1 - h[:, -reach:].square()).square().mean().sqrt())
    kept = gates(layer, x, h[:, :-1]).flip(1)[:, :reach].cumprod(1)  # (N, reach, H)
    return decay_factor(kept.square().mean((0, 2)).sqrt().tolist())


def gates(layer: Recurrent, x: Tensor, h: Tensor) -> Tensor:
    """f_t of an LSTM or z_t of a GRU by their formula, from inputs and states before them (..., H)."""
    return torch.sigmoid(x @ gate(layer, "weight_ih").T + h @ gate(layer, "weight_hh").T + gate(layer, "bias"))


def carousel(layer: Recurrent, x: Tensor) -> dict[str, float]:
    """dc_t / dc_{t-1} at given h_{t-1}, all of it, by autograd, against diag(f_t): the largest difference."""
    width = layer.d_out
    before = unroll(layer, x)[:-1]
    h, c = (torch.stack([state[i] for state in before], 1).detach().flatten(0, 1) for i in range(2))  # (N T, H)
    inputs = x.flatten(0, 1)
    f = gates(layer, inputs, h).detach()
    copies = [part.repeat_interleave(width, 0) for part in (inputs, h, c)]
    copies[2].requires_grad_()
    after = layer.step(copies[0], (copies[1], copies[2]))[1][1].view(-1, width, width)
    jacobian = torch.autograd.grad(after.diagonal(dim1=1, dim2=2).sum(), copies[2])[0].view(-1, width, width)
    difference = float((jacobian - torch.diag_embed(f)).abs().max())
    return {"difference": difference, "least": float(f.min()), "most": float(f.max()), "steps": len(f)}


# ---- attention --------------------------------------------------------------------------------------------------------


def attention(width: int) -> Mixer:
    config = ModelConfig(d_model=width, n_heads=HEADS, n_kv_heads=HEADS, d_head=width // HEADS)
    layer: Mixer = make_part("mixer", "attention", config, Place("decoder", causal=True)).double()
    initialize(layer)
    return layer


def attention_flow(layer: Mixer, x: Tensor) -> list[float]:
    """The same of what attention makes of the last token of x (N, T, C), by the token k places back."""
    n, length, width = x.shape
    rows = x.repeat_interleave(width, 0).requires_grad_()
    positions = torch.arange(length).expand(len(rows), -1)
    request = Request(positions, positions, CAUSAL, find("positions", "none")(), None, layer.training)
    last = layer(rows, Context(positions, layer.prepare(request)))[:, -1].view(n, width, width)
    gradient = torch.autograd.grad(last.diagonal(dim1=1, dim2=2).sum(), rows)[0]  # (N C, T, C)
    return (gradient.square().sum((0, 2)) / (n * width)).sqrt().flip(0)[1:].tolist()


# ---- report -----------------------------------------------------------------------------------------------------------


def table(results: dict[str, Any]) -> str:
    reach, wheel, where = results["reach"], results["carousel"], results["setting"]
    distances = [k for k in (1, 10, 50, 100, 200) if k <= reach]
    lines = [["", *(f"k = {k}" for k in distances), "factor a step", "expected"]]
    lines.append(["---", *["---:"] * (len(distances) + 2)])
    for name, row in results["rows"].items():
        shown = [f"{row['gains'][k - 1]:.2g}" for k in distances]
        lines.append([name, *shown, f"{row['factor']:.3f}", f"{row['expected']:.3f}"])
    cells = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    measured = (
        f"dc_t/dc_(t-1) of an LSTM (forget bias 1) by autograd is diag(f_t) up to {wheel['difference']:.1e}, over "
        f"{wheel['steps']:,} steps of {results['width']} cells; f_t is from {wheel['least']:.3f} to {wheel['most']:.3f}."
    )
    note = f"Layers {results['width']} wide, float64, torch {where['torch']}, {where['date'][:10]}."
    return f"{cells}\n\n{measured}\n\n{note}\n\n```\n{where['command']}\n```\n"


def picture(results: dict[str, Any]) -> Any:
    """Vanilla layers beside gated ones and attention, on one scale."""
    rows, at = results["rows"], np.arange(1, results["reach"] + 1)
    left, right = ([row.name for row in part] for part in (VANILLA, GATED))
    panels = [
        Lines(title, at, {name: np.array(rows[name]["gains"]) for name in names}, "steps back, k", "G(k)", log=True)
        for title, names in (("vanilla RNN", left), ("LSTM, GRU, attention", [*right, ATTENTION]))
    ]
    figure = draw("What is left of a gradient k steps back", panels, 2)
    for axes in figure.axes:
        axes.set_ylim(1e-16, 1e16)
        axes.axhline(1, color="#999999", linewidth=1, zorder=0)
    return figure
