"""Threads of matrix products on a CPU: one for small products, all of them for large ones.

The threads of a matrix product wait for each other at its end. If another process occupies one of the cores, the wait
lasts until the scheduler runs the delayed thread again: milliseconds for a product of microseconds. So a decoding step
runs in one thread, except for products with large matrices, which use all threads as long as none of them is delayed
(`LargeMatmul`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

LARGE_MATRIX_BYTES = 4 << 20  # from this size of a matrix on, two threads are faster than one


class LargeMatmul(threading.local):
    """Runs products with large matrices in several threads, and in one for a while after a delay (exponential backoff).

    Every thread of Python has its own settings and times.

    A product was delayed if it takes `max_delay` seconds longer than four times its best time. Then the next `backoff`
    products run in one thread, and the backoff doubles, so that a busy machine is tried ever more rarely. Every product
    in time makes it one shorter again.
    """

    min_backoff, max_backoff, max_delay = 32, 4096, 1e-3  # products, products, seconds

    def __init__(self) -> None:
        self.threads = 1  # threads of a large product; `one_thread` sets it
        self.backoff = self.min_backoff  # products in one thread after the next delay
        self.remaining = 0  # products until several threads are tried again
        self.best_seconds: dict[tuple[int, int], float] = {}  # by (matrix, rows)

    def __call__(self, product: Callable[[Any], Any], x: Any) -> Any:
        if self.threads == 1:
            return product(x)
        if self.remaining:
            self.remaining -= 1
            return product(x)
        torch.set_num_threads(self.threads)
        try:
            begun = time.perf_counter()
            result = product(x)
            seconds = time.perf_counter() - begun
        finally:
            torch.set_num_threads(1)
        self.update_backoff((id(getattr(product, "__self__", product)), x.numel() // x.shape[-1]), seconds)
        return result

    def update_backoff(self, key: tuple[int, int], seconds: float) -> None:
        """Compare the time of a product with the best one of the same (matrix, rows), and adapt the backoff."""
        best = self.best_seconds[key] = min(seconds, self.best_seconds.get(key, seconds))
        if seconds > 4 * best + self.max_delay:
            self.remaining, self.backoff = self.backoff, min(2 * self.backoff, self.max_backoff)
        elif self.backoff > self.min_backoff:
            self.backoff -= 1


large_matmul = LargeMatmul()


# For each thread of Python in the body of `one_thread`: how many threads torch had before.
_threads_before: dict[int, int] = {}


@contextlib.contextmanager
def one_thread() -> Iterator[int]:
    """Run the body in one thread, except for large products; yield the number of threads that torch had before.

    That number is OMP_NUM_THREADS, or what `torch.set_num_threads` was given, or all cores. In a new thread of Python torch
    begins with the number that was set last anywhere, which is 1 while another thread is in such a body: then the number
    is the one from before that. A body inside of another of the same thread changes nothing.
    """
    own = threading.get_ident()
    if own in _threads_before:
        yield torch.get_num_threads()
        return
    threads = max([torch.get_num_threads(), *list(_threads_before.values())])
    # Others read it before torch's threads change. There is no lock, which a fork could find closed.
    _threads_before[own] = threads
    large_matmul.threads = threads
    torch.set_num_threads(1)
    try:
        yield threads
    finally:
        large_matmul.threads = 1
        torch.set_num_threads(threads)
        del _threads_before[own]


# ---- several processes of one machine ----------------------------------------------------------------------------------

_undivided = 0  # threads that torch had before they were divided among processes; 0 where they were not


def divide_threads(processes: int) -> None:
    """Leave this process its share of torch's threads, at least one, since `processes` processes use this machine."""
    global _undivided
    _undivided = max(_undivided, torch.get_num_threads())
    torch.set_num_threads(max(1, _undivided // processes))


def undivided_threads() -> int:
    """Return the number of torch's threads before they were divided: the same in one process and in several."""
    return _undivided or torch.get_num_threads()
