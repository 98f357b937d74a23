"""`regard study cell-search`: a search for recurrent cells by mutation (Jozefowicz et al. 2015), at a small scale.

A pool of cells starts with the GRU and the LSTM. In each round some cells of the pool are mutated, and some are tested again
with another seed. A new cell must first learn to repeat four symbols. Its score is the least, over four tasks, of its
accuracy divided by that of the GRU, with the best of four learning rates and equal numbers of parameters. The best cells
are tested with new seeds. The winner is compared with the GRU once more, on seeds and on one task that took no part in the
search.

Every evaluation is a file, so a search that was stopped continues where it was. The cells of a round follow from the seed,
the sizes and the accuracies of earlier rounds, not from time. With a given number of rounds a search that was stopped
therefore finds the cell that it would have found without the stop. With a limit of minutes the number of rounds depends on
how fast the evaluations were. Another machine or another version of torch rounds differently, and may find another cell.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import heapq
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from regard.config.registry import find
from regard.device import cpu_cores
from regard.errors import RegardError
from regard.files import remove, write_text
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
from regard.studies.cell_tasks import check_text
from regard.studies.job_pool import JobPool, describe_machine, describe_setting, load_result
from regard.studies.stacked_training import (
    LEARNING_RATES,
    TrainingSizes,
    Trial,
    best_rate,
    choose_width,
    train_stacked,
)
from regard.training.metrics_log import print_message

MORE = "give the search more time (--minutes) or more rounds (--rounds)"
TASKS, HELD_OUT, FIRST_TASK = ("memory", "arithmetic", "brackets", "text"), "reverse", "repeat"
GRU, LSTM = (to_text(canonical(parse(text))) for text in (GRU_TEXT, LSTM_TEXT))


@dataclass(frozen=True)
class SearchSizes:
    """Everything that determines the search, apart from its seed, the text and the time."""

    training: TrainingSizes = field(default_factory=TrainingSizes)
    first_steps: int = 150  # of the first task
    first_accuracy: float = 0.5  # that a new cell must reach on it
    lrs: tuple[float, ...] = LEARNING_RATES
    seeds: int = 3  # with which a cell of the pool is scored in the end
    pool: int = 20
    round: int = 8  # evaluations
    again: float = 0.3  # the share of evaluations that test a cell of the pool again
    finalists: int = 4
    rounds: int | None = None  # None: as many as the time allows


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
        self.digest = hashlib.sha256(check_text(data).encode()).hexdigest()
        self.random = random.Random(seed)
        self.found: dict[str, list[dict[str, float]]] = {}  # text -> for each seed, the best accuracy of each task
        self.refused: set[str] = set()
        self.history: list[dict[str, Any]] = []
        self.seconds = 0.0  # that the evaluations took, several at once
        self.run_here = 0  # evaluations that this search ran, and did not find in files
        self.rounds = 0
        self.full: list[float] = []  # seconds of evaluations of all tasks

    def evaluate(self, wanted: Sequence[tuple[str, int]], tasks: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return the results of cells with seeds. What is there is not run again.

        An evaluation that fails is an error, and not a cell that did not learn: the search would find other cells than
        without the failure."""
        begun = time.perf_counter()
        jobs = [CellJob(*pair, tasks, self.sizes, self.data, self.digest, self.folder) for pair in wanted]
        missing = {job.name: job for job in jobs if load_result(job) is None}
        failures = []
        for outcome in self.jobs.run(missing, lambda name: None):
            trace = missing[outcome.name].result.with_suffix(".error")
            if outcome.error:
                write_text(trace, outcome.error)
                failures.append((missing[outcome.name], outcome, trace))
            else:
                remove(trace)
        results = [result for job in jobs if (result := load_result(job))]
        if failures:
            job, outcome, trace = failures[0]
            raise RegardError(
                f'{len(failures)} of {len(missing)} evaluations failed. The first was that of the cell "{job.graph}" with '
                f"seed {job.seed}: {outcome.reason} (all of it: {trace}). The same command tries them again"
            )
        if len(results) < len(jobs):
            raise RegardError(
                f"results of evaluations disappeared from {self.folder}: the same command evaluates them again"
            )
        self.run_here += len(missing)
        # The time of an earlier run is that of its evaluations; what ran now also had to wait for its processes.
        needed = time_of_jobs([result["seconds"] for result in results], self.at_once)
        self.seconds += max(needed, time.perf_counter() - begun)
        self.full += [result["seconds"] for result in results if result["accuracies"]]
        return results

    def add(self, wanted: Sequence[tuple[str, int]]) -> None:
        """Evaluate cells with seeds on the tasks of the search, and keep their accuracies."""
        for (text, _), result in zip(wanted, self.evaluate(wanted, TASKS), strict=True):
            if result["accuracies"]:
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
        """Search for the given number of rounds, or else until only the time for the final tests is left."""
        seeds = range(self.sizes.seeds)
        self.add([(GRU, seed) for seed in seeds])
        if GRU in self.refused:
            raise RegardError("the GRU did not learn the first task, so there is nothing to compare cells with")
        self.add([(LSTM, seed) for seed in seeds])
        while self.rounds < (math.inf if self.sizes.rounds is None else self.sizes.rounds):
            left = minutes * 60 - self.seconds - self.time_of_end()
            if self.sizes.rounds is None and left < self.time_of(self.sizes.round):
                break
            self.rounds += 1
            self.add(self.propose())
            best = self.ranking()[0]
            rest = (
                f"{left / 60:.1f} minutes left" if self.sizes.rounds is None else f"{self.sizes.rounds} rounds in all"
            )
            print_message(
                f"round {self.rounds}: {len(self.found) + len(self.refused):,} cells, {len(self.found):,} of them scored; "
                f"best {self.score(best):.3f} of the GRU with {len(self.found[best])} seeds; {rest}"
            )

    def time_of(self, evaluations: int) -> float:
        """Return the seconds that evaluations of all tasks will take, by the mean of the last ones."""
        return math.ceil(evaluations / self.at_once) * statistics.mean(self.full[-20:])

    def time_of_end(self) -> float:
        """Return the seconds that the final tests and the comparison will take."""
        finalists, s = self.sizes.finalists + 1, self.sizes.seeds  # with the GRU
        more = (len(TASKS) + 1) / len(TASKS)  # the comparison has one more task
        return self.time_of(finalists * s) + more * self.time_of(3 * s)

    def finish(self) -> str:
        """Test the best cells with new seeds, and return the one with the best score over all seeds."""
        old = (GRU, LSTM)
        tested = [text for text in self.ranking() if text not in old and len(self.found[text]) == self.sizes.seeds]
        finalists = (tested or [text for text in self.ranking() if text not in old])[: self.sizes.finalists]
        if not finalists:
            raise RegardError(f"no new cell learned the first task in {self.rounds} rounds: {MORE}")
        print_message(f"testing the best {len(finalists)} cells with {self.sizes.seeds} new seeds")
        n = self.sizes.seeds
        self.add([(text, seed) for text in (GRU, *finalists) for seed in range(n, 2 * n)])
        passed = [text for text in finalists if text not in self.refused]  # every seed learned the first task
        if not passed:
            raise RegardError(f"no finalist learned the first task with all new seeds: {MORE}")
        return max(passed, key=self.score)

    def compare(self, best: str) -> tuple[dict[str, dict[str, list[float]]], dict[str, dict[str, list[float]]]]:
        """Return the accuracies of GRU, LSTM and the best cell on all tasks with seeds that the search did not use, and
        the learning rates that were the best."""
        print_message("comparing the best cell with the GRU: new seeds, and a task that took no part in the search")
        n, cells = self.sizes.seeds, {"GRU": GRU, "LSTM": LSTM, "found": best}
        wanted = [(text, seed) for text in cells.values() for seed in range(2 * n, 3 * n)]
        results = self.evaluate(wanted, (*TASKS, HELD_OUT))
        accuracies: dict[str, dict[str, list[float]]] = {}
        rates: dict[str, dict[str, list[float]]] = {}
        for i, name in enumerate(cells):
            tests = [
                result["accuracies"] for result in results[i * n : (i + 1) * n]
            ]  # empty where a cell failed to learn
            accuracies[name] = {task: [max(test.get(task, [0.0])) for test in tests] for task in (*TASKS, HELD_OUT)}
            rates[name] = {
                task: [best_rate(self.sizes.lrs, test[task]) for test in tests if test] for task in (*TASKS, HELD_OUT)
            }
        return accuracies, rates


