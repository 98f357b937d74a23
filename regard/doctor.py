"""What this machine has for Regard, and which kernel the attention of a model would run on."""

from __future__ import annotations

import importlib.metadata
import itertools
import platform
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import regard
from regard import model_folder, pretrained
from regard.api import ANSWERS, model_settings
from regard.config import Config, ModelConfig, recipes
from regard.config.registry import help_of
from regard.data.shards import cache_folder
from regard.device import cores, describe, peak_flops, pick_device, pick_precision
from regard.errors import RegardError
from regard.files import exists, read_json
from regard.kernels.masks import FULL, window
from regard.layers.cells import Cell
from regard.layers.kernel_selection import Situation, choose
from regard.layers.positions.scheme import schemes_for
from regard.layers.recurrent import Recurrent
from regard.layers.recurrent_attention import Attentive
from regard.layers.stack import Stack
from regard.models import gpt
from regard.models.architectures import make_model

LIBRARIES = (
    "torch",
    "tokenizers",
    "safetensors",
    "sacrebleu",
    "numpy",
    "zstandard",
    "matplotlib",
    "triton",
    "transformers",
    "fastapi",
)


def examine() -> dict[str, str]:
    device = pick_device("auto")
    peak = peak_flops(device)
    free = shutil.disk_usage(Path.cwd()).free
    return {
        "regard": regard.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) for name in LIBRARIES},
        "device": describe(device) + (f", {peak / 1e12:.0f} TFLOP/s bf16 by data sheet" if peak else ""),
        "precision": str(pick_precision("auto", device)).removeprefix("torch."),
        "cores": f"{cores()} usable, torch uses {torch.get_num_threads()} threads",
        "CPU kernels": torch.backends.cpu.get_cpu_capability(),
        "models": ", ".join(pretrained.names()) or "none brought along",
        "cache": f"{cache_folder()} (set REGARD_CACHE to move it)",
        "disk": f"{free / 1e9:,.0f} GB free here" + ("  <- little: checkpoints may fail" if free < 2e9 else ""),
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


# ---- which kernel, and why -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """What one kind of attention runs on in one situation."""

    layer: str  # decoder.0-5.self: blocks 0 to 5 do the same
    positions: str
    when: str
    kernel: str
    why: str
    fast: bool


def explain(target: Path | None, settings: Mapping[str, Any], device: str, length: int | None = None) -> list[Row]:
    """For a run, a model folder or a recipe, or without any for a causal decoder with each of the position schemes.

    `settings` are dotted, {"model.positions": "rope"}. The device need not be here, and no weight is ever made. `length` is
    that of training rows; by default the model's longest, or 4096.
    """
    device = kind_of_device(device)
    if length is not None and length < 1:
        raise RegardError(f"--length must be at least 1, not {length}")
    with torch.device("meta"):
        if target is not None:
            config = recipe_of(target, settings).model
            model = make_model(replace(config, n_classes=max(1, config.n_classes)))  # classes come with the data
            return explain_model(model, device, length or config.max_len)
        config = built({"model": {"preset": "gpt-small"}}, settings).model
        names = [config.positions] if "model.positions" in settings else schemes_for(config, "decoder")
        models = (gpt.GPT(replace(config, positions=name)) for name in names)
        return [row for model in models for row in explain_model(model, device, length or 4096)]


def explain_model(model: nn.Module, device: str, length: int) -> list[Row]:
    """Neighbouring blocks that do the same share their rows."""
    rows = recurrent_rows(model, length)
    for name, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        each = [block_rows(stack, i, name, model.config, device, length) for i in range(len(stack.blocks))]  # type: ignore[arg-type]
        for same, group in itertools.groupby(range(len(each)), key=each.__getitem__):
            blocks = [*group]
            span = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"{blocks[0]}"
            rows += [replace(row, layer=f"{name}.{span}.{row.layer}") for row in same]
    return rows


def block_rows(stack: Stack, i: int, place: str, config: ModelConfig, device: str, length: int) -> list[Row]:
    """The rows of block i, whose layer is only `self` or `cross` yet."""
    scheme = stack.schemes[i % len(stack.schemes)]  # one for all blocks, or one each
    mixer = stack.mixers[i]
    mask = window(stack.mask, mixer.window)
    training = Situation(device, length, True, mask, scheme, stack.d_head, stack.attention_dropout, keys=length)  # type: ignore[arg-type]
    rows = two_rows("self", config.positions_at(place), training, place == "encoder")
    if not mixer.attends:
        rows = [replace(row, kernel="product", why=help_of(type(mixer)), fast=True) for row in rows]
    if "cross" in stack.blocks[i].sublayers:  # type: ignore[operator]
        cross = replace(training, own=False, mask=FULL, scheme=stack.cross_scheme)
        rows += two_rows("cross", config.positions_at("cross"), cross, reads=False)
    return rows


