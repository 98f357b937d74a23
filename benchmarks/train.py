"""Training steps beside the peers': the same sizes, the same batches, bf16, one process.

    python benchmarks/train.py [--only gpt2,marian] [--peers hf,nn] [--data MULTI30K] [--repeats 5] [--json FILE]

Regard's step is that of `regard train`: compiled and in a CUDA graph on a GPU. A peer is compiled, under autocast, with a
fused AdamW; on small real batches it runs eagerly, as its users run it (`--peers hf-compiled`: compiled too). MFU counts
6n + 12 L C T FLOPs per token (n: all parameters) against the maker's data sheet.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import (
    LLAMA,
    TINY,
    Report,
    compiled_graphs,
    joint,
    make_random_model,
    parser,
    peak_memory,
    reset_memory,
    seconds,
    sizes,
    wall,
)
from peer_models import TorchTransformer, make_hf_model, make_marian_step, make_peer_step, smoothed_loss
from steps import RegardStep, Step, TrainingSpeed, random_batch, time_batches
from torch import nn

from regard.config import ModelConfig, TrainConfig
from regard.data.batches import Batch
from regard.device import peak_flops, pick_device
from regard.models.analysis.cost import training_flops
from regard.tasks import prepare_job
from regard.tasks.run_config import make_config
from regard.training.job import Job

WARM = 6  # calls before timing: the first compiles, the second captures the CUDA graph
EACH = 3  # steps between two clock readings; they run without synchronization, as in training
EPOCHS = 8  # timed epochs of real batches
Section = Callable[[Report], None]


# ---- one padded batch, over and over ----------------------------------------------------------------------------------


def measure(report: Report, what: str, who: str, step: Step, batch: Batch, flops: float) -> None:
    """Report tokens per second; `flops` are those of a token."""
    device = report.device
    first = wall(lambda: [step(batch) for _ in range(WARM)], device)
    graphs = compiled_graphs()
    rate = batch.tokens / seconds(lambda: step(batch), device, report.options.repeats, EACH)
    if isinstance(step, RegardStep):
        step.check()
    report.put(what, who, rate, "tokens/s", rate * flops / report.limits["matmul"])
    if peak := peak_flops(device):
        report.put(f"{what}, MFU", who, 100 * rate * flops / peak, "%")
    put_costs(report, what, who, first, graphs)


def put_costs(report: Report, what: str, who: str, first: float, graphs: int) -> None:
    """Report warm-up time and memory; `graphs` is how many were compiled when the warm-up was over."""
    report.put(f"{what}, first steps", who, first, "s")
    if report.device.type == "cuda":
        report.put(f"{what}, peak memory", who, peak_memory(report.device), "GiB")
    again = compiled_graphs() - graphs
    report.note(f"{what}, {who}: {again} graphs compiled after the warm-up")
    if who == "regard" and again:
        raise AssertionError(f"{again} graphs were compiled after the warm-up")


def language_model(what: str, peer: str, name: str, shape: tuple[int, int], **settings: Any) -> Section:
    """Return a section of a decoder-only model, and transformers' of the same sizes."""

    def run(report: Report) -> None:
        tiny, device = report.options.tiny, report.device
        config, (rows, length) = sizes(name, tiny, **settings), (2, 16) if tiny else shape
        batch, model = random_batch(config, rows, length, device), make_random_model(config, device)
        parameters = sum(p.numel() for p in model.parameters())
        flops = 6 * parameters + 12 * config.n_decoder_layers * config.d_model * length
        step = RegardStep(model, TrainConfig(label_smoothing=0.0), tiny)
        measure(report, what, "regard", step, batch, flops)
        if peer in report.peers:
            del model, step
            reset_memory(device)
            theirs = make_hf_model(config, what, device).train()
            compiled = torch.compile(theirs)
            step = make_peer_step(theirs, lambda ids, labels: compiled(ids, labels=ids).loss, device)
            measure(report, what, "hf compiled", step, batch, flops)

    return run


def base(report: Report) -> tuple[ModelConfig, Batch, float]:
    """Return Transformer-base, a padded batch for it, and its FLOPs per target token."""
    config = sizes("transformer-base", report.options.tiny, **joint(32000), dropout=0.1, max_len=512)
    rows, length = (4, 16) if report.options.tiny else (512, 64)
    flops = training_flops(config, 1, length, length) / length
    return config, random_batch(config, rows, length, report.device), flops


def marian(report: Report) -> None:
    (config, batch, flops), device = base(report), report.device
    step = RegardStep(make_random_model(config, device), TrainConfig(label_smoothing=0.1), report.options.tiny)
    measure(report, "marian", "regard", step, batch, flops)
    if "hf" in report.peers:
        del step
        reset_memory(device)
        theirs = make_hf_model(config, "marian", device).train()
        compiled, mask = torch.compile(theirs), torch.ones_like(batch.labels, device=device)
        step = make_peer_step(theirs, lambda s, _, y: compiled(input_ids=s, attention_mask=mask, labels=y).loss, device)
        measure(report, "marian", "hf compiled", step, batch, flops)


