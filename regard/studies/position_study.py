"""`regard study positions`: how each position scheme handles texts longer than those of its training.

Small decoder-only models that differ only in their scheme are trained at one length L and tested at 1, 2, 4 and 8 times L.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from regard.config import ModelConfig
from regard.config.registry import PARTS, find
from regard.device import cpu_cores, pick_device
from regard.errors import RegardError
from regard.files import disk_errors, write_text
from regard.layers.positions.scheme import schemes_for
from regard.models import presets
from regard.models.sizes import resolve_sizes
from regard.studies.job_pool import Outcome, describe_machine, load_result, run_missing
from regard.studies.position_study_jobs import (
    QUICK,
    ROPE_ROWS,
    TASKS,
    PositionStudyJob,
    PositionStudySettings,
    list_rows,
    load_text_task,
    run_job,
)


def study(
    out: Path,
    data: Path | None = None,
    steps: int | None = None,
    schemes: tuple[str, ...] | None = None,
    jobs: int = 1,
    device: str = "auto",
    quick: bool = False,
) -> Path:
    """Run the jobs that are not done yet; write results.json, table.md and positions.png into `out`, and return it."""
    if jobs < 1 or (steps is not None and steps < 1):
        raise RegardError(f"a study needs at least 1 job at a time and 1 step, not {jobs} and {steps}")
    settings = QUICK if quick else PositionStudySettings()
    settings = dataclasses.replace(settings, steps=steps or settings.steps)
    todo = plan_jobs(
        out, data, settings, choose_schemes(schemes), str(pick_device(device)), threads=max(1, cpu_cores() // jobs)
    )
    failures = run_missing(run_job, todo, jobs)
    results = {"setting": describe_study(todo[0])} | collect_results(todo, failures)
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_report(out, results)
    if failures:
        reasons = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures)
        again = "the same command tries only them again"
        raise RegardError(
            f"{len(failures)} of {len(todo)} jobs failed ({reasons}); the others are in {out}, and {again}"
        )
    return out


def plan_jobs(
    out: Path, data: Path | None, settings: PositionStudySettings, schemes: list[str], device: str, threads: int
) -> list[PositionStudyJob]:
    """Return a job for each task and scheme. Errors in the text are raised here, before anything is trained."""
    text = load_text_task(data, settings).sha256
    return [
        PositionStudyJob(task, scheme, settings, out / "jobs", data, text, device, threads)
        for task in TASKS
        for scheme in schemes
    ]


def describe_study(job: PositionStudyJob) -> dict[str, Any]:
    """Return the settings that all jobs have in common."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["regard", *sys.argv[1:]]),
        **describe_machine(job.device),
        "data": {"file": str(job.data) if job.data else "toy", "sha256": job.text},
        "settings": dataclasses.asdict(job.settings),
    }


def choose_schemes(schemes: Sequence[str] | None) -> list[str]:
    """Return the schemes to train. YaRN is tested with the weights of RoPE, so it is trained as RoPE."""
    known = schemes_for(resolve_sizes(ModelConfig(preset="gpt-tiny", target_vocab=1), presets.GPT), "decoder")
    wrong = [name for name in schemes or () if name not in (*known, *ROPE_ROWS)]
    if wrong:
        raise RegardError(f"unknown position scheme '{wrong[0]}': choose among {', '.join(known)}")
    return list(dict.fromkeys("rope" if name in ROPE_ROWS else name for name in schemes or known))


def collect_results(todo: list[PositionStudyJob], failures: list[Outcome]) -> dict[str, Any]:
    """Return {task: {row: {length: scores}}} in the order of the schemes, with the training losses of each job."""
    results: dict[str, Any] = {task: {} for task in TASKS} | {"training": {}}
    for job in todo:
        if result := load_result(job):
            results[job.task] |= {row: result["rows"][row] for row in list_rows(job.scheme)}
            results["training"][job.name] = result["training"]
    return results | {"failed": {failure.name: failure.reason for failure in failures}}


# ---- report -----------------------------------------------------------------------------------------------------------

Scores = Mapping[str, Any]
Rows = Mapping[str, Mapping[str, Scores]]  # row -> length -> scores

# Colour and marker show the row, the line style shows where its scheme acts on the model.
LINES: dict[str, Any] = {"none": ":", "embed": "--", "rotation": "-", "bias": "-.", "scores": (0, (5, 1, 1, 1, 1, 1))}
COLOURS = (
    *("#000000", "#a6761d", "#e7298a", "#7f7f7f", "#08306b", "#2b7bba", "#00a6c8", "#7bb3e0", "#b30000", "#ff7f00"),
    *("#c7b000", "#1b9e3e", "#8bc34a", "#6a3d9a", "#c39bd3", "#5f9ea0", "#8b4513", "#ff69b4", "#556b2f", "#4b0082"),
)
MARKERS = "osD^vP*XhpdH<>8"


def make_line_styles() -> dict[str, dict[str, Any]]:
    """Return how each row of the study is drawn, for every registered scheme."""
    rows = {row: find("positions", name) for name in PARTS["positions"] for row in list_rows(name)}
    return {
        row: {
            "color": COLOURS[i % len(COLOURS)],
            "marker": MARKERS[i % len(MARKERS)],
            "linestyle": LINES[scheme.hook()],
            "label": row,
        }
        for i, (row, scheme) in enumerate(rows.items())
    }


