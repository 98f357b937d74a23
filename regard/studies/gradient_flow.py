"""`regard study gradient-flow`: the size of a gradient k steps back in time.

G(k) = |d h_T / d s_{T-k}|_F / sqrt(H) is the gain of a gradient from the last output h_T to the state s of k steps before:
the root mean square over all directions of a unit gradient at h_T. The state s is all that a step passes to the next: h, and
c in an LSTM. For attention, s_{T-k} is the token k places back, with no steps between.
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
from regard.layers.context import Context, PrepareRequest
from regard.layers.part import Mixer, Place, make_part
from regard.layers.recurrent import CellState, Recurrent
from regard.look.figures import Lines, draw, save
from regard.look.gradient_figure import decay_factor
from regard.models.initialization import initialize
from regard.studies.job_pool import describe_setting

HEADS, WARM_UP = 4, 50


@dataclass(frozen=True)
class LayerSetup:
    """The settings of a recurrent layer that differ from its initialization."""

    name: str
    cell: str
    radius: float = 1.0  # modulus of all eigenvalues of W_hh
    inputs: float = 1.0  # standard deviation; at 0 the state stays 0, where tanh is the identity
    gate: float = 1.0  # bias of the gate that keeps the old state: an LSTM's forget gate, a GRU's update gate


VANILLA = (
    *(LayerSetup(f"RNN, linear, radius {radius:g}", "rnn", radius, inputs=0.0) for radius in (0.5, 0.9, 1.5)),
    *(LayerSetup(f"RNN, tanh, radius {radius:g}", "rnn", radius) for radius in (0.9, 1.5, 3.0)),
)
GATED = (
    *(LayerSetup(f"LSTM, forget bias {bias:g}", "lstm", gate=bias) for bias in (1.0, 3.0, 5.0)),
    *(LayerSetup(f"GRU, update bias {bias:g}", "gru", gate=bias) for bias in (0.0, 3.0, 5.0)),
)
ATTENTION = "self-attention"


def study(out: Path, quick: bool = False) -> Path:
    """Write results.json, table.md and gradient-flow.png into `out`, and return it. It runs on a CPU in float64."""
    width, reach = (16, 30) if quick else (64, 200)
    results = {"setting": describe_setting("cpu", quick), "width": width, "reach": reach, **run(width, reach)}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    save(plot_results(results), out / "gradient-flow.png")
    return out


def run(width: int, reach: int, seed: int = 0) -> dict[str, Any]:
    """Return for each layer G(1) to G(reach), the fitted factor per step, and the factor that theory predicts."""
    torch.manual_seed(seed)
    x = torch.randn(2, WARM_UP + reach, width, dtype=torch.float64)  # (N, T, C), the same for all layers
    rows = {row.name: measure(row, x, reach) for row in (*VANILLA, *GATED)}
    rows[ATTENTION] = summarize(measure_attention_flow(make_attention(width), x[:, -reach - 1 :]), 1.0)
    return {"rows": rows, "carousel": measure_carousel(make_layer(GATED[0], width), x)}


def measure(row: LayerSetup, x: Tensor, reach: int) -> dict[str, Any]:
    layer = make_layer(row, x.shape[-1])
    return summarize(measure_flow(layer, x * row.inputs, reach), predict_factor(row, layer, x * row.inputs, reach))


def summarize(gains: Sequence[float], expected: float) -> dict[str, Any]:
    return {"gains": list(gains), "factor": decay_factor(gains), "expected": expected}


# ---- recurrent layers -------------------------------------------------------------------------------------------------


def make_layer(row: LayerSetup, width: int) -> Recurrent:
    """Return a recurrent layer with the settings of `row`."""
    layer = Recurrent(row.cell, width, [width]).double()
    initialize(layer)
    with torch.no_grad():
        if row.cell == "rnn":
            get_weights(layer).weight_hh.mul_(row.radius)
        else:
            get_gate(layer, "bias").fill_(row.gate)
    return layer


def get_weights(layer: Recurrent) -> Any:
    """Return the parameters of the layer's only direction."""
    return layer.layers[0].forward_


def get_gate(layer: Recurrent, name: str) -> Tensor:
    """Return the rows of a parameter that belong to the gate that keeps the old state.

    It is the second of an LSTM's gates i f g o, and of a GRU's r z n.
    """
    return getattr(get_weights(layer), name)[layer.d_out : 2 * layer.d_out]


def unroll(layer: Recurrent, x: Tensor) -> list[CellState]:
    """Return the T + 1 states of x (B, T, C): the one before each step, and the last."""
    states = [layer.zero_state(len(x), x)]
    for t in range(x.shape[1]):
        state = layer.step(x[:, t], states[-1])[1]
        # Clones, so that the gradient of c is that of the next step alone, without the path through h of its own step.
        states.append(tuple(part.clone() for part in state))
    return states


