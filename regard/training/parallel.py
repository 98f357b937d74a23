"""Training by several processes (ranks) that torchrun starts, on torch's own engine.

| `train.parallel` | parameters                       | engine                                             |
|------------------|----------------------------------|----------------------------------------------------|
| ddp              | every rank holds all of them     | `DistributedDataParallel`                          |
| fsdp             | ranks of a `shard` group share   | `fully_shard` (FSDP2); with `data` > 1 also HSDP   |
| `mesh.tensor`    | matrices are cut                 | `parallelize_module`, as the parts declare it      |

All ranks follow the same plan of batches. Each takes its share of the rows of every batch, and the loss is divided by the
scored labels of all ranks. So a step is that of one device, up to the order of sums.

`Ranks` is what training asks of the other processes; `SingleProcess` answers for a process without others.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from regard.config import TrainConfig
from regard.data.batches import Batch
from regard.device import pick_device
from regard.errors import RegardError
from regard.layers.part import Mixer, Part
from regard.layers.stack import Stack
from regard.models.initialization import materialize_part
from regard.process_rank import Rank, current_rank
from regard.signals import StopRequest
from regard.text.special_tokens import PAD
from regard.training.communication import time_communication
from regard.training.objective import Objective

STRAGGLER_SHARE = 0.1  # of the time that all others wait for one rank, from which on it is named


class OtherRankFailed(RegardError):
    """The error of a process that ends because another one failed, which has said why."""


class SingleProcess:
    """What training asks of other processes, where there are none."""

    is_first = True  # prints, validates and writes the run folder
    is_parallel = False  # there is a process group
    is_sharded = False  # parameters are DTensors
    can_capture = True  # the training step can be captured as a CUDA graph
    count = 1  # processes
    data_index, data_count = 0, 1  # which share of a batch this process takes, and how many there are

    def device(self, config: TrainConfig) -> str:
        """Return the name of the device of this process."""
        return config.device

    def share(self, batch: Batch) -> Batch:
        """Return the rows of a batch that this process computes."""
        return batch

    def local_rows(self, rows: int) -> int:
        """Return how many of so many rows this process computes, padding included."""
        return -(-rows // self.data_count)

    def wrap(self, objective: Objective, dtype: torch.dtype) -> nn.Module:
        """Arrange an objective and its model for training, before its optimizer is made; return what is called for it."""
        return objective

    def synchronize(self, forward: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Return the context of the forward and backward pass of one batch; `is_last` of an optimizer step."""
        return contextlib.nullcontext()

    def add_up(self, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all shares of a batch."""
        return x

    def agree_on_largest(self, x: Tensor) -> None:
        """Replace a number by the largest of all ranks."""

    def agree_to_stop(self, stop: StopRequest) -> StopRequest:
        """Return the same request to stop on all ranks: that of any of them."""
        return stop

    def separate_random_numbers(self, seed: int) -> None:
        """Let the dropout of this share of a batch differ from that of the others."""

    def time_communication(self, model: nn.Module, config: TrainConfig, dtype: torch.dtype) -> float:
        """Return the seconds that the exchanges of a step take by themselves; 0 where there are none."""
        return 0.0

    def read_waiting(self) -> list[float]:
        """Return the share of the time since the last call that each rank has waited for the others; nothing for one."""
        return []

    def broadcast(self, value: Any) -> Any:
        """Return the value that the first rank gave, which JSON can express."""
        return value

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, which JSON can express."""
        return [value]

    def from_first(self, function: Callable[[], Any]) -> Any:
        """Call a function on the first rank alone, and return its result, which JSON can express, on all of them."""
        return function()

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        """Return all parameters, whole, by name; every rank must call it."""
        return {name: p.detach() for name, p in model.named_parameters()}

    def own_rows(self, x: Tensor) -> Tensor:
        """Return this rank's share of the rows of a tensor, padded with zeros to the size of all shares."""
        return x

    def all_rows(self, x: Tensor, rows: int) -> Tensor:
        """Return the rows of all shares, without padding; every rank must call it."""
        return x


class Ranks(SingleProcess):
    """The processes that train one model together."""

    is_parallel = True

    def __init__(self, config: TrainConfig, rank: Rank) -> None:
        self.rank, self.count, self.is_first = rank, rank.count, rank.is_first
        self.data, self.shard, self.tensor = arrange(config, rank.count)
        # A group of one process has nothing to share: it trains as a process without others.
        self.is_sharded = rank.count > 1 and (config.parallel == "fsdp" or self.tensor > 1)
        self.name = self.device(config)
        kind = torch.device(self.name).type
        if kind == "cuda":
            torch.cuda.set_device(torch.device(self.name))
        timeout = timedelta(seconds=config.rank_timeout)
        # NCCL does not let two ranks use one GPU; gloo does, for tests.
        self.shares_gpu = kind == "cuda" and rank.local_count > torch.cuda.device_count()
        # With gloo the host takes part in a step, and matrices that are cut have operators that wait for the host.
        self.can_capture = self.tensor == 1 and not self.shares_gpu
        backend = "gloo" if kind == "cpu" or self.shares_gpu else "cpu:gloo,cuda:nccl"
        dist.init_process_group(
            backend, store=make_store(rank), rank=rank.index, world_size=rank.count, timeout=timeout
        )
        shape, names = (self.data, self.shard, self.tensor), ("data", "shard", "tensor")
        self.mesh = dist.device_mesh.init_device_mesh(kind, shape, mesh_dim_names=names)
        place = self.mesh.get_coordinate()
        assert place is not None
        self.data_index, self.data_count = place[0] * self.shard + place[1], self.data * self.shard
        self.host = dist.new_group(backend="gloo", timeout=timeout)  # for small messages between hosts
        # The first rank may tokenize or validate for hours while the others wait; if it dies, they notice it at once.
        self.patient = dist.new_group(backend="gloo", timeout=timedelta(days=7))
        # Checkpoints are saved in the background, while the other groups are in use.
        self.saving = dist.new_group(backend="gloo", timeout=timeout)
        self.share_host = self._host_group(timeout)
        self.has_stepped = False  # a whole step was done
        self.waited, self.measured_from = 0.0, time.perf_counter()  # seconds that this process waited for others

    def _host_group(self, timeout: timedelta) -> Any:
        """Return the gloo group of the ranks that hold other shares of a batch, and the same part of matrices."""
        mine = None
        for place in range(self.tensor):
            ranks = list(range(place, self.count, self.tensor))
            group = dist.new_group(ranks, backend="gloo", timeout=timeout)
            mine = group if self.rank.index in ranks else mine
        return mine

    def device(self, config: TrainConfig) -> str:
        kind = pick_device(config.device).type
        return f"cuda:{self.rank.local_index % torch.cuda.device_count()}" if kind == "cuda" else kind

    # ---- batches ------------------------------------------------------------------------------------------------------

    def share(self, batch: Batch) -> Batch:
        """Return this rank's rows of a batch; all ranks have as many, filled up with rows that are not scored."""
        rows = len(batch.inputs[0])
        each = self.local_rows(rows)
        first = self.data_index * each
        which = torch.arange(first, first + each)
        is_padding = which >= rows
        inputs = [x[which.clamp(max=rows - 1)] for x in batch.inputs]
        if is_padding.any():
            labels = inputs[-1]
            labels[is_padding] = torch.nan if labels.is_floating_point() else PAD
        return Batch(tuple(inputs), batch.tokens)

    def own_rows(self, x: Tensor) -> Tensor:
        each = self.local_rows(len(x))
        own = x[self.data_index * each : (self.data_index + 1) * each]
        return torch.cat([own, own.new_zeros(each - len(own), *x.shape[1:])])

    def all_rows(self, x: Tensor, rows: int) -> Tensor:
        parts = [torch.empty_like(x, device="cpu") for _ in range(self.data_count)]
        dist.all_gather(parts, x.cpu(), group=self.share_host)
        return torch.cat(parts)[:rows]

    # ---- the model ----------------------------------------------------------------------------------------------------

    def wrap(self, objective: Objective, dtype: torch.dtype) -> nn.Module:
        for name, buffer in objective.named_buffers(recurse=False):  # recurrent state of the rows of a batch
            objective.register_buffer(name, self.own_rows(buffer))
        if self.tensor > 1:
            cut_matrices(objective.model, self.mesh["tensor"])
        if self.count == 1:
            return objective
        if not self.is_sharded:
            devices = [torch.device(self.name)] if self.name != "cpu" else None
            # static_graph: parameters without gradients, such as BERT's pooler in pre-training, are found in the first step.
            with (
                warnings.catch_warnings()
            ):  # torch 2.13 has another name for broadcast_buffers, which 2.11 does not know
                warnings.simplefilter("ignore", FutureWarning)
                return nn.parallel.DistributedDataParallel(
                    objective, devices, broadcast_buffers=False, gradient_as_bucket_view=True, static_graph=True
                )
        self._shard(objective, dtype)
        return objective

    def _shard(self, objective: Objective, dtype: torch.dtype) -> None:
        """Cut the parameters of each block, and those outside of blocks, over the ranks of a `shard` group."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # A block returns the residual stream, which may be a view; nothing changes it in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        mesh = self.mesh["data", "shard"] if self.data > 1 else self.mesh["shard"]
        mixed = dtype != torch.float32
        policy = MixedPrecisionPolicy(dtype, torch.float32) if mixed else MixedPrecisionPolicy()
        model = objective.model
        blocks = {block for stack in model.modules() if isinstance(stack, Stack) for block in stack.blocks}
        for path, block in [(path, module) for path, module in model.named_modules() if module in blocks]:
            materialize_part(model, path, "cpu")  # a block at a time is whole in memory
            for part in block.modules():  # a group of its own is not rounded
                if isinstance(part, Mixer) and part.full_precision:
                    fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy())
            fully_shard(block, mesh=mesh, mp_policy=policy)
        materialize_part(model, "", "cpu")
        fully_shard(objective, mesh=mesh, mp_policy=policy)

    def synchronize(self, forward: nn.Module, is_last: bool) -> contextlib.AbstractContextManager[Any]:
        """Add up gradients with the last batch of a step alone.

        With ddp every batch of the first step does so, since it finds out which parameters have gradients. With fsdp the
        gradients of every batch are cut at once, which needs less memory; replicas wait for the last one."""
        if isinstance(forward, nn.parallel.DistributedDataParallel):
            adds_up = is_last or not self.has_stepped
            self.has_stepped = self.has_stepped or is_last
            return contextlib.nullcontext() if adds_up else forward.no_sync()
        if self.data > 1:
            forward.set_requires_all_reduce(is_last)  # type: ignore[operator]
        return contextlib.nullcontext()

    def full_weights(self, model: nn.Module) -> dict[str, Tensor]:
        if not self.shares_gpu:
            return {name: whole(p.detach()) for name, p in model.named_parameters()}
        # gloo gathers on the host.
        mesh = dist.device_mesh.init_device_mesh("cpu", self.mesh.shape, mesh_dim_names=self.mesh.mesh_dim_names)
        return {name: whole(on_host(p.detach(), mesh)) for name, p in model.named_parameters()}

    # ---- agreement ----------------------------------------------------------------------------------------------------

    def add_up(self, x: Tensor) -> Tensor:
        total = x.detach().to("cpu", copy=True)
        dist.all_reduce(total, group=self.share_host)
        return total

    def agree_on_largest(self, x: Tensor) -> None:
        if self.count > 1:
            dist.all_reduce(x, dist.ReduceOp.MAX)

    def separate_random_numbers(self, seed: int) -> None:
        if self.data_index:
            torch.manual_seed(np.random.SeedSequence([seed, self.data_index]).generate_state(1)[0])

    def time_communication(self, model: nn.Module, config: TrainConfig, dtype: torch.dtype) -> float:
        return time_communication(self, model, config, dtype) if self.count > 1 else 0.0

    def read_waiting(self) -> list[float]:
        now = time.perf_counter()
        share = self.waited / max(now - self.measured_from, 1e-9)
        self.waited, self.measured_from = 0.0, now
        return [float(each) for each in self.gather(share)]

    def agree_to_stop(self, stop: StopRequest) -> StopRequest:
        signum = torch.tensor(stop.signum or 0)
        begun = time.perf_counter()
        dist.all_reduce(signum, dist.ReduceOp.MAX, group=self.host)
        self.waited += time.perf_counter() - begun
        agreed = StopRequest()
        agreed.signum = int(signum) or None
        return agreed

    def broadcast(self, value: Any) -> Any:
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        size = torch.tensor(len(data))
        dist.broadcast(size, 0, group=self.patient)
        data = data if self.is_first else torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(data, 0, group=self.patient)
        return json.loads(bytes(data.tolist()))

    def gather(self, value: Any) -> list[Any]:
        data = json.dumps(value).encode()
        sizes = [torch.tensor(0) for _ in range(self.count)]
        dist.all_gather(sizes, torch.tensor(len(data)), group=self.host)
        room = max(int(size) for size in sizes)
        own = torch.frombuffer(bytearray(data.ljust(room)), dtype=torch.uint8)
        parts = [torch.empty(room, dtype=torch.uint8) for _ in range(self.count)]
        dist.all_gather(parts, own, group=self.host)
        return [json.loads(bytes(part.tolist())) for part in parts]

    def from_first(self, function: Callable[[], Any]) -> Any:
        result, error = None, None
        if self.is_first:
            try:
                result = function()
            except BaseException as raised:
                error = raised
        answer = self.broadcast({"result": result, "failed": error is not None})
        if error is not None:
            raise error
        if answer["failed"]:
            raise OtherRankFailed("rank 0 failed")
        return answer["result"]


STARTED = itertools.count()  # process groups that this process has started


def make_store(rank: Rank) -> dist.Store:
    """Return the store in which the ranks find each other; each process group of a program has a part of its own.

    The store of torchrun's agent outlives a restart of the ranks, which must not find the addresses of those before."""
    store, _, _ = next(dist.rendezvous("env://", rank.index, rank.count))
    outlives = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    restarts = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if outlives else "0"
    return dist.PrefixStore(f"regard-{restarts}-{next(STARTED)}", store)


def find_straggler(waiting: list[float]) -> tuple[int, float] | None:
    """Return the rank that the others wait for, and the mean share of the time that they do, if that is a tenth or more."""
    slowest = min(range(len(waiting)), key=waiting.__getitem__)
    others = [share for i, share in enumerate(waiting) if i != slowest]
    if not others or min(others) < STRAGGLER_SHARE or waiting[slowest] > min(others) / 2:
        return None
    return slowest, sum(others) / len(others)


def cuts_new_models(config: TrainConfig) -> bool:
    """Return whether processes share a new model from the beginning: it is then built on the meta device."""
    return current_rank().count > 1 and config.parallel == "fsdp" and config.mesh.tensor == 1


def arrange(config: TrainConfig, count: int) -> tuple[int, int, int]:
    """Return the sizes of the axes data, shard and tensor of a mesh of `count` processes."""
    mesh, sharded = config.mesh, config.parallel == "fsdp"
    if count > 1 and config.param_dtype != "fp32":
        raise RegardError(
            f"train.param_dtype {config.param_dtype} rounds weights at random, differently on every rank: with several "
            f"ranks leave it at fp32; train.parallel fsdp divides the memory of weights among them"
        )
    if not sharded and mesh.shard > 1:
        raise RegardError("train.mesh.shard is for train.parallel fsdp: set that, or leave mesh.shard out")
    left = count // mesh.tensor
    if sharded:
        data = mesh.data or (left // mesh.shard if mesh.shard else 1)
        shard = mesh.shard or left // data
    else:
        data, shard = mesh.data or left, 1
    if data * shard * mesh.tensor != count:
        raise RegardError(
            f"train.mesh has {data} x {shard} x {mesh.tensor} (data x shard x tensor) processes, and {count} were started: "
            f"change train.mesh, or start as many"
        )
    return data, shard, mesh.tensor


def whole(x: Tensor) -> Tensor:
    """Return a tensor whole, gathered from the ranks that it is cut over."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def on_host(x: Tensor, mesh: Any) -> Tensor:
    """Return a tensor on the host, cut over the same ranks as before; `mesh` has all of them."""
    if not hasattr(x, "full_tensor"):
        return x.cpu()
    names = x.device_mesh.mesh_dim_names  # type: ignore[attr-defined]
    own = mesh[names] if len(names) < mesh.ndim else mesh
    local = x.to_local().cpu()  # type: ignore[attr-defined]
    return DTensor.from_local(local, own, x.placements, run_check=False, shape=x.shape, stride=x.stride())  # type: ignore[attr-defined]


def cut_matrices(model: nn.Module, mesh: Any) -> None:
    """Cut the matrices of parts as they declare it: by columns (their outputs) or by rows (their inputs)."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"column": ColwiseParallel, "row": RowwiseParallel}
    size = mesh.size()
    for stack in (module for module in model.modules() if isinstance(module, Stack)):
        for scheme in (*stack.schemes, stack.cross_scheme):
            if scheme.relative or scheme.contextual:
                name = getattr(scheme, "name", type(scheme).__name__)
                raise RegardError(
                    f"train.mesh.tensor cuts the heads of attention, and the positions '{name}' have a table for all of "
                    f"them: leave mesh.tensor out, or choose other positions, such as rope"
                )
    parts = [(path, part) for path, part in model.named_modules() if isinstance(part, Part) and part.tensor_parallel]
    if not parts:
        raise RegardError(
            "train.mesh.tensor cuts attention and dense feed-forward layers, and this model has none: leave it out, and use "
            "train.parallel fsdp to share memory"
        )
    for path, part in parts:
        check_divisible(part, path, size)
        plan = {name: styles[how]() for name, how in part.tensor_parallel.items() if hasattr(part, name)}
        parallelize_module(part, mesh, plan)
        part.cut(size)


def check_divisible(part: Part, path: str, size: int) -> None:
    """Refuse a part whose heads or inner width cannot be cut into `size` equal parts."""
    for name, number in part.cut_sizes().items():
        if number % size:
            raise RegardError(
                f"train.mesh.tensor is {size}, but {path} has {number} {name}, which {size} does not divide"
            )


@contextlib.contextmanager
def open_ranks(config: TrainConfig) -> Iterator[SingleProcess]:
    """Yield the processes that train together: those of torchrun, or this one alone."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        yield SingleProcess()
        return
    ranks = Ranks(config, current_rank())
    try:
        yield ranks
    finally:
        dist.destroy_process_group()
