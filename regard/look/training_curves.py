"""Training curves of one or several runs, from their metrics.jsonl."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from regard.errors import RegardError
from regard.files import exists, parse_json
from regard.look.figures import Drawable, XYLines, draw, text_table, write_csv
from regard.training.metrics_log import read_metric_lines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Curve = tuple[np.ndarray, np.ndarray]  # steps, values
TRAINING_VALUES = {  # what training logs beside its loss: title, axis, whether logarithmic
    "reward": ("mean reward of sampled translations", "reward", False),
    "lr": ("learning rate", "learning rate", False),
    "grad_norm": ("norm of the gradient, before clipping", "|gradient|", True),
    "tokens_per_s": ("speed", "tokens/s", False),
    "expert_load_max": ("tokens of the busiest expert, 1 = even", "times the mean", False),
    "expert_load_min": ("tokens of the idlest expert, 1 = even", "times the mean", False),
    "dropped_tokens": ("tokens over the capacity of their expert", "share", False),
}


@dataclass(frozen=True)
class Run:
    """The log of one run."""

    name: str
    lines: tuple[dict[str, Any], ...]  # of metrics.jsonl

    def curve(self, kind: str, value: str) -> Curve:
        """Return steps and values; `kind` is train or valid."""
        found = [(x["step"], x[value]) for x in self.lines if x["kind"] == kind and is_number(x.get(value))]
        steps, values = zip(*found, strict=True) if found else ((), ())
        return np.array(steps, float), np.array(values, float)

    def scores(self) -> list[str]:
        """Return the names of what validation measured beside the loss."""
        names = dict.fromkeys(
            n for x in self.lines if x["kind"] == "valid" for n in x if n not in ("kind", "step", "loss")
        )
        return list(names)

    def summary(self) -> dict[str, Any]:
        (steps, loss), (valid_steps, valid) = self.curve("train", "loss"), self.curve("valid", "loss")
        speed = self.curve("train", "tokens_per_s")[1]
        found: dict[str, Any] = {"run": self.name, "steps": int(max([*steps, *valid_steps], default=0))}
        found["training loss"] = float(loss[-1]) if len(loss) else None
        best = int(valid.argmin()) if len(valid) else None
        found["best validation loss"] = None if best is None else float(valid[best])
        found["at step"] = None if best is None else int(valid_steps[best])
        return {**found, "tokens/s (median)": round(float(np.median(speed))) if len(speed) else None}


@dataclass(frozen=True)
class TrainingCurves(Drawable):
    """The curves of several runs, in one figure."""

    runs: tuple[Run, ...]

    def figure(self) -> Figure:
        names = ", ".join(run.name for run in self.runs)
        figure = draw("", self.panels(), 3)
        figure.suptitle(names, parse_math=False)
        return figure

    def panels(self) -> list[XYLines]:
        found = [self.losses()]
        found += [self.panel(f"validation: {name}", "valid", score, name) for score, name in self.scores().items()]
        found += [self.panel(title, "train", value, y, log) for value, (title, y, log) in TRAINING_VALUES.items()]
        return [panel for panel in found if panel.curves]

    def scores(self) -> dict[str, str]:
        """Return the scores that any run has, with their names in the figure."""
        return {score: score.replace("_", " ") for run in self.runs for score in run.scores()}

    def losses(self) -> XYLines:
        curves: dict[str, Curve] = {}
        for run in self.runs:
            for kind, name in (("train", "training"), ("valid", "validation")):
                curves[f"{run.name}, {name}" if len(self.runs) > 1 else name] = run.curve(kind, "loss")
        return XYLines("loss", {name: curve for name, curve in curves.items() if len(curve[0])}, "step", "loss")

    def panel(self, title: str, kind: str, value: str, y: str, log: bool = False) -> XYLines:
        curves = {run.name: run.curve(kind, value) for run in self.runs}
        return XYLines(title, {name: curve for name, curve in curves.items() if len(curve[0])}, "step", y, log)

    def numbers(self) -> dict[str, Any]:
        return {"runs": [run.summary() for run in self.runs], "panels": [panel.numbers() for panel in self.panels()]}

    def rows(self) -> Iterator[dict[str, Any]]:
        curves = {"training loss": ("train", "loss"), "validation loss": ("valid", "loss")}
        curves |= {f"validation: {name}": ("valid", score) for score, name in self.scores().items()}
        curves |= {title: ("train", value) for value, (title, *_) in TRAINING_VALUES.items()}
        for run in self.runs:
            for title, (kind, value) in curves.items():
                for step, y in zip(*run.curve(kind, value), strict=True):
                    yield {"run": run.name, "curve": title, "step": int(step), "value": f"{y:.6g}"}

    def save_csv(self, path: Path) -> None:
        write_csv(path, self.rows())

    def __str__(self) -> str:
        return text_table([run.summary() for run in self.runs])


def read_training_curves(paths: Sequence[Path | str]) -> TrainingCurves:
    """Read the curves of run folders; the runs need not be finished."""
    folders = [Path(path) for path in paths]
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else [str(folder) for folder in folders]
    found = TrainingCurves(tuple(Run(name, read_log(folder)) for name, folder in zip(names, folders, strict=True)))
    if not found.panels():
        raise RegardError(f"there is no number in the metrics.jsonl of {', '.join(names)} yet: nothing can be drawn")
    return found


def read_log(run: Path) -> tuple[dict[str, Any], ...]:
    """Read the lines of a run's metrics.jsonl."""
    path = run / "metrics.jsonl"
    if not exists(path):
        raise RegardError(f"there is no metrics.jsonl in {run}: give the folder of a run, such as runs/toy-en-de")
    found = tuple(line for line in map(parse_line, read_metric_lines(path)) if line)
    if not found:
        raise RegardError(f"{path} has no line yet: train.log_every says after how many steps the first is written")
    return found


def parse_line(line: str) -> dict[str, Any]:
    """Return the values of a line; none if a killed run left it half written."""
    try:
        found = parse_json(line)
    except ValueError:
        return {}
    return found if isinstance(found, dict) and is_number(found.get("step")) and "kind" in found else {}


def is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and math.isfinite(x)
