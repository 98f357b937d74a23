"""Pictures from arrays, and the same arrays as numbers.

No window is ever opened: a figure is drawn in memory and written as PNG or SVG. Matplotlib is imported when the first
one is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.files import disk_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# All can be told apart without red and green (Okabe and Ito), and the dashes without any colour.
FEW = ("#0072B2", "#D55E00", "#000000")
DASHES = ("-", "--", "-.", ":")


@dataclass(frozen=True)
class Image:
    """A matrix as colours, its first row at the top."""

    title: str
    values: np.ndarray  # (rows, columns)
    x: str  # what columns are
    y: str  # what rows are
    start: int = 0  # the number of the first column

    def draw(self, axes: Axes) -> None:
        rows, columns = self.values.shape
        signed, most = self.values.min() < 0, np.abs(self.values).max()
        colours: dict[str, Any] = {"cmap": "RdBu_r", "vmin": -most, "vmax": most} if signed else {"cmap": "viridis"}
        edges = (self.start - 0.5, self.start + columns - 0.5, rows - 0.5, -0.5)
        drawn = axes.imshow(self.values, aspect="auto", interpolation="nearest", extent=edges, **colours)
        axes.figure.colorbar(drawn, ax=axes)

    def numbers(self) -> dict[str, Any]:
        columns = range(self.start, self.start + self.values.shape[1])
        return {"title": self.title, "rows": self.y, "columns": self.x, "at": [*columns], "values": short(self.values)}


@dataclass(frozen=True)
class Lines:
    """Numbers over an axis, one line each."""

    title: str
    at: np.ndarray  # (n,)
    lines: dict[str, np.ndarray]  # name -> (n,)
    x: str
    y: str
    log: bool = False  # the y axis
    powers: bool = False  # `at` are powers of 2, as far from each other as their exponents
    ticks: tuple[str, ...] = ()  # words instead of numbers under `at`

    def draw(self, axes: Axes) -> None:
        mark, width = "o" if self.ticks else "", 1.8 if len(self.at) <= 1000 else 0.7
        for i, (name, values) in enumerate(self.lines.items()):
            style = {"linestyle": DASHES[i % len(DASHES)], "color": colour(i, len(self.lines)), "marker": mark}
            axes.plot(self.at, values, label=name, linewidth=width, markersize=4, **style)
        axes.grid(alpha=0.3)
        if self.log:
            plain_log(axes)
        if self.powers:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        if self.ticks:
            axes.set_xticks(self.at, self.ticks, rotation=60, ha="right")
        if len(self.lines) > 1:
            axes.legend(fontsize=8, ncols=math.ceil(len(self.lines) / 8))

    def numbers(self) -> dict[str, Any]:
        at = [*self.ticks] or self.at.tolist()
        lines = {name: short(values) for name, values in self.lines.items()}
        return {"title": self.title, "x": self.x, "y": self.y, "at": at, "lines": lines}


def plain_log(axes: Axes) -> None:
    """A logarithmic y axis; over a few powers of ten with numbers as people write them."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 1e4:
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


Panel = Image | Lines


def draw(title: str, panels: Sequence[Panel], columns: int) -> Figure:
    """Panels side by side, a title above all."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(5.4 * columns, 7.2), 4.0 * rows + 0.6), dpi=150, layout="constrained")
    figure.suptitle(title)
    for place, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, place)
        panel.draw(axes)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
    return figure


def save(figure: Figure, path: Path) -> None:
    """SVG where the name ends so, else PNG."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg" if path.suffix.lower() == ".svg" else "png")


def colour(i: int, n: int) -> Any:
    """Of line i of n: a few stand apart, many are a ramp from dark to light."""
    from matplotlib import colormaps

    return FEW[i] if n <= len(FEW) else colormaps["viridis"](0.92 * i / (n - 1))


def short(values: np.ndarray) -> Any:
    """Nested lists of numbers with six digits, all that fp32 has to say."""
    return [short(row) for row in values] if values.ndim > 1 else [float(f"{x:.6g}") for x in values]
