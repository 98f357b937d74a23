"""Figures of position schemes.

Every number comes from the scheme's own methods, so a figure shows what a model uses. Learned schemes are drawn as they
are initialised, or as a trained model has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.part import Curves
from regard.layers.positions.scheme import PositionScheme, make_positions
from regard.layers.stack import Stack
from regard.look.figures import Drawable, Image, Lines, Panel, draw
from regard.models.architectures import architecture_of
from regard.models.sizes import resolve_sizes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class PositionFigure(Drawable):
    """The curves and matrices that describe one position scheme."""

    scheme: str
    formula: str
    panels: tuple[Panel, ...]
    columns: int

    def figure(self) -> Figure:
        title = f"{self.scheme}:  {self.formula}" if self.formula else self.scheme
        return draw(title, self.panels, self.columns)

    def numbers(self) -> dict[str, Any]:
        return {"scheme": self.scheme, "panels": [panel.numbers() for panel in self.panels]}


@torch.no_grad()
def draw_untrained_scheme(name: str, config: ModelConfig, n: int) -> PositionFigure:
    """Draw a scheme as initialised, over n positions of a causal decoder of this configuration; the seed is 0."""
    config = resolve_sizes(config, architecture_of(config).presets)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        scheme = make_positions(config, "decoder", name)
    learned = any(p.any() for p in scheme.parameters())
    panels = panels_of(scheme, config, n, "as it starts" if learned else "")
    return PositionFigure(name, scheme.formula, panels, len(panels))


@torch.no_grad()
def draw_trained_scheme(name: str, model: nn.Module, n: int) -> PositionFigure:
    """Draw a scheme as a model has learned it: in each stack, and in each layer where layers have their own."""
    config = model.config
    assert isinstance(config, ModelConfig)
    found = [(where, scheme) for used, where, scheme in schemes_of(model) if used == name]
    if not found:
        used = ", ".join(dict.fromkeys(used for used, *_ in schemes_of(model)))
        raise RegardError(f"this model has no positions '{name}' to draw: it has {used or 'no scheme at all'}")
    if next(found[0][1].parameters(), None) is None:
        found = [("", found[0][1])]  # without parameters all places are alike
    groups = [panels_of(scheme, config, n, where) for where, scheme in found]
    columns = len(groups[0]) if len(groups[0]) > 1 else min(len(groups), 3)
    return PositionFigure(name, found[0][1].formula, tuple(panel for group in groups for panel in group), columns)


def schemes_of(model: nn.Module) -> Iterator[tuple[str, str, PositionScheme]]:
    """Yield name, place and module of every position scheme in a model."""
    for place, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        for i, scheme in enumerate(stack.schemes):
            assert isinstance(scheme, PositionScheme)
            yield scheme.name, f"{place}.{i}" if scheme.per_layer else place, scheme
        if any("cross" in block.sublayers for block in stack.blocks):  # type: ignore[operator]
            assert isinstance(stack.cross_scheme, PositionScheme)
            yield stack.cross_scheme.name, "cross-attention", stack.cross_scheme


def panels_of(scheme: PositionScheme, config: ModelConfig, n: int, where: str) -> tuple[Panel, ...]:
    """Return the panels that describe a scheme; `where` is added to their titles."""
    if scheme.hook() == "embed" and n > config.max_len:
        raise RegardError(
            f"--length {n} is more than the {config.max_len} positions of model.max_len: draw fewer, or raise it"
        )
    described = scheme.describe(n)
    if not described:
        raise RegardError(f"positions '{scheme.name}' have nothing to draw")
    note = f" ({where})" if where else ""
    return tuple(
        Lines(
            shown.title + note,
            to_numpy(shown.x),
            {name: to_numpy(curve) for name, curve in shown.curves.items()},
            shown.across,
            shown.up,
            log=shown.log,
            ticks=shown.ticks,
        )
        if isinstance(shown, Curves)
        else Image(shown.title + note, to_numpy(shown.values), shown.across, shown.up, start=shown.start)
        for shown in described
    )


def to_numpy(x: Tensor) -> np.ndarray:
    return x.detach().cpu().numpy()