def write_report(out: Path, results: Mapping[str, Any]) -> None:
    """Write table.md and positions.png."""
    write_text(out / "table.md", format_tables(results))
    with disk_errors(out):
        plot_results(results).savefig(out / "positions.png", dpi=150)


# ---- tables -----------------------------------------------------------------------------------------------------------


def format_tables(results: Mapping[str, Any]) -> str:
    """Return the Markdown report."""
    setting = results["setting"]
    s = setting["settings"]
    model = f"{s['layers']} layers, width {s['width']}, {s['heads']} heads"
    training = f"{s['steps']:,} steps of {s['batch']} x {s['length']} tokens, seed {s['seed']}"
    lengths = [str(n * s["length"]) for n in s["multiples"]]
    last = f"over the last {s['length']} characters of each window, the same ones at every length"
    parts = [
        f"# Position schemes, trained at length {s['length']}",
        f"Decoder-only models ({model}), one of each; {training}. {setting['device']}, torch {setting['torch']}.",
        f"## Bits per character, {last}",
        format_table(results["lm"], lengths, lambda scores: f"{scores['last']:.3f}"),
        "## Bits per character, over whole windows",
        format_table(results["lm"], lengths, lambda scores: f"{scores['whole']:.3f}"),
        "## Copying: symbols right, and in brackets whole strings right, in percent",
        format_table(results["copy"], lengths, lambda scores: f"{scores['symbols']:.1%} ({scores['strings']:.1%})"),
        *list_remarks(results),
    ]
    return "\n\n".join(parts) + "\n"


def format_table(rows: Rows, lengths: list[str], cell: Callable[[Scores], str]) -> str:
    """Return a Markdown table with a row for each scheme and a column for each length."""
    lines = [["positions", *lengths], ["---", *("---:" for _ in lengths)]]
    lines += [[row, *(cell(scores[length]) for length in lengths)] for row, scores in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def list_remarks(results: Mapping[str, Any]) -> list[str]:
    """Return what a reader of the tables must know: missing rows, and trainings whose loss was not finite."""
    found = [f"{name} failed: {reason}" for name, reason in results["failed"].items()]
    for name, training in results["training"].items():
        if training["first_bad_step"]:
            step = training["first_bad_step"]
            found.append(f"{name}: the loss was not finite at step {step}; tested with the weights before it")
    return ["\n".join(f"- {remark}" for remark in found)] if found else []


# ---- plot -------------------------------------------------------------------------------------------------------------


def plot_results(results: Mapping[str, Any]) -> Figure:
    """Return the figure: scores by length of both tasks, and bits along the longest window."""
    s = results["setting"]["settings"]
    figure = Figure(figsize=(12, 8.5), layout="constrained")
    (lm, copy), (along, legend) = figure.subplots(2, 2)
    plot_by_length(lm, results["lm"], s, "last")
    lm.set(title=f"Text: the last {s['length']} characters of a window", ylabel="bits per character", yscale="log")
    plot_by_length(copy, results["copy"], s, "symbols")
    copy.set(title="Copy: symbols right", ylabel="share", ylim=(-0.03, 1.03))
    plot_along_window(along, results["lm"], s)
    for axes in (lm, along):
        label_log_axis(axes)
    legend.axis("off")
    known = make_line_styles()
    lines = {line.get_label(): line for axes in (lm, copy) for line in axes.get_lines() if line.get_label() in known}
    ordered = [row for row in known if row in lines]
    legend.legend([lines[row] for row in ordered], ordered, ncols=2, loc="center", handlelength=4, fontsize=11)
    return figure


def plot_by_length(axes: Axes, rows: Rows, s: Mapping[str, Any], score: str) -> None:
    """Plot one score of every row against the tested length."""
    lengths = [n * s["length"] for n in s["multiples"]]
    known = make_line_styles()
    for row, scores in rows.items():
        axes.plot(lengths, [scores[str(n)][score] for n in lengths], markersize=6, linewidth=1.7, **known[row])
    axes.set_xscale("log", base=2)
    axes.xaxis.set(major_locator=FixedLocator(lengths), major_formatter=FuncFormatter(lambda x, _: f"{x:.0f}"))
    axes.set_xlabel(f"tested length (trained: {s['length']})")
    axes.grid(alpha=0.3)


def plot_along_window(axes: Axes, rows: Rows, s: Mapping[str, Any]) -> None:
    """Plot bits per character against the position in the longest window; the trained length is marked."""
    longest, step = max(s["multiples"]) * s["length"], s["length"] // 4
    places = [step * i + step / 2 for i in range(longest // step)]
    known = make_line_styles()
    for row, scores in rows.items():
        axes.plot(places, scores[str(longest)]["along"], linewidth=1.7, **{**known[row], "marker": ""})
    axes.axvline(s["length"], color="#999999", linewidth=1)
    axes.set(title=f"Text: along windows of {longest}", xlabel="position", ylabel="bits per character", yscale="log")
    axes.grid(alpha=0.3)


def label_log_axis(axes: Axes) -> None:
    """Label a logarithmic axis with plain numbers."""
    axes.yaxis.set(
        major_locator=MaxNLocator(8), minor_locator=NullLocator(), major_formatter=FuncFormatter(lambda y, _: f"{y:g}")
    )
