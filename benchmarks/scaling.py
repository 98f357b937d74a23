"""Training by several processes: the cost of DDP and FSDP2 with one, and weak scaling with more.

    python benchmarks/scaling.py [--ranks 1,2,4,8] [--layouts plain,ddp,fsdp] [--model gpt2-medium] [--rows 16]

Every rank trains a language model on random tokens, `--rows` rows of `--length` tokens a step; with more ranks the global
batch grows with their number (weak scaling). The figures are tokens a second of all ranks and, as efficiency, those of one
rank of the same layout times their number. `plain` is training without torchrun, whose step is one CUDA graph; `eager` is
the same without a graph, which several processes do not use. The layouts take turns, and the best of `--repeats` is shown.

On a node of 8 GPUs with NVLink the efficiency of 8 ranks must be at least 0.9 for ddp and fsdp.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
from steps import random_batch

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.device import set_up_device
from regard.models.architectures import make_model, preset, resolve
from regard.terminal import format_table
from regard.training.objective import make_token_objective
from regard.training.parallel import SingleProcess, open_ranks
from regard.training.training_step import TrainingStep

LAYOUTS = ("plain", "eager", "ddp", "fsdp", "fsdp-eager")
PARALLEL = ("ddp", "fsdp", "fsdp-eager")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default="", help="numbers of processes; all powers of two up to the number of GPUs")
    parser.add_argument("--layouts", default="plain,eager,ddp,fsdp")
    parser.add_argument("--model", default="gpt2-medium")
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--compile", type=int, default=1)
    parser.add_argument(
        "--force", type=int, default=0, help="1: one rank uses DDP or FSDP2 too, although it needs none"
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", choices=LAYOUTS, help=argparse.SUPPRESS)  # this process is a rank
    given = parser.parse_args()
    if given.worker:
        return measure(given)
    gpus = torch.cuda.device_count()
    counts = [int(n) for n in given.ranks.split(",") if n] or [1 << i for i in range(max(1, gpus).bit_length())]
    best: dict[tuple[str, int], dict[str, float]] = {}
    for _ in range(given.repeats):
        for layout in given.layouts.split(","):
            for count in counts if layout in PARALLEL else [1]:
                found = run(layout, count, given)
                key = layout, count
                best[key] = max(best.get(key, found), found, key=lambda one: one["tokens/s"])
    rows = [("layout", "ranks", "tokens/s", "efficiency", "of plain", "GiB a rank", "mean loss")]
    for (layout, count), found in best.items():
        alone = best.get((layout, 1), found)["tokens/s"] * count
        plain = best.get(("plain", 1), found)["tokens/s"] * count
        figures = (found["tokens/s"] / alone, found["tokens/s"] / plain)
        speed, memory, loss = f"{found['tokens/s']:,.0f}", f"{found['GiB']:.2f}", f"{found['loss']:.4f}"
        rows.append((layout, str(count), speed, *(f"{x:.3f}" for x in figures), memory, loss))
    print("\n".join(format_table(rows, 1)))
    if given.json:
        given.json.write_text(json.dumps([{"layout": k[0], "ranks": k[1], **v} for k, v in best.items()]) + "\n")


def run(layout: str, count: int, given: argparse.Namespace) -> dict[str, float]:
    """Measure a layout with so many processes; return what its first rank printed."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"]
    names = ("model", "rows", "length", "steps", "device", "compile", "force")
    options = [text for name in names for text in (f"--{name}", str(getattr(given, name)))]
    command = [sys.executable, *(launcher if layout in PARALLEL else []), __file__, "--worker", layout, *options]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(f"{layout} with {count} ranks failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(given: argparse.Namespace) -> None:
    layout = given.worker
    config = TrainConfig(
        parallel="fsdp" if layout.startswith("fsdp") else "ddp",
        device=given.device,
        compile=bool(given.compile),
        warmup=10,
    )
    context = open_ranks(config) if layout in PARALLEL else nullcontext(SingleProcess())
    with context as ranks:
        device, dtype = set_up_device(replace(config, device=ranks.device(config)))
        torch.manual_seed(0)
        sizes = {"max_len": given.length, "target_vocab": 32000, "source_vocab": 32000}
        sizes |= {"dropout": 0.0, "attention_dropout": 0.0, "ff_dropout": 0.0}
        model = make_model(resolve(replace(preset(given.model), **sizes))).to(device).train()
        if given.force and layout in PARALLEL:  # one rank alone would train as a process without others
            ranks.count = max(2, ranks.count)
            ranks.is_sharded = layout.startswith("fsdp")
        step = TrainingStep(make_token_objective(model, config), config, device, dtype, ranks)
        if layout.endswith("eager"):
            step.is_graphed = False
        batches = [random_batch(model.config, given.rows * ranks.data_count, given.length, device) for _ in range(4)]
        seconds = time_steps(step, batches, given.steps, device)
        tokens = given.rows * given.length * given.steps * ranks.data_count
        peak = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else 0.0
        if ranks.is_first:
            loss = float(step.sums[1] / step.sums[2])
            print(json.dumps({"tokens/s": tokens / seconds, "GiB": peak, "loss": loss}), flush=True)


def time_steps(step: TrainingStep, batches: list[Batch], steps: int, device: torch.device) -> float:
    """Return the seconds of so many steps, after as many that compile and capture."""
    for i in range(max(5, steps // 2) + 2 * steps):
        if i == max(5, steps // 2) + steps:
            wait(device)
            begun = time.perf_counter()
        step([batches[i % len(batches)]], 1e-4)
    wait(device)
    return time.perf_counter() - begun


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
