"""`regard study three-ways`: one layer each of the three ways to read a sequence, against its length n and its width d.

Recurrence (an LSTM) costs n d^2 and takes n steps that wait for each other; a convolution costs n d^2 too, all at once, but
sees a few neighbours; attention costs n^2 d, all at once, and sees everything. Time and memory are those of a forward and a
backward pass over the same number of tokens, in few long rows or many short ones; all three read causally.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.device import autocast, set_up_device
from regard.files import write_text
from regard.kernels.cuda_graph import GraphedCallable
from regard.look.figures import Lines, draw, save
from regard.studies.finetuning import setting
from regard.studies.ways import WAYS, flops, make_layer, paths, reader
from regard.training.metrics_log import print_message

UNITS = {"seconds": ("ms", 1e3), "flops": ("GFLOP", 1e-9), "bytes": ("MB", 1e-6)}


@dataclass(frozen=True)
class Sizes:
    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    tokens: int  # of a batch, whatever its rows' length
    repeats: int = 5
    paths: tuple[int, ...] = (16, 64, 256)  # lengths at which paths are measured


ON_GPU = Sizes((64, 128, 256, 512, 1024, 2048, 4096), (64, 256, 1024), tokens=65536)
ON_CPU = Sizes((64, 128, 256, 512, 1024, 2048), (64, 256, 1024), tokens=2048)
QUICK = Sizes((64, 128, 256, 512, 1024), (64, 256), tokens=1024)


def study(out: Path, device: str = "auto", quick: bool = False) -> Path:
    """Write results.json, table.md and three-ways.png into `out`, which is returned."""
    where, dtype = set_up_device(TrainConfig(device=device))
    sizes = QUICK if quick else ON_GPU if where.type == "cuda" else ON_CPU
    results: dict[str, Any] = {"setting": setting(str(where), quick), "sizes": vars(sizes)}
    results["precision"] = str(dtype).removeprefix("torch.")
    results["memory"] = "the peak of a pass" if where.type == "cuda" else "what is kept for the backward pass"
    results["cells"] = [cell for d in sizes.widths for cell in measure(d, sizes, where, dtype)]
    results["paths"] = {str(n): paths(n) for n in sizes.paths}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", table(results))
    save(picture(results), out / "three-ways.png")
    return out


# ---- time and memory --------------------------------------------------------------------------------------------------


def measure(d: int, sizes: Sizes, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """At all lengths, one width. On a GPU as training runs them: compiled where not fused already, and recorded."""
    layers = {way: make_layer(way, d).to(device) for way in WAYS}
    if device.type == "cuda":
        torch._dynamo.reset()
        for way in WAYS[1:]:
            layers[way].compile(dynamic=True)
    cells: list[dict[str, Any]] = []
    for n in sizes.lengths:
        print_message(f"width {d}, length {n:,}")
        rows = max(1, sizes.tokens // n)
        for way, layer in layers.items():
            work = make_work(layer, rows, n, d, device, dtype)
            work()  # compiles
            cell = {"width": d, "length": n, "rows": rows, "way": way, "flops": 3 * rows * flops(way, n, d)}
            cells.append({**cell, "bytes": memory(work, device), "seconds": seconds(work, device, sizes.repeats)})
    return cells


def make_work(
    layer: nn.Module, rows: int, n: int, d: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """A forward and a backward pass."""
    x = torch.randn(rows, n, d, device=device, dtype=dtype, requires_grad=True)
    read, leaves = reader(layer, rows, n, device), (x, *layer.parameters())

    def work() -> None:
        with autocast(device, dtype):
            y = read(x)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return work


def memory(work: Callable[[], None], device: torch.device) -> int:
    """Bytes: on a GPU the peak above what was there before, else what the forward pass keeps for the backward pass."""
    if device.type != "cuda":
        return kept(work)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kept(work: Callable[[], None]) -> int:
    """Weights and inputs are there anyway, so leaves are not counted; tensors that share memory are counted once."""
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not x.is_leaf or not x.requires_grad:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        work()
    return sum(found.values())


def seconds(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """The median."""
    if device.type != "cuda":
        return statistics.median(wall(work) for _ in range(repeats))
    replayed, times = GraphedCallable(work), []
    for _ in range(2):  # runs, then records
        replayed()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replayed()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def wall(work: Callable[[], None]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# ---- report -----------------------------------------------------------------------------------------------------------


def crossing(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> str:
    """The length from which `ours` is above `theirs` for good, between two measured ones on a logarithmic scale."""
    gaps = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    below = [i for i, gap in enumerate(gaps) if gap <= 0]
    if not below:
        return f"< {lengths[0]:,}"
    if (i := below[-1]) == len(gaps) - 1:
        return f"> {lengths[-1]:,}"
    share = -gaps[i] / (gaps[i + 1] - gaps[i])
    return f"{lengths[i] * (lengths[i + 1] / lengths[i]) ** share:,.0f}"


def column(results: dict[str, Any], width: int, way: str, what: str) -> list[float]:
    """One number of one layer, by length."""
    return [cell[what] for cell in results["cells"] if (cell["width"], cell["way"]) == (width, way)]


def table(results: dict[str, Any]) -> str:
    sizes, where = results["sizes"], results["setting"]
    note = (
        f"Forward and backward of one layer over {sizes['tokens']:,} tokens, in bold where n = d; "
        f"memory: {results['memory']}. {where['device']}, {results['precision']}, torch {where['torch']}, "
        f"{where['date'][:10]}."
    )
    parts = [costs(results), note, crossings(results), path_table(results), f"```\n{where['command']}\n```"]
    return "\n\n".join(parts) + "\n"


def markdown(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---:"] * len(head), *lines])


def costs(results: dict[str, Any]) -> str:
    head, lines = ["d", "n", *(f"{way}, {unit}" for unit, _ in UNITS.values() for way in WAYS)], []
    for d in results["sizes"]["widths"]:
        found = [
            [scale * x for x in column(results, d, way, what)] for what, (_, scale) in UNITS.items() for way in WAYS
        ]
        for n, *numbers in zip(results["sizes"]["lengths"], *found, strict=True):
            lines.append([str(d), f"**{n}**" if n == d else str(n), *(f"{x:,.3g}" for x in numbers)])
    return markdown(head, lines)


def crossings(results: dict[str, Any]) -> str:
    """From which length on attention costs more than the others."""
    lengths, lines = results["sizes"]["lengths"], []
    for d in results["sizes"]["widths"]:
        pairs = [
            [column(results, d, one, what) for one in ("attention", way)]
            for what in ("flops", "seconds")
            for way in WAYS[:2]
        ]
        lines.append([str(d), *(crossing(lengths, *pair) for pair in pairs)])
    head = [f"attention above {way}, {what}: n" for what in ("FLOPs", "time") for way in WAYS[:2]]
    return markdown(["d", *head], lines)


def path_table(results: dict[str, Any]) -> str:
    found = results["paths"]
    head = ["n", "LSTM: steps", "convolution: layers", "dilated: layers", "attention: layers"]
    return markdown(head, [[n, *(f"{count:,}" for count in row.values())] for n, row in found.items()])


def picture(results: dict[str, Any]) -> Any:
    """A column of panels for each width: time, arithmetic, memory; a line where n = d."""
    sizes, panels = results["sizes"], []
    for what, (unit, scale) in UNITS.items():
        for d in sizes["widths"]:
            lines = {way: scale * np.array(column(results, d, way, what)) for way in WAYS}
            panels.append(
                Lines(f"width {d}", np.array(sizes["lengths"]), lines, "length n", unit, log=True, powers=True)
            )
    figure = draw("Three ways to read a sequence: forward and backward of one layer", panels, len(sizes["widths"]))
    for axes, d in zip(figure.axes, sizes["widths"] * 3, strict=True):
        axes.axvline(d, color="#999999", linewidth=1, zorder=0)
    return figure
