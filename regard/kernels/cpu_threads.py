"""Threads inside matrix products on a CPU: one for small products, all of them for large ones.

Threads inside a product wait for each other at its end. Where another process occupies one of the cores, each wait lasts
until the scheduler lets the delayed thread run again, milliseconds for a product of microseconds. So a decoding step runs
in one thread, and a product that is large enough is given to all threads as long as none of them is late (`LargeProducts`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

log = logging.getLogger("regard")
T = TypeVar("T")
LARGE_MATRIX_BYTES = 4 << 20  # bytes of a matrix from which two threads are faster than one


class LargeMatmul:
    """Multiplies with large matrices in several threads, and in one for a while whenever a thread came late.

    A product is late when it takes `late` seconds longer than four times its best time. The pause after it lasts twice as
    many products as the last one, so that a busy machine is tried ever more rarely; it shrinks again while nothing is late.
    """

    shortest, longest, late = 32, 4096, 1e-3

    def __init__(self) -> None:
        self.threads = 1  # as many as a large product may take; `one_thread` sets it
        self.pause = self.shortest  # products, the next time that one is late
        self.waiting = 0  # products until several threads are tried again
        self.best: dict[tuple[int, int], float] = {}  # (matrix, rows) -> seconds

    def __call__(self, product: Callable[[Any], Any], x: Any) -> Any:
        if self.threads == 1:
            return product(x)
        if self.waiting:
            self.waiting -= 1
            return product(x)
        torch.set_num_threads(self.threads)
        try:
            begun = time.perf_counter()
            result = product(x)
            seconds = time.perf_counter() - begun
        finally:
            torch.set_num_threads(1)
        self.judge((id(getattr(product, "__self__", product)), x.numel() // x.shape[-1]), seconds)
        return result

    def judge(self, which: tuple[int, int], seconds: float) -> None:
        best = self.best[which] = min(seconds, self.best.get(which, seconds))
        if seconds > 4 * best + self.late:
            self.waiting, self.pause = self.pause, min(2 * self.pause, self.longest)
        elif self.pause > self.shortest:
            self.pause -= 1


large_matmul = LargeMatmul()


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Run what is inside in one thread, large products excepted; yields the number of threads that torch had before.

    That number is OMP_NUM_THREADS, or what `torch.set_num_threads` was given, or all cores."""
    threads = torch.get_num_threads()
    before, large_matmul.threads = large_matmul.threads, max(threads, large_matmul.threads)
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        large_matmul.threads = before
        torch.set_num_threads(threads)
