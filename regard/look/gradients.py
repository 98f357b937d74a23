"""Gradient flow: how large the gradient of one batch is in every layer, and at every time step of a recurrent one.

    gradients("runs/multi30k-en-de").save(Path("gradients.png"))

The batch is the first that the run trained on, in training mode, with its objective; the weights are those of its finished
model, or of its newest checkpoint. For recurrent layers |dL/dh_t| is shown twice: of the whole loss, where every step has a
share of its own, and of the loss at the last step alone, where all that is left at step t has come back through time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from regard.data.batches import Batch, Cursor
from regard.device import pick_device
from regard.look.drawn import Drawn, finite, write_csv
from regard.look.figures import Curves, Lines, Panel, draw
from regard.look.prepared import prepared
from regard.look.stream import short_name
from regard.look.through_time import arriving, mean_loss, through_time
from regard.training.objective import Objective

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VANISHING, EXPLODING = 1e-3, 1e3  # of the far end's gradient against that of the near end
KINDS = {"self": "self", "cross": "cross", "ff": "ff", "schemes": "positions", "cross_scheme": "positions"}
OUTSIDE = {"head": "head", "answers": "head", "pooler": "head", "weight_ih": "input", "weight_hh": "recurrent"}


@dataclass(frozen=True)
class Part:
    """All weights of one kind in one layer."""

    layer: str
    kind: str
    parameters: int
    gradient: float  # its norm
    weight: float  # theirs

    @property
    def ratio(self) -> float:
        return self.gradient / self.weight if self.weight else math.nan

    def row(self) -> dict[str, Any]:
        return finite({**asdict(self), "gradient / weights": self.ratio})


@dataclass(frozen=True)
class Flow(Drawn):
    title: str
    parts: tuple[Part, ...]
    loss: float
    total: float  # norm of the whole gradient
    clip: float  # 0: none
    time: dict[str, dict[str, np.ndarray]]  # recurrent layer -> line -> (T,): |dL/dh_t|

    def figure(self) -> Figure:
        layers = list(dict.fromkeys(part.layer for part in self.parts))
        clip = (("train.clip", self.clip),) if self.clip else ()
        marks = (*clip, (f"all of it: {self.total:.3g}", self.total))
        panels: list[Panel] = [
            self.panel("gradient by layer and kind", layers, "|gradient|", "gradient", marks),
            self.panel("gradient against weights", layers, "|gradient| / |weights|", "ratio"),
        ]
        for name, lines in self.time.items():
            curves = {line: (np.arange(len(values)), values) for line, values in lines.items()}
            panels.append(Curves(f"{name}: through time", curves, "time step t", "norm of the gradient", log=True))
        figure, said = draw("", panels, 2), [self.title, *self.verdicts()]
        figure.set_figheight(figure.get_figheight() + 0.17 * len(said))
        figure.suptitle("\n".join(said), fontsize=9, parse_math=False)
        return figure

    def panel(self, title: str, layers: list[str], y: str, what: str, marks: Any = ()) -> Lines:
        lines = {part.kind: np.full(len(layers), np.nan) for part in self.parts}
        for part in self.parts:
            value = getattr(part, what)
            lines[part.kind][layers.index(part.layer)] = value if value > 0 else math.nan
        return Lines(title, np.arange(len(layers)), lines, "layer", y, log=True, ticks=tuple(layers), marks=marks)

    def verdicts(self) -> list[str]:
        """How the ends of every stack and of every stretch of time compare."""
        if not math.isfinite(self.total):
            return ["the gradient is not finite: it has exploded"]
        kept = f"makes it {self.clip:g}" if self.total > self.clip else "leaves it as it is"
        clipped = f", and train.clip {self.clip:g} {kept}" if self.clip else ""
        found = [f"the norm of the gradient is {self.total:.3g}{clipped}"]
        for stack, (first, last) in self.depths().items():
            found.append(f"{stack}: the first layer has {verdict(first / last)} of the last one's gradient (rms)")
        for name, lines in self.time.items():
            gains = arriving(lines, name)
            if len(gains) > 1:
                left = f"{verdict(gains[-1] / gains[0])} of it arrives {len(gains) - 1} steps before"
                found.append(f"{name}: {left}, a factor of {factor(gains.tolist()):.3f} a step")
        limits = f"vanishing: less than {VANISHING:g} of it is left; exploding: more than {EXPLODING:g} times as much"
        return [*found, limits]

    def depths(self) -> dict[str, tuple[float, float]]:
        """Of stacks of several layers: the root mean square of the gradients of the first and of the last layer."""
        squares: dict[str, dict[int, list[float]]] = {}
        for part in self.parts:
            stack, _, number = part.layer.rpartition(".")
            if number.isdigit() and part.kind not in ("norm", "positions"):
                at = squares.setdefault(stack, {}).setdefault(int(number), [0.0, 0.0])
                at[0] += part.gradient**2
                at[1] += part.parameters
        rms = {stack: [math.sqrt(g / n) for _, (g, n) in sorted(found.items())] for stack, found in squares.items()}
        return {stack: (found[0], found[-1]) for stack, found in rms.items() if len(found) > 1 and found[-1] > 0}

    def numbers(self) -> dict[str, Any]:
        time = {name: {line: x.tolist() for line, x in lines.items()} for name, lines in self.time.items()}
        given = {"model": self.title, "loss": self.loss, "norm": self.total, "clip": self.clip, "time": time}
        return finite({**given, "parts": [part.row() for part in self.parts], "verdicts": self.verdicts()})

    def save_csv(self, path: Path) -> None:
        write_csv(path, (part.row() for part in self.parts))

    def __str__(self) -> str:
        return "\n".join(self.verdicts())


def verdict(share: float) -> str:
    word = "vanishing" if share < VANISHING else "exploding" if share > EXPLODING else "even enough"
    return f"{share:.2g} ({word})"


# ---- measuring --------------------------------------------------------------------------------------------------------


def gradients(path: Path | str, settings: Mapping[str, Any] | None = None, device: str = "auto") -> Flow:
    """Of a run, or of a model with `settings={"data.train": FILE}`; settings are dotted names, as on the command line."""
    with prepared(Path(path), settings or {}) as job:
        batch, _ = next(job.batches().iterate_from(Cursor()))
        where = pick_device(device)
        job.model.to(where).train()
        seed = job.config.train.seed
        return measure(job.objective().to(where), batch.to(where), job.config.train.clip, seed, str(path))


def measure(objective: Objective, batch: Batch, clip: float = 0.0, seed: int = 0, title: str = "") -> Flow:
    """The gradient of the mean loss of a batch, part by part; what is there of gradients is thrown away."""
    model = objective.model
    model.zero_grad(set_to_none=True)
    with torch.random.fork_rng([batch.labels.device] if batch.labels.is_cuda else []):
        loss = mean_loss(objective, batch.inputs, batch.tokens, seed)
        loss.backward()
        parts = tuple(parts_of(model))
        model.zero_grad(set_to_none=True)
        time = through_time(objective, batch, seed)
    return Flow(title, parts, loss.item(), math.sqrt(sum(part.gradient**2 for part in parts)), clip, time)


def parts_of(model: nn.Module) -> Iterator[Part]:
    found: dict[tuple[str, str], list[float]] = {}
    for name, p in model.named_parameters():
        sums = found.setdefault(named(name), [0.0, 0.0, 0.0])
        gradient = 0.0 if p.grad is None else float(p.grad.double().square().sum())
        for i, value in enumerate((p.numel(), gradient, float(p.detach().double().square().sum()))):
            sums[i] += value
    for (layer, kind), (n, gradient, weight) in found.items():
        yield Part(layer, kind, int(n), math.sqrt(gradient), math.sqrt(weight))


def named(parameter: str) -> tuple[str, str]:
    """The layer and the kind of a parameter: "encoder.blocks.0.sublayers.self.qkv.weight" is encoder.0, self."""
    parts = [part for part in short_name(parameter).split(".") if part not in ("layers", "forward_", "backward_")]
    number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
    if number is not None:
        layer = ".".join(part for part in parts[: number + 1] if part != "schemes")
    else:
        layer = ".".join(parts[:2]) if parts[0] in ("encoder", "decoder") and len(parts) > 2 else parts[0]
    if any(part.endswith(("norm", "norms")) for part in parts):
        return layer, "norm"
    if parts[-1] == "bias" and (parts[-2].isdigit() or parts[-2] == "cell"):
        return layer, "bias"
    for known in (KINDS, OUTSIDE):
        if kind := next((known[part] for part in parts if part in known), ""):
            return layer, kind
    return layer, "embedding" if "embedding" in parts[0] or parts[0] in ("types", "patches", "summary") else "other"


def factor(gains: Sequence[float]) -> float:
    """The r of the line log G(k) = a + k log r that fits best."""
    k = np.arange(1, len(gains) + 1)
    return math.exp(np.polyfit(k, np.log(gains), 1)[0])
