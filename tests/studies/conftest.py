"""Jobs of a study in the process of the test, which has imported torch already."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from regard.studies import job_pool


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the worker processes, which tests/studies/test_position_study.py covers: each imports torch for seconds."""

    def run(
        pool: job_pool.JobPool, jobs: Mapping[str, Any], started: Callable[[str], None]
    ) -> Iterator[job_pool.Outcome]:
        for name, job in jobs.items():
            started(name)
            begun = time.perf_counter()
            error = job_pool.try_job(pool.work, job)
            yield job_pool.Outcome(name, time.perf_counter() - begun, error)

    monkeypatch.setattr(job_pool.JobPool, "run", run)
    monkeypatch.setattr("torch.set_num_threads", lambda n: None)
