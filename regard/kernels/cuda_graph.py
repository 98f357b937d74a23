"""CUDA graphs: a function is captured once per input shape and then replayed, without the cost of launching each kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def count_compiled_graphs() -> int:
    """Return how many graphs torch.compile has made in this process."""
    dynamo = sys.modules.get("torch._dynamo.utils")  # not an import: that takes seconds
    return dynamo.counters["stats"]["unique_graphs"] if dynamo else 0


class GraphedCallable:
    """A function of tensors, without a result, whose calls are replayed as CUDA graphs, one for each tuple of input shapes.

    The function must use the same memory in every call, apart from its inputs, which are copied into static buffers.
    Calls with new shapes run eagerly (warm-up) until one of them compiles nothing; the next call is captured, and later
    ones are replayed. One warm-up call is mostly enough. But where torch.compile breaks a graph, the parts behind the
    break are compiled only when they are reached again, which must not happen during capture.
    """

    def __init__(
        self, function: Callable[..., None], stream: torch.cuda.Stream | None = None, warm_up_calls: int = 0
    ) -> None:
        """Take the function, the stream that it is captured on, and how many calls of any shape come before a capture."""
        self.function = function
        self.calls_left = warm_up_calls
        self.warmed_up: set[tuple[torch.Size, ...]] = set()  # shapes whose next call is captured
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self.pool: Any = None
        self.stream = stream or torch.cuda.Stream()

    def __call__(self, *inputs: Tensor) -> None:
        shape = tuple(x.shape for x in inputs)
        if shape not in self.warmed_up:
            before = count_compiled_graphs()
            self._warm_up(inputs)
            self.calls_left -= 1
            if count_compiled_graphs() == before and self.calls_left < 0:
                self.warmed_up.add(shape)
            return
        if shape not in self.graphs:
            self.graphs[shape] = self._capture(inputs)
        graph, static_inputs = self.graphs[shape]
        for static, x in zip(static_inputs, inputs, strict=True):
            static.copy_(x, non_blocking=True)
        graph.replay()

    def _warm_up(self, inputs: tuple[Tensor, ...]) -> None:
        """Run eagerly on a side stream, as the capture will, so that lazily allocated workspaces exist by then."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            self.function(*inputs)
        torch.cuda.current_stream().wait_stream(self.stream)

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
        graph, static_inputs = torch.cuda.CUDAGraph(), tuple(x.clone() for x in inputs)
        # thread_local: the data-loading thread may pin memory during the capture
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"):
            self.function(*static_inputs)
        self.pool = self.pool or graph.pool()
        return graph, static_inputs
