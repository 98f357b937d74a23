"""Plot of word vectors in their first two principal components.

Vectors are normalised to length 1, as wherever words are compared; otherwise a few long ones would push the others
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.look.figures import LINE_COLOURS, Drawable, rounded
from regard.vectors.word_vectors import WordVectors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LABEL_PLACES = (  # which side of a label is at its point, and the offset in points
    *(("left", "center", 5, 0), ("right", "center", -5, 0), ("center", "bottom", 0, 5), ("center", "top", 0, -5)),
    *(("left", "bottom", 4, 4), ("left", "top", 4, -4), ("right", "bottom", -4, 4), ("right", "top", -4, -4)),
)


@dataclass(frozen=True)
class WordPlot(Drawable):
    """Words in the plane, and pairs of them that are joined by a line."""

    words: tuple[str, ...]
    points: np.ndarray  # (n, 2)
    lines: tuple[tuple[int, int], ...]
    shares: tuple[float, float]  # of the variance, for each axis

    def figure(self) -> Figure:
        from matplotlib.figure import Figure

        side = 6.4 + min(len(self.words), 400) / 50
        figure = Figure(figsize=(1.25 * side, side), dpi=150, layout="constrained")
        axes = figure.add_subplot()
        for a, b in self.lines:
            axes.plot(*self.points[[a, b]].T, color=LINE_COLOURS[1], linewidth=1, alpha=0.7, zorder=1)
        axes.scatter(self.points[:, 0], self.points[:, 1], s=14, color=LINE_COLOURS[0], zorder=2)
        axes.margins(0.12)
        axes.set_xlabel(f"first principal component ({self.shares[0]:.0%} of the variance)")
        axes.set_ylabel(f"second ({self.shares[1]:.0%})")
        axes.grid(alpha=0.3)
        figure.draw_without_rendering()  # labels are placed after the layout is computed
        place_labels(axes, self.words, self.points)
        return figure

    def numbers(self) -> dict[str, Any]:
        joined = [[self.words[a], self.words[b]] for a, b in self.lines]
        return {"words": [*self.words], "points": rounded(self.points), "lines": joined, "variance": [*self.shares]}


def plot_words(vectors: WordVectors, chosen: Sequence[str] = (), n: int = 50) -> WordPlot:
    """Plot the words named (`king`, or `man:woman` for two joined by a line), or the n most frequent."""
    words, lines = parse_words(chosen, vectors) if chosen else (vectors.words[:n], [])
    if len(words) < 3:
        raise RegardError(f"{len(words)} words make no picture: give at least 3")
    points, shares = principal_components(vectors.unit[[vectors.row(word) for word in words]])
    return WordPlot(tuple(words), points, tuple(lines), shares)


def parse_words(chosen: Sequence[str], vectors: WordVectors) -> tuple[list[str], list[tuple[int, int]]]:
    """Return the words, each once, and the pairs of them. A text that is itself a word, such as "3:1", is no pair."""
    places: dict[str, int] = {}
    lines = []
    for given in chosen:
        parts = [given] if given in vectors or given.count(":") != 1 else given.split(":")
        found = [places.setdefault(word, len(places)) for word in parts]
        if len(found) == 2:
            lines.append((found[0], found[1]))
    return list(places), lines


def principal_components(x: np.ndarray) -> tuple[np.ndarray, tuple[float, float]]:
    """Return the first two components (n, 2) of vectors (n, D), and their shares of the variance.

    The sign of each axis is chosen so that its largest number is positive."""
    centred = x.astype(np.float64) - x.mean(axis=0, dtype=np.float64)
    u, s, _ = np.linalg.svd(centred, full_matrices=False)
    points = np.zeros((len(x), 2))
    points[:, : min(2, len(s))] = (u * s)[:, :2]
    largest = np.abs(points).argmax(axis=0)
    points *= np.where(points[largest, [0, 1]] < 0, -1.0, 1.0)
    power = np.append(s, 0.0)[:2] ** 2 / ((s**2).sum() or 1.0)
    return points, (float(power[0]), float(power[1]))


def place_labels(axes: Axes, words: Sequence[str], points: np.ndarray) -> None:
    """Write each word beside its point, on the side where it covers least of the others: to the right if possible."""
    per_point = axes.figure.dpi / 72
    at = axes.transData.transform(points)  # (n, 2) pixels
    size = np.array([4.9, 9.5]) * per_point  # width and height of a letter
    dots = np.concatenate([at - 3, at + 3], axis=1)  # (n, 4): left, bottom, right, top
    taken = list(dots)
    for i, word in enumerate(words):
        boxes = [label_box(at[i], len(word) * size[0], size[1], place, per_point) for place in LABEL_PLACES]
        covered = [overlap(box, np.array(taken)) for box in boxes]
        best = int(np.argmin(covered))
        taken.append(boxes[best])
        across, up, dx, dy = LABEL_PLACES[best]
        shift: dict[str, Any] = {
            "textcoords": "offset points",
            "ha": across,
            "va": up,
            "fontsize": 8,
            "parse_math": False,
        }
        axes.annotate(word, points[i], xytext=(dx, dy), **shift)


def label_box(
    at: np.ndarray, width: float, height: float, place: tuple[str, str, int, int], per_point: float
) -> np.ndarray:
    """Return left, bottom, right and top of a label at one side of its point."""
    across, up, dx, dy = place
    x = at[0] + dx * per_point - {"left": 0.0, "center": 0.5, "right": 1.0}[across] * width
    y = at[1] + dy * per_point - {"bottom": 0.0, "center": 0.5, "top": 1.0}[up] * height
    return np.array([x, y, x + width, y + height])


def overlap(box: np.ndarray, others: np.ndarray) -> float:
    """Return the area that a box shares with others (n, 4)."""
    width = np.minimum(box[2], others[:, 2]) - np.maximum(box[0], others[:, 0])
    height = np.minimum(box[3], others[:, 3]) - np.maximum(box[1], others[:, 1])
    return float((np.maximum(width, 0) * np.maximum(height, 0)).sum())
