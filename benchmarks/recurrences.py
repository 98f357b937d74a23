"""Mixers with a state of fixed size beside attention: GPTs of equal parameter count, bf16, one process.

    python benchmarks/recurrences.py [--only train,decode,kernel,scan] [--repeats 3] [--mixers gla,mamba2] [--json FILE]

`train` is a step of `regard train` on the same number of tokens in rows of 2k to 32k. `decode` is the time of one more
token of 4 rows after a context of 1k to 64k tokens, with CUDA graphs; the decoding state of a row; and the memory at its
peak, weights and reading of the prompts included. `kernel` is gated linear attention alone, forward and backward, with its
share of the time in which its inputs, results and gradients could be copied; `scan` is Mamba's scan and convolution alone.
How fast training with a mixer is relative to attention has lines of its own.
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

import torch
from common import Report, make_random_model, parser, peak_memory, reset_memory, seconds, sizes, wall
from decode import ALL_AT_ONCE, make_inference_model, rows
from steps import RegardStep, random_batch

from regard.config import DecodeConfig, ModelConfig, TrainConfig
from regard.decode.constraints import free_decode_graphs
from regard.decode.generation import generate
from regard.device import pick_device
from regard.kernels.causal_convolution import causal_convolution
from regard.kernels.gated_linear_attention import gated_linear_attention
from regard.kernels.selective_scan import selective_scan
from regard.layers.decoding_state import state_bytes
from regard.models.analysis.cost import Cost
from regard.models.architectures import PRESETS

GATED = {"activation": "silu", "feedforward": "gated", "bias": False, "norm_kind": "rms", "scale_embeddings": False}
ATTENTION = {"n_decoder_layers": 24, "d_model": 1024, "n_heads": 16, "d_ff": 2896, "positions": "rope", **GATED}
# A name -> its preset of about 350M parameters, settings that differ from it, and the preset of a tiny model.
MIXERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "attention": ("gpt-tiny", ATTENTION, "gpt-tiny"),
    "gla": ("gla-340m", {}, "gla-tiny"),
    "mamba2": ("mamba2-370m", {}, "mamba2-tiny"),
    "mamba": ("mamba-370m", {}, "mamba-tiny"),
}
TOKENS = 32768  # of a training step
LENGTHS = (2048, 8192, 16384, 32768)
CONTEXTS = (1024, 4096, 16384, 65536)
DECODED = 4  # rows
WARM = 4  # training steps


def wanted_mixers(report: Report) -> list[str]:
    """Return the chosen mixers that exist; attention is always among them, and comes first."""
    chosen = report.options.mixers.split(",")
    return [
        "attention",
        *(name for name in MIXERS if name in chosen and name != "attention" and MIXERS[name][0] in PRESETS),
    ]


def make_config(report: Report, mixer: str, length: int) -> ModelConfig:
    name, settings, tiny_name = MIXERS[mixer]
    common = {"dropout": 0.0, "target_vocab": 32000, "max_len": length}
    if not report.options.tiny:
        return sizes(name, **{**settings, **common})
    recurrent = mixer in ("mamba", "mamba2")  # blocks without heads and feed-forward layers
    small = {"n_decoder_layers": 2, "d_model": 32, **({} if recurrent else {"n_heads": 2, "d_ff": 64})}
    return sizes(tiny_name, **{**common, **small, "target_vocab": 97})


def train(report: Report) -> None:
    """Measure tokens per second and memory of training, mixer by mixer and length by length."""
    device, tiny = report.device, report.options.tiny
    tokens, lengths = (64, (16, 32)) if tiny else (TOKENS, LENGTHS)
    for mixer in wanted_mixers(report):
        reset_memory(device)
        config = make_config(report, mixer, lengths[-1])
        cost, model = Cost(config), make_random_model(config, device)
        report.note(f"train, {mixer}: {cost.parameters:,} parameters")
        step = RegardStep(model, TrainConfig(label_smoothing=0.0), tiny)
        for length in lengths:
            reset_memory(device, compiler=False)
            batch = random_batch(config, tokens // length, length, device)
            first = wall(lambda step=step, batch=batch: [step(batch) for _ in range(WARM)], device)
            clock = seconds(lambda step=step, batch=batch: step(batch), device, report.options.repeats, 2)
            flops = cost.training_flops(1, 0, length) / length
            rate = batch.tokens / clock
            what = f"train, rows of {length:,}"
            report.put(what, mixer, rate, "tokens/s", rate * flops / report.limits["matmul"])
            report.put(f"{what}, memory", mixer, peak_memory(device), "GiB")
            report.note(f"{what}, {mixer}: first {WARM} steps in {first:.0f} s")
            put_ratio(report, what, mixer)
        step.check()
        del model, step


def decode(report: Report) -> None:
    """Measure the time of a decoded token, and memory, after contexts of several lengths."""
    device, tiny = report.device, report.options.tiny
    contexts, few, many = ((8, 16), 2, 6) if tiny else (CONTEXTS, 8, 72)
    for mixer in wanted_mixers(report):
        reset_memory(device)
        config = make_config(report, mixer, contexts[-1] + many + 8)
        model = make_inference_model(config, device)
        for length in contexts:
            free_decode_graphs(model)
            reset_memory(device)
            prompts = rows(DECODED, length, config.target_vocab)

            def run(new: int, model: Any = model, prompts: Any = prompts) -> None:
                options = DecodeConfig(beam=1, min_len=new, max_new_tokens=new, batch_tokens=ALL_AT_ONCE)
                generate(model, prompts, options)

            clocks = []
            for new in (few, many):
                run(new)
                clocks.append(
                    statistics.median(
                        wall(lambda new=new, run=run: run(new), device) for _ in range(report.options.repeats)
                    )
                )
            what = f"decode, context {length:,}"
            report.put(f"{what}, a token", mixer, 1e3 * max(clocks[1] - clocks[0], 1e-9) / (many - few), "ms")
            report.put(f"{what}, memory", mixer, peak_memory(device), "GiB")
            size = state_bytes(model, 1, 1, length, 0, next(model.parameters()).dtype)
            report.put(f"{what}, state of a row", mixer, size / 2**20, "MiB")
        free_decode_graphs(model)
        del model, run


def kernel(report: Report) -> None:
    """Measure the recurrence of one layer: decays a head as in Mamba-2, a channel as in GLA, and none."""
    device, tiny = report.device, report.options.tiny
    tokens, lengths = (32, (16, 32)) if tiny else (TOKENS, (2048, 32768))
    shapes = {"a head": (32, 1, 128, 64, 1), "a channel": (4, 4, 128, 256, 2), "none": (16, 16, 64, 65, 0)}
    for name, (h, g, k, v, mode) in shapes.items():
        for length in lengths:
            b, dtype = tokens // length, torch.bfloat16 if device.type == "cuda" else torch.float32
            leaves = [torch.randn(b, length, *x, device=device, dtype=dtype) for x in ((g, k), (g, k), (h, v))]
            decay = [None, torch.rand(b, length, h, device=device), torch.rand(b, length, h, k, device=device)][mode]
            given = [*leaves, *([] if decay is None else [(-0.1 * decay)])]
            given = [x.requires_grad_() for x in given]
            starts = torch.zeros(b, length, dtype=torch.int32, device=device)

            def both(given: Any = given, starts: Any = starts, decay: Any = decay) -> None:
                o = gated_linear_attention(*given[:3], given[3] if decay is not None else None, starts)[0]
                torch.autograd.grad(o, given, torch.ones_like(o))

            def forward(given: Any = given, starts: Any = starts, decay: Any = decay) -> None:
                with torch.no_grad():
                    gated_linear_attention(*given[:3], given[3] if decay is not None else None, starts)

            size = sum(x.nbytes for x in given)
            for what, run, moved in (("forward", forward, size + leaves[2].nbytes), ("both ways", both, 3 * size)):
                for _ in range(1 if tiny else 3):
                    run()
                clock = seconds(run, device, report.options.repeats, 5)
                copied = moved / report.limits["copy"] / clock
                report.put(f"kernel, decay {name}, rows of {length:,}, {what}", "regard", 1e3 * clock, "ms", copied)


def scan(report: Report) -> None:
    """Measure Mamba's scan and short convolution in one layer, 16 states a channel, rows of several lengths."""
    device, tiny = report.device, report.options.tiny
    tokens, lengths, width = (32, (16, 32), 8) if tiny else (TOKENS, (2048, 8192, 32768), 2048)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for length in lengths:
        shape = (tokens // length, length)
        x, u, z = (torch.randn(*shape, width, device=device, dtype=dtype) for _ in range(3))
        b, c = (torch.randn(*shape, 16, device=device, dtype=dtype) for _ in range(2))
        rates, skip, bias = -torch.rand(width, 16, device=device), torch.ones(width, device=device), torch.zeros(width)
        weight, starts = torch.randn(width, 4, device=device), torch.zeros(shape, dtype=torch.int32, device=device)
        given = [each.to(device).requires_grad_() for each in (x, u - 4, rates, b, c, skip, bias, z, weight)]
        names = ("scan", "convolution")
        runs = (
            lambda x, u, a, b, c, skip, bias, z, w, starts=starts: selective_scan(x, u, a, b, c, skip, bias, starts, z)[
                0
            ],
            lambda x, u, a, b, c, skip, bias, z, w, starts=starts: causal_convolution(x, w, bias, starts, True),
        )
        for name, run in zip(names, runs, strict=True):

            def forward(run: Any = run, given: Any = given) -> Any:
                with torch.inference_mode():
                    return run(*given)

            def both(run: Any = run, given: Any = given) -> None:
                y = run(*given)
                torch.autograd.grad(y, given, torch.ones_like(y), allow_unused=True)

            for what, work in (("forward", forward), ("both ways", both)):
                for _ in range(1 if tiny else 3):
                    work()
                clock = seconds(work, device, report.options.repeats, 5)
                report.put(f"{name}, rows of {length:,}, {what}", "regard", 1e3 * clock, "ms")


def put_ratio(report: Report, what: str, mixer: str) -> None:
    """Report how fast training with a mixer is relative to attention."""
    found = {row.who: row.value for row in report.rows if row.what == what}
    if mixer != "attention":
        report.put(f"{what}, of attention", mixer, 100 * found[mixer] / found["attention"], "%")


SECTIONS = {"kernel": kernel, "scan": scan, "train": train, "decode": decode}


def main() -> int:
    made = parser(__doc__, SECTIONS, (), "none")
    made.add_argument("--mixers", default=",".join(MIXERS), help="mixers beside attention, by commas")
    made.set_defaults(repeats=3)
    report = Report(made.parse_args(), pick_device("auto"))
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
