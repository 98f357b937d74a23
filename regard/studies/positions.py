"""`regard study positions`: what each position scheme makes of texts longer than any it was trained on.

Small decoder-only models, alike but for their scheme, are trained at one length L and tested at 1, 2, 4 and 8 times L. The
result of each job is a file of its own, written when it is done: a study that was stopped goes on where it was.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from regard.config import ModelConfig
from regard.device import cpu_cores, pick_device
from regard.errors import RegardError
from regard.files import write_text
from regard.layers.positions.scheme import schemes_for
from regard.models import presets
from regard.models.sizes import resolve_sizes
from regard.studies import report
from regard.studies.job import ROPE_ROWS, TASKS, Job, machine, make_text, rows_of, run_job
from regard.studies.pool import Outcome, result_of, run_missing
from regard.studies.tasks import QUICK, Settings


def study(
    out: Path,
    data: Path | None = None,
    steps: int | None = None,
    schemes: tuple[str, ...] | None = None,
    jobs: int = 1,
    device: str = "auto",
    quick: bool = False,
) -> Path:
    """Run what is not done yet and write results.json, table.md and positions.png into `out`, which is returned."""
    if jobs < 1 or (steps is not None and steps < 1):
        raise RegardError(f"a study needs at least 1 job at a time and 1 step, not {jobs} and {steps}")
    settings = QUICK if quick else Settings()
    settings = dataclasses.replace(settings, steps=steps or settings.steps)
    todo = plan(out, data, settings, to_train(schemes), str(pick_device(device)), threads=max(1, cpu_cores() // jobs))
    failures = run_missing(run_job, todo, jobs)
    results = {"setting": setting_of(todo[0])} | collect(todo, failures)
    write_text(out / "results.json", json.dumps(results, indent=1))
    report.write(out, results)
    if failures:
        told = "; ".join(f"{failure.name}: {failure.reason}" for failure in failures)
        again = "the same command tries only them again"
        raise RegardError(f"{len(failures)} of {len(todo)} jobs failed ({told}); the others are in {out}, and {again}")
    return out


def plan(out: Path, data: Path | None, settings: Settings, schemes: list[str], device: str, threads: int) -> list[Job]:
    """A job for each task and scheme. What is wrong with the text is said here, before anything is trained."""
    text = make_text(data, settings).sha256
    return [
        Job(task, scheme, settings, out / "jobs", data, text, device, threads) for task in TASKS for scheme in schemes
    ]


def setting_of(job: Job) -> dict[str, Any]:
    """All that the jobs have in common."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["regard", *sys.argv[1:]]),
        **machine(job.device),
        "data": {"file": str(job.data) if job.data else "toy", "sha256": job.text},
        "settings": dataclasses.asdict(job.settings),
    }


def to_train(schemes: Sequence[str] | None) -> list[str]:
    """The schemes to train. YaRN reads the weights that RoPE learned, so asking for it is asking for RoPE."""
    known = schemes_for(resolve_sizes(ModelConfig(preset="gpt-tiny", target_vocab=1), presets.GPT), "decoder")
    wrong = [name for name in schemes or () if name not in (*known, *ROPE_ROWS)]
    if wrong:
        raise RegardError(f"unknown position scheme '{wrong[0]}': choose among {', '.join(known)}")
    return list(dict.fromkeys("rope" if name in ROPE_ROWS else name for name in schemes or known))


def collect(todo: list[Job], failures: list[Outcome]) -> dict[str, Any]:
    """{task: {row: {length: scores}}}, in the order of the schemes, with how the training of each went."""
    results: dict[str, Any] = {task: {} for task in TASKS} | {"training": {}}
    for job in todo:
        if result := result_of(job):
            results[job.task] |= {row: result["rows"][row] for row in rows_of(job.scheme)}
            results["training"][job.name] = result["training"]
    return results | {"failed": {failure.name: failure.reason for failure in failures}}