def torch_nn(report: Report) -> None:
    if "nn" not in report.peers:
        return
    (config, batch, flops), device = base(report), report.device
    theirs = TorchTransformer(config).to(device).train()
    mask = nn.Transformer.generate_square_subsequent_mask(batch.labels.shape[1], device=device)
    compiled = torch.compile(theirs)
    step = make_peer_step(theirs, lambda s, t, y: smoothed_loss(compiled(s, t, mask), y), device)
    measure(report, "marian", "nn compiled", step, batch, flops)


# ---- real batches -----------------------------------------------------------------------------------------------------


def real_job(options: argparse.Namespace, folder: str, batch_tokens: int, **model: Any) -> Job:
    """Return Multi30k English to German as a run prepares it: 10,000 joint BPE pieces, rows in buckets of length."""
    if not (options.tiny or options.data):
        raise ValueError("give --data, the folder of train.en.xz, train.de.xz, val.en.xz and val.de.xz")
    toy = {"train": ("toy:60",), "valid": ("toy:10",)}
    real = {"root": str(options.data), "train": ("train.{lang}.xz",), "valid": ("val.{lang}.xz",)}
    values = {
        "data": toy if options.tiny else real,
        "tokenizer": {"vocab_size": 150 if options.tiny else 10000},
        "model": {**model, **(TINY | {"n_encoder_layers": 2} if options.tiny else {}), "max_len": 256},
        "train": {"batch_tokens": 256 if options.tiny else batch_tokens, "label_smoothing": 0.1},
    }
    return prepare_job(Path(folder), make_config(values, {}), quiet=True)


def own_epochs(report: Report, model: nn.Module, job: Job) -> TrainingSpeed:
    """Train for whole epochs. All have the same shapes, so after two of them every shape is in a CUDA graph."""
    batches, tiny = job.batches(), report.options.tiny
    n = len(batches.plan(0))
    return time_batches(
        RegardStep(model, job.config.train, tiny), batches, report.device, 2 * n, n if tiny else EPOCHS * n
    )


def marian_real(report: Report) -> None:
    """Measure the model of `marian` with its vocabulary: the share shows the cost of padding and of the input pipeline."""
    config, device = base(report)[0], report.device
    with tempfile.TemporaryDirectory() as folder:
        job = real_job(report.options, folder, 32768, preset="transformer-base")
    vocabulary = joint(max(config.target_vocab, job.config.model.target_vocab))
    ran = own_epochs(report, make_random_model(replace(job.config.model, **vocabulary), device), job)
    padded = report.regard("marian")
    report.put("marian-real", "regard", ran.tokens, "tokens/s")
    if padded:
        report.put("marian-real, of padded", "regard", 100 * ran.tokens / padded, "%")
    put_costs(report, "marian-real", "regard", ran.first, ran.graphs)


def small_real(report: Report) -> None:
    """Measure 4+4 layers of 128 with 8,192 tokens per batch, which kernel launches limit, not arithmetic."""
    device, dropouts = report.device, {"dropout": 0.3, "attention_dropout": 0.1, "ff_dropout": 0.1}
    with tempfile.TemporaryDirectory() as folder:
        job = real_job(report.options, folder, 8192, preset="transformer-tiny", **dropouts)
    ran = own_epochs(report, job.model, job)
    report.put("small-real", "regard", ran.updates, "updates/s")
    put_costs(report, "small-real", "regard", ran.first, ran.graphs)
    batches = job.batches()
    n = len(batches.plan(0))
    for peer, who, warm in (("hf", "hf eager", 10), ("hf-compiled", "hf compiled", n)):
        if peer in report.peers:
            reset_memory(device)
            step = make_marian_step(
                make_hf_model(job.config.model, "marian", device).train(), device, peer == "hf-compiled"
            )
            report.put("small-real", who, time_batches(step, batches, device, warm, n).updates, "updates/s")


SECTIONS: dict[str, Section] = {
    "gpt2": language_model("gpt2", "hf", "gpt2", (32, 1024), target_vocab=50304, dropout=0.0, attention_dropout=0.0),
    "llama": language_model("llama", "hf-llama", "llama-7b", (8, 2048), **LLAMA, target_vocab=32000),
    "marian": marian,
    "nn": torch_nn,
    "marian-real": marian_real,
    "small-real": small_real,
}


def main() -> int:
    made = parser(__doc__, SECTIONS, ("hf", "nn", "hf-compiled", "hf-llama"), "hf,nn")
    made.add_argument(
        "--data", type=Path, help="the folder of Multi30k: train.en.xz, train.de.xz, val.en.xz, val.de.xz"
    )
    made.set_defaults(repeats=5)
    report = Report(made.parse_args(), pick_device("auto"))
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
