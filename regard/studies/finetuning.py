"""Pre-train a few models, fine-tune them on many tasks with several seeds, and set the scores side by side.

What `regard study pretraining` and `regard study roformer` share. Every job is a run of its own, through the same tasks and
loops as `regard train`.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from regard.device import cpu_cores, pick_device
from regard.errors import RegardError
from regard.exchange.loader import load_model
from regard.files import write_text
from regard.studies.glue import TASKS
from regard.studies.job import machine
from regard.studies.pool import result_of, run_missing

Values = dict[str, Any]  # a recipe


@dataclass(frozen=True)
class Row:
    """A line of the table: the pre-trained model it is of, whether only its vocabulary is taken, and what is changed."""

    name: str
    init: str
    fresh: bool = False
    changes: Values = field(default_factory=dict)


@dataclass(frozen=True)
class Study:
    pretrained: dict[str, Values]  # recipes of what is pre-trained
    rows: tuple[Row, ...]
    tune: Values  # the [train] of fine-tuning


@dataclass(frozen=True)
class Job:
    name: str
    values: Values
    folder: Path
    device: str
    threads: int
    task: str = ""  # of TASKS; empty: pre-training

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"

    @property
    def run(self) -> Path:
        return self.folder / self.name

    def identity(self) -> dict[str, Any]:
        """What its numbers depend on, as JSON gives it back."""
        return json.loads(json.dumps({"values": self.values, **machine(self.device)}))


def run_job(job: Job) -> None:
    """Train, score, and keep the model and the numbers alone."""
    from regard import tasks
    from regard.device import set_up_device
    from regard.tasks.run import train_config as train
    from regard.tasks.run_config import make_config
    from regard.training.checkpoint import Checkpoints

    config = make_config(job.values, {"train.device": job.device, "train.threads": job.threads})
    train(config, job.run, overwrite=True, quiet=True)
    package = load_model(job.run, set_up_device(config.train)[0])
    test = TASKS[job.task].test_columns if job.task else None
    if test:
        config = dataclasses.replace(config, data=dataclasses.replace(config.data, **test))  # type: ignore[arg-type]
    config = dataclasses.replace(config, model=package.config)
    found = tasks.evaluate(package, config, set_up_device(config.train)[0])
    Checkpoints(job.run / "checkpoints").remove()
    write_text(job.result, json.dumps({"of": job.identity(), "loss": found.loss, "scores": found.scores}, indent=1))


def study(
    plan: Study,
    out: Path,
    text: Path,
    glue: Path,
    tasks: list[str],
    seeds: int = 3,
    jobs: int = 1,
    device: str = "auto",
    quick: bool = False,
) -> Path:
    """Run what is not done yet and write results.json and table.md into `out`, which is returned."""
    wrong = [task for task in tasks if task not in TASKS]
    if wrong:
        raise RegardError(f"unknown task '{wrong[0]}': choose among {', '.join(TASKS)}")
    where: dict[str, Any] = {"device": str(pick_device(device)), "threads": max(1, cpu_cores() // jobs)}
    first = pretraining_jobs(plan, text, out, quick, **where)
    failures = run_missing(run_job, first, jobs)
    second = [] if failures else tuning_jobs(plan, glue, tasks, seeds, out, quick, **where)
    failures += run_missing(run_job, second, jobs)
    if failures:
        told = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures)
        raise RegardError(f"{len(failures)} jobs failed ({told}); the same command tries only them again")
    results = collect(plan, first, second, tasks, seeds) | {"setting": setting(where["device"], quick)}
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", table(results, tasks))
    return out


def pretraining_jobs(plan: Study, text: Path, out: Path, quick: bool, **where: Any) -> list[Job]:
    data: dict[str, Any] = {"root": str(text.absolute()), "documents": "line"}
    data |= {split: [f"wikitext2.{split}.txt.xz"] for split in ("train", "valid", "test")}
    hurry = {"train": {"steps": 4, "valid_every": 4, "save_every": 4, "warmup": 1}} if quick else {}
    return [
        Job(name, merged(merged(values, {"name": name, "data": data}), hurry), out / "jobs", **where)
        for name, values in plan.pretrained.items()
    ]


def tuning_jobs(
    plan: Study, glue: Path, tasks: list[str], seeds: int, out: Path, quick: bool, **where: Any
) -> list[Job]:
    jobs = []
    for row in plan.rows:
        for task in tasks:
            for seed in range(seeds):
                values = tuning_values(plan, row, task, glue, seed, out, 5 if quick else TASKS[task].steps)
                jobs.append(Job(values["name"], values, out / "jobs", **where, task=task))
    return jobs


def tuning_values(plan: Study, row: Row, task: str, glue: Path, seed: int, out: Path, steps: int) -> Values:
    kind, begin = TASKS[task], str((out / "jobs" / row.init).absolute())
    train = {**plan.tune, "steps": steps, "metric": kind.metric, "seed": seed, "warmup": steps // 10, "keep": 1}
    train |= {"valid_every": max(1, steps // 5), "save_every": max(1, steps // 5)}
    values: Values = {
        "name": f"{row.name}-{task}-{seed}".replace(",", "").replace(" ", "-"),
        "task": kind.task,
        "train": train,
    }
    values["data"] = kind.data(task, str(glue.absolute()))
    if row.fresh:
        values |= {"tokenizer": {"file": begin}, "model": plan.pretrained[row.init]["model"]}
    else:
        train["init"] = begin
    return merged(values, row.changes)


def merged(values: Values, changes: Values) -> Values:
    """Tables within tables, `changes` over `values`."""
    both = {k for k, v in changes.items() if isinstance(v, dict) and isinstance(values.get(k), dict)}
    return {**values, **changes, **{k: merged(values[k], changes[k]) for k in both}}


def collect(plan: Study, first: list[Job], second: list[Job], tasks: list[str], seeds: int) -> dict[str, Any]:
    """{row: {task: scores, one a seed}}, and the losses of pre-training."""
    found = {job.name: result_of(job) for job in (*first, *second)}
    rows: dict[str, dict[str, list[float]]] = {row.name: {task: [] for task in tasks} for row in plan.rows}
    jobs = iter(second)
    for row in plan.rows:
        for task in tasks:
            for _ in range(seeds):
                result = found[next(jobs).name]
                assert result is not None
                rows[row.name][task].append(result["scores"][TASKS[task].metric])
    losses = {job.name: found[job.name]["loss"] for job in first}  # type: ignore[index]
    return {"rows": rows, "pretraining": losses}


def setting(device: str, quick: bool) -> dict[str, Any]:
    date, command = datetime.now(UTC).isoformat(timespec="seconds"), shlex.join(["regard", *sys.argv[1:]])
    return {"date": date, "command": command, "quick": quick, **machine(device)}


def table(results: dict[str, Any], tasks: list[str]) -> str:
    """Means over seeds with their standard deviation, and the mean over tasks."""
    head = ["", *(f"{task} ({TASKS[task].metric})" for task in tasks), "mean"]
    lines = [head, ["---", *["---:"] * (len(head) - 1)]]
    for name, row in results["rows"].items():
        cells = [spread(row[task]) for task in tasks]
        lines.append([name, *cells, f"{mean(mean(row[task]) for task in tasks):.1f}"])
    where = results["setting"]
    told = "; ".join(f"{name} {loss:.3f}" for name, loss in results["pretraining"].items())
    note = f"{where['device']}, torch {where['torch']}, {where['date'][:10]}. Test loss of pre-training: {told}."
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + f"\n\n{note}\n\n```\n{where['command']}\n```\n"


def spread(scores: list[float]) -> str:
    return f"{mean(scores):.1f} ± {stdev(scores):.1f}" if len(scores) > 1 else f"{scores[0]:.1f}"
