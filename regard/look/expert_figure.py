"""A figure of the weights with which every mixture of experts of a model (layers/experts.py) sends tokens to experts, and
of how many tokens each expert gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.look.figures import Drawable, HeatMap, draw, rounded, text_table, write_csv
from regard.look.model_trace import body_of, package_of
from regard.look.recorded_forward import record_forward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIX = ".experts"  # of the recorded weights (look/record.py)


@dataclass(frozen=True)
class ExpertFigure(Drawable):
    """The weights of all experts for the tokens of one text, layer by layer; 0 where an expert was not chosen."""

    layers: dict[str, np.ndarray]  # (T, E) by the name of the layer
    tokens: dict[str, tuple[str, ...]]  # (T,) by the name of the layer

    @property
    def loads(self) -> dict[str, list[int]]:
        """How many tokens of the text each expert got, by the name of the layer."""
        return {name: (weights > 0).sum(0).tolist() for name, weights in self.layers.items()}

    def figure(self) -> Figure:
        """Return a panel of each layer, and one of the loads of all layers with equally many experts."""
        panels = [
            HeatMap(name, weights, self.tokens[name], tuple(map(str, range(weights.shape[1]))), "expert", "token")
            for name, weights in self.layers.items()
        ]
        for n in dict.fromkeys(map(len, self.loads.values())):
            rows = {name: load for name, load in self.loads.items() if len(load) == n}
            experts, values = tuple(map(str, range(n))), np.array([*rows.values()], float)
            panels.append(HeatMap("tokens of each expert", values, (*rows,), experts, "expert", "layer"))
        return draw("Weights of the experts, and how many tokens each has", panels, min(4, len(panels)))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each token in each layer, with its experts from the heaviest to the lightest."""
        for name, weights in self.layers.items():
            for token, row in zip(self.tokens[name], weights, strict=True):
                chosen = [int(e) for e in np.argsort(-row, kind="stable") if row[e] > 0]
                found = ", ".join(f"{e} ({row[e]:.2f})" for e in chosen)
                yield {"layer": name, "token": token, "experts": found or "none: over capacity"}

    def numbers(self) -> dict[str, Any]:
        return {
            name: {"tokens": self.tokens[name], "weights": rounded(x), "load": self.loads[name]}
            for name, x in self.layers.items()
        }

    def save_csv(self, path: Path) -> None:
        write_csv(path, self.rows())

    def __str__(self) -> str:
        """Return a table of tokens, and one of loads."""
        loads = [
            {"layer": name, "tokens of each expert, from expert 0 on": " ".join(map(str, load))}
            for name, load in self.loads.items()
        ]
        return f"{text_table([*self.rows()])}\n\n{text_table(loads)}"


def trace_experts(model: Any, text: str, **options: Any) -> ExpertFigure:
    """Run a model on a text, and return the weights of its experts; a translator reads its translation once more.

    `model` is a folder or what `load` returns; options are those of `[decode]`, for models that translate."""
    package, _ = package_of(model)
    if not any(getattr(part, "observed", {}).get("experts") for part in package.model.modules()):
        if body_of(package.model).is_recurrent:
            chosen = f"model.recurrent_feedforward is {package.config.recurrent_feedforward or 'empty'}"
        else:
            chosen = f"model.feedforward is {', '.join(package.config.feedforward)}"
        raise RegardError(f"this model has no experts: its {chosen}")
    forward = record_forward(package, text, stream=True, **options)
    found = {name.removesuffix(SUFFIX): x for name, x in forward.vectors.items() if name.endswith(SUFFIX)}
    layers = {name: x.double().cpu().numpy() for name, x in found.items()}
    return ExpertFigure(layers, {name: tuple(forward.tokens[name.split(".")[0]][0].pieces) for name in layers})
