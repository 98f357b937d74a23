"""`regard study lstm-odyssey`: the LSTM with peepholes against its eight variants (Greff et al. 2017), at a small scale.

Each variant changes one thing (layers/lstm_variants.py). All have the same width and are trained on three tasks with the
same seeds, each with the best of four learning rates. A variant differs from the vanilla LSTM on a task if the exact
Mann-Whitney test of their accuracies says so at the 5% level.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.config.registry import find
from regard.device import cpu_cores
from regard.errors import RegardError
from regard.files import write_text
from regard.layers.lstm_variants import VARIANTS
from regard.look.figures import save
from regard.studies.job_pool import describe_machine, describe_setting, load_result, run_missing
from regard.studies.stacked_training import (
    LEARNING_RATES,
    TrainingSizes,
    Trial,
    best_rate,
    count_parameters,
    name_largest_rates,
    train_stacked,
)

CELL = "lstm-peephole"
TASKS = ("arithmetic", "brackets", "text")
LEVEL = 0.05


@dataclass(frozen=True)
class OdysseySizes:
    """Everything that determines the numbers of the study."""

    training: TrainingSizes = field(default_factory=lambda: TrainingSizes(steps=300))
    lrs: tuple[float, ...] = LEARNING_RATES
    seeds: int = 5


QUICK = OdysseySizes(
    TrainingSizes(width=8, embedding=8, steps=4, batch=8, training_examples=64, test_examples=32), seeds=2
)


@dataclass(frozen=True)
class VariantJob:
    """The training of one variant on one task, with all seeds and learning rates."""

    variant: str
    task: str
    sizes: OdysseySizes
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.variant}-{self.task}"

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    def identity(self) -> dict[str, Any]:
        sizes = json.loads(json.dumps(dataclasses.asdict(self.sizes)))
        return {"variant": self.variant, "task": self.task, **sizes, **describe_machine("cpu")}


def settings_of(variant: str) -> Any:
    """Return the settings of the cell of a variant."""
    return find("cell", CELL).Settings(variant)


def train_variant(job: VariantJob) -> None:
    """Train all seeds and learning rates of a variant at once, and write the accuracy of each."""
    torch.set_num_threads(1)
    begun, s = time.perf_counter(), job.sizes
    trials = [Trial(job.task, lr, seed) for seed in range(s.seeds) for lr in s.lrs]
    found = train_stacked(CELL, settings_of(job.variant), s.training.width, trials, s.training)
    # The accuracies of each seed, by learning rate.
    accuracies = [found[i * len(s.lrs) : (i + 1) * len(s.lrs)] for i in range(s.seeds)]
    result = {"of": job.identity(), "accuracies": accuracies, "seconds": time.perf_counter() - begun}
    write_text(job.result, json.dumps(result))


def study(out: Path, jobs: int = 2, quick: bool = False) -> Path:
    """Write results.json, table.md and lstm-odyssey.png into `out`, and return it."""
    sizes = QUICK if quick else OdysseySizes()
    todo = [VariantJob(variant, task, sizes, out / "trainings") for task in TASKS for variant in VARIANTS]
    at_once = min(jobs, cpu_cores())  # more would wait for a core
    if failures := run_missing(train_variant, todo, at_once):
        names = ", ".join(failure.name for failure in failures)
        raise RegardError(f"these trainings failed: {names}; their errors are in {out / 'trainings'}")
    found = {(job.variant, job.task): load_result(job) or {} for job in todo}
    best = {
        variant: {task: [max(seed) for seed in found[variant, task]["accuracies"]] for task in TASKS}
        for variant in VARIANTS
    }
    results: dict[str, Any] = {
        "setting": describe_setting("cpu", quick),
        "sizes": dataclasses.asdict(sizes),
        "jobs": at_once,
        "seconds": sum(result["seconds"] for result in found.values()),  # of all trainings, one after the other
        "parameters": {
            variant: count_parameters(CELL, settings_of(variant), sizes.training.width, sizes.training.embedding)
            for variant in VARIANTS
        },
        "accuracies": best,
        "all": {f"{variant} {task}": result["accuracies"] for (variant, task), result in found.items()},
        "best_lrs": {
            task: [best_rate(sizes.lrs, seed) for variant in VARIANTS for seed in found[variant, task]["accuracies"]]
            for task in TASKS
        },
        "p": {
            variant: {task: mann_whitney(best[variant][task], best["vanilla"][task]) for task in TASKS}
            for variant in VARIANTS
            if variant != "vanilla"
        },
    }
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    save(plot_results(results), out / "lstm-odyssey.png")
    return out


def mann_whitney(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the exact two-sided p-value of the Mann-Whitney test: how often a random split of all numbers is as uneven.

    Equal numbers share the mean of their ranks."""
    both = sorted([*a, *b])
    rank = {x: statistics.mean(i for i, y in enumerate(both) if y == x) for x in both}
    ranks = [rank[x] for x in (*a, *b)]
    expected = len(a) * statistics.mean(ranks)
    away = abs(sum(ranks[: len(a)]) - expected)
    splits = [abs(sum(split) - expected) for split in itertools.combinations(ranks, len(a))]
    return sum(split >= away - 1e-9 for split in splits) / len(splits)


