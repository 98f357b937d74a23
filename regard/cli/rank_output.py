"""Commands whose work several processes (ranks) share: only rank 0 prints."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout

from regard.process_rank import Rank, current_rank


@contextmanager
def as_rank() -> Iterator[Rank]:
    """Yield the rank of this process, which prints nothing but the error that ends it unless it is rank 0.

    Launchers set OMP_NUM_THREADS where a user has not: torchrun to 1, others to a share of the cores. It is taken back
    before torch is imported, so that torch finds all cores; then `set_up_rank` of inference/shared_work.py leaves the rank
    its share.
    """
    rank = current_rank()
    if not rank.is_alone:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        if os.environ.get("OMP_NUM_THREADS") in ("1", str(cores // rank.local_count)):
            del os.environ["OMP_NUM_THREADS"]
    if rank.is_first:
        yield rank
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        yield rank
