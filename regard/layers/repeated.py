"""Loops whose turns are all alike, on the meta device: one turn is run, and counts as many.

A recurrent layer of 10,000 steps is counted by one step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_times = [1]


def times() -> int:
    """How often what runs now would run."""
    return _times[-1]


@contextmanager
def repeating(n: int) -> Iterator[None]:
    """What runs inside stands for n turns."""
    _times.append(n * _times[-1])
    try:
        yield
    finally:
        _times.pop()
