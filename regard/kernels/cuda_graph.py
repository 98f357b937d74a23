"""CUDA graphs: work that is recorded once and then replayed, so that launching its kernels costs nothing."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def compilations() -> int:
    """Return how many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not imported by this: it takes seconds
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


class GraphedCallable:
    """A function of tensors, without a result, that works on the same memory each time: recorded per input shape.

    Calls with a shape run as usual until one of them compiles nothing; the next is recorded, and from then on it is
    replayed. Mostly the first call compiles nothing or all there is. But a compiler that gives up on a function when it
    meets it in one place compiles it in parts elsewhere only when it comes there again, and must not do so in a recording.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.seen: set[tuple[torch.Size, ...]] = set()  # shapes that are recorded next time
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self.pool: Any = None
        self.stream = torch.cuda.Stream()

    def __call__(self, *inputs: Tensor) -> None:
        shape = tuple(x.shape for x in inputs)
        if shape not in self.seen:
            before = compilations()
            self._run_aside(inputs)
            if compilations() == before:
                self.seen.add(shape)
            return
        if shape not in self.graphs:
            self.graphs[shape] = self._record(inputs)
        graph, places = self.graphs[shape]
        for place, x in zip(places, inputs, strict=True):
            place.copy_(x, non_blocking=True)
        graph.replay()

    def _run_aside(self, inputs: tuple[Tensor, ...]) -> None:
        """On a stream of its own, as recording will be, so that lazily made workspaces exist by then."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _record(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        graph, places = torch.cuda.CUDAGraph(), tuple(x.clone() for x in inputs)
        # thread_local: the thread that prepares batches may pin memory meanwhile
        with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
            self.function(*places)
        self.pool = self.pool or graph.pool()
        return graph, places
