"""`regard study three-ways`: an LSTM, a convolution and an attention layer against the length n and the width d.

An LSTM costs n d^2 in n sequential steps. A convolution costs n d^2 in parallel, but sees a few neighbours. Attention costs
n^2 d in parallel and sees everything. Time and memory are those of a forward and a backward pass over the same number of
tokens, in few long rows or many short ones; all three layers are causal.
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
import torch.nn.functional as F
from torch import Tensor, nn

from regard.config import ModelConfig, TrainConfig
from regard.config.registry import find
from regard.device import autocast, set_up_device
from regard.files import write_text
from regard.kernels.cuda_graph import GraphedCallable
from regard.kernels.masks import CAUSAL
from regard.layers.context import Context, PrepareRequest
from regard.layers.part import Place, make_part
from regard.layers.recurrent import Recurrent
from regard.look.figures import Lines, draw, save
from regard.models.initialization import initialize
from regard.studies.job_pool import describe_setting
from regard.training.metrics_log import print_message

LAYER_TYPES = ("LSTM", "convolution", "attention")
KERNEL = 3  # the default of [model.convolution]
UNITS = {"seconds": ("ms", 1e3), "flops": ("GFLOP", 1e-9), "bytes": ("MB", 1e-6)}


@dataclass(frozen=True)
class ComparisonSizes:
    """The lengths and widths that are measured."""

    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    tokens: int  # of a batch, in many short rows or few long ones
    repeats: int = 5
    paths: tuple[int, ...] = (16, 64, 256)  # lengths at which path lengths are measured


ON_GPU = ComparisonSizes((64, 128, 256, 512, 1024, 2048, 4096), (64, 256, 1024), tokens=65536)
ON_CPU = ComparisonSizes((64, 128, 256, 512, 1024, 2048), (64, 256, 1024), tokens=2048)
QUICK = ComparisonSizes((64, 128, 256, 512, 1024), (64, 256), tokens=1024)


def study(out: Path, device: str = "auto", quick: bool = False) -> Path:
    """Write results.json, table.md and three-ways.png into `out`, and return it."""
    where, dtype = set_up_device(TrainConfig(device=device))
    sizes = QUICK if quick else ON_GPU if where.type == "cuda" else ON_CPU
    results: dict[str, Any] = {"setting": describe_setting(str(where), quick), "sizes": vars(sizes)}
    results["precision"] = str(dtype).removeprefix("torch.")
    results["memory"] = "the peak of a pass" if where.type == "cuda" else "what is kept for the backward pass"
    results["cells"] = [cell for d in sizes.widths for cell in measure_width(d, sizes, where, dtype)]
    results["paths"] = {str(n): measure_paths(n) for n in sizes.paths}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    save(plot_results(results), out / "three-ways.png")
    return out


# ---- layers -----------------------------------------------------------------------------------------------------------


def count_flops(layer_type: str, n: int, d: int) -> int:
    """Return the FLOPs of the forward pass of one row: matrix products alone, attention as if it had no mask."""
    flops_per_token = {
        "LSTM": 16 * d * d,  # four gates, each a product of input and of state
        "convolution": 4 * KERNEL * d * d,  # to 2d channels: gates and values
        "attention": 8 * d * d + 4 * n * d,  # q, k, v and output projections; scores and weighted values
    }
    return n * flops_per_token[layer_type]


def make_layer(layer_type: str, d: int, dilation: int = 1) -> nn.Module:
    """Return a causal layer as it starts training."""
    heads = max(1, d // 64)
    config = ModelConfig(
        d_model=d, n_heads=heads, n_kv_heads=heads, d_head=d // heads, mixer=(layer_type,),
        parts={"convolution": find("mixer", "convolution").Settings(kernel=KERNEL, dilations=(dilation,))},
    )  # fmt: skip
    place = Place("decoder", causal=True)
    layer: nn.Module = (
        Recurrent("lstm", d, [d]) if layer_type == "LSTM" else make_part("mixer", layer_type, config, place)
    )
    initialize(layer)
    return layer


def make_forward(layer: nn.Module, rows: int, n: int, device: torch.device) -> Callable[[Tensor], Tensor]:
    """Return the layer as a function of x (rows, n, C) alone."""
    if isinstance(layer, Recurrent):
        return lambda x: layer(x)[0]
    positions = torch.arange(n, device=device).repeat(rows, 1)
    request = PrepareRequest(positions, positions, CAUSAL, find("positions", "none")(), None, layer.training)
    ctx = Context(positions, layer.prepare(request))  # type: ignore[operator]
    return lambda x: layer(x, ctx)


# ---- time and memory --------------------------------------------------------------------------------------------------


def measure_width(d: int, sizes: ComparisonSizes, device: torch.device, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Measure all layers of one width at all lengths.

    On a GPU they run as in training: compiled where they are not fused already, and in a CUDA graph.
    """
    layers = {layer_type: make_layer(layer_type, d).to(device) for layer_type in LAYER_TYPES}
    if device.type == "cuda":
        torch._dynamo.reset()
        for layer_type in LAYER_TYPES[1:]:
            layers[layer_type].compile(dynamic=True)
    cells: list[dict[str, Any]] = []
    for n in sizes.lengths:
        print_message(f"width {d}, length {n:,}")
        rows = max(1, sizes.tokens // n)
        for layer_type, layer in layers.items():
            work = make_training_pass(layer, rows, n, d, device, dtype)
            work()  # compiles
            cell = {
                "width": d,
                "length": n,
                "rows": rows,
                "way": layer_type,
                "flops": 3 * rows * count_flops(layer_type, n, d),
            }
            cells.append(
                {**cell, "bytes": measure_memory(work, device), "seconds": measure_seconds(work, device, sizes.repeats)}
            )
    return cells


def make_training_pass(
    layer: nn.Module, rows: int, n: int, d: int, device: torch.device, dtype: torch.dtype
) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass."""
    x = torch.randn(rows, n, d, device=device, dtype=dtype, requires_grad=True)
    read, leaves = make_forward(layer, rows, n, device), (x, *layer.parameters())

    def work() -> None:
        with autocast(device, dtype):
            y = read(x)
        torch.autograd.grad(y, leaves, torch.ones_like(y))

    return work


def measure_memory(work: Callable[[], None], device: torch.device) -> int:
    """Return bytes: on a GPU the peak above what was allocated before, else what autograd saves for the backward pass."""
    if device.type != "cuda":
        return count_saved_bytes(work)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def count_saved_bytes(work: Callable[[], None]) -> int:
    """Return the bytes that autograd saves for the backward pass.

    Leaves (weights and inputs) are there anyway and not counted; tensors that share memory are counted once.
    """
    found: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        if not x.is_leaf or not x.requires_grad:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        work()
    return sum(found.values())


def measure_seconds(work: Callable[[], None], device: torch.device, repeats: int) -> float:
    """Return the median time of `repeats` runs."""
    if device.type != "cuda":
        return statistics.median(time_once(work) for _ in range(repeats))
    replayed, times = GraphedCallable(work), []
    for _ in range(2):  # the first call warms up, the second captures the graph
        replayed()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replayed()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def time_once(work: Callable[[], None]) -> float:
    """Return the wall-clock time of one run."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# ---- path length ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def measure_paths(n: int, d: int = 8) -> dict[str, int]:
    """Return how many steps or layers lie between the first and the last of n tokens.

    The first token is NaN, and the steps are counted until the last position is NaN too.
    """
    cpu = torch.device("cpu")
    convolution, attention = (
        make_forward(make_layer("convolution", d), 1, n, cpu),
        make_forward(make_layer("attention", d), 1, n, cpu),
    )
    return {
        "LSTM": count_hops(make_recurrent_hop(n, d), torch.zeros(1, n, 2 * d), first=1),
        "convolution": count_hops(lambda x, _: convolution(x), mark_first_token(n, d)),
        "dilated": count_hops(
            lambda x, i: make_forward(make_layer("convolution", d, KERNEL**i), 1, n, cpu)(x), mark_first_token(n, d)
        ),
        "attention": count_hops(lambda x, _: attention(x), mark_first_token(n, d)),
    }


def mark_first_token(n: int, d: int) -> Tensor:
    """Return an input (1, n, d) whose first token is NaN.

    Everything that depends on a NaN is NaN, however weak the dependence; a gradient could round to zero.
    """
    x = torch.randn(1, n, d)
    x[:, 0] = torch.nan
    return x


def make_recurrent_hop(n: int, d: int) -> Callable[[Tensor, int], Tensor]:
    """Return a function that runs one LSTM step at every position, each from its neighbour's state after the hop before."""
    layer, x = make_layer("LSTM", d), mark_first_token(n, d)[0]
    assert isinstance(layer, Recurrent)

    def hop(states: Tensor, _: int) -> Tensor:
        before = F.pad(states[0, :-1], (0, 0, 1, 0))  # (n, 2d): h and c
        return torch.cat(layer.step(x, before.tensor_split(2, -1))[1], -1)[None]

    return hop


def count_hops(hop: Callable[[Tensor, int], Tensor], x: Tensor, first: int = 0) -> int:
    """Return how many hops it takes until the last position is NaN, without the `first` ones, which only read a token."""
    count = 0
    while not x[0, -1].isnan().any():
        x, count = hop(x, count), count + 1
        assert count <= x.shape[1], "no hop leads there"
    return count - first


# ---- report -----------------------------------------------------------------------------------------------------------


def find_crossing(lengths: Sequence[int], ours: Sequence[float], theirs: Sequence[float]) -> str:
    """Return the length from which `ours` stays above `theirs`, interpolated between measured lengths on a log scale."""
    gaps = [math.log(a / b) for a, b in zip(ours, theirs, strict=True)]
    below = [i for i, gap in enumerate(gaps) if gap <= 0]
    if not below:
        return f"< {lengths[0]:,}"
    if (i := below[-1]) == len(gaps) - 1:
        return f"> {lengths[-1]:,}"
    share = -gaps[i] / (gaps[i + 1] - gaps[i])
    return f"{lengths[i] * (lengths[i + 1] / lengths[i]) ** share:,.0f}"


def select_numbers(results: dict[str, Any], width: int, layer_type: str, what: str) -> list[float]:
    """Return one number of one layer at all lengths."""
    return [cell[what] for cell in results["cells"] if (cell["width"], cell["way"]) == (width, layer_type)]


def format_table(results: dict[str, Any]) -> str:
    """Return the Markdown report."""
    sizes, where = results["sizes"], results["setting"]
    note = (
        f"Forward and backward of one layer over {sizes['tokens']:,} tokens, in bold where n = d; "
        f"memory: {results['memory']}. {where['device']}, {results['precision']}, torch {where['torch']}, "
        f"{where['date'][:10]}."
    )
    parts = [
        format_costs(results),
        note,
        format_crossings(results),
        format_paths(results),
        f"```\n{where['command']}\n```",
    ]
    return "\n\n".join(parts) + "\n"


def markdown_table(head: list[str], lines: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, ["---:"] * len(head), *lines])


