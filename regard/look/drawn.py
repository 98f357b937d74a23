"""Results that are pictures, and the tables of their numbers."""

from __future__ import annotations

import csv
import io
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard.errors import RegardError
from regard.files import disk_errors
from regard.look.figures import any_letters, save
from regard.terminal import format_table as columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Drawn(ABC):
    """What can be saved as a picture, and is shown as one by a notebook."""

    @abstractmethod
    def figure(self) -> Figure: ...

    @abstractmethod
    def numbers(self) -> dict[str, Any]:
        """What is drawn, as JSON can hold it."""

    def save(self, path: Path) -> None:
        """PNG or SVG, by the suffix."""
        save(self.figure(), path)

    def _repr_png_(self) -> bytes:
        held = io.BytesIO()
        with any_letters():
            self.figure().savefig(held, format="png")
        return held.getvalue()


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """A line for each row, under the names of the first; what is None stays empty."""
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


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """For reading: columns as wide as they must be; what is None is a dash."""

    def cell(value: Any) -> str:
        return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)

    return "\n".join(columns([tuple(rows[0]), *(tuple(map(cell, row.values())) for row in rows)], right=1))


def finite(value: Any) -> Any:
    """The same with None for what is no number, which JSON cannot write."""
    if isinstance(value, Mapping):
        return {name: finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
