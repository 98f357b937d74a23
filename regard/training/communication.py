"""The time that the exchanges of a training step take by themselves.

In a step they overlap with the computation, and inside of a CUDA graph nothing can be timed. So before the first step the
ranks run the same operations on tensors of the same sizes, without computing anything. The result is what a step would
spend on communication if nothing hid it.

| layout          | exchanges of a step                                                                              |
|-----------------|--------------------------------------------------------------------------------------------------|
| ddp             | all-reduce of all gradients                                                                      |
| fsdp            | for each block two all-gathers of its parameters and one reduce-scatter of its gradients         |
| fsdp, data > 1  | as well the all-reduce of each rank's share of the gradients                                     |
| tensor          | as well an all-reduce of activations for each matrix that is cut: the result of one that is cut  |
|                 | by its inputs, and the gradient of the input of one that is cut by its outputs                   |
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.config import TrainConfig
from regard.layers.part import Part
from regard.layers.stack import Stack
from regard.training.interconnect import all_gather, reduce_scatter, synchronize

if TYPE_CHECKING:
    from regard.training.parallel import Ranks

BUCKET = 25 * 2**20  # bytes of gradients that DDP adds up at once
REPEATS = 3


class Exchange(NamedTuple):
    """An operation on a number of values of each rank of an axis of the mesh."""

    operation: str  # all-reduce, all-gather or reduce-scatter
    axis: str  # data, shard or tensor
    size: int  # values of one rank
    dtype: torch.dtype


def time_communication(ranks: Ranks, model: nn.Module, config: TrainConfig, dtype: torch.dtype) -> float:
    """Return the seconds that the exchanges of a step take by themselves, on the slowest rank; all ranks must call it."""
    device = torch.device(ranks.name)
    units = [max(sizes) for sizes in zip(*ranks.gather(unit_sizes(model)), strict=True)]
    found = list_exchanges(ranks, model, units, config, dtype)
    mine = sum(n * time_exchange(ranks, one, device) for one, n in found.items())
    return max(float(each) for each in ranks.gather(mine))


def unit_sizes(model: nn.Module) -> list[int]:
    """Return how many parameters of each block this rank holds, and last of what is outside of blocks.

    A parameter that cannot be cut evenly gives the ranks shares of different sizes; FSDP2 fills all up to the largest."""
    blocks = [block for stack in model.modules() if isinstance(stack, Stack) for block in stack.blocks]
    inside = {id(p) for block in blocks for p in block.parameters()}
    units = [list(block.parameters()) for block in blocks]
    units.append([p for p in model.parameters() if id(p) not in inside])
    return [sum(local(p).numel() for p in parameters) for parameters in units]


def list_exchanges(
    ranks: Ranks, model: nn.Module, units: list[int], config: TrainConfig, dtype: torch.dtype
) -> Counter[Exchange]:
    """Return the exchanges of a step, and how often each occurs; `units` are those of `unit_sizes`, the same on all ranks,
    and `dtype` is that of activations.

    With gradient accumulation ddp and the replicas of fsdp add up gradients once a step, all others with every batch. The
    few mixers that fsdp gathers in fp32 (S4 and S4D, `Part.full_precision`) are counted like the rest of their blocks."""
    found: Counter[Exchange] = Counter()
    batches = config.accumulate
    if ranks.shard > 1:
        for number, size in enumerate(units):
            gathers = 2 if number < len(units) - 1 else 1  # what is outside of blocks is whole until the backward pass
            found[Exchange("all-gather", "shard", size, dtype)] += gathers * batches
            found[Exchange("reduce-scatter", "shard", size, torch.float32)] += batches
            if ranks.data > 1:
                found[Exchange("all-reduce", "data", size, torch.float32)] += 1
    elif ranks.data > 1:
        for size in bucket_sizes(model):
            found[Exchange("all-reduce", "data", size, torch.float32)] += 1
    if ranks.tensor > 1:
        width = getattr(getattr(model, "config", None), "d_model", 0)
        tokens = config.batch_tokens // ranks.data_count
        cut = sum(
            hasattr(part, name) for part in model.modules() if isinstance(part, Part) for name in part.tensor_parallel
        )
        found[Exchange("all-reduce", "tensor", width * tokens, dtype)] += cut * batches
    return found


def bucket_sizes(model: nn.Module) -> Iterator[int]:
    """Yield the numbers of gradients that DDP adds up at once."""
    size, most = 0, BUCKET // 4
    for p in model.parameters():
        size += local(p).numel()
        if size >= most:
            yield size
            size = 0
    if size:
        yield size


def time_exchange(ranks: Ranks, exchange: Exchange, device: torch.device) -> float:
    """Return the seconds of one exchange, in the mean of some after the first."""
    group = ranks.mesh[exchange.axis].get_group()
    share = torch.zeros(exchange.size, dtype=exchange.dtype, device=device)
    gathers = exchange.operation != "all-reduce"
    whole = share.new_zeros(exchange.size * group.size()) if gathers else share
    for repeat in range(1 + REPEATS):
        if repeat == 1:
            synchronize(device)
            begun = time.perf_counter()
        run_exchange(exchange.operation, whole, share, group)
    synchronize(device)
    return (time.perf_counter() - begun) / REPEATS


def run_exchange(operation: str, whole: Tensor, share: Tensor, group: Any) -> None:
    if operation == "all-gather":
        all_gather(whole, share, group=group)
    elif operation == "reduce-scatter":
        reduce_scatter(share, whole, group=group)
    else:
        dist.all_reduce(share, group=group)


def local(p: Tensor) -> Tensor:
    """Return the part of a parameter that this rank holds."""
    return p.to_local() if hasattr(p, "to_local") else p
