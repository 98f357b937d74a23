"""One optimizer step, as fast as the device can do it.

On a GPU the blocks and the loss are compiled, and the whole step (forward, backward, clipping, update) is recorded once for
each batch shape and then replayed as one CUDA graph: small models are limited by launching kernels, not by arithmetic.
Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.device import autocast
from regard.layers.stack import Stack
from regard.training.objective import Objective
from regard.training.optim import Updater


class TrainingStep:
    def __init__(self, objective: Objective, config: TrainConfig, device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype, self.objective = device, dtype, objective
        self.updater = Updater(objective.model, config)
        self.sums = torch.zeros(3, device=device)  # the objective's, over steps: whoever reads them resets them
        self.loss = torch.zeros((), device=device)  # of the step in progress
        self.norm = torch.zeros((), device=device)  # of the last gradient
        self.accumulate: Callable[..., Any] = self._accumulate
        self.update: Callable[..., Any] = self._update
        if device.type == "cuda" and config.compile:
            compile_blocks(objective)
            self.accumulate, self.update = Replayed(self._accumulate), Replayed(self._update)

    def __call__(self, batches: list[Batch], lr: float) -> None:
        """Descend the mean loss over all that is scored in `batches`."""
        share = torch.tensor(1 / sum(batch.tokens for batch in batches), device=self.device)
        for batch in batches:
            self.accumulate(*batch.to(self.device).inputs, share)
        self.updater.set_lr(lr)
        self.update()

    def _accumulate(self, *inputs: Tensor) -> None:
        *batch, share = inputs
        with autocast(self.device, self.dtype):
            sums = self.objective(*batch)  # (3,)
        loss = sums[0] * share
        loss.backward()
        self.loss += loss.detach()
        self.sums += sums.detach()

    def _update(self) -> None:
        self.norm.copy_(self.updater.step(self.loss))
        self.loss.zero_()


def compile_blocks(objective: Objective) -> None:
    """Block by block: blocks of a kind share one compiled form, for any shape, so compiling takes seconds, not minutes."""
    for stack in objective.modules():
        if isinstance(stack, Stack):
            for block in stack.blocks:
                block.compile(dynamic=True)
    objective.losses = torch.compile(objective.losses, dynamic=True)  # type: ignore[method-assign]


class Replayed:
    """A function of tensors, without a result, that works on the same memory each time: recorded per input shape.

    The first call with a shape runs as usual (and compiles), the second is recorded, and from then on it is replayed.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self.seen: set[tuple[torch.Size, ...]] = set()
        self.graphs: dict[tuple[torch.Size, ...], tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self.pool: Any = None
        self.stream = torch.cuda.Stream()

    def __call__(self, *inputs: Tensor) -> None:
        shape = tuple(x.shape for x in inputs)
        if shape not in self.seen:
            self.seen.add(shape)
            return self._run_aside(inputs)
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