def measure_flow(layer: Recurrent, x: Tensor, reach: int) -> list[float]:
    """Return G(1) to G(reach).

    Every row of x (N, T, C) is repeated for each element of h_T, so one backward pass computes whole Jacobians.
    """
    width = layer.d_out
    states = unroll(layer, x.repeat_interleave(width, 0))
    pulled = states[-1][0].view(len(x), width, width).diagonal(dim1=1, dim2=2)  # (N, H): element i of copy i
    handed = states[-1 - reach : -1][::-1]
    gradients = torch.autograd.grad(pulled.sum(), [part for state in handed for part in state])
    squares = [float(gradient.square().sum()) for gradient in gradients]
    parts = len(handed[0])
    return [math.sqrt(sum(squares[i * parts : (i + 1) * parts]) / pulled.numel()) for i in range(reach)]


@torch.no_grad()
def predict_factor(row: LayerSetup, layer: Recurrent, x: Tensor, reach: int) -> float:
    """Return the factor per step that theory predicts for a gradient.

    For an RNN it is the radius times the slope of tanh (root mean square). For gated cells it is the product of gates over k
    steps, without the paths through h.
    """
    h = torch.stack([state[0] for state in unroll(layer, x)], 1)  # (N, T + 1, H)
    if row.cell == "rnn":
        return row.radius * float((1 - h[:, -reach:].square()).square().mean().sqrt())
    kept = compute_gates(layer, x, h[:, :-1]).flip(1)[:, :reach].cumprod(1)  # (N, reach, H)
    return decay_factor(kept.square().mean((0, 2)).sqrt().tolist())


def compute_gates(layer: Recurrent, x: Tensor, h: Tensor) -> Tensor:
    """Return f_t of an LSTM or z_t of a GRU by their formula, from the inputs and the states before them (..., H)."""
    return torch.sigmoid(
        x @ get_gate(layer, "weight_ih").T + h @ get_gate(layer, "weight_hh").T + get_gate(layer, "bias")
    )


def measure_carousel(layer: Recurrent, x: Tensor) -> dict[str, float]:
    """Compare dc_t / dc_{t-1} at fixed h_{t-1}, by autograd, with diag(f_t): the constant error carousel of the LSTM."""
    width = layer.d_out
    before = unroll(layer, x)[:-1]
    h, c = (torch.stack([state[i] for state in before], 1).detach().flatten(0, 1) for i in range(2))  # (N T, H)
    inputs = x.flatten(0, 1)
    f = compute_gates(layer, inputs, h).detach()
    copies = [part.repeat_interleave(width, 0) for part in (inputs, h, c)]
    copies[2].requires_grad_()
    after = layer.step(copies[0], (copies[1], copies[2]))[1][1].view(-1, width, width)
    jacobian = torch.autograd.grad(after.diagonal(dim1=1, dim2=2).sum(), copies[2])[0].view(-1, width, width)
    difference = float((jacobian - torch.diag_embed(f)).abs().max())
    return {"difference": difference, "least": float(f.min()), "most": float(f.max()), "steps": len(f)}


# ---- attention --------------------------------------------------------------------------------------------------------


def make_attention(width: int) -> Mixer:
    """Return a causal self-attention layer."""
    config = ModelConfig(d_model=width, n_heads=HEADS, n_kv_heads=HEADS, d_head=width // HEADS)
    layer: Mixer = make_part("mixer", "attention", config, Place("decoder", causal=True)).double()
    initialize(layer)
    return layer


def measure_attention_flow(layer: Mixer, x: Tensor) -> list[float]:
    """Return the gains of attention, from the output at the last token of x (N, T, C) to the token k places back."""
    n, length, width = x.shape
    rows = x.repeat_interleave(width, 0).requires_grad_()
    positions = torch.arange(length).expand(len(rows), -1)
    request = PrepareRequest(positions, positions, CAUSAL, find("positions", "none")(), None, layer.training)
    last = layer(rows, Context(positions, layer.prepare(request)))[:, -1].view(n, width, width)
    gradient = torch.autograd.grad(last.diagonal(dim1=1, dim2=2).sum(), rows)[0]  # (N C, T, C)
    return (gradient.square().sum((0, 2)) / (n * width)).sqrt().flip(0)[1:].tolist()


# ---- report -----------------------------------------------------------------------------------------------------------


def format_table(results: dict[str, Any]) -> str:
    """Return the Markdown report."""
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


def plot_results(results: dict[str, Any]) -> Any:
    """Return the figure: vanilla layers beside gated ones and attention, on one scale."""
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
