"""Memory of a training step: what `regard cost` predicts (models/analysis/scaling.py) against what torch measures.

    python benchmarks/memory_prediction.py [--only transformer-*,*-bf16] [--trace 12] [--json FILE]

Three models in three settings each: plain, with activation checkpointing, and with bf16 parameters; `--only bert-*` runs a
fourth model. The step is that of `regard train`: compiled, in a CUDA graph, with the optimizer's state. Measured is
`torch.cuda.max_memory_allocated`, from before the model is made until its graph was replayed. `state` is what is allocated
between two steps: weights, moments and workspaces. The target is an error of at most 5% for the peak.

The parts of a prediction are printed below it, in the phase of its peak. `--trace N` prints the N largest groups of tensors
that were alive at the measured peak of an eager step, with the lines that allocated them.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from common import Report, joint, make_random_model, parser, reset_memory, sizes
from steps import FIRST, RegardStep, random_batch

from regard.config import ModelConfig, TrainConfig
from regard.data.batches import Batch
from regard.device import pick_device
from regard.models.analysis.gpu_cluster import MeshShape, make_cluster
from regard.models.analysis.scaling import ScalingPlanner, StepPrediction, Workload

TARGET = 0.05  # relative error
MIB = 1 << 20
STEPS = 5  # the first compiles, the second mostly finds all compiled, the next is captured, the others are replayed


@dataclass(frozen=True)
class Case:
    """A model and the batches that it is trained on."""

    preset: str
    shape: tuple[int, int]  # rows, tokens in a row
    settings: dict[str, Any] = field(default_factory=dict)

    def config(self, tiny: bool, **settings: Any) -> ModelConfig:
        return sizes(self.preset, tiny, **{**self.settings, **settings})


UNDROPPED = {"dropout": 0.0, "attention_dropout": 0.0, "ff_dropout": 0.0}
CASES = {
    "transformer": Case("transformer-base", (384, 64), {**joint(32000), "dropout": 0.1, "max_len": 512}),  # 60M
    "gpt": Case("gpt2-medium", (16, 1024), {"target_vocab": 50304, **UNDROPPED}),  # 355M
    "llama": Case(  # 664M
        "llama-7b",
        (8, 2048),
        {"n_decoder_layers": 20, "d_model": 1536, "n_heads": 12, "d_ff": 4096, "target_vocab": 32000},
    ),
    "bert": Case("bert-large", (32, 512), UNDROPPED),  # 335M
}
DEFAULT = "transformer-*,gpt-*,llama-*"
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "checkpointing": {"activation_checkpointing": True},
    "bf16": {"param_dtype": "bf16"},
}


def make_batch(config: ModelConfig, shape: tuple[int, int], device: torch.device) -> Batch:
    """Return a batch of random tokens; BERT reads tokens and labels."""
    if config.architecture != "bert":
        return random_batch(config, *shape, device)
    words = torch.randint(FIRST, config.source_vocab, (2, *shape))
    batch = Batch(tuple(words), shape[0] * shape[1])
    return batch.pin() if device.type == "cuda" else batch


def predict(config: ModelConfig, shape: tuple[int, int], train: TrainConfig) -> StepPrediction:
    """Return the prediction for one GPU."""
    rows, length = shape
    work = Workload(length, rows, 1, train.activation_checkpointing, train.param_dtype)
    return ScalingPlanner(config, make_cluster("h200")).predict(MeshShape(), work)


def measure(name: str, setting: str) -> Callable[[Report], None]:
    """Return a section: one model in one setting."""

    def run(report: Report) -> None:
        tiny, device, case = report.options.tiny, report.device, CASES[name]
        train = TrainConfig(label_smoothing=0.0, precision="bf16", **SETTINGS[setting])
        # Dropout cannot be recomputed in a CUDA graph.
        config = case.config(tiny, **(UNDROPPED if train.activation_checkpointing else {}))
        shape = (2, 16) if tiny else case.shape
        found, batch = predict(config, shape, train), make_batch(config, shape, device)
        before = clear(device)
        step = RegardStep(make_random_model(config, device), train, tiny)
        for number in range(1, STEPS + 1):
            if number == 2 and report.options.trace:  # eager, and nothing is compiled
                trace(report, lambda: step(batch), device)
            else:
                step(batch)
        state, peak = allocated(device)
        step.check()
        compare(report, f"{name}-{setting}", found, state - before, peak - before)

    return run


def clear(device: torch.device) -> int:
    """Free what earlier sections left behind, such as workspaces of cuBLAS; return the bytes that are still allocated."""
    if device.type != "cuda":
        return 0
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    reset_memory(device, compiler=False)
    return torch.cuda.memory_allocated()


def allocated(device: torch.device) -> tuple[int, int]:
    """Return the bytes that are allocated now and at the peak, 0 on a CPU."""
    if device.type != "cuda":
        return 0, 0
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()


def compare(report: Report, what: str, found: StepPrediction, state: int, peak: int) -> None:
    """Report the measured and the predicted bytes, and the parts of the prediction."""
    parts = found.memory[found.phase]
    kept = sum(parts[name] for name in ("weights", "moments", "workspaces"))
    for kind, measured, predicted in (("peak", peak, found.peak_memory), ("state", state, kept)):
        report.put(f"{what}, {kind}", "measured", measured / MIB, "MiB")
        report.put(f"{what}, {kind}", "predicted", predicted / MIB, "MiB")
    listed = ", ".join(f"{name} {n / MIB:,.0f}" for name, n in parts.items() if n)
    report.note(f"{what}, predicted MiB in the phase '{found.phase}': {listed}")
    totals = ", ".join(f"{phase} {sum(each.values()) / MIB:,.0f}" for phase, each in found.memory.items())
    report.note(f"{what}, predicted MiB of all phases: {totals}")


def errors(report: Report) -> list[tuple[str, float, float, float]]:
    """Return what was compared: its name, the measured and the predicted MiB, and the relative error."""
    values: dict[str, dict[str, float]] = defaultdict(dict)
    for row in report.rows:
        values[row.what][row.who] = row.value
    pairs = ((what, who["measured"], who["predicted"]) for what, who in values.items())
    return [(what, got, said, said / got - 1 if got else float("nan")) for what, got, said in pairs]


# ---- attribution -------------------------------------------------------------------------------------------------------


def trace(report: Report, run: Callable[[], None], device: torch.device) -> None:
    """Run a step and report the largest groups of tensors that it had allocated at its peak, with where that was."""
    if device.type != "cuda":
        return run()
    torch.cuda.memory._record_memory_history(max_entries=1_000_000, stacks="python")
    try:
        run()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    total, groups = largest_groups(events)
    report.note(f"at the peak of an eager step {total / MIB:,.0f} MiB were alive that it had allocated:")
    for (size, place), count in groups.most_common(report.options.trace):
        report.note(f"{count / MIB:9,.0f} MiB = {count // size} x {size / MIB:,.1f} MiB at {place}")


def largest_groups(events: list[dict[str, Any]]) -> tuple[int, Counter[tuple[int, str]]]:
    """Return the bytes that were alive at the peak of some events of the allocator, in total and by size and place."""
    alive: dict[int, tuple[int, str]] = {}
    total = peak = 0
    at_peak: dict[int, tuple[int, str]] = {}
    rising = False
    for event in events:
        if event["action"] == "alloc":
            alive[event["addr"]] = event["size"], place_of(event.get("frames", []))
            total, rising = total + event["size"], True
        elif event["action"] == "free_requested" and event["addr"] in alive:
            if rising and total > peak:  # copied only where a rise ends
                peak, at_peak = total, dict(alive)
            total, rising = total - alive.pop(event["addr"])[0], False
    if total > peak:
        peak, at_peak = total, dict(alive)
    groups: Counter[tuple[int, str]] = Counter()
    for size, place in at_peak.values():
        groups[size, place] += size
    return peak, groups


def place_of(frames: list[dict[str, Any]]) -> str:
    """Return the innermost line of Regard or of compiled code in a stack, otherwise the innermost line."""
    own = [f for f in frames if "/regard/" in f["filename"] or "inductor" in f["filename"]] or frames
    names = [f"{'/'.join(f['filename'].split('/')[-2:])}:{f['line']} {f['name']}" for f in own[:1]]
    return names[0] if names else "unknown"


def main() -> int:
    names = [f"{name}-{setting}" for name in CASES for setting in SETTINGS]
    made = parser(__doc__, names, ["none"], "none")
    made.set_defaults(only=DEFAULT)
    made.add_argument(
        "--trace", type=int, default=0, metavar="N", help="print the N largest groups of tensors at the peak"
    )
    options = made.parse_args()
    device = pick_device("auto")
    if device.type != "cuda" and not options.tiny:
        made.error("memory is measured on a CUDA device, and this torch sees none")
    report = Report(options, device)
    for name in CASES:
        for setting in SETTINGS:
            report.section(f"{name}-{setting}", measure(name, setting))
    code = report.finish()
    found = errors(report)
    print(f"\n{'MiB':32}{'measured':>12}{'predicted':>12}{'error':>9}")
    for what, got, said, error in found:
        print(f"{what:32}{got:12,.0f}{said:12,.0f}{error:+9.1%}")
    peaks = [abs(error) for what, *_, error in found if what.endswith("peak")]
    if peaks and device.type == "cuda":
        print(f"largest error of a peak: {max(peaks):.1%}; target {TARGET:.0%}")
        code = code or int(max(peaks) > TARGET)
    return code


if __name__ == "__main__":
    sys.exit(main())
