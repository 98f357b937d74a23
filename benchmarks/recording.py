"""Cost of recording activations (look/record.py), which must be nothing while it is off.

    python benchmarks/recording.py [--device cuda] [--only forward,training,decoding] [--peers once,on,stream,live]
                                   [--repeats 50] [--json FILE]

Three models share one set of weights: `regard` was never recorded; `once` was recorded, with its residual stream, and is
not any more; the third is recorded all the time: `on` all its attention, `stream` the residual stream too; in decoding
`on` reads the best hypotheses again, and `live` keeps every step of the search. All take turns in alternating order.
Figures are medians; the notes are medians of the ratios of all turns with their quartiles: the ratio of `once` should be
1.00 within 0.02. On a GPU a training step is compiled and in a CUDA graph, and runs eagerly while it is recorded.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from common import Report, joint, parser, sizes, wall
from decode import make_inference_model, rows
from steps import RegardStep, random_batch
from torch import nn

from regard.config import DecodeConfig, ModelConfig, TrainConfig
from regard.decode.batch_decoding import decode
from regard.device import pick_device
from regard.look.beam_search_trace import SearchTracer
from regard.look.record import record

Work = Callable[[], Any]
Models = tuple[Any, Any, Any]
LABELS = {"once": "recorded once", "on": "recorded now", "stream": "with the stream", "live": "live"}
WARM = 4  # turns before timing, in which models are compiled and CUDA graphs captured


def config_of(report: Report) -> ModelConfig:
    """Return the base Transformer on a GPU, a small one on a CPU."""
    name, vocabulary = ("transformer-base", 8000) if report.device.type == "cuda" else ("transformer-tiny", 1000)
    return sizes(name, report.options.tiny, **joint(vocabulary), dropout=0.0, max_len=128)


def shape_of(report: Report) -> tuple[int, int]:
    """Return the number of rows, and the tokens of each."""
    if report.options.tiny:
        return 2, 8
    return (64, 32) if report.device.type == "cuda" else (2, 16)


def twin(model: nn.Module) -> Any:
    """Return another model with the same tensors, so that their place in memory makes no difference."""
    held = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(x): x for x in held})


def three(model: nn.Module) -> Models:
    return model, twin(model), twin(model)


def clock(work: Work, device: torch.device) -> float:
    """Return seconds; on a CPU the CPU time of this process, so that other processes make no difference."""
    if device.type != "cpu":
        return wall(work, device)
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(report: Report, what: str, works: dict[str, Work], each: int) -> None:
    """Time `each` calls of all works in turns, and report them."""
    times: dict[str, list[float]] = {who: [] for who in works}
    for turn in range(WARM + report.options.repeats):
        for who in list(works)[:: 1 if turn % 2 else -1]:
            found = clock(lambda who=who: [works[who]() for _ in range(each)], report.device)
            times[who] += [found / each] if turn >= WARM else []
    for who, found in times.items():
        report.put(what, who, 1e3 * statistics.median(found), "ms")
    never = times.pop("regard")
    for who, found in times.items():
        ratios = [b / a for a, b in zip(never, found, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        report.note(f"{what}: {LABELS[who]} / never recorded {middle:.3f} ({low:.3f} to {high:.3f})")


def recorded(model: nn.Module, work: Work, stream: bool = False) -> None:
    with record(model, stream=stream):
        work()


def measure(report: Report, what: str, models: Models, run: Callable[[Any], Work], each: int, **more: Work) -> None:
    """Compare the work `run(model)` of the three models; the second is recorded once at the beginning."""
    never, once, always = (run(model) for model in models)
    for _ in range(WARM):  # compile and capture before recording
        never(), once()
    recorded(models[1], once, stream=True)
    works = {"regard": never, "once": once, "on": partial(recorded, models[2], always)}
    if what != "decoding":
        works["stream"] = partial(recorded, models[2], always, stream=True)
    compare(report, what, {who: work for who, work in (works | more).items() if who in ("regard", *report.peers)}, each)


# ---- sections ---------------------------------------------------------------------------------------------------------


def forward(report: Report) -> None:
    config, (n, length) = config_of(report), shape_of(report)
    models = three(make_inference_model(config, report.device))
    source, target = (torch.tensor(rows(n, length, config.source_vocab), device=report.device) for _ in range(2))
    for work in ("evaluating", "with gradients"):
        context = torch.inference_mode if work == "evaluating" else nullcontext

        def run(model: nn.Module, context: Any = context) -> None:
            with context():
                model(source, target)

        measure(report, f"forward, {work}", models, partial(partial, run), 2)


def training(report: Report) -> None:
    config, (n, length) = config_of(report), shape_of(report)
    models = three(make_inference_model(config, report.device).float())
    batch = random_batch(config, n, length, report.device)
    one_thread = report.device.type == "cpu"
    steps = {id(model): RegardStep(model, TrainConfig(device=report.device.type), one_thread) for model in models}
    each = 4 if report.device.type == "cuda" else 1
    measure(report, "training", models, lambda model: partial(steps[id(model)], batch), each)
    for step in steps.values():
        step.check()


def decoding(report: Report) -> None:
    config, (n, length) = config_of(report), shape_of(report)
    models = three(make_inference_model(config, report.device))
    limits = {"min_len": length - 1, "max_len_a": 0.0, "max_len_b": length}
    options, sources = DecodeConfig(beam=4, **limits), rows(n, length - 1, config.source_vocab)  # type: ignore[arg-type]

    def run(model: Any) -> None:
        decode(model, sources, options, config.max_len, report.device)

    measure(report, "decoding", models, partial(partial, run), 1, live=lambda: run(SearchTracer(models[2], options)))


SECTIONS: dict[str, Callable[[Report], None]] = {"forward": forward, "training": training, "decoding": decoding}


def main() -> int:
    peers = ("once", "on", "stream", "live")
    made = parser(__doc__, SECTIONS, peers, ",".join(peers))
    made.set_defaults(repeats=50)
    made.add_argument("--device", default="auto", help="auto, cpu or cuda")
    options = made.parse_args()
    report = Report(options, pick_device(options.device))
    torch.set_num_threads(1)  # on a CPU, waiting threads would disturb the comparison
    for name, run in SECTIONS.items():
        report.section(name, run)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
