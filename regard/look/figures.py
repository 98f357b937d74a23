"""Pictures from arrays, and the same arrays as numbers.

No window is ever opened: a figure is drawn in memory and written as PNG or SVG. Matplotlib is imported when the first
one is drawn.
"""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.files import disk_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# All can be told apart without red and green (Okabe and Ito), and the dashes without any colour.
FEW = ("#0072B2", "#D55E00", "#000000")
DASHES = ("-", "--", "-.", ":")
LONGEST = 30  # letters of a label


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
    marks: tuple[tuple[str, float], ...] = ()  # heights to be seen beside them, by name

    def draw(self, axes: Axes) -> None:
        mark, width = "o" if self.ticks else "", 1.8 if len(self.at) <= 1000 else 0.7
        for i, (name, values) in enumerate(self.lines.items()):
            style = {"linestyle": DASHES[i % len(DASHES)], "color": colour(i, len(self.lines)), "marker": mark}
            axes.plot(self.at, values, label=name, linewidth=width, markersize=4, **style)
        axes.grid(alpha=0.3)
        for i, (name, height) in enumerate(self.marks):
            axes.axhline(height, color="#888888", linewidth=1.2, linestyle=DASHES[-1 - i], label=name, zorder=1)
        if self.log:
            plain_log(axes)
        if self.powers:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        if self.ticks:
            axes.set_xticks(self.at, self.ticks, rotation=60, ha="right")
        if len(self.lines) + len(self.marks) > 1:
            axes.legend(fontsize=8, ncols=math.ceil(len(self.lines) / 8))

    def numbers(self) -> dict[str, Any]:
        at = [*self.ticks] or self.at.tolist()
        lines = {name: short(values) for name, values in self.lines.items()}
        marks = {"marks": dict(self.marks)} if self.marks else {}
        return {"title": self.title, "x": self.x, "y": self.y, "at": at, "lines": lines, **marks}


@dataclass(frozen=True)
class Curves:
    """Lines that have an x axis each: runs of different lengths, say."""

    title: str
    curves: dict[str, tuple[np.ndarray, np.ndarray]]  # name -> x (n,), y (n,)
    x: str
    y: str
    log: bool = False  # the y axis, which then leaves out what is not above 0

    def draw(self, axes: Axes) -> None:
        for i, (at, values) in enumerate(self.curves.values()):
            shown = np.where(values > 0, values, np.nan) if self.log else values
            style = {"linestyle": DASHES[i % len(DASHES)], "color": colour(i, len(self.curves))}
            axes.plot(at, shown, linewidth=1.5, marker="o" if len(at) <= 20 else "", markersize=3, **style)
        axes.grid(alpha=0.3)
        if self.log and any((values > 0).any() for _, values in self.curves.values()):
            plain_log(axes)
        if len(self.curves) > 1:
            shown_names = [name.lstrip("_") or name for name in self.curves]  # matplotlib hides what begins with "_"
            for text in axes.legend(axes.lines, shown_names, fontsize=8).get_texts():
                text.set_parse_math(False)

    def numbers(self) -> dict[str, Any]:
        curves = {name: {"at": short(at), "values": short(values)} for name, (at, values) in self.curves.items()}
        return {"title": self.title, "x": self.x, "y": self.y, "curves": curves}


@dataclass(frozen=True)
class Heat:
    """A matrix whose rows and columns have names; what is NaN stays blank."""

    title: str
    values: np.ndarray  # (rows, columns)
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    x: str  # what columns are
    y: str  # what rows are
    most: float | None = None  # the brightest number of many pictures on one scale, which share one colour bar

    def draw(self, axes: Axes) -> None:
        drawn = self.paint(axes)
        name_ticks(axes, self.rows, self.columns)
        if self.most is None:
            axes.figure.colorbar(drawn, ax=axes)

    def paint(self, axes: Axes) -> AxesImage:
        axes.set_facecolor("#dddddd")
        return axes.imshow(self.values, cmap="viridis", vmin=0, vmax=self.most, aspect="auto", interpolation="nearest")

    def numbers(self) -> dict[str, Any]:
        names = {"x": self.x, "y": self.y, "rows": [*self.rows], "columns": [*self.columns]}
        return {"title": self.title, **names, "values": short(self.values)}


