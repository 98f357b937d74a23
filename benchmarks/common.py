"""Shared parts of the benchmarks: clocks, physical limits, models by size, and a report that continues when a section fails.

Figures are comparable within one run only. A peer's row says how many times better Regard's figure for the same work is. The
last column is the share of what the device can do at best, measured just before in the same process.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from datetime import date
from fnmatch import fnmatch
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
from torch import nn

from regard.config import ModelConfig
from regard.device import describe
from regard.models.architectures import make_model, preset, resolve
from regard.text.special_tokens import DEFAULT_SPECIAL_TOKENS

LOWER_IS_BETTER = {"s", "ms", "GiB"}
TINY = {"n_decoder_layers": 2, "d_model": 32, "n_heads": 2, "d_ff": 64, "max_len": 64}
LLAMA = {"n_decoder_layers": 24, "d_model": 2048, "n_heads": 16, "d_ff": 5504, "max_len": 2048}  # 1.3B parameters
PACKAGES = ("torch", "triton", "transformers", "tokenizers", "numpy")


def parser(doc: str | None, sections: Iterable[str], peers: Iterable[str], default: str) -> argparse.ArgumentParser:
    """Return a parser with the options of every benchmark; a script adds its own."""
    options = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", default="*", help=f"names or patterns, by commas, of {', '.join(sections)}")
    options.add_argument(
        "--peers", default=default, help=f"none, or by commas of {', '.join(peers)} (default {default})"
    )
    options.add_argument("--repeats", type=int, default=10, help="timed repeats; the median is reported")
    options.add_argument(
        "--tiny", action="store_true", help="tiny sizes, to test that it runs; the figures mean nothing"
    )
    options.add_argument("--json", type=Path, help="write all figures to this file")
    options.add_argument("--date", default=str(date.today()), help="date to write into the JSON")
    return options


# ---- clocks -----------------------------------------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def wall(run: Callable[[], Any], device: torch.device) -> float:
    """Return the seconds of one call, host and device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def seconds(run: Callable[[], Any], device: torch.device, repeats: int, each: int = 1) -> float:
    """Return the seconds of one call: the median of repeats of `each` calls by the device's clock. The caller warms up."""
    if device.type != "cuda":
        return statistics.median(wall(run, device) for _ in range(repeats))
    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(each):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / each)
    return statistics.median(times)


def compiled_graphs() -> int:
    """Return how many graphs torch has compiled so far; if the number stays the same, nothing was compiled in between."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def reset_memory(device: torch.device, compiler: bool = True) -> None:
    """Free memory, and reset the compiler, as in a new process."""
    gc.collect()
    if compiler:
        torch._dynamo.reset()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> float:
    """Return the peak in GiB since `reset_memory`."""
    return torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0


def measure_limits(device: torch.device, tiny: bool = False) -> dict[str, float]:
    """Return the FLOP/s of a large bf16 matrix product, and the bytes per second of a copy, counting reads and writes."""
    n, size = (16, 1 << 10) if tiny else (8192, 1 << 31) if device.type == "cuda" else (256, 1 << 22)
    a, b = (torch.randn(n, n, device=device, dtype=torch.bfloat16) for _ in range(2))
    x = torch.empty(size, device=device, dtype=torch.uint8)
    y = torch.empty_like(x)
    for run in (lambda: a @ b, lambda: y.copy_(x)):
        wall(lambda run=run: [run() for _ in range(3)], device)
    return {
        "matmul": 2 * n**3 / seconds(lambda: a @ b, device, 15),
        "copy": 2 * size / seconds(lambda: y.copy_(x), device, 15),
    }


# ---- models -----------------------------------------------------------------------------------------------------------


def sizes(name: str, tiny: bool = False, **settings: Any) -> ModelConfig:
    """Return a preset with some settings, resolved; if `tiny`, a model of the same kind that is small enough for a test."""
    if tiny:
        settings |= TINY | ({"n_encoder_layers": 2} if name.startswith("transformer") else {})
        settings |= {key: 97 for key in settings if key.endswith("_vocab")}
    return resolve(preset(name, **{**DEFAULT_SPECIAL_TOKENS.model_settings(), **settings}))


def joint(size: int) -> dict[str, int]:
    return {"source_vocab": size, "target_vocab": size}


def make_random_model(config: ModelConfig, device: torch.device) -> nn.Module:
    """Return a model with random weights, created on the device."""
    torch.manual_seed(0)
    with device:
        return make_model(config).to(device)


# ---- the report -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One measured figure."""

    what: str  # the work
    who: str  # regard, or a peer
    value: float
    unit: str
    limit: float | None = None  # measured share of the physical limit


class Report:
    """The figures of a benchmark: printed as they are measured, then as a table and as JSON."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device = options, device
        if options.tiny:
            torch.set_num_threads(1)
        self.rows: list[Row] = []
        self.notes: list[str] = []
        self.failed: list[str] = []
        self.limits = measure_limits(device, options.tiny)
        self.peers = [] if options.peers == "none" else options.peers.split(",")
        flops, copied = self.limits["matmul"] / 1e12, self.limits["copy"] / 1e12
        self.note(f"{describe(device)}: {flops:.3g} TFLOP/s in a bf16 product, {copied:.3g} TB/s in a copy")

    def put(self, what: str, who: str, value: float, unit: str, limit: float | None = None) -> None:
        self.rows.append(Row(what, who, value, unit, limit))
        print(f"  {what}, {who}: {format_figure(value)} {unit}", flush=True)

    def note(self, line: str) -> None:
        self.notes.append(line)
        print(f"  {line}", flush=True)

    def regard(self, what: str) -> float | None:
        """Return Regard's figure for some work, if it was measured."""
        return next((row.value for row in self.rows if (row.what, row.who) == (what, "regard")), None)

    def wanted(self, name: str) -> bool:
        return any(fnmatch(name, pattern) for pattern in self.options.only.split(","))

    def section(self, name: str, run: Callable[[Report], None]) -> None:
        """Run one section, if it was asked for. A section that fails is reported in one line, and the next one runs."""
        if not self.wanted(name):
            return
        print(f"{name}", flush=True)
        start = time.perf_counter()
        try:
            reset_memory(self.device)
            run(self)
        except Exception as error:
            self.failed.append(name)
            self.note(f"{name} failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
        print(f"  [{time.perf_counter() - start:.0f} s]", flush=True)

    def table(self) -> str:
        """Return lines of: work, who, figure, unit, how many times better Regard is, share of the limit."""
        cells = [("work", "who", "figure", "unit", "regard", "of limit")]
        for row in self.rows:
            limit = "" if row.limit is None else f"{100 * row.limit:.1f}%"
            cells.append((row.what, row.who, format_figure(row.value), row.unit, self.ratio(row), limit))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells)

    def ratio(self, row: Row) -> str:
        own = self.regard(row.what)
        if row.who == "regard" or not own or not row.value:
            return ""
        return f"{row.value / own if row.unit in LOWER_IS_BETTER else own / row.value:.2f}x"

    def finish(self) -> int:
        """Print the table, write the JSON, and return the exit code."""
        print("\n" + self.table())
        if self.options.json:
            self.options.json.write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        return 1 if self.failed else 0

    def to_dict(self) -> dict[str, Any]:
        return {
            "date": self.options.date,
            "device": describe(self.device),
            "versions": {name: version(name) for name in PACKAGES},
            "tiny": self.options.tiny,
            "limits": self.limits,
            "rows": [asdict(row) | {"ratio": self.ratio(row)} for row in self.rows],
            "notes": self.notes,
            "failed": self.failed,
        }


def format_figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "-"
