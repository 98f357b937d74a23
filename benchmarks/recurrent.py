"""Recurrent layers: fused ones beside torch.nn.LSTM, and compiled scans beside a plain loop over the steps.

    python benchmarks/recurrent.py [--only lstm,lstm-layer,mut1] [--peers nn,eager] [--repeats 5] [--json FILE]

`lstm`: training a language model of two layers of 1,024. `lstm-layer`: these two layers alone, forward and backward. The
others: one layer of 512, 64 rows of 64 steps, forward and backward, compiled and in a CUDA graph as in training; `eager` is
the same cell in a loop that does everything at every step. torch.nn under autocast computes in fp16, Regard in bf16.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import Report, make_random_model, parser, reset_memory, seconds, sizes, wall
from peer_models import make_peer_step
from steps import RegardStep
from torch import Tensor, nn
from train import EACH, WARM, measure

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.device import autocast, pick_device
from regard.kernels.cuda_graph import GraphedCallable
from regard.layers.cells import Cell
from regard.layers.recurrent import Recurrent
from regard.models.initialization import initialize

Read = Callable[[Tensor], Tensor]  # (B, T, C) -> (B, T, C)
SCANS = ("gru-cho", "mut1", "mut2", "mut3")


class TorchLanguageModel(nn.Module):
    """A language model of torch.nn layers."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.body(self.embedding(ids))[0])


def lstm(report: Report) -> None:
    """Measure training of a language model: untied, with a bias in the head, without dropout."""
    tiny, device = report.options.tiny, report.device
    (rows, length), width = ((2, 16), 32) if tiny else ((256, 64), 1024)
    settings = {"d_model": width, "recurrent.d_hidden": width, "tie": "none", "head_bias": True, "dropout": 0.0}
    config = sizes("lstm-small", target_vocab=97 if tiny else 32000, max_len=length, **settings)
    words = torch.randint(5, config.target_vocab, (2, rows, length))
    batch = Batch(tuple(words.pin_memory() if device.type == "cuda" else words), rows * length)
    flops = 6 * (
        2 * 8 * width * width + config.target_vocab * width
    )  # two layers of eight width x width matrices, and the head
    step: Any = RegardStep(make_random_model(config, device), TrainConfig(label_smoothing=0.0), tiny)
    measure(report, "lstm", "regard", step, batch, flops)
    if "nn" in report.peers:
        del step
        reset_memory(device)
        theirs = TorchLanguageModel(config.target_vocab, width).to(device).train()
        step = make_peer_step(
            theirs, lambda ids, labels: F.cross_entropy(theirs(ids).flatten(0, 1), labels.flatten()), device
        )
        measure(report, "lstm", "nn", step, batch, flops)


# ---- layers alone ---------------------------------------------------------------------------------------------------------


def layer(kind: str, width: int, depth: int, device: torch.device) -> Recurrent:
    torch.manual_seed(0)
    made = Recurrent(kind, width, [width] * depth)
    initialize(made)
    return made.to(device)


def both_ways(read: Read, model: nn.Module, x: Tensor, by_out: Tensor) -> Callable[..., None]:
    """Return a function that runs forward and backward to the input and every weight, in bf16 on a GPU."""
    dtype = torch.bfloat16 if x.is_cuda else torch.float32

    def work() -> None:
        with autocast(x.device, dtype):
            out = read(x)
        torch.autograd.grad(out, [x, *model.parameters()], by_out.to(out.dtype))

    return work


def put(report: Report, what: str, who: str, work: Callable[..., None]) -> None:
    wall(lambda: [work() for _ in range(WARM)], report.device)
    report.put(what, who, 1e3 * seconds(work, report.device, report.options.repeats, EACH), "ms")


def capture_graph(work: Callable[..., None], device: torch.device) -> Callable[..., None]:
    return GraphedCallable(work) if device.type == "cuda" else work


def make_tensors(report: Report, rows: int, steps: int, width: int) -> tuple[Tensor, Tensor]:
    x, by_out = torch.randn(2, rows, steps, width, device=report.device)
    return x.clone().requires_grad_(), by_out


def lstm_layer(report: Report) -> None:
    rows, steps, width = (2, 8, 16) if report.options.tiny else (256, 64, 1024)
    (x, by_out), device = make_tensors(report, rows, steps, width), report.device
    ours = layer("lstm", width, 2, device)
    put(report, "lstm-layer", "regard", capture_graph(both_ways(lambda x: ours(x)[0], ours, x, by_out), device))
    if "nn" in report.peers:
        theirs = nn.LSTM(width, width, 2, batch_first=True).to(device)
        put(report, "lstm-layer", "nn", both_ways(lambda x: theirs(x)[0], theirs, x, by_out))


def plain_loop(cell: Cell, x: Tensor) -> Tensor:
    outs: list[Tensor] = []
    for now in x.unbind(1):
        projected = cell.project(now)
        before = outs[-1] if outs else projected.new_zeros(len(x), cell.d_hidden)
        (h,), _ = cell.forward(projected, cell.weight_hh, None, None, before)
        outs.append(h)
    return torch.stack(outs, 1)


def scan_section(kind: str) -> Callable[[Report], None]:
    def run(report: Report) -> None:
        rows, steps, width = (2, 4, 16) if report.options.tiny else (64, 64, 512)
        (x, by_out), device = make_tensors(report, rows, steps, width), report.device
        ours = layer(kind, width, 1, device)
        (cell,) = [module for module in ours.modules() if isinstance(module, Cell)]
        with torch.no_grad():
            torch.testing.assert_close(plain_loop(cell, x), ours(x)[0], atol=1e-3, rtol=0)
        if device.type == "cuda":
            cell.compile(dynamic=True)
        put(report, kind, "regard", capture_graph(both_ways(lambda x: ours(x)[0], ours, x, by_out), device))
        if "eager" in report.peers:
            put(report, kind, "eager", both_ways(lambda x: plain_loop(cell, x), ours, x, by_out))

    return run


SECTIONS: dict[str, Callable[[Report], None]] = {
    "lstm": lstm,
    "lstm-layer": lstm_layer,
    **{kind: scan_section(kind) for kind in SCANS},
}


def main() -> int:
    report = Report(
        parser(__doc__, SECTIONS, ("nn", "eager"), "nn,eager").parse_args(),
        pick_device("auto"),
    )
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
