"""Growth of time and memory: training against length, batch, vocabulary and model; decoding against batch and context.

    python benchmarks/scale.py --json scale.json [--only length,batch] [--repeats 5]      on the GPU
    python benchmarks/scale.py --plot scale.json [--pictures docs/pictures]               anywhere

The models are GPTs; each point of an axis is twice the one before. Memory is the peak of allocated tensors during a step. A
decoding step is timed as the difference of two runs, one 64 tokens longer than the other, so that reading the prompt does
not count.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, make_random_model, parser, peak_memory, reset_memory, seconds, sizes, wall
from decode import ALL_AT_ONCE, make_inference_model, rows
from steps import RegardStep, Step, random_batch
from train import WARM

from regard.config import DecodeConfig, ModelConfig, TrainConfig
from regard.decode.generation import generate
from regard.device import pick_device
from regard.look.figures import Lines, draw, save
from regard.models.gpt import GPT

AXES = {
    "train length": "4 rows",
    "train batch": "rows of 1,024 tokens",
    "train vocabulary": "8 x 1,024 tokens",
    "train model": "4 x 1,024 tokens",
    "decode batch": "after 128 tokens",
    "decode context": "16 rows",
}  # what is constant along each axis
MODELS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
STEPS = 64  # decoding steps between the two runs
Shape = tuple[int, int]  # rows, length


def doubling(first: int, last: int) -> list[int]:
    return [first << i for i in range((last // first).bit_length())]


def gpt(report: Report, name: str = "gpt2", **settings: Any) -> ModelConfig:
    given = {"target_vocab": 50304, "dropout": 0.0, "attention_dropout": 0.0, **settings}
    return sizes(name, report.options.tiny, **given)


# ---- training ---------------------------------------------------------------------------------------------------------


def stepper(config: ModelConfig, report: Report) -> Step:
    return RegardStep(make_random_model(config, report.device), TrainConfig(label_smoothing=0.0), report.options.tiny)


def point(report: Report, name: str, step: Step, config: ModelConfig, shape: Shape) -> None:
    """Report milliseconds and GiB of a training step, after its warm-up."""
    device = report.device
    batch = random_batch(config, *shape, device)
    wall(lambda: [step(batch) for _ in range(WARM)], device)
    report.put(name, "regard", 1e3 * seconds(lambda: step(batch), device, report.options.repeats), "ms")
    if device.type == "cuda":
        report.put(name, "regard", peak_memory(device), "GiB")


def shapes(report: Report, axis: str, found: Iterable[tuple[int, Shape]]) -> None:
    """Measure one model with many shapes."""
    found = list(found)
    config = gpt(report, max_len=max(length for _, (_, length) in found))
    step = stepper(config, report)
    for x, shape in found:
        reset_memory(report.device, compiler=False)
        point(report, f"train {axis}={x}", step, config, shape)


def length(report: Report) -> None:
    points = (8, 16) if report.options.tiny else doubling(512, 8192)
    shapes(report, "length", ((n, (4, n)) for n in points))


def batch(report: Report) -> None:
    points, width = ((1, 2), 8) if report.options.tiny else (doubling(1, 64), 1024)
    shapes(report, "batch", ((n, (n, width)) for n in points))


def configurations(report: Report, axis: str, found: Iterable[tuple[Any, ModelConfig]], shape: Shape) -> None:
    """Measure many models with one shape; blocks of the same sizes are compiled once."""
    for x, config in found:
        reset_memory(report.device, compiler=False)
        point(report, f"train {axis}={x}", stepper(config, report), config, (2, 8) if report.options.tiny else shape)


def vocabulary(report: Report) -> None:
    points = (64, 128) if report.options.tiny else doubling(8192, 131072)
    configurations(report, "vocabulary", ((n, gpt(report, target_vocab=n)) for n in points), (8, 1024))


def model(report: Report) -> None:
    configurations(report, "model", ((name, gpt(report, name)) for name in MODELS), (4, 1024))


# ---- decoding ---------------------------------------------------------------------------------------------------------


def decoding(report: Report, axis: str, found: Iterable[tuple[int, Shape]]) -> None:
    """Measure decoding steps; `found` are x, and the number of prompts and their length."""
    found, tiny = list(found), report.options.tiny
    steps = 2 if tiny else STEPS
    config = gpt(report, max_len=max(n for _, (_, n) in found) + 3 * steps)
    generator: GPT = make_inference_model(config, report.device)
    for x, (n, read) in found:
        prompts = rows(n, read, config.target_vocab)

        def clock(new: int, prompts: list[list[int]] = prompts) -> float:
            options = DecodeConfig(beam=1, min_len=new, max_new_tokens=new, batch_tokens=ALL_AT_ONCE)
            wall(lambda: generate(generator, prompts, options), report.device)  # captures the CUDA graph
            runs = range(report.options.repeats)
            return statistics.median(wall(lambda: generate(generator, prompts, options), report.device) for _ in runs)

        report.put(f"decode {axis}={x}", "regard", 1e3 * (clock(2 * steps) - clock(steps)) / steps, "ms")


def decode_batch(report: Report) -> None:
    points, read = ((1, 2), 4) if report.options.tiny else (doubling(1, 256), 128)
    decoding(report, "batch", ((n, (n, read)) for n in points))


def decode_context(report: Report) -> None:
    points = (4, 8) if report.options.tiny else doubling(128, 8192)
    decoding(report, "context", ((n, (16, n)) for n in points))


SECTIONS: dict[str, Callable[[Report], None]] = {
    **{"length": length, "batch": batch, "vocabulary": vocabulary, "model": model},
    **{"decode-batch": decode_batch, "decode-context": decode_context},
}


# ---- pictures ---------------------------------------------------------------------------------------------------------


def plot(source: Path, folder: Path) -> list[Path]:
    """Plot the measured figures: one picture of training and one of decoding."""
    found = json.loads(source.read_text())
    lines: dict[tuple[str, str, str], list[tuple[str, float]]] = defaultdict(list)
    for row in found["rows"]:
        name, x = row["what"].split("=")
        kind, axis = name.split()
        lines[kind, row["unit"], axis].append((x, row["value"]))
    paths = []
    for kind in dict.fromkeys(kind for kind, _, _ in lines):
        units = dict.fromkeys(unit for k, unit, _ in lines if k == kind)
        chosen = [(unit, axis) for unit in units for k, u, axis in lines if (k, u) == (kind, unit)]
        panels = [panel(kind, unit, axis, lines[kind, unit, axis]) for unit, axis in chosen]
        title = f"{'Training' if kind == 'train' else 'Decoding'} step, {found['device']}, {found['date']}"
        paths.append(folder / f"scale-{kind}.png")
        save(draw(title, panels, len(panels) // len(units)), paths[-1])
    return paths


def panel(kind: str, unit: str, axis: str, points: list[tuple[str, float]]) -> Lines:
    names, values = zip(*points, strict=True)
    what = "milliseconds" if unit == "ms" else unit
    return Lines(
        AXES[f"{kind} {axis}"], np.arange(len(names)), {axis: np.array(values)}, axis, what, log=True, ticks=names
    )


def main() -> int:
    made = parser(__doc__, SECTIONS, ["none"], "none")
    made.set_defaults(repeats=5)
    made.add_argument("--plot", type=Path, help="plot the figures of this JSON instead of measuring")
    made.add_argument("--pictures", type=Path, default=Path("docs/pictures"), help="folder of the plots")
    options = made.parse_args()
    if options.plot:
        print("\n".join(map(str, plot(options.plot, options.pictures))))
        return 0
    report = Report(options, pick_device("auto"))
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
