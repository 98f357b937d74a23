"""`regard study cell-search`: a search for recurrent cells by mutation (Jozefowicz et al. 2015), at a small scale.

A pool of cells starts with the GRU and the LSTM. In each round some cells of the pool are mutated, and some are tested again
with another seed. A new cell must first learn to repeat four symbols. Its score is the least, over four tasks, of its
accuracy divided by that of the GRU, with the better of two learning rates and equal numbers of parameters. The best cells
are tested with new seeds. The winner is compared with the GRU once more, on seeds and on one task that took no part in the
search.

Every evaluation is a file. The cells of a round depend on the results of earlier rounds alone, not on time, so a search that
was stopped continues where it was, and another machine finds the same cells in the same order.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.config.registry import find
from regard.errors import RegardError
from regard.files import write_text
from regard.layers.expression_cell import (
    GRU_TEXT,
    LSTM_TEXT,
    canonical,
    parse,
    simplify,
    to_python,
    to_text,
)
from regard.studies.cell_mutation import mutate
from regard.studies.cell_search_report import draw_search, format_table, write_recipe
from regard.studies.cell_tasks import read_text
from regard.studies.job_pool import JobPool, describe_machine, describe_setting, load_result
from regard.studies.stacked_training import TrainingSizes, Trial, choose_width, train_stacked
from regard.training.metrics_log import print_message

TASKS, HELD_OUT, FIRST_TASK = ("memory", "arithmetic", "brackets", "text"), "reverse", "repeat"
GRU, LSTM = (to_text(canonical(parse(text))) for text in (GRU_TEXT, LSTM_TEXT))


@dataclass(frozen=True)
class SearchSizes:
    """Everything that determines the search, apart from its seed, the text and the time."""

    training: TrainingSizes = field(default_factory=TrainingSizes)
    first_steps: int = 150  # of the first task
    first_accuracy: float = 0.5  # that a new cell must reach on it
    lrs: tuple[float, ...] = (0.01, 0.03)
    seeds: int = 3  # with which a cell of the pool is scored in the end
    pool: int = 20
    round: int = 8  # evaluations
    again: float = 0.3  # the share of evaluations that test a cell of the pool again
    finalists: int = 4
    rounds: int = 10_000  # at most


QUICK = SearchSizes(
    TrainingSizes(width=8, embedding=8, steps=4, batch=8, training_examples=64, test_examples=32),
    first_steps=4, first_accuracy=0.0, seeds=1, round=4, finalists=2, rounds=2,
)  # fmt: skip


@dataclass(frozen=True)
class CellJob:
    """The evaluation of one cell with one seed."""

    graph: str
    seed: int
    tasks: tuple[str, ...]
    sizes: SearchSizes
    data: Path | None
    text_digest: str
    folder: Path

    def identity(self) -> dict[str, Any]:
        sizes = json.loads(json.dumps(dataclasses.asdict(self.sizes)))
        used = {name: sizes[name] for name in ("training", "first_steps", "first_accuracy", "lrs")}
        about = {"graph": self.graph, "seed": self.seed, "tasks": list(self.tasks), "text": self.text_digest}
        return {**about, **used, **describe_machine("cpu")}

    @property
    def name(self) -> str:
        return hashlib.sha256(json.dumps(self.identity()).encode()).hexdigest()[:16]

    @property
    def result(self) -> Path:
        return self.folder / f"{self.name}.json"


def evaluate(job: CellJob) -> None:
    """Train a cell on the first task, and on the others if it passes; write the accuracies of all learning rates."""
    torch.set_num_threads(1)
    begun, s, cell = time.perf_counter(), job.sizes, find("cell", "expression").Settings(job.graph)
    width = choose_width("expression", cell, s.training)
    trials = [Trial(FIRST_TASK, lr, job.seed) for lr in s.lrs]
    first = max(train_stacked("expression", cell, width, trials, dataclasses.replace(s.training, steps=s.first_steps)))
    accuracies: dict[str, list[float]] = {}
    if first >= s.first_accuracy:
        trials = [Trial(task, lr, job.seed) for task in job.tasks for lr in s.lrs]
        found = train_stacked("expression", cell, width, trials, s.training, job.data)
        accuracies = {task: found[i * len(s.lrs) : (i + 1) * len(s.lrs)] for i, task in enumerate(job.tasks)}
    result = {
        "of": job.identity(),
        "first": first,
        "accuracies": accuracies,
        "width": width,
        "seconds": time.perf_counter() - begun,
    }
    write_text(job.result, json.dumps(result))


class CellSearch:
    """The pool, and the results that it follows from."""

    def __init__(
        self, pool: JobPool, sizes: SearchSizes, seed: int, data: Path | None, folder: Path, at_once: int
    ) -> None:
        self.jobs, self.sizes, self.data, self.folder, self.at_once = pool, sizes, data, folder, at_once
        self.digest = hashlib.sha256(read_text(data).encode()).hexdigest()
        self.random = random.Random(seed)
        self.found: dict[str, list[dict[str, float]]] = {}  # text -> for each seed, the best accuracy of each task
        self.refused: set[str] = set()
        self.history: list[dict[str, Any]] = []
        self.seconds = 0.0  # of all evaluations
        self.full: list[float] = []  # seconds of evaluations of all tasks

    def evaluate(self, wanted: Sequence[tuple[str, int]], tasks: tuple[str, ...]) -> list[dict[str, Any] | None]:
        """Return the results of cells with seeds, None where an evaluation failed. What is there is not run again."""
        jobs = [CellJob(*pair, tasks, self.sizes, self.data, self.digest, self.folder) for pair in wanted]
        missing = {job.name: job for job in jobs if load_result(job) is None}
        for outcome in self.jobs.run(missing, lambda name: None):
            if outcome.error:
                write_text(missing[outcome.name].result.with_suffix(".error"), outcome.error)
        results = [load_result(job) for job in jobs]
        for result in results:
            self.seconds += result["seconds"] if result else 0
            self.full += [result["seconds"]] if result and result["accuracies"] else []
        return results

    def add(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Evaluate cells with seeds on the tasks of the search, and keep their accuracies."""
        for (text, _), result in zip(wanted, self.evaluate(wanted, TASKS), strict=True):
            if result and result["accuracies"]:
                self.found.setdefault(text, []).append(best_accuracies(result))
            else:
                self.refused.add(text)
            score = self.score(text) if text in self.found and GRU in self.found else None
            self.history.append({"graph": text, "score": score})

    def score(self, text: str) -> float:
        """Return the least accuracy of the tasks, in units of the GRU's."""
        return min(self.ratios(text).values())

    def ratios(self, text: str) -> dict[str, float]:
        mean = {cell: average(self.found[cell]) for cell in (text, GRU)}
        return {task: mean[text][task] / max(mean[GRU][task], 1e-9) for task in TASKS}

    def ranking(self) -> list[str]:
        """Return the cells, the best first; a score of few seeds counts a little less."""
        penalty = {text: 0.03 * (1 / len(tests) - 1 / self.sizes.seeds) for text, tests in self.found.items()}
        usable = [text for text in self.found if text not in self.refused]
        return sorted(usable, key=lambda text: (penalty[text] - self.score(text), text))[: self.sizes.pool]

    def propose(self) -> list[tuple[str, int]]:
        """Return the cells and seeds of the next round."""
        pool, wanted = self.ranking(), list[tuple[str, int]]()
        while len(wanted) < self.sizes.round:
            chosen = {text for text, _ in wanted}
            unsure = [text for text in pool if len(self.found[text]) < self.sizes.seeds and text not in chosen][:3]
            if unsure and self.random.random() < self.sizes.again:
                wanted.append((unsure[0], len(self.found[unsure[0]])))
                continue
            parent = pool[int(len(pool) * self.random.random() ** 2)]  # the best most often
            child = to_text(mutate(parse(parent), self.random))
            if child not in self.found and child not in self.refused and child not in chosen:
                wanted.append((child, 0))
        return wanted

    def run(self, minutes: float) -> None:
        """Search until only the time for the final tests is left."""
        seeds = range(self.sizes.seeds)
        self.add([(GRU, seed) for seed in seeds])
        if GRU in self.refused:
            raise RegardError(f"the GRU did not learn the first task: its errors, if any, are in {self.folder}")
        self.add([(LSTM, seed) for seed in seeds])
        final_tests = (self.sizes.finalists + 5) * self.sizes.seeds  # the last comparison has one more task
        for number in range(1, self.sizes.rounds + 1):
            left = minutes * 60 - (self.seconds + final_tests * statistics.mean(self.full[-20:])) / self.at_once
            if left <= 0:
                break
            self.add(self.propose())
            best = self.ranking()[0]
            print_message(
                f"round {number}: {len(self.found) + len(self.refused):,} cells, {len(self.found):,} of them scored; best "
                f"{self.score(best):.3f} of the GRU with {len(self.found[best])} seeds; {left / 60:.1f} minutes left"
            )

    def finish(self) -> str:
        """Test the best cells with new seeds, and return the one with the best score over all seeds."""
        old = (GRU, LSTM)
        tested = [text for text in self.ranking() if text not in old and len(self.found[text]) == self.sizes.seeds]
        finalists = (tested or [text for text in self.ranking() if text not in old])[: self.sizes.finalists]
        if not finalists:
            raise RegardError("no new cell learned the first task: give the search more time (--minutes)")
        print_message(f"testing the best {len(finalists)} cells with {self.sizes.seeds} new seeds")
        n = self.sizes.seeds
        self.add([(text, seed) for text in (GRU, *finalists) for seed in range(n, 2 * n)])
        passed = [text for text in finalists if text not in self.refused]  # every seed learned the first task
        if not passed:
            raise RegardError(
                "no finalist learned the first task with all new seeds: give the search more time (--minutes)"
            )
        return max(passed, key=self.score)

    def compare(self, best: str) -> dict[str, dict[str, list[float]]]:
        """Return the accuracies of GRU, LSTM and the best cell on all tasks with seeds that the search did not use."""
        print_message("comparing the best cell with the GRU: new seeds, and a task that took no part in the search")
        n, cells = self.sizes.seeds, {"GRU": GRU, "LSTM": LSTM, "found": best}
        wanted = [(text, seed) for text in cells.values() for seed in range(2 * n, 3 * n)]
        tested = [best_accuracies(result) for result in self.evaluate(wanted, (*TASKS, HELD_OUT)) if result]
        if len(tested) < len(wanted):
            raise RegardError(
                f"an evaluation failed: its error is in {self.folder}, and the same command tries it again"
            )
        accuracies: dict[str, dict[str, list[float]]] = {}
        for i, name in enumerate(cells):
            tests = tested[i * n : (i + 1) * n]
            accuracies[name] = {task: [test.get(task, 0.0) for test in tests] for task in (*TASKS, HELD_OUT)}
        return accuracies