def time_of_jobs(seconds: Sequence[float], at_once: int) -> float:
    """Return how long jobs take when `at_once` processes begin them in this order, each as soon as a process is free."""
    free = [0.0] * at_once
    for each in seconds:
        heapq.heapreplace(free, free[0] + each)
    return max(free)


def best_accuracies(result: dict[str, Any]) -> dict[str, float]:
    """Return the accuracy of each task with the best learning rate."""
    return {task: max(values) for task, values in result["accuracies"].items()}


def average(tests: Iterable[dict[str, float]]) -> dict[str, float]:
    tests = list(tests)
    return {task: statistics.mean(test[task] for test in tests) for task in tests[0]}


def study(
    out: Path,
    minutes: float = 30.0,
    jobs: int = 2,
    seed: int = 0,
    data: Path | None = None,
    quick: bool = False,
    rounds: int | None = None,
) -> Path:
    """Write table.md, results.json, cell-search.png, found_cell.py and found-cell.toml into `out`, and return it.

    If `rounds` is given, the search has exactly so many, and `minutes` is ignored."""
    sizes = QUICK if quick else SearchSizes()
    if rounds is not None:
        sizes = dataclasses.replace(sizes, rounds=rounds)
    text = check_text(data)
    at_once = min(jobs, cpu_cores(), max(sizes.round, (sizes.finalists + 1) * sizes.seeds))
    if at_once < jobs:
        print_message(f"using {at_once} of {jobs} processes: more would wait for evaluations or for a core")
    with JobPool(evaluate, at_once) as pool:
        search = CellSearch(pool, sizes, seed, data, out / "evaluations", at_once)
        search.run(minutes)
        best = search.finish()
        accuracies, rates = search.compare(best)
        ratios, shown = search.ratios(best), to_text(simplify(parse(best)))
    ranking = [each for each in search.ranking() if each not in (GRU, LSTM)][:10]
    width = functools.partial(choose_width, sizes=sizes.training)
    results: dict[str, Any] = {
        "setting": describe_setting("cpu", quick),
        "sizes": dataclasses.asdict(sizes),
        "seed": seed,
        "jobs": at_once,
        "minutes": search.seconds / 60,
        "rounds": search.rounds,
        "cells": len(search.found) + len(search.refused),
        "scored": len(search.found),
        "evaluations": len(search.history),
        "evaluations_run_now": search.run_here,
        "widths": {
            name: width("expression", find("cell", "expression").Settings(each))
            for name, each in (("GRU", GRU), ("found", shown))
        },
        "graph": shown,
        "search_ratios": ratios,
        "accuracies": accuracies,
        "best_lrs": rates,
        "held_out": HELD_OUT,
        "pool": [{"graph": each, "score": search.score(each), "seeds": len(search.found[each])} for each in ranking],
        "scores": [entry["score"] for entry in search.history],
    }
    write_text(out / "results.json", json.dumps(results, indent=1))
    write_text(out / "table.md", format_table(results))
    write_text(out / "found_cell.py", to_python(parse(shown), "found", "A cell that `regard study cell-search` found."))
    write_text(out / "text.txt", text)
    write_text(out / "found-cell.toml", write_recipe(shown))
    draw_search(results, out / "cell-search.png")
    return out
