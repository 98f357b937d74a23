"""The summary of a model: output shape, parameters, FLOPs and weight bytes of each layer.

    regard.summary("gpt2", length=128)                     # a preset, a recipe, or a run or model folder
    regard.summary(regard.load("runs/toy-en-de"), depth=3)

The numbers are counted on the model (models/analysis/counting.py). A line is a module, by its path. Tied weights are
counted once, at their first place.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from torch import nn

from regard.config import ModelConfig
from regard.errors import RegardError
from regard.models.analysis.cost import meta_inputs, side_lengths
from regard.models.analysis.counting import Shape, count, meta_copy
from regard.models.architectures import architecture_of
from regard.terminal import format_bytes, format_count, format_table


@dataclass(frozen=True)
class LayerSummary:
    """One line of a summary: a layer, or the total."""

    name: str
    output: Shape  # of its output; () for a module that is not called
    parameters: int
    tied: int  # parameters that it shares with an earlier line
    flops: int
    weights: int  # bytes

    def cells(self) -> tuple[str, ...]:
        """Return the line as text, one string for each column."""
        title = self.name + (" (tied)" if self.tied and self.name != "total" else "")
        numbers = f"{self.parameters:,}", format_count(self.flops), format_bytes(self.weights)
        return (title, " x ".join(f"{n:,}" for n in self.output), *numbers)


HEADER = ("layer", "output", "parameters", "FLOPs", "weights")


@dataclass(frozen=True)
class Summary:
    """The layers of a model and their total; it prints as a table, and as HTML in a notebook."""

    model: str
    config: ModelConfig
    batch: int
    source_length: int  # 0 for a side that the model does not have
    target_length: int
    lines: list[LayerSummary]
    total: LayerSummary
    assumed: dict[str, int]  # sizes that the data would determine, such as the vocabulary

    @property
    def title(self) -> str:
        """The line above the table: model, architecture, batch and lengths."""
        sides = " and ".join(f"{n:,}" for n in (self.source_length, self.target_length) if n)
        return f"{self.model} ({self.config.architecture}), {self.batch:,} x {sides} tokens"

    @property
    def notes(self) -> list[str]:
        """The lines below the table."""
        tied = any(line.tied for line in self.lines)
        found = ["Tied: with numbers of a line above, which are counted once."] if tied else []
        return found + [f"model.{field} comes from the data: {n:,} assumed" for field, n in self.assumed.items()]

    def __str__(self) -> str:
        rows = [HEADER, *(line.cells() for line in (*self.lines, self.total))]
        return "\n".join([self.title, "", *format_table(rows, 2), *([""] if self.notes else []), *self.notes])

    def _repr_html_(self) -> str:
        """Return the table as HTML, for notebooks."""
        cell = '<td style="text-align:right">{}</td>'
        head = "".join(f"<th>{name}</th>" for name in HEADER)
        lines = (*self.lines, self.total)
        body = [f"<tr>{''.join(cell.format(escape(text)) for text in line.cells())}</tr>" for line in lines]
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes)
        return f"<p>{escape(self.title)}</p><table><tr>{head}</tr>{''.join(body)}</table>{notes}"

    def to_dict(self) -> dict[str, Any]:
        """Return the summary as JSON types."""
        return {
            **{"model": self.model, "architecture": self.config.architecture, "batch": self.batch},
            **{"source_length": self.source_length, "target_length": self.target_length},
            **{"lines": [line_dict(line) for line in self.lines], "total": line_dict(self.total)},
            "assumed": self.assumed,
        }


def line_dict(line: LayerSummary) -> dict[str, Any]:
    return {**vars(line), "output": list(line.output)}


# ---- making a summary --------------------------------------------------------------------------------------------------


def summarize(
    model: nn.Module,
    name: str,
    *,
    batch: int = 1,
    length: int | None = None,
    source_length: int | None = None,
    depth: int = 2,
    assumed: dict[str, int] | None = None,
) -> Summary:
    """Return the summary of a model, which may be on the meta device; `inference.model_spec.summary` has the options."""
    if depth < 1:
        raise RegardError(f"--depth must be at least 1, not {depth}: 1 for stacks, 2 for blocks, 3 for sublayers")
    config: ModelConfig = model.config  # type: ignore[assignment]
    s, t = resolve_lengths(config, batch, length, source_length)
    lines = count_layers(model, batch, s, t, depth)
    return Summary(name, config, batch, s, t, lines, merge_lines("total", lines, ()), assumed or {})


def resolve_lengths(config: ModelConfig, batch: int, length: int | None, source_length: int | None) -> tuple[int, int]:
    """Return the lengths of source and target, by default `max_len`; 0 for a side that the model does not have."""
    s, t = side_lengths(config, config.max_len if length is None else length)
    two_sides = s > 0 and t > 0
    if source_length is not None:
        if not two_sides:
            raise RegardError(
                f"--source-length is for translators, and a {config.architecture} has one length: --length"
            )
        s = source_length
    check_lengths(config, batch, *((s, t) if two_sides else (max(s, t),)))
    if architecture_of(config).sees_images and s < 2:
        raise RegardError(f"--length of a {config.architecture} is its patches and one more: at least 2")
    return s, t


def check_lengths(config: ModelConfig, batch: int, *lengths: int) -> None:
    """Refuse a batch or lengths that the model cannot have."""
    endless = architecture_of(config).carries_state  # a recurrent language model reads texts of any length
    for length in lengths:
        if batch < 1 or length < 1 or (length > config.max_len and not endless):
            most = "on" if endless else f"to model.max_len {config.max_len}"
            raise RegardError(f"--batch {batch} must be at least 1, and --length {length} from 1 {most}")


def count_layers(model: nn.Module, batch: int, s: int, t: int, depth: int) -> list[LayerSummary]:
    """Return a line for each module at `depth`, in the order of the modules."""
    on_meta = model if next(model.parameters()).is_meta else meta_copy(model)
    ran = count(on_meta, *meta_inputs(on_meta, batch, s, t))
    flops, shapes = ran.flops(), ran.shapes()
    containers = {path for path, module in model.named_modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))}
    groups: dict[str, list[LayerSummary]] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        numbers = tied = weights = 0
        for p in module.parameters(recurse=False):
            if id(p) in seen:
                tied += p.numel()
            else:
                numbers, weights = numbers + p.numel(), weights + p.nbytes
            seen.add(id(p))
        group = ancestor_path(path, depth, containers)
        groups.setdefault(group, []).append(
            LayerSummary(path, shapes.get(path, ()), numbers, tied, flops[path], weights)
        )
    lines = (merge_lines(name or "model", group, shapes.get(name, ())) for name, group in groups.items())
    return [line for line in lines if any((line.parameters, line.tied, line.flops))]


def ancestor_path(path: str, depth: int, containers: set[str]) -> str:
    """Return the path of the first `depth` modules on a path.

    The members of a list or dictionary of modules are levels, the container is not, nor is the body of a classification
    model."""
    steps = path.split(".")
    levels, end = 0, 0
    for i in range(len(steps)):
        here = ".".join(steps[: i + 1])
        levels += (here not in containers or ".".join(steps[:i]) in containers) and here != "body"
        end = i + 1
        if levels == depth:
            break
    return ".".join(steps[:end])


def merge_lines(name: str, lines: list[LayerSummary], output: Shape) -> LayerSummary:
    """Return the sum of lines as one line."""
    sums = (sum(getattr(line, field) for line in lines) for field in ("parameters", "tied", "flops", "weights"))
    return LayerSummary(name, output, *sums)
