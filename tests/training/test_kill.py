"""SIGKILL at any moment: the run that is left resumes to exactly the run that was never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import assert_same_run, write_corpus

KILLED = -signal.SIGKILL


class Trainers:
    """A process that forks trainers of the tiny run, each ready in milliseconds (see `helpers.serve`)."""

    def __init__(self, folder: Path) -> None:
        self.errors = folder / "stderr"
        self.process = subprocess.Popen(
            [sys.executable, "-c", "import helpers; helpers.serve()"],
            cwd=Path(__file__).parent,
            env={**os.environ, "REGARD_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors.open("w"),
            text=True,
        )

    def train(self, run: Path, **order: Any) -> int:
        """The exit status of one trainer, negative where a signal ended it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"run": str(run), **order}) + "\n")
        self.process.stdin.flush()
        status, self.seconds = json.loads(self.process.stdout.readline())
        assert status in (0, KILLED), self.errors.read_text()
        return status


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kill")
    for place in (folder, folder / "random", folder / "writing"):
        place.mkdir(exist_ok=True)
        write_corpus(place)
    return folder


@pytest.fixture(scope="module")
def trainers(folder: Path) -> Iterator[Trainers]:
    trainers = Trainers(folder)
    yield trainers
    trainers.process.communicate()


@pytest.fixture(scope="module")
def reference(folder: Path, trainers: Trainers) -> Path:
    assert trainers.train(folder / "reference") == 0
    return folder / "reference"


def kill_ten_times(trainers: Trainers, reference: Path, folder: Path, order: Callable[[], dict[str, float]]) -> int:
    """Train under `order`s to kill until 10 did; a run that came to its end is compared, and so is the last one.

    Returns how many kills left a half-written checkpoint behind.
    """
    kills, in_a_save, runs = 0, 0, 1
    while kills < 10:
        run = folder / f"run-{runs}"
        status = trainers.train(run, **order())
        kills += status == KILLED
        in_a_save += any((run / "checkpoints").glob(".step-*")) and status == KILLED
        if status == 0:
            assert_same_run(run, reference)
            runs += 1
    assert trainers.train(folder / f"run-{runs}") == 0
    assert_same_run(folder / f"run-{runs}", reference)
    return in_a_save


def test_random_moments(folder: Path, trainers: Trainers, reference: Path) -> None:
    """At times drawn from the length of a whole run, so wherever it happens to be."""
    assert trainers.train(folder / "timed") == 0
    rng, whole = random.Random(20), trainers.seconds
    kill_ten_times(trainers, reference, folder / "random", lambda: {"after": rng.uniform(0, whole / 2)})


def test_moments_of_writing(folder: Path, trainers: Trainers, reference: Path) -> None:
    """Just before a file is opened, made, renamed or removed, so nearly always within a save or its tidying."""
    rng = random.Random(21)
    in_a_save = kill_ten_times(trainers, reference, folder / "writing", lambda: {"before": rng.randrange(1, 80)})
    assert in_a_save >= 3
