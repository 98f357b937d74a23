"""`regard study long-range`: attention, recurrences and state spaces on tasks that need a long memory, and their cost.

Small models of nearly equal size learn copying, selective copying and associative recall, and, given a text, to predict its
characters. Then the time and the memory of a training step and of a decoded token are measured against the length.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from regard.device import cpu_cores, pick_device
from regard.errors import RegardError
from regard.files import write_text
from regard.look.figures import Lines, draw, save
from regard.studies.job_pool import Outcome, choose, describe_setting, load_result, run_missing
from regard.studies.layer_comparison import markdown_table
from regard.studies.long_range_jobs import (
    COST,
    ON_CPU,
    QUICK,
    SYSTEMS,
    TASKS,
    TITLES,
    LongRangeJob,
    LongRangeSettings,
    hash_text,
    load_text,
    run_job,
)


def study(
    out: Path,
    data: Path | None = None,
    systems: Sequence[str] | None = None,
    tasks: Sequence[str] | None = None,
    steps: int | None = None,
    jobs: int = 1,
    device: str = "auto",
    quick: bool = False,
) -> Path:
    """Run the jobs that are not done yet; write results.json, table.md and pictures into `out`, and return it."""
    if jobs < 1 or (steps is not None and steps < 1):
        raise RegardError(f"a study needs at least 1 job at a time and 1 step, not {jobs} and {steps}")
    where = pick_device(device)
    settings = QUICK if quick else LongRangeSettings() if where.type == "cuda" else ON_CPU
    if steps:
        settings = dataclasses.replace(settings, steps=steps)
    chosen = choose("system", systems, list(SYSTEMS)), choose("task", tasks, [*TASKS, COST])
    if data is None and "text" in (tasks or ()):
        raise RegardError("the task 'text' needs a text file: --data FILE")
    todo = [job for job in plan_jobs(out, data, settings, chosen[0], str(where), jobs) if job.task in chosen[1]]
    training, costs = ([job for job in todo if (job.task == COST) == cost] for cost in (False, True))
    # One measurement at a time: jobs beside each other would slow each other down.
    failures = run_missing(run_job, training, jobs) + run_missing(run_job, costs, 1)
    results = collect_results(todo, failures)
    results["setting"] = describe_setting(str(where), quick) | {"settings": dataclasses.asdict(settings)}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    for name, figure in plot_results(results).items():
        save(figure, out / f"{name}.png")
    if failures:
        reasons = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures)
        raise RegardError(
            f"{len(failures)} of {len(todo)} jobs failed ({reasons}); the others are in {out}, and the same command tries "
            f"only them again"
        )
    return out


def plan_jobs(
    out: Path, data: Path | None, settings: LongRangeSettings, systems: Sequence[str], device: str, jobs: int
) -> list[LongRangeJob]:
    """Return a job for each task and system. Errors in the text are raised here, before anything is trained."""
    text = ""
    if data is not None:
        load_text(data, settings.length)
        text = hash_text(data)
    tasks = [task for task in (*TASKS, COST) if task != "text" or data is not None]
    threads = max(1, cpu_cores() // jobs)
    return [
        LongRangeJob(task, system, settings, out / "jobs", data, text, device, cpu_cores() if task == COST else threads)
        for task in tasks
        for system in systems
    ]


def collect_results(todo: Sequence[LongRangeJob], failures: Sequence[Outcome]) -> dict[str, Any]:
    """Return {task: {system: result}}, and what failed."""
    results: dict[str, Any] = {job.task: {} for job in todo}
    for job in todo:
        if result := load_result(job):
            results[job.task][job.system] = {name: value for name, value in result.items() if name != "of"}
    return results | {"failed": {failure.name: failure.reason for failure in failures}}


# ---- report --------------------------------------------------------------------------------------------------------------

LEFT_OUT = "\u2013"
COSTS = {  # kind, quantity -> title, unit, factor
    ("training", "seconds"): ("a training step", "ms", 1e3),
    ("training", "bytes"): ("memory of a training step", "MB", 1e-6),
    ("decoding", "seconds"): ("a decoded token", "ms", 1e3),
    ("decoding", "bytes"): ("decoding state of a text", "MB", 1e-6),
}


def list_systems(results: dict[str, Any]) -> list[str]:
    """Return the systems with any result, in the order of the study."""
    return [name for name in TITLES if any(name in results.get(task, {}) for task in (*TASKS, COST))]


def format_table(results: dict[str, Any]) -> str:
    """Return the Markdown report."""
    setting = results["setting"]
    parts = [format_scores(results), *(format_costs(results, *key) for key in COSTS if COST in results)]
    s = setting["settings"]
    notes = (
        f"Accuracy on held-out sequences of {s['length']} tokens in percent; text: the lowest validation loss, in nats a "
        f"character. "
        f"A training step reads {s['cost_tokens']:,} tokens in rows of n. "
        f"{LEFT_OUT} is a length that does not fit or takes too long. "
        f"{setting['device']}, torch {setting['torch']}, {setting['date'][:10]}."
    )
    return "\n\n".join([*parts, notes, f"```\n{setting['command']}\n```"]) + "\n"


def format_scores(results: dict[str, Any]) -> str:
    """Return the table of accuracies and of the loss on a text."""
    pairs, with_text = results["setting"]["settings"]["pairs"], "text" in results
    head = ["system", "parameters", "copying", "selective copying", *(f"recall, {n} pairs" for n in pairs)]
    lines = []
    for system in list_systems(results):

        def score(task: str, name: str, system: str = system) -> str:
            found = results.get(task, {}).get(system)
            if found is None:
                return ""
            return f"{100 * found['scores'][name]:.1f}"

        sizes = [results[task][system]["parameters"] for task in TASKS[:3] if system in results.get(task, {})]
        line = [TITLES[system], f"{sizes[0]:,}" if sizes else ""]
        line += [score(task, "accuracy") for task in TASKS[:2]] + [score("recall", str(n)) for n in pairs]
        found = results.get("text", {}).get(system)
        text = [f"{found['scores']['loss']:.3f}", f"{found['parameters']:,}"] if found else ["", ""]
        lines.append([*line, *(text if with_text else [])])
    return markdown_table([*head, *(["text, nats", "its parameters"] if with_text else [])], lines)


def cost_numbers(results: dict[str, Any], system: str, kind: str, what: str) -> list[float]:
    """Return one quantity at all lengths, NaN where a length was left out; a decoding state is that of one text."""
    each = (kind, what) == ("decoding", "bytes")
    return [
        math.nan if "left_out" in row else row[what] / (row["rows"] if each else 1)
        for row in results[COST][system][kind]
    ]


def format_costs(results: dict[str, Any], kind: str, what: str) -> str:
    """Return the table of one quantity against the length."""
    title, unit, factor = COSTS[kind, what]
    head = [f"{title}, {unit}: n =", *(f"{n:,}" for n in results["setting"]["settings"]["cost_lengths"])]
    lines = []
    for system in results[COST]:
        numbers = [factor * x for x in cost_numbers(results, system, kind, what)]
        shown = (LEFT_OUT if math.isnan(x) else f"{x:,.0f}" if x >= 1000 else f"{x:.3g}" for x in numbers)
        lines.append([TITLES[system], *shown])
    return markdown_table(head, lines)


def plot_results(results: dict[str, Any]) -> dict[str, Any]:
    """Return the figures: accuracy of recall against the number of pairs, and time and memory against the length."""
    s, figures = results["setting"]["settings"], {}
    if results.get("recall"):
        recall = {
            TITLES[system]: np.array([100 * found["scores"][str(n)] for n in s["pairs"]])
            for system, found in results["recall"].items()
        }
        accuracy = Lines(
            *("", np.array(s["pairs"]), recall, "pairs of key and value", "correct values, %"),
            powers=True,
            unordered=True,
        )
        figures["recall"] = draw("Associative recall", [accuracy], 1)
    if results.get(COST):
        panels = []
        for (kind, what), (title, unit, factor) in COSTS.items():
            lines = {
                TITLES[system]: factor * np.array(cost_numbers(results, system, kind, what)) for system in results[COST]
            }
            panels.append(
                Lines(
                    title, np.array(s["cost_lengths"]), lines, "length n", unit, log=True, powers=True, unordered=True
                )
            )
        figures["cost"] = draw("Time and memory against the length of a text", panels, 2)
    return figures
