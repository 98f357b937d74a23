"""Mixtures of experts beside a dense model with as many active parameters: a GPT, bf16, one process.

    python benchmarks/experts.py [--only train,decode] [--profile] [--repeats 5] [--json FILE]
    python benchmarks/experts.py --only loads --loads FILE.txt [--steps 1000]

8 experts, 2 a token, each gated and half as wide as the dense model's gated layer: both multiply a token with the same
number of weights, apart from the router. `train` is a step of `regard train` on padded batches, `decode` continues 64
prompts with CUDA graphs, short ones and long ones: a step reads all experts, and the keys and values of all tokens. The last
column of the dense model's row is how fast the mixture is relative to it.

--profile counts, in the profile of one training step, the calls with which the host waits for the device. --loads trains on
a text, and prints how many tokens each expert had in the last tenth of the steps, 1 = the mean of its layer.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import Report, make_random_model, parser, reset_memory, seconds, sizes, wall
from decode import ALL_AT_ONCE, make_inference_model, rows
from steps import RegardStep, random_batch

from regard.config import DecodeConfig, ModelConfig, TrainConfig
from regard.decode.generation import generate
from regard.device import pick_device
from regard.layers.experts import expert_loads, limited_layers, summarize_loads
from regard.models.analysis.cost import Cost

TARGET = 0.7  # of the dense model's speed
EVEN = 0.2  # how far the load of an expert may be from the mean
WARM, EACH = 6, 3
WAITS = (
    "cudaStreamSynchronize",
    "cudaDeviceSynchronize",
    "cudaEventSynchronize",
    "aten::item",
    "aten::_local_scalar_dense",
)


def make_config(report: Report, experts: bool, **more: Any) -> ModelConfig:
    """Return a GPT with a gated layer of 4096 in each block, or with 8 experts of 2048."""
    tiny = report.options.tiny
    wide = {"n_decoder_layers": 12, "d_model": 1024, "n_heads": 16, "max_len": 1024, "d_ff": 2048 if experts else 4096}
    small = {"d_ff": 32 if experts else 64}
    style = {"activation": "silu", "bias": False, "dropout": 0.0, "positions": "rope"}
    made = sizes("gpt-tiny", tiny, **wide, **style, target_vocab=32000, feedforward="mixtral" if experts else "gated")
    return replace(made, **(small if tiny else {}), **more)


def train(report: Report) -> None:
    """Measure tokens per second of training, and profile a step if asked to."""
    device, (n, length) = report.device, (2, 16) if report.options.tiny else (16, 1024)
    for who, experts in (("regard", True), ("dense", False)):
        reset_memory(device)
        config = make_config(report, experts)
        cost, model = Cost(config), make_random_model(config, device)
        batch = random_batch(config, n, length, device)
        step = RegardStep(model, TrainConfig(label_smoothing=0.0), report.options.tiny)
        first = wall(lambda step=step, batch=batch: [step(batch) for _ in range(WARM)], device)
        rate = batch.tokens / seconds(lambda step=step, batch=batch: step(batch), device, report.options.repeats, EACH)
        step.check()
        flops = cost.training_flops(1, 0, length) / length
        report.put("train", who, rate, "tokens/s", rate * flops / report.limits["matmul"])
        report.put("train, first steps", who, first, "s")
        report.note(f"train, {who}: {cost.parameters:,} parameters, {cost.active:,} active")
        if experts:
            mean = summarize_loads(expert_loads(model), limited_layers(model))
            report.note(f"train: busiest expert {mean['expert_load_max']:.2f}, idlest {mean['expert_load_min']:.2f}")
            if report.options.profile:
                profile(report, step, batch)
        del model, step
    put_ratio(report, "train")


def put_ratio(report: Report, what: str) -> None:
    """Report the speed of the mixture relative to the dense model."""
    own, dense = report.regard(what), next(row.value for row in report.rows if (row.what, row.who) == (what, "dense"))
    assert own is not None
    report.put(f"{what}, of dense", "regard", 100 * own / dense, "%")
    report.note(f"{what}: {own / dense:.2f} of the dense model, target {TARGET}")


def profile(report: Report, step: RegardStep, batch: Any) -> None:
    """Report how often the host waits for the device in a training step, replayed as a CUDA graph and run eagerly."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if report.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    eagerly = [False, True] if step.step.is_graphed else [True]
    for eager in eagerly:
        graphed, step.step.is_graphed = step.step.is_graphed, not eager
        with torch.profiler.profile(activities=activities) as found:
            step(batch)
        step.step.is_graphed = graphed
        counts = {event.key: event.count for event in found.key_averages() if event.key in WAITS}
        # The profiler itself waits for the device once, when it ends.
        counts["cudaDeviceSynchronize"] = max(0, counts.get("cudaDeviceSynchronize", 0) - 1)
        shown = ", ".join(f"{name} {counts.get(name, 0)}" for name in WAITS)
        report.put(
            f"train, waits {'without' if eager else 'with'} a CUDA graph", "regard", sum(counts.values()), "calls"
        )
        report.note(f"train, {'without' if eager else 'with'} a CUDA graph: {shown}")


