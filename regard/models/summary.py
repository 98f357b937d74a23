"""A model layer by layer: what each gives, its parameters, FLOPs and memory; by formula and counted, side by side.

    regard.summary("gpt2", length=128)                     # a preset, a recipe, or a run or model folder
    regard.summary(regard.load("runs/toy-en-de"), depth=3)

Parameters are counted on the tensors, FLOPs while the model runs (models/flops.py). What is tied is counted once, where it
stands first. Activations are what the backward pass of a training step in bf16 needs, by formula (models/cost.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.layers.packed import is_packed
from regard.models.architectures import of
from regard.models.cost import lengths, place_activations, place_flops
from regard.models.cost_positions import position_flops
from regard.models.counted import Placed, counted_places, place_of
from regard.models.flops import Shape, count, hollow
from regard.models.parameters import placed
from regard.named import check_lengths, config_of
from regard.tables import short, size, table

STEPS = 64  # tokens of a recurrent model, if nothing is said: all of its steps run, and each costs the same


class Both(NamedTuple):
    formula: int
    counted: int


@dataclass(frozen=True)
class Line:
    """One layer, or all of them."""

    name: str
    output: Shape  # of what it gives; () for what only lends its numbers
    parameters: Both
    tied: int  # numbers of another line that it uses too
    flops: Both
    weights: int  # bytes
    activations: int  # bytes

    @property
    def agrees(self) -> bool:
        return self.parameters[0] == self.parameters[1] and self.flops[0] == self.flops[1]

    @property
    def holds_anything(self) -> bool:
        return any((*self.parameters, self.tied, *self.flops, self.activations))

    def cells(self) -> tuple[str, ...]:
        numbers = (*(f"{n:,}" for n in self.parameters), *map(short, self.flops))
        title = self.name + (" (tied)" if self.tied and self.name != "total" else "")
        return (
            title,
            " x ".join(f"{n:,}" for n in self.output),
            *numbers,
            *map(size, (self.weights, self.activations)),
        )

    def to_dict(self) -> dict[str, Any]:
        parameters = {**self.parameters._asdict(), "tied": self.tied}
        memory = {"weights": self.weights, "activations": self.activations}
        return {
            **{"name": self.name, "output": list(self.output), "parameters": parameters},
            **{"flops": self.flops._asdict(), "memory": memory},
        }


MEMORY = "Memory: weights as they are here; activations that a training step in bf16 keeps, by formula."
HEADER = ("layer", "output", "parameters", "counted", "FLOPs", "counted", "weights", "activations")


@dataclass(frozen=True)
class Summary:
    model: str
    config: ModelConfig
    batch: int
    source_length: int  # 0 for a side that the model does not have
    target_length: int
    lines: list[Line]
    total: Line
    positions: int  # FLOPs of position schemes, which the usual count leaves aside
    assumed: dict[str, int]

    @property
    def differences(self) -> list[str]:
        """Where formula and count do not agree."""
        found = []
        for line in (*self.lines, self.total):
            for what, (formula, counted) in (("parameters", line.parameters), ("FLOPs", line.flops)):
                if formula != counted:
                    found.append(f"{line.name}: {formula:,} {what} by formula, {counted:,} counted")
        return found

    @property
    def title(self) -> str:
        sides = " and ".join(f"{n:,}" for n in (self.source_length, self.target_length) if n)
        return f"{self.model} ({self.config.architecture}), {self.batch:,} x {sides} tokens"

    @property
    def notes(self) -> list[str]:
        found = [f"! {line}" for line in self.differences] or ["Formula and count agree in every line."]
        found.append(MEMORY)
        if any(line.tied for line in self.lines):
            found.append("Tied: with numbers of a line above, which are counted once.")
        if self.positions:
            share = f"{short(self.positions)} of the FLOPs are of positions"
            found.append(f"{share}, which the usual count, that of `regard cost`, leaves aside.")
        return found + [f"model.{field} comes from the data: {n:,} assumed" for field, n in self.assumed.items()]

    def __str__(self) -> str:
        rows = [HEADER, *(line.cells() for line in (*self.lines, self.total))]
        return "\n".join([self.title, "", *table(rows, 2), "", *self.notes])

    def _repr_html_(self) -> str:
        """For notebooks."""
        cell = '<td style="text-align:right">{}</td>'
        head = "".join(f"<th>{name}</th>" for name in HEADER)
        body = []
        for line in (*self.lines, self.total):
            style = "" if line.agrees else ' style="color:red"'
            body.append(f"<tr{style}>{''.join(cell.format(escape(text)) for text in line.cells())}</tr>")
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(self.title)}</p><table><tr>{head}</tr>{''.join(body)}</table>{notes}"

    def to_dict(self) -> dict[str, Any]:
        return {
            **{"model": self.model, "architecture": self.config.architecture, "batch": self.batch},
            **{"source_length": self.source_length, "target_length": self.target_length},
            **{"lines": [line.to_dict() for line in self.lines], "total": self.total.to_dict()},
            **{"position_flops": self.positions, "differences": self.differences, "assumed": self.assumed},
        }


# ---- making one --------------------------------------------------------------------------------------------------------


def summary(
    model: Any,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    depth: int = 2,
    settings: dict[str, str] | None = None,
) -> Summary:
    """Of a model, of what holds one (such as a Translator), or of a preset, a recipe or a folder by name.

    `length` is that of the rows, by default the model's longest, or 64 if it is recurrent; `source_length` that of a
    translator's source, if it is another. `depth` 1 shows stacks, 2 their blocks, 3 the sublayers of those. `settings`
    change a model that is not there yet.
    """
    if depth < 1:
        raise RegardError(f"--depth must be at least 1, not {depth}: 1 for stacks, 2 for blocks, 3 for sublayers")
    name, built, assumed = found_model(model, settings or {})
    config: ModelConfig = built.config  # type: ignore[assignment]
    s, t = asked_lengths(config, batch, length, source_length)
    lines = measured(built, batch, s, t, depth)
    positions = sum(position_flops(config, batch, s, t).values())
    return Summary(name, config, batch, s, t, lines, joined("total", lines, ()), positions, assumed)


def asked_lengths(config: ModelConfig, batch: int, length: int | None, source_length: int | None) -> tuple[int, int]:
    """Of source and target; 0 for a side that the model does not have."""
    longest = min(STEPS, config.max_len) if of(config).is_recurrent else config.max_len
    s, t = lengths(config, longest if length is None else length)
    if source_length is not None:
        if not (s and t):
            raise RegardError(
                f"--source-length is for translators, and a {config.architecture} has one length: --length"
            )
        s = source_length
    check_lengths(config, batch, *((s, t) if of(config).translates else (max(s, t),)))
    if of(config).sees_images and s < 2:
        raise RegardError(f"--length of a {config.architecture} is its patches and one more: at least 2")
    return s, t


def found_model(model: Any, settings: dict[str, str]) -> tuple[str, nn.Module, dict[str, int]]:
    """Its name, the model, and what was assumed. What is there is run as it is; what is not, or on a GPU, whose kernels hide
    their products, without numbers."""
    if isinstance(model, (str, Path)):
        there = any((Path(model) / place / "config.json").exists() for place in ("", "model"))
        if settings or not there:
            config, assumed = config_of(str(model), settings)
            return str(model), hollow(config), assumed
        from regard import folder

        return str(model), folder.load(Path(model), torch.device("cpu"), "fp32").model, {}
    model = model if isinstance(model, nn.Module) else getattr(model, "model", None)
    if not isinstance(getattr(model, "config", None), ModelConfig):
        raise RegardError("a summary is of a model of Regard, of what holds one, or of a preset, a recipe or a folder")
    if is_packed(model):
        raise RegardError(
            "this model was loaded with rounded weights, which are no parameters: load it without weights="
        )
    return type(model).__name__, model, {}


def measured(model: nn.Module, batch: int, s: int, t: int, depth: int) -> list[Line]:
    """Every layer, in the order of the forward."""
    config: ModelConfig = model.config  # type: ignore[assignment]
    on_gpu = next(model.parameters()).is_cuda
    ran = count(hollow(config) if on_gpu else model, batch, s, t)
    formula, tensors = [*placed(config)], [*counted_places(model)]
    parameters, counted, again = numbers(formula), numbers(tensors), numbers(tensors, tied=True)
    flops = Counter({place: batch * n for place, n in place_flops(config, s, t).items()})
    flops.update(position_flops(config, batch, s, t))
    activations = Counter({place: batch * n for place, n in place_activations(config, s, t).items()})
    weights: Counter[str] = Counter()
    for name, p in model.named_parameters():  # tied ones once
        weights[place_of(name, config)] += p.nbytes
    groups: dict[str, list[Line]] = {}
    for place in dict.fromkeys([place for place, _ in formula + tensors] + [*flops, *ran.flops, *activations]):
        both = Both(parameters[place], counted[place]), again[place], Both(flops[place], ran.flops[place])
        line = Line(place, output(ran.shapes, place), *both, weights[place], activations[place])
        groups.setdefault(".".join(place.split(".")[:depth]), []).append(line)
    lines = (joined(name, group, output(ran.shapes, name) or group[0].output) for name, group in groups.items())
    return [line for line in lines if line.holds_anything]


def numbers(parts: list[Placed], tied: bool = False) -> Counter[str]:
    """Parameters by place: a place's own, or those of another that it uses too."""
    found: Counter[str] = Counter()
    for place, part in parts:
        found[place] += part.total * (part.tied == tied)
    return found


def output(shapes: dict[str, Shape], place: str) -> Shape:
    """What a place gave. A norm inside blocks is no call of its own: it gives what its stack or block gives."""
    return shapes.get(place) or shapes.get(place.removesuffix(".norm"), ())


def joined(name: str, lines: list[Line], output: Shape) -> Line:
    """Lines as one."""

    def both(pairs: list[Both]) -> Both:
        return Both(sum(pair.formula for pair in pairs), sum(pair.counted for pair in pairs))

    parameters, flops = both([line.parameters for line in lines]), both([line.flops for line in lines])
    again, weights, activations = (
        sum(getattr(line, field) for line in lines) for field in ("tied", "weights", "activations")
    )
    return Line(name, output, parameters, again, flops, weights, activations)
