"""Jobs of a study in the process of the test, which has imported torch already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from regard.studies import pool


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the worker processes, which tests/studies/test_positions_study.py covers: each imports torch for seconds."""

    def run_all(
        work: Callable[[Any], None], jobs: Mapping[str, Any], at_once: int, started: Callable[[str], None]
    ) -> Iterator[pool.Outcome]:
        for name, job in jobs.items():
            started(name)
            begun = time.perf_counter()
            error = pool.attempt(work, job)
            yield pool.Outcome(name, time.perf_counter() - begun, error)

    monkeypatch.setattr(pool, "run_all", run_all)