def decode(report: Report) -> None:
    """Measure tokens per second of 64 continuations of short and of long prompts."""
    for length in (4, 16) if report.options.tiny else (32, 896):
        decode_after(report, length)


def decode_after(report: Report, length: int) -> None:
    """Measure tokens per second of 64 continuations of prompts of this length; reading the prompts counts too."""
    tiny, device, what = report.options.tiny, report.device, f"decode after {length} tokens"
    n, new = (4, 8) if tiny else (64, 128)
    for who, experts in (("regard", True), ("dense", False)):
        reset_memory(device)
        config = make_config(report, experts)
        model = make_inference_model(config, device)
        prompts = rows(n, length, config.target_vocab)
        options = DecodeConfig(beam=1, min_len=new, max_new_tokens=new, batch_tokens=ALL_AT_ONCE)

        def run(model: Any = model, prompts: Any = prompts, options: DecodeConfig = options) -> int:
            return sum(len(row.tokens) for row in generate(model, prompts, options))

        report.put(f"{what}, first call", who, wall(run, device), "s")
        rate = n * new / statistics.median(wall(run, device) for _ in range(report.options.repeats))
        read = sum(p.numel() * p.element_size() for p in model.parameters())
        report.put(what, who, rate, "tokens/s", rate / n * read / report.limits["copy"])
        del model
    put_ratio(report, what)


def loads(report: Report) -> None:
    """Train on a text, by bytes, and report how evenly the experts are used."""
    path, tiny, steps = report.options.loads, report.options.tiny, report.options.steps
    if path is None:
        return report.note("loads: give --loads FILE.txt")
    (n, length), device = (2, 16) if tiny else (32, 512), report.device
    text = torch.tensor(list(Path(path).read_bytes()), dtype=torch.long) % (92 if tiny else 256) + 5
    config = make_config(report, True, target_vocab=97 if tiny else 261, **({} if tiny else {"n_decoder_layers": 6}))
    model = make_random_model(config, device)
    step = RegardStep(model, TrainConfig(label_smoothing=0.0, lr=3e-4), tiny)
    generator = torch.Generator().manual_seed(0)
    losses = []
    for i in range(steps):
        starts = torch.randint(len(text) - length - 1, (n, 1), generator=generator)
        words = text[starts + torch.arange(length + 1)]
        batch = random_batch(config, n, length, device)
        batch.inputs[0].copy_(words[:, :-1]), batch.inputs[1].copy_(words[:, 1:])
        step.step([batch], 3e-4 * min(1.0, (i + 1) / 100))
        if i in (steps // 10, steps - steps // 10 - 1, steps - 1):
            total = step.step.sums.tolist()
            losses.append(total[1] / total[2])
            found = summarize_loads(expert_loads(model), limited_layers(model))
            for tensor in (step.step.sums, *expert_loads(model)):
                tensor.zero_()
    step.check()
    report.put("loads, busiest expert", "regard", found["expert_load_max"], "of mean")
    report.put("loads, idlest expert", "regard", found["expert_load_min"], "of mean")
    even = found["expert_load_max"] <= 1 + EVEN and found["expert_load_min"] >= 1 - EVEN
    report.note(f"loads after {steps} steps: within {EVEN:.0%} of even: {'yes' if even else 'no'}")
    report.note(f"loads, nll of a byte: {', '.join(f'{x:.3f}' for x in losses)}")


SECTIONS = {"train": train, "decode": decode, "loads": loads}


def main() -> int:
    made = parser(__doc__, SECTIONS, (), "none")
    made.add_argument("--profile", action="store_true", help="count the calls with which the host waits for the device")
    made.add_argument("--loads", type=Path, help="train on this text, and print the loads of experts")
    made.add_argument("--steps", type=int, default=1000, help="steps of --loads")
    made.set_defaults(repeats=5)
    report = Report(made.parse_args(), pick_device("auto"))
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
