"""`regard study translation-cost`: BLEU against training FLOPs, Table 2 of the Transformer's paper at a small scale.

An LSTM with one context vector, RNNsearch, a convolutional model and a Transformer learn Multi30k, German to English, from
the same batches. FLOPs are counted for every batch of the training, not estimated from time.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from regard.device import pick_device
from regard.files import disk_errors, write_text
from regard.metrics.translation_scores import score_translations
from regard.studies.job_pool import describe_setting
from regard.studies.translation_models import COLOURS, TITLES, Pair, read_tests, train_models

MODELS = ("lstm", "rnnsearch", "convs2s", "transformer")
TEST = "test_2016_flickr"
KEPT = ("parameters", "steps", "tokens", "flops", "seconds", "curve")  # copied from the result of a training
Rows = Mapping[str, Mapping[str, Any]]  # model -> numbers


def study(out: Path, data: Path, jobs: int = 1, device: str = "auto", quick: bool = False) -> Path:
    """Train the models that are missing; write results.json, table.md and translation-cost.png into `out`, and return it.

    `data` is the folder of Multi30k. The models are kept in the folder `translators` beside `out`.
    """
    found = train_models(MODELS, out, data, jobs, device, quick)
    pairs = read_tests(data, quick)[TEST]
    where = describe_setting(str(pick_device(device)), quick)
    results = {"setting": where | {"jobs": jobs}, "rows": {name: make_row(found[name], pairs) for name in MODELS}}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    with disk_errors(out):
        plot_results(results["rows"]).savefig(out / "translation-cost.png", dpi=150)
    return out


def make_row(found: Mapping[str, Any], pairs: list[Pair]) -> dict[str, Any]:
    """Return the training cost of a model and its BLEU."""
    sources, references = zip(*pairs, strict=True)
    scores = score_translations(found["translations"][TEST]["1"], references, sources, "en")
    bleu = {"bleu_tokenized": scores.bleu_tokenized.value, "bleu_lower": scores.bleu_lower.value}
    return {key: found[key] for key in KEPT} | bleu


def format_table(results: Mapping[str, Any]) -> str:
    """Return the Markdown report."""
    head = ["", "parameters", "steps", "training FLOPs", "seconds", "BLEU, tokenized", "sacreBLEU"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, found in results["rows"].items():
        numbers = [
            f"{found['parameters']:,}",
            f"{found['steps']:,}",
            f"{found['flops']:.2e}",
            f"{found['seconds']:.0f}",
        ]
        lines.append([TITLES[name], *numbers, f"{found['bleu_tokenized']:.2f}", f"{found['bleu_lower']:.2f}"])
    where = results["setting"]
    shared = "" if where["jobs"] == 1 else f", {where['jobs']} trainings at a time"
    note = f"Both BLEU lower-cased, on {TEST}. {where['device']}{shared}, torch {where['torch']}, {where['date'][:10]}."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{note}\n\n```\n{where['command']}\n```\n"


def plot_results(rows: Rows) -> Figure:
    """Return the figure: BLEU and validation loss against training FLOPs."""
    figure = Figure(figsize=(12, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    plot_bleu(left, rows)
    plot_losses(right, rows)
    for axes in (left, right):
        axes.set(xscale="log", xlabel="training FLOPs")
        axes.grid(alpha=0.3, which="both")
    return figure


def plot_bleu(axes: Axes, rows: Rows) -> None:
    """Plot the BLEU of each model against its training FLOPs."""
    for name, found in rows.items():
        axes.plot(found["flops"], found["bleu_tokenized"], "o", color=COLOURS[name], markersize=9, label=TITLES[name])
    axes.set(title="After training", ylabel="BLEU, tokenized, lower-cased")
    axes.margins(0.15)
    axes.legend()


def plot_losses(axes: Axes, rows: Rows) -> None:
    for name, found in rows.items():
        at, losses = zip(*((point["flops"], point["loss"]) for point in found["curve"]), strict=True)
        axes.plot(at, losses, marker=".", color=COLOURS[name])
    axes.set(title="During training", ylabel="validation loss, nats a piece")
