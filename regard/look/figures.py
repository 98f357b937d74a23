"""Figures of several panels, as PNG or SVG and as numbers.

No window is opened: a figure is drawn in memory and written to a file. Matplotlib is imported when the first one is
drawn.
"""

from __future__ import annotations

import csv
import io
import math
import textwrap
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.files import disk_errors
from regard.terminal import format_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# The first seven are safe for colour-blind readers (Okabe and Ito); the dashes can be told apart without colour.
LINE_COLOURS = (
    *("#0072B2", "#D55E00", "#000000", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"),
    *("#8C564B", "#7F7F7F", "#ADA400", "#332288"),
)
FEW = 3  # so many lines have distinct colours in any figure
MANY = 7  # more lines have their legend below the panels
DASHES = ("-", "--", "-.", ":")
MAX_LABEL = 30  # characters of a label


class Drawable(ABC):
    """A result that can be saved as a figure, and that a notebook shows as one."""

    @abstractmethod
    def figure(self) -> Figure: ...

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """Return what is drawn as values for JSON."""

    def save(self, path: Path) -> None:
        """Write a PNG or SVG file, by the suffix."""
        save(self.figure(), path)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        with ignore_missing_glyphs():
            self.figure().savefig(file, format="png")
        return file.getvalue()


# ---- panels -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image:
    """A matrix in colours, its first row at the top."""

    title: str
    values: np.ndarray  # (rows, columns)
    x: str  # label of the columns
    y: str  # label of the rows
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
        return {
            "title": self.title,
            "rows": self.y,
            "columns": self.x,
            "at": [*columns],
            "values": rounded(self.values),
        }


@dataclass(frozen=True)
class Lines:
    """Lines over one common x axis."""

    title: str
    at: np.ndarray  # (n,)
    lines: dict[str, np.ndarray]  # name -> (n,)
    x: str
    y: str
    log: bool = False  # logarithmic y axis
    powers: bool = False  # logarithmic x axis, with powers of 2 as ticks
    ticks: tuple[str, ...] = ()  # tick labels in place of the numbers in `at`
    marks: tuple[tuple[str, float], ...] = ()  # names and heights of horizontal lines
    unordered: bool = False  # the lines have no order, so their colours are as different as can be, not a ramp

    def draw(self, axes: Axes) -> None:
        mark, width = "o" if self.ticks else "", 1.8 if len(self.at) <= 1000 else 0.7
        for i, (name, values) in enumerate(self.lines.items()):
            shade = LINE_COLOURS[i % len(LINE_COLOURS)] if self.unordered else colour(i, len(self.lines))
            dash = DASHES[i % len(DASHES)]
            axes.plot(
                self.at, values, label=name, linestyle=dash, linewidth=width, color=shade, marker=mark, markersize=4
            )
        axes.grid(alpha=0.3)
        for i, (name, height) in enumerate(self.marks):
            axes.axhline(height, color="#888888", linewidth=1.2, linestyle=DASHES[-1 - i], label=name, zorder=1)
        if self.log:
            set_log_scale(axes)
        if self.powers:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        if self.ticks:
            axes.set_xticks(self.at, self.ticks, rotation=60, ha="right")
        if len(self.lines) + len(self.marks) > 1:
            axes.legend(fontsize=8, ncols=math.ceil(len(self.lines) / 8))

    def numbers(self) -> dict[str, Any]:
        at = [*self.ticks] or self.at.tolist()
        lines = {name: rounded(values) for name, values in self.lines.items()}
        marks = {"marks": dict(self.marks)} if self.marks else {}
        return {"title": self.title, "x": self.x, "y": self.y, "at": at, "lines": lines, **marks}


@dataclass(frozen=True)
class XYLines:
    """Lines with x values of their own, such as runs of different lengths."""

    title: str
    curves: dict[str, tuple[np.ndarray, np.ndarray]]  # name -> x (n,), y (n,)
    x: str
    y: str
    log: bool = False  # logarithmic y axis, which leaves out values that are not positive

    def draw(self, axes: Axes) -> None:
        for i, (at, values) in enumerate(self.curves.values()):
            shown = np.where(values > 0, values, np.nan) if self.log else values
            style = {"linestyle": DASHES[i % len(DASHES)], "color": colour(i, len(self.curves))}
            axes.plot(at, shown, linewidth=1.5, marker="o" if len(at) <= 20 else "", markersize=3, **style)
        axes.grid(alpha=0.3)
        if self.log and any((values > 0).any() for _, values in self.curves.values()):
            set_log_scale(axes)
        if len(self.curves) > 1:
            # matplotlib hides names that begin with "_"
            shown_names = [name.lstrip("_") or name for name in self.curves]
            for text in axes.legend(axes.lines, shown_names, fontsize=8).get_texts():
                text.set_parse_math(False)

    def numbers(self) -> dict[str, Any]:
        curves = {name: {"at": rounded(at), "values": rounded(values)} for name, (at, values) in self.curves.items()}
        return {"title": self.title, "x": self.x, "y": self.y, "curves": curves}


@dataclass(frozen=True)
class HeatMap:
    """A matrix whose rows and columns have names; NaN stays blank."""

    title: str
    values: np.ndarray  # (rows, columns)
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    x: str  # label of the columns
    y: str  # label of the rows
    most: float | None = None  # upper end of the colour scale, where several heat-maps share one colour bar

    def draw(self, axes: Axes) -> None:
        drawn = self.paint(axes)
        label_ticks(axes, self.rows, self.columns)
        if self.most is None:
            axes.figure.colorbar(drawn, ax=axes)

    def paint(self, axes: Axes) -> AxesImage:
        axes.set_facecolor("#dddddd")
        return axes.imshow(self.values, cmap="viridis", vmin=0, vmax=self.most, aspect="auto", interpolation="nearest")

    def numbers(self) -> dict[str, Any]:
        names = {"x": self.x, "y": self.y, "rows": [*self.rows], "columns": [*self.columns]}
        return {"title": self.title, **names, "values": rounded(self.values)}


def set_log_scale(axes: Axes) -> None:
    """Make the y axis logarithmic; over less than four powers of ten with plain numbers."""
    from matplotlib.ticker import LogLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high / low < 1e4:
        axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")


def label_ticks(axes: Axes, rows: Sequence[str], columns: Sequence[str]) -> None:
    """Label every row and column, or every n-th if there are too many; long labels are shortened.

    Labels are never parsed as formulas, whatever is in them."""
    rows, columns = ([shorten(name) for name in names] for names in (rows, columns))
    box = axes.get_position()
    width, height = axes.figure.get_size_inches() * (box.width, box.height)  # type: ignore[union-attr]
    for axis, names, inches, turn in ((axes.yaxis, rows, height, 0), (axes.xaxis, columns, width, 90)):
        turn = turn if max(map(len, names), default=0) > 2 else 0
        size = min(9.0, max(4.0, 58 * inches / max(1, len(names))))
        every = max(1, math.ceil(len(names) * size / 58 / inches))
        shown = range(0, len(names), every)
        axis.set_ticks(shown, [names[i] for i in shown], rotation=turn, fontsize=size, parse_math=False)
        axis.set_tick_params(length=0)


def shorten(name: str) -> str:
    return name if len(name) <= MAX_LABEL else name[: MAX_LABEL - 1] + "…"


Panel = Image | Lines | XYLines | HeatMap


def draw(title: str, panels: Sequence[Panel], columns: int) -> Figure:
    """Return a figure of panels in a grid, with a title above all.

    Many lines have one legend for all panels, below them, where it hides no line."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(max(5.4 * columns, 7.2), 4.0 * rows + 0.6), dpi=150, layout="constrained")
    figure.suptitle(title)
    for number, panel in enumerate(panels, 1):
        axes = figure.add_subplot(rows, columns, number)
        panel.draw(axes)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.x)
        axes.set_ylabel(panel.y)
    names = {tuple(panel.lines) if isinstance(panel, Lines) and panel.unordered else () for panel in panels}
    if len(names) == 1 and len(lines := names.pop()) > MANY:
        for axes in figure.axes:
            if legend := axes.get_legend():
                legend.remove()
        width = 6 if columns > 1 else 4
        figure.legend(figure.axes[0].lines, lines, fontsize=8, loc="outside lower center", ncols=width)
    return figure


def draw_small_multiples(title: str, panels: Sequence[HeatMap], columns: int, scale: str) -> Figure:
    """Return a figure of many heat-maps with one colour bar, labelled `scale`.

    Rows and columns are labelled only at the left and at the bottom."""
    from matplotlib.figure import Figure

    rows = math.ceil(len(panels) / columns)
    most = 9.0 if len(panels) == 1 else max(1.5, 22 / max(columns, rows))  # inches of one panel
    wide, high = (min(most, max(1.5, 0.26 * n)) for n in panels[0].values.shape[::-1])
    names = [0.08 * max(len(shorten(name)) for name in ticks) for ticks in (panels[0].rows, panels[0].columns)]
    size = (max(4.5, columns * wide + names[0] + 1.8), rows * (high + 0.3) + names[1] + 1.2)
    figure = Figure(figsize=size, dpi=150, layout="constrained")
    width = max(40, int(13 * size[0]))  # characters in a line
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, width)[:3]]
    figure.suptitle("\n".join(lines), fontsize=10, parse_math=False)
    figure.supxlabel(panels[0].x, fontsize=10)
    figure.supylabel(panels[0].y, fontsize=10)
    for place, panel in enumerate(panels):
        axes = figure.add_subplot(rows, columns, place + 1)
        drawn = panel.paint(axes)
        left, bottom = place % columns == 0, place + columns >= len(panels)
        label_ticks(axes, panel.rows if left else (), panel.columns if bottom else ())
        axes.set_title(panel.title, fontsize=8)
    figure.colorbar(drawn, ax=figure.axes, label=scale, fraction=0.05, aspect=30)
    return figure


# ---- files and tables -------------------------------------------------------------------------------------------------


def save(figure: Figure, path: Path) -> None:
    """Write a figure as PNG or SVG, by the suffix."""
    kind = image_format(path)
    with disk_errors(path), ignore_missing_glyphs():
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format=kind)


def image_format(path: Path) -> str:
    """Return png or svg by the suffix of a path; png if it has none."""
    kind = path.suffix.lower().removeprefix(".") or "png"
    if kind not in ("png", "svg"):
        raise RegardError(f"{path}: pictures are PNG or SVG, so let the name end in .png or .svg")
    return kind


@contextmanager
def ignore_missing_glyphs() -> Iterator[None]:
    """Draw characters that the font does not have as boxes, without a warning for each."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def colour(i: int, n: int) -> Any:
    """Return the colour of line i of n: distinct colours for a few, a ramp from dark to light for many."""
    from matplotlib import colormaps

    return LINE_COLOURS[i] if n <= FEW else colormaps["viridis"](0.92 * i / (n - 1))


def rounded(values: np.ndarray) -> Any:
    """Return nested lists of numbers with six digits, the precision of fp32; None for NaN and infinity."""
    if values.ndim > 1:
        return [rounded(row) for row in values]
    return [float(f"{x:.6g}") if math.isfinite(x) else None for x in values]


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a line for each row, under the names of the first; None stays empty."""
    rows = iter(rows)
    first = next(rows, None)
    if first is None:
        raise RegardError(f"there is no number to write to {path} yet")
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(first), lineterminator="\n")
            writer.writeheader()
            writer.writerow(first)
            writer.writerows(rows)


def text_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return rows as a table in plain text; None is a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return "\n".join(format_table([tuple(rows[0]), *(tuple(map(cell, row.values())) for row in rows)], right=1))


def finite(value: Any) -> Any:
    """Return nested values with None for NaN and infinity, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