def plain_log(axes: Axes) -> None:
    """A logarithmic y axis; over a few powers of ten with numbers as people write them."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 1e4:
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


def name_ticks(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """A name for every row and column, or for as many as there is room for. Names are text, whatever they look like, and
    long ones are cut."""
    rows, columns = ([cut(name) for name in names] for names in (rows, columns))
    box = axes.get_position()
    width, height = axes.figure.get_size_inches() * (box.width, box.height)  # type: ignore[union-attr]
    for axis, names, inches, turn in ((axes.yaxis, rows, height, 0), (axes.xaxis, columns, width, 90)):
        turn = turn if max(map(len, names), default=0) > 2 else 0
        size = min(9.0, max(4.0, 58 * inches / max(1, len(names))))
        every = max(1, math.ceil(len(names) * size / 58 / inches))
        shown = range(0, len(names), every)
        axis.set_ticks(shown, [names[i] for i in shown], rotation=turn, fontsize=size, parse_math=False)
        axis.set_tick_params(length=0)


def cut(name: str) -> str:
    return name if len(name) <= LONGEST else name[: LONGEST - 1] + "…"


Panel = Image | Lines | Curves | Heat


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


def grid(title: str, panels: Sequence[Heat], columns: int, scale: str) -> Figure:
    """Many matrices of one kind as small multiples: one colour bar, which `scale` names, and names of rows and columns only
    at the left and at the bottom."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    most = 9.0 if len(panels) == 1 else max(1.5, 22 / max(columns, rows))  # inches of one
    wide, high = (min(most, max(1.5, 0.26 * n)) for n in panels[0].values.shape[::-1])
    names = [0.08 * max(len(cut(name)) for name in ticks) for ticks in (panels[0].rows, panels[0].columns)]
    size = (max(4.5, columns * wide + names[0] + 1.8), rows * (high + 0.3) + names[1] + 1.2)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    width = max(40, int(13 * size[0]))  # letters in a line
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, width)[:3]]
    figure.suptitle("\n".join(lines), fontsize=10, parse_math=False)
    figure.supxlabel(panels[0].x, fontsize=10)
    figure.supylabel(panels[0].y, fontsize=10)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        drawn = panel.paint(axes)
        left, bottom = place % columns == 0, place + columns >= len(panels)
        name_ticks(axes, panel.rows if left else (), panel.columns if bottom else ())
        axes.set_title(panel.title, fontsize=8)
    figure.colorbar(drawn, ax=figure.axes, label=scale, fraction=0.05, aspect=30)
    return figure


def save(figure: Figure, path: Path) -> None:
    """PNG or SVG, by the suffix."""
    kind = kind_of(path)
    with disk_errors(path), any_letters():
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=kind)


def kind_of(path: Path) -> str:
    """What a picture's name says that it is; a name that says nothing is a PNG's."""
    kind = path.suffix.lower().removeprefix(".") or "png"
    if kind not in ("png", "svg"):
        raise RegardError(f"{path}: pictures are PNG or SVG, so let the name end in .png or .svg")
    return kind


@contextmanager
def any_letters() -> Iterator[None]:
    """Letters that the font does not have become boxes, without a word about each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def colour(i: int, n: int) -> Any:
    """Of line i of n: a few stand apart, many are a ramp from dark to light."""
    from matplotlib import colormaps

    return FEW[i] if n <= len(FEW) else colormaps["viridis"](0.92 * i / (n - 1))


def short(values: np.ndarray) -> Any:
    """Nested lists of numbers with six digits, all that fp32 has to say; None for what is no number."""
    if values.ndim > 1:
        return [short(row) for row in values]
    return [float(f"{x:.6g}") if math.isfinite(x) else None for x in values]
