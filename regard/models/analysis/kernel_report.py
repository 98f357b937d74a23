"""The report of `regard doctor --explain`: which kernel each layer of a model uses in training and decoding, and why."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn

from regard.config import ModelConfig
from regard.config.registry import help_of
from regard.kernels.masks import FULL, with_window
from regard.layers.cells import Cell
from regard.layers.kernel_selection import Situation, choose
from regard.layers.recurrent import Recurrent
from regard.layers.recurrent_attention import AttentionCell
from regard.layers.stack import Stack


@dataclass(frozen=True)
class KernelChoice:
    """The kernel of one layer, or of equal layers, in one situation."""

    layer: str  # decoder.0-5.self: blocks 0 to 5 have the same kernel
    positions: str
    when: str  # training, reading a source or decoding a token
    kernel: str
    why: str
    fast: bool  # False: a slower kernel than usual


def explain_model(model: nn.Module, device: str, length: int) -> list[KernelChoice]:
    """Return the kernels of all layers; neighbouring blocks with the same kernels share their lines."""
    rows = choices_of_recurrent(model, length)
    for name, stack in model.named_modules():
        if not isinstance(stack, Stack):
            continue
        each = [choices_of_block(stack, i, name, model.config, device, length) for i in range(len(stack.blocks))]  # type: ignore[arg-type]
        for same, group in itertools.groupby(range(len(each)), key=each.__getitem__):
            blocks = [*group]
            span = f"{blocks[0]}-{blocks[-1]}" if len(blocks) > 1 else f"{blocks[0]}"
            rows += [replace(row, layer=f"{name}.{span}.{row.layer}") for row in same]
    return rows


def choices_of_block(
    stack: Stack, i: int, place: str, config: ModelConfig, device: str, length: int
) -> list[KernelChoice]:
    """Return the kernels of block i; `layer` is only `self` or `cross` here."""
    scheme = stack.schemes[i % len(stack.schemes)]  # one for all blocks, or one each
    mixer = stack.mixers[i]
    mask = with_window(stack.mask, mixer.window)
    training = Situation(device, length, True, mask, scheme, stack.d_head, stack.attention_dropout, keys=length)  # type: ignore[arg-type]
    rows = choices_of_layer("self", config.positions_at(place), training, place == "encoder")
    if not mixer.attends:
        rows = [replace(row, kernel="product", why=help_of(type(mixer)), fast=True) for row in rows]
    if "cross" in stack.blocks[i].sublayers:  # type: ignore[operator]
        cross = replace(training, self_attention=False, mask=FULL, scheme=stack.cross_scheme)
        rows += choices_of_layer("cross", config.positions_at("cross"), cross, reads=False)
    return rows


def choices_of_layer(layer: str, positions: str, training: Situation, reads: bool) -> list[KernelChoice]:
    """Return the kernels in training and at inference, where an encoder reads a whole source (`reads`) and a decoder adds
    one token to its cache."""
    used = replace(training, dropout=0.0, needs_grad=False)
    used = used if reads else replace(used, queries=1, self_attention=False)
    times = {
        f"training, {training.queries} tokens": training,
        "reading a source" if reads else "decoding a token": used,
    }
    choices = {when: choose(situation) for when, situation in times.items()}
    return [KernelChoice(layer, positions, when, c.kernel, c.why, c.fast) for when, c in choices.items()]


def choices_of_recurrent(model: nn.Module, length: int) -> list[KernelChoice]:
    """Return the kernels of recurrent layers: one fused kernel for all steps, or a scan, step by step; the first layer of a
    decoder with attention is a scan, since every step attends first."""
    rows = []
    for path, module in model.named_modules():
        reads = path.startswith(("encoder", "body"))
        padded = path.startswith("encoder") or bool(getattr(module, "bidirectional", False))
        if isinstance(module, AttentionCell):
            rows += choices_of_cells(
                "decoder.0", "scan", "each step looks at the source with the state of the last", length
            )
        elif isinstance(module, Recurrent):
            first, n = 1 if path.endswith("above") else 0, len(module.layers)
            span = f"{first}-{first + n - 1}" if n > 1 else f"{first}"
            name = path.removeprefix("body.").split(".")[0]
            if path.endswith("columns.backward_"):
                continue  # its kernels are those of the other column
            rows += choices_of_cells(f"{name}.{span}", *explain_cells(module, padded), length, reads)
    return rows


def explain_cells(module: Recurrent, padded: bool) -> tuple[str, str]:
    """Return the kernel of recurrent layers over a sequence, and why."""
    if module.fuses_padded if padded else module.fuses:
        return "fused", "all steps are one kernel, of cuDNN or oneDNN"
    cell = next(cell for cell in module.modules() if isinstance(cell, Cell))
    if cell.input_norm is not None:
        return "scan", "no fused kernel has the norms inside these cells"
    if cell.fused_op:
        return "scan", "the fused kernel of this cell cannot be told of padding"
    return "scan", f"there is no fused kernel for {type(cell).__name__}"


def choices_of_cells(layer: str, kernel: str, why: str, length: int, reads: bool = False) -> list[KernelChoice]:
    """Return the kernels of recurrent layers in training and at inference."""
    training = KernelChoice(layer, "none", f"training, {length} tokens", kernel, why, kernel == "fused")
    if reads:
        return [training, replace(training, when="reading a source")]
    return [training, KernelChoice(layer, "none", "decoding a token", "step", "a step is a few products", True)]


def format_choices(rows: Sequence[KernelChoice]) -> str:
    """Return a table of the choices; `!` marks those that are not on the fast path."""
    cells = [("layer", "positions", "when", "kernel", "why")]
    cells += [(row.layer, row.positions, row.when, row.kernel, row.why) for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    marks = [" ", *("  " if row.fast else "! " for row in rows)]
    lines = [
        mark.ljust(2) + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for mark, line in zip(marks, cells, strict=True)
    ]
    return "\n".join(lines + (["! not on the fast path"] if not all(row.fast for row in rows) else []))