def format_costs(results: dict[str, Any]) -> str:
    """Return the table of time, FLOPs and memory."""
    head, lines = ["d", "n", *(f"{layer_type}, {unit}" for unit, _ in UNITS.values() for layer_type in LAYER_TYPES)], []
    for d in results["sizes"]["widths"]:
        found = [
            [scale * x for x in select_numbers(results, d, layer_type, what)]
            for what, (_, scale) in UNITS.items()
            for layer_type in LAYER_TYPES
        ]
        for n, *numbers in zip(results["sizes"]["lengths"], *found, strict=True):
            lines.append([str(d), f"**{n}**" if n == d else str(n), *(f"{x:,.3g}" for x in numbers)])
    return markdown_table(head, lines)


def format_crossings(results: dict[str, Any]) -> str:
    """Return the table of lengths from which attention costs more than the other layers."""
    lengths, lines = results["sizes"]["lengths"], []
    for d in results["sizes"]["widths"]:
        pairs = [
            [select_numbers(results, d, one, what) for one in ("attention", layer_type)]
            for what in ("flops", "seconds")
            for layer_type in LAYER_TYPES[:2]
        ]
        lines.append([str(d), *(find_crossing(lengths, *pair) for pair in pairs)])
    head = [f"attention above {layer_type}, {what}: n" for what in ("FLOPs", "time") for layer_type in LAYER_TYPES[:2]]
    return markdown_table(["d", *head], lines)


def format_paths(results: dict[str, Any]) -> str:
    """Return the table of path lengths."""
    found = results["paths"]
    head = ["n", "LSTM: steps", "convolution: layers", "dilated: layers", "attention: layers"]
    return markdown_table(head, [[n, *(f"{count:,}" for count in row.values())] for n, row in found.items()])


def plot_results(results: dict[str, Any]) -> Any:
    """Return the figure: a column of panels for each width (time, FLOPs, memory), with a vertical line at n = d."""
    sizes, panels = results["sizes"], []
    for what, (unit, scale) in UNITS.items():
        for d in sizes["widths"]:
            lines = {
                layer_type: scale * np.array(select_numbers(results, d, layer_type, what)) for layer_type in LAYER_TYPES
            }
            panels.append(
                Lines(f"width {d}", np.array(sizes["lengths"]), lines, "length n", unit, log=True, powers=True)
            )
    figure = draw("Three ways to read a sequence: forward and backward of one layer", panels, len(sizes["widths"]))
    for axes, d in zip(figure.axes, sizes["widths"] * 3, strict=True):
        axes.axvline(d, color="#999999", linewidth=1, zorder=0)
    return figure