def best_accuracies(result: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy of each task with the better learning rate."""
    return {task: max(values) for task, values in result["accuracies"].items()}


def average(tests: Iterable[dict[str, float]]) -> dict[str, float]:
    tests = list(tests)
    return {task: statistics.mean(test[task] for test in tests) for task in tests[0]}


def study(
    out: Path, minutes: float = 30.0, jobs: int = 2, seed: int = 0, data: Path | None = None, quick: bool = False
) -> Path:
    """Write table.md, results.json, cell-search.png, found_cell.py and found-cell.toml into `out`, and return it."""
    sizes = QUICK if quick else SearchSizes()
    with JobPool(evaluate, jobs) as pool:
        search = CellSearch(pool, sizes, seed, data, out / "evaluations", jobs)
        search.run(minutes)
        best = search.finish()
        accuracies = search.compare(best)
        ratios, shown = search.ratios(best), to_text(simplify(parse(best)))
    ranking = [text for text in search.ranking() if text not in (GRU, LSTM)][:10]
    width = functools.partial(choose_width, sizes=sizes.training)
    results: dict[str, Any] = {
        "setting": describe_setting("cpu", quick),
        "sizes": dataclasses.asdict(sizes),
        "seed": seed,
        "jobs": jobs,
        "minutes": search.seconds / jobs / 60,
        "cells": len(search.found) + len(search.refused),
        "scored": len(search.found),
        "evaluations": len(search.history),
        "widths": {
            name: width("expression", find("cell", "expression").Settings(text))
            for name, text in (("GRU", GRU), ("found", shown))
        },
        "graph": shown,
        "search_ratios": ratios,
        "accuracies": accuracies,
        "held_out": HELD_OUT,
        "pool": [{"graph": text, "score": search.score(text), "seeds": len(search.found[text])} for text in ranking],
        "scores": [entry["score"] for entry in search.history],
    }
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    write_text(out / "found_cell.py", to_python(parse(shown), "found", "A cell that `regard study cell-search` found."))
    write_text(out / "text.txt", read_text(data))
    write_text(out / "found-cell.toml", write_recipe(shown))
    draw_search(results, out / "cell-search.png")
    return out
