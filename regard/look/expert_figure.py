"""A figure of the weights with which every mixture of experts of a model (layers/experts.py) sends tokens to experts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.look.figures import Drawable, HeatMap, draw, rounded, text_table, write_csv
from regard.look.model_trace import package_of
from regard.look.recorded_forward import record_forward

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SUFFIX = ".experts"  # of the recorded weights (look/record.py)


@dataclass(frozen=True)
class ExpertFigure(Drawable):
    """The weights of all experts for the tokens of one text, layer by layer; 0 where an expert was not chosen."""

    layers: dict[str, np.ndarray]  # (T, E) by the name of the layer
    tokens: dict[str, tuple[str, ...]]  # (T,) by the name of the layer

    def figure(self) -> Figure:
        panels = [
            HeatMap(name, weights, self.tokens[name], tuple(map(str, range(weights.shape[1]))), "expert", "token")
            for name, weights in self.layers.items()
        ]
        return draw("Weights of the experts", panels, min(4, len(panels)))

    def rows(self) -> Iterator[dict[str, Any]]:
        """Yield a row for each token in each layer, with its experts from the heaviest to the lightest."""
        for name, weights in self.layers.items():
            for token, row in zip(self.tokens[name], weights, strict=True):
                chosen = [int(e) for e in np.argsort(-row, kind="stable") if row[e] > 0]
                found = ", ".join(f"{e} ({row[e]:.2f})" for e in chosen)
                yield {"layer": name, "token": token, "experts": found or "none: over capacity"}

    def numbers(self) -> dict[str, Any]:
        return {name: {"tokens": self.tokens[name], "weights": rounded(x)} for name, x in self.layers.items()}

    def save_csv(self, path: Path) -> None:
        write_csv(path, self.rows())

    def __str__(self) -> str:
        return text_table([*self.rows()])


def trace_experts(model: Any, text: str, **options: Any) -> ExpertFigure:
    """Run a model on a text, and return the weights of its experts; a translator reads its translation once more.

    `model` is a folder or what `load` returns; options are those of `[decode]`, for models that translate."""
    package, _ = package_of(model)
    if not any(getattr(part, "observed", {}).get("experts") for part in package.model.modules()):
        chosen = ", ".join(package.config.feedforward)
        raise RegardError(f"this model has no experts: its model.feedforward is {chosen}")
    if package.model.is_recurrent:
        raise RegardError(
            "experts between recurrent layers are not recorded: metrics.jsonl of the run says how evenly they were used"
        )
    forward = record_forward(package, text, stream=True, **options)
    found = {name.removesuffix(SUFFIX): x for name, x in forward.vectors.items() if name.endswith(SUFFIX)}
    layers = {name: x.double().cpu().numpy() for name, x in found.items()}
    return ExpertFigure(layers, {name: tuple(forward.tokens[name.split(".")[0]][0].pieces) for name in layers})