def two_rows(layer: str, positions: str, training: Situation, reads: bool) -> list[Row]:
    """In training, and in use: an encoder reads a whole source, a decoder adds a token to its cache."""
    used = replace(training, dropout=0.0, learning=False)
    used = used if reads else replace(used, queries=1, own=False)
    times = {
        f"training, {training.queries} tokens": training,
        "reading a source" if reads else "decoding a token": used,
    }
    choices = {when: choose(situation) for when, situation in times.items()}
    return [Row(layer, positions, when, c.kernel, c.why, c.fast) for when, c in choices.items()]


def recurrent_rows(model: nn.Module, length: int) -> list[Row]:
    """Of layers of cells: all steps as one fused kernel, or a scan, step by step; a decoder that attends has one in which
    every step looks first."""
    rows = []
    for path, module in model.named_modules():
        reads = path == "encoder" or path.startswith("body")
        padded = path == "encoder" or bool(getattr(module, "bidirectional", False))
        if isinstance(module, Attentive):
            rows += step_rows("decoder.0", "scan", "each step looks at the source with the state of the last", length)
        elif isinstance(module, Recurrent):
            first, n = 1 if path.endswith("above") else 0, len(module.layers)
            span = f"{first}-{first + n - 1}" if n > 1 else f"{first}"
            rows += step_rows(
                f"{path.removeprefix('body.').split('.')[0]}.{span}", *how_cells_run(module, padded), length, reads
            )
    return rows


def how_cells_run(module: Recurrent, padded: bool) -> tuple[str, str]:
    if module.fuses_padded if padded else module.fuses:
        return "fused", "all steps are one kernel, of cuDNN or oneDNN"
    cell = next(cell for cell in module.modules() if isinstance(cell, Cell))
    if cell.input_norm is not None:
        return "scan", "no fused kernel has the norms inside these cells"
    if cell.fused:
        return "scan", "the fused kernel of this cell cannot be told of padding"
    return "scan", f"there is no fused kernel for {type(cell).__name__}"


def step_rows(layer: str, kernel: str, why: str, length: int, reads: bool = False) -> list[Row]:
    """In training, and in use."""
    training = Row(layer, "none", f"training, {length} tokens", kernel, why, kernel == "fused")
    if reads:
        return [training, replace(training, when="reading a source")]
    return [training, Row(layer, "none", "decoding a token", "step", "a step is a few products", True)]


def table(rows: Sequence[Row]) -> str:
    """Rows under their names; `!` marks what is slower than it could be."""
    cells = [("layer", "positions", "when", "kernel", "why")]
    cells += [(row.layer, row.positions, row.when, row.kernel, row.why) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    marks = [" ", *("  " if row.fast else "! " for row in rows)]
    lines = [
        mark.ljust(2) + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for mark, line in zip(marks, cells, strict=True)
    ]
    return "\n".join(lines + (["! not on the fast path"] if not all(row.fast for row in rows) else []))


def recipe_of(target: Path, settings: Mapping[str, Any]) -> Config:
    """The recipe of a run (finished or not), or what a model folder says in its place, with settings written over it."""
    recipe = target / "config.toml" if exists(target / "config.toml") else target
    if (exists(recipe) and recipe.is_file()) or recipe.suffix == ".toml":
        return built(recipes.load(recipe), settings)
    path = model_folder.find(target) / "config.json"
    try:
        return built({"model": read_json(path)["model"]}, settings)
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise RegardError(f"{path} is not a model's configuration ({type(error).__name__}: {error})") from None


def built(values: dict[str, Any], settings: Mapping[str, Any]) -> Config:
    """With the style of the preset where nothing is said, and the answers that its task asks for."""
    config = recipes.build({**recipes.override(values, settings), "model": model_settings(values, settings)}, Config)
    return replace(config, model=replace(config.model, answer=ANSWERS.get(config.task, config.model.answer)))


def kind_of_device(name: str) -> str:
    """cpu or cuda, whether it is here or not."""
    kind = pick_device(name).type if name == "auto" else name.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise RegardError(f"unknown device '{name}': use auto, cpu, cuda or cuda:N")
    return kind