# ---- report -----------------------------------------------------------------------------------------------------------


def format_table(results: dict[str, Any]) -> str:
    """Return the Markdown report: medians, in bold where a variant differs from the vanilla LSTM."""
    best, p = results["accuracies"], results["p"]
    lines = [["variant", "in the paper", "parameters", *TASKS, "better", "worse"], ["---", "---", *["---:"] * 6]]
    for variant in best:
        cells, better, worse = list[str](), list[str](), list[str]()
        for task in TASKS:
            median = statistics.median(best[variant][task])
            differs = variant in p and p[variant][task] < LEVEL
            cells.append(f"**{median:.3f}**" if differs else f"{median:.3f}")
            if differs:
                (better if median > statistics.median(best["vanilla"][task]) else worse).append(task)
        counts = ["", ""] if variant == "vanilla" else [str(len(better)), str(len(worse))]
        lines.append([variant, VARIANTS[variant].short, f"{results['parameters'][variant]:,}", *cells, *counts])
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    s, where = results["sizes"], results["setting"]
    note = (
        f"Median accuracy of {s['seeds']} seeds, each with the best of the learning rates "
        f"{', '.join(f'{lr:g}' for lr in s['lrs'])}; cells of width {s['training']['width']}, "
        f"{s['training']['steps']:,} steps. Bold: differs from vanilla, p < {LEVEL:g} in the exact Mann-Whitney test; of "
        f"{len(p) * len(TASKS)} such tests about one finds a difference by chance. CPU, torch {where['torch']}, "
        f"{where['date'][:10]}; the trainings took {results['seconds'] / 60:.1f} minutes, added up over "
        f"{results['jobs']} {'process' if results['jobs'] == 1 else 'processes'}. "
        f"{name_largest_rates(s['lrs'], results['best_lrs'])}"
    )
    return f"{table}\n\n{note}\n\n```\n{where['command']}\n```\n"


def plot_results(results: dict[str, Any]) -> Any:
    """Return the figure: a box for each variant on each task, with its seeds as points."""
    from matplotlib.figure import Figure

    best, p = results["accuracies"], results["p"]
    figure = Figure(figsize=(12, 4.6), dpi=130, layout="constrained")
    title = f"The LSTM and eight variants: accuracy of {results['sizes']['seeds']} seeds (blue: differs from V)"
    figure.suptitle(title, fontsize=11)
    names = [VARIANTS[variant].short for variant in best]
    for axes, task in zip(figure.subplots(1, len(TASKS)), TASKS, strict=True):
        values = [best[variant][task] for variant in best]
        drawn = axes.boxplot(values, tick_labels=names, patch_artist=True, medianprops={"color": "#D55E00"})
        for variant, box in zip(best, drawn["boxes"], strict=True):
            differs = variant in p and p[variant][task] < LEVEL
            box.set_facecolor("#56B4E9" if differs else "#EEEEEE")
        for k, points in enumerate(values, 1):
            axes.plot([k] * len(points), points, ".", color="#000000", markersize=4, zorder=3)
        axes.axhline(statistics.median(best["vanilla"][task]), color="#999999", linewidth=1, zorder=0)
        axes.set_title(task, fontsize=10)
        axes.set_ylabel("accuracy")
        axes.tick_params(axis="x", rotation=60)
        axes.grid(alpha=0.3, axis="y")
    return figure
