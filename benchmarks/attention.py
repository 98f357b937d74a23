"""Causal training attention with each position scheme against plain causal attention, in one run on one GPU.

    python benchmarks/attention.py [--out results.json]

Every row is a forward and a backward pass in a CUDA graph (as Regard trains), including the preparation of the attention
plan: the cost in a model of one layer. `once` is the part that deeper models pay once for all layers (FIRE: nothing, since
each layer has its own). Ratios are of the whole, to `scaled_dot_product_attention(is_causal=True)` with torch's choice of
kernel. The second table is memory against length.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard.config import ModelConfig
from regard.kernels.attention_functions import rotate
from regard.kernels.masks import CAUSAL
from regard.kernels.toeplitz_attention import ToeplitzBias
from regard.layers.attention_kernels import make_plan
from regard.layers.kernel_selection import Situation, choose
from regard.layers.positions.scheme import make_positions

SCHEMES = ("rope", "alibi", "t5", "kerple-log", "kerple-power", "fire")
Step = Callable[[], None]


def inputs(b: int, h: int, t: int, d: int) -> tuple[list[Tensor], Tensor]:
    torch.manual_seed(0)
    q, k, v, g = (torch.randn(b, h, t, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    return [x.requires_grad_() for x in (q, k, v)], g


def plain(qkv: list[Tensor], g: Tensor, backend: SDPBackend | None = None) -> Step:
    def step() -> None:
        with sdpa_kernel(backend) if backend else torch.enable_grad():
            out = F.scaled_dot_product_attention(*qkv, is_causal=True)
        out.backward(g)

    return step


def with_scheme(name: str, qkv: list[Tensor], g: Tensor) -> tuple[Step, Step, str]:
    """Return a training step of attention, the part that is done once for all layers, and the name of the kernel."""
    b, h, t, d = qkv[0].shape
    config = ModelConfig(positions=name, d_model=h * d, n_heads=h, n_kv_heads=h, d_head=d, max_len=t)
    scheme = make_positions(config, "decoder").cuda()
    positions = torch.arange(t, device="cuda").expand(b, t).contiguous()
    turn = torch.compile(rotate)

    def step() -> None:
        plan = make_plan(CAUSAL, positions, positions, scheme, d_head=d)
        rotation = scheme.rotation(positions)
        q, k = (turn(x, rotation) for x in qkv[:2])
        plan(q, k, qkv[2], 0.0).backward(g)

    def once() -> None:
        plan = make_plan(CAUSAL, positions, positions, scheme, d_head=d)
        scheme.rotation(positions)
        if isinstance(plan.kernel_input, ToeplitzBias) and plan.kernel_input.learned.requires_grad:
            plan.kernel_input.learned.backward(torch.zeros_like(plan.kernel_input.learned))

    return step, once, choose(Situation("cuda", t, True, CAUSAL, scheme, d)).kernel


def milliseconds(step: Step, leaves: list[Tensor]) -> float:
    """Return the time of one replay: the median of five measurements of ten replays."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    times = []
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(10):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 10)
    for x in leaves:
        x.grad = None
    return statistics.median(times)


def speed(b: int, h: int, t: int, d: int) -> list[dict[str, object]]:
    qkv, g = inputs(b, h, t, d)
    rows: list[dict[str, object]] = [
        {"scheme": "none", "kernel": "sdpa", "ms": milliseconds(plain(qkv, g), qkv), "once": 0.0}
    ]
    flash = milliseconds(plain(qkv, g, SDPBackend.FLASH_ATTENTION), qkv)
    rows.append({"scheme": "none", "kernel": "sdpa, flash", "ms": flash, "once": 0.0})
    for name in SCHEMES:
        step, once, kernel = with_scheme(name, qkv, g)
        shared = 0.0 if name == "fire" else milliseconds(once, qkv)
        rows.append({"scheme": name, "kernel": kernel, "ms": milliseconds(step, qkv), "once": shared})
    base = rows[0]["ms"]
    return [row | {"ratio": row["ms"] / base, "to flash": row["ms"] / flash} for row in rows]  # type: ignore[operator]


def memory(h: int, d: int, lengths: tuple[int, ...]) -> list[dict[str, object]]:
    """Return the bytes per token of one step beyond its inputs and their gradients, with one row."""
    rows = []
    for name in ("none", *SCHEMES):
        row: dict[str, object] = {"scheme": name}
        for t in lengths:
            qkv, g = inputs(1, h, t, d)
            step = plain(qkv, g) if name == "none" else with_scheme(name, qkv, g)[0]
            step()  # makes the gradients
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            row[str(t)] = (torch.cuda.max_memory_allocated() - before) / t
        rows.append(row)
    return rows


def show(rows: list[dict[str, object]]) -> None:
    print("| " + " | ".join(rows[0]) + " |\n|" + "---|" * len(rows[0]))
    for row in rows:
        cells = (
            f"{x:,.0f}" if isinstance(x, float) and x > 100 else f"{x:.2f}" if isinstance(x, float) else str(x)
            for x in row.values()
        )
        print("| " + " | ".join(cells) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    out = parser.parse_args().out
    results = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    results["speed"] = speed(8, 16, 4096, 64)  # type: ignore[assignment]
    show(results["speed"])  # type: ignore[arg-type]
    print("\nbytes a token beyond inputs and their gradients")
    results["memory"] = memory(16, 64, (4096, 16384, 65536))  # type: ignore[assignment]
    show(results["memory"])  # type: ignore[arg-type]
    if out:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
