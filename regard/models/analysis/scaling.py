"""Predictions of training on many GPUs: memory, communication and time of a step, and the smallest mesh that fits.

models/analysis/gpu_cluster.py has the GPUs and the axes of a mesh. This is the model behind the predictions:

**Memory** is what torch's allocator hands out in six phases of a step (`PHASES`); the largest phase is the peak. The sizes
are those of models/analysis/cost.py. Tensor parallelism cuts the matrices that parts declare in `tensor_parallel`, and
replicates the rest. Shards cut all parameters, gradients and moments (`fully_shard` of each block and of the rest, which
tensor parallelism uses too, with one shard); the parameters of two blocks and of the rest are gathered in bf16, and
gradients are reduced in fp32. Gradients of DDP are views of its buckets. Buffers of NCCL, the CUDA context and fragmentation
are not counted.

**Communication**: to gather or reduce-scatter b bytes among n ranks, each sends (n-1)/n b bytes; an all-reduce is both.
Gradients are all-reduced over `data` once a step. With shards, every batch gathers the blocks forward and backward and the
rest once, and reduce-scatters all gradients. Tensor parallelism all-reduces the activations behind every "row" matrix in the
forward pass, and the gradients before every "column" matrix in the backward pass.

**Time** is computing, FLOPs / (peak x efficiency), plus the communication that computing does not hide. Communication of
`tensor` is never hidden. That of `data` and `shard` is, as far as the same pass computes for that long, except the gathers
before the first block and the reductions of gradients that are ready last, those of embeddings. A group of ranks inside a
node has the bandwidth of its links; one that spans nodes has that of its members' network adapters in one node, if that is
less. Every operation has the latency of its hops.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil, prod
from typing import Any, NamedTuple

from torch import nn

from regard.config import ModelConfig
from regard.config.registry import find
from regard.errors import RegardError
from regard.layers.embedding import Embedding
from regard.layers.mixers.attention import CrossAttention
from regard.layers.part import FeedForward, Part, full_precision_parameters, settings_of
from regard.layers.positions.scheme import PositionScheme
from regard.layers.stack import Stack
from regard.models.analysis.cost import (
    Cost,
    activation_bytes,
    head_widths,
    logit_bytes,
    side_lengths,
    stack_activations,
)
from regard.models.analysis.gpu_cluster import Cluster, MeshShape
from regard.models.architectures import architecture_of

WORKSPACES = 4  # of cuBLAS: for two threads, forward and backward, on two streams, warm-up and capture of a CUDA graph
BUCKET = 25 << 20  # bytes that DDP all-reduces at a time
MOST_NODES = 1024  # that are tried for the smallest mesh
AS_FAST = 0.01  # predictions that differ by this share of the time are as fast as each other


@dataclass(frozen=True)
class Workload:
    """The work of a training step."""

    length: int  # tokens in a row
    batch: int | None = None  # rows of all ranks together; None: one for each rank that reads
    accumulate: int | None = None  # batches of a rank in a step (train.accumulate); None: what is fastest and fits
    activation_checkpointing: bool | None = None  # None: what is fastest and fits
    param_dtype: str = "fp32"


# ---- results -----------------------------------------------------------------------------------------------------------

PHASES = {  # of a step: moments in which memory may be at its peak
    "loss": "at the end of the forward pass, with a chunk of logits",
    "loss gradient": "in the gradient of the output matrix",
    "backward begins": "in the backward pass of the last block",
    "backward ends": "in the backward pass of the first block",
    "embedding gradient": "in the gradient of the embeddings",
    "update": "in the optimizer's step",
}
MemoryParts = dict[str, int]  # bytes, by what they hold
PARTS = ("gradients", "bf16 copies", "gathered", "activations", "logits", "working")  # beside weights and moments


@dataclass(frozen=True)
class Communication:
    """One kind of communication of a rank in a step."""

    axis: str
    operation: str
    sent: int  # bytes
    seconds: float
    hidden: float  # seconds of these during which the rank computes


@dataclass(frozen=True)
class StepPrediction:
    """What a training step on a mesh is predicted to need."""

    mesh: MeshShape
    cluster: Cluster
    work: Workload  # with nothing left open
    memory: dict[str, MemoryParts]  # of a rank, by phase
    communication: tuple[Communication, ...]
    computing: float  # seconds
    flops: int  # of the step without recomputation, on all GPUs

    @property
    def phase(self) -> str:
        """The phase in which memory is at its peak."""
        return max(self.memory, key=lambda phase: sum(self.memory[phase].values()))

    @property
    def peak_memory(self) -> int:
        """The bytes of a rank at the peak."""
        return sum(self.memory[self.phase].values())

    @property
    def fits(self) -> bool:
        """Whether the peak is at most the memory of a GPU."""
        return self.peak_memory <= self.cluster.gpu.memory

    @property
    def exposed(self) -> float:
        """The seconds of communication during which nothing is computed."""
        return sum(one.seconds - one.hidden for one in self.communication)

    @property
    def seconds(self) -> float:
        """The seconds of the step."""
        return self.computing + self.exposed

    @property
    def rows(self) -> int:
        """The rows of the step."""
        assert self.work.batch is not None
        return self.work.batch

    @property
    def seconds_per_row(self) -> float:
        """The seconds of the step, divided by its rows: meshes may have different numbers of rows."""
        return self.seconds / self.rows

    @property
    def tokens_per_second(self) -> float:
        """The tokens of all ranks in a second."""
        return self.work.length / self.seconds_per_row

    @property
    def mfu(self) -> float:
        """The model FLOPs utilization: useful FLOPs as a share of what the GPUs could do in that time."""
        return self.flops / (self.seconds * self.mesh.gpus * self.cluster.gpu.peak)

    def to_dict(self) -> dict[str, Any]:
        """Return the prediction as JSON types."""
        cluster, work = asdict(self.cluster), asdict(self.work)
        return {
            "mesh": self.mesh._asdict(),
            "gpus": self.mesh.gpus,
            "assumed": cluster,
            "training": work,
            "memory": {"phases": self.memory, "phase": self.phase, "peak": self.peak_memory, "fits": self.fits},
            "communication": [asdict(one) for one in self.communication],
            "seconds": {"step": self.seconds, "computing": self.computing, "exposed": self.exposed},
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
        }


@dataclass(frozen=True)
class MeshChoice:
    """The mesh that was chosen, and those that would have been preferred but do not fit."""

    chosen: StepPrediction  # where nothing fits, the one that needs the least memory
    refused: tuple[StepPrediction, ...]


# ---- the parameters of a rank ------------------------------------------------------------------------------------------


class ParameterFacts(NamedTuple):
    """What a prediction needs to know of a parameter."""

    shape: tuple[int, ...]
    block: int  # its block, counted over all stacks; -1 outside of blocks
    cut: str  # column or row; "" where tensor parallelism replicates it
    is_exact: bool  # stays fp32 where train.param_dtype is bf16
    is_multiplied: bool  # in a matrix product, so that autocast makes a copy of it
    is_head: bool  # the output matrix, of a loss that is computed in chunks
    is_embedding: bool

    def local_shape(self, tensor: int) -> tuple[int, ...]:
        """Return the shape on one tensor-parallel rank."""
        axis = {"column": 0, "row": 1}.get(self.cut)
        return tuple(n // tensor if i == axis else n for i, n in enumerate(self.shape))


@dataclass(frozen=True)
class RankParameters:
    """The parameters of one rank, as numbers or bytes; `gathered` are those of all shards together."""

    kept: int  # numbers that the rank keeps
    weights: int  # bytes of these; gradients take as many, and AdamW's moments twice as many
    first_block: int  # bytes of these in the first block
    kept_outside: int  # bytes of these outside of blocks
    late: int  # bytes of these whose gradients are made last: embeddings that are not tied to the output matrix
    blocks: tuple[int, ...]  # gathered numbers of each block
    outside: int  # gathered numbers outside of blocks
    copied: tuple[int, ...]  # those in matrix products, of each block
    copied_outside: int  # those in matrix products outside of blocks, without the output matrix
    gradients: int  # gathered bytes of all gradients
    head: int  # gathered numbers of the output matrix; 0 where the loss is not computed in chunks
    head_gradient: int  # gathered bytes of its gradient
    embedding_gradients: int  # gathered bytes of the gradients of embeddings


class RowCosts(NamedTuple):
    """The costs of one row in a forward or backward pass."""

    cut_flops: int  # of a forward pass, divided by tensor parallelism
    other_flops: int
    forward_vectors: int  # all-reduced over `tensor` in the forward pass
    backward_vectors: int
    forward_reductions: int  # the operations that this takes, whatever the number of rows
    backward_reductions: int


class Transfer(NamedTuple):
    """Bytes that a group of ranks gathers or reduces, in a number of operations."""

    operation: str
    payload: int  # bytes of the whole
    operations: int

    def sent(self, size: int) -> float:
        """Return the bytes that each rank of a group sends."""
        return (2 if self.operation == "all-reduce" else 1) * (size - 1) / size * self.payload


# ---- predicting --------------------------------------------------------------------------------------------------------


class ScalingPlanner:
    """Predicts training steps of one model on meshes of a cluster, and chooses a mesh."""

    def __init__(self, config: ModelConfig, cluster: Cluster) -> None:
        self.config, self.cluster, self.cost = config, cluster, Cost(config)
        self.kind = architecture_of(config)
        self.stacks = [module for module in self.cost.model.modules() if isinstance(module, Stack)]
        self.ranks: dict[tuple[int, int, str], RankParameters] = {}
        self.rows: dict[int, RowCosts] = {}  # by length

    def predict(self, mesh: MeshShape, work: Workload) -> StepPrediction:
        """Return the prediction for a mesh; what the workload leaves open is chosen so that it fits and is fastest."""
        if obstacle := self.obstacle(mesh, work):
            raise RegardError(f"the mesh {mesh} cannot train this model: {obstacle}")
        return prefer([self.predict_step(mesh, way) for way in self.ways(mesh, work)])

    def smallest_mesh(self, work: Workload, gpus: int | None = None) -> MeshChoice:
        """Return the mesh that fits the memory with the least time for a row; without `gpus`, the one of the fewest GPUs.

        All meshes of a number of GPUs compute for about the same time, so the least time is the least communication that is
        not hidden. Without `gpus`, the divisors of a node are tried, and then 2, 3, 4, 6, 8, 12, ... whole nodes."""
        refused: list[StepPrediction] = []
        obstacle = ""
        for number in numbers_of_gpus(self.cluster.gpus_per_node) if gpus is None else (gpus,):
            meshes = list(meshes_of(number, self.cluster.gpus_per_node))
            possible = [mesh for mesh in meshes if not self.obstacle(mesh, work)]
            found = [self.predict(mesh, work) for mesh in possible]
            if not found:
                obstacle = obstacle or f"{meshes[0]}: {self.obstacle(meshes[0], work)}"
                continue
            best = prefer(found)
            if best.fits and gpus is not None:
                refused = [one for one in found if not one.fits and one.seconds_per_row < best.seconds_per_row]
            if best.fits:
                return MeshChoice(best, tuple(refused))
            refused.append(best)
        if not refused:
            raise RegardError(f"no mesh can train this model ({obstacle})")
        return MeshChoice(prefer(refused), ())

    def obstacle(self, mesh: MeshShape, work: Workload) -> str:
        """Return why a mesh cannot train the model, whatever memory it has, or the empty string."""
        if work.batch is not None and work.batch < mesh.readers:
            return f"{work.batch:,} rows are too few for data x shard = {mesh.readers:,} ranks: use more rows"
        rows = 1 if work.batch is None else ceil(work.batch / mesh.readers)
        if work.accumulate is not None and work.accumulate > rows:
            return f"the {rows:,} rows of a rank cannot be divided into {work.accumulate:,} batches (accumulate)"
        if work.activation_checkpointing and not self.stacks:
            return "activation checkpointing is for models of blocks"
        if mesh.tensor > 1 and not self.cut_parts:
            return "no part of it declares how tensor parallelism cuts it: use tensor=1"
        for path, part in self.cut_parts:
            for what, number in part.cut_sizes().items():
                if number % mesh.tensor:
                    return f"{path} has {number} {what}, which tensor={mesh.tensor} does not divide"
        return ""

    def ways(self, mesh: MeshShape, work: Workload) -> Iterator[Workload]:
        """Yield the workload with every choice of what it leaves open."""
        batch = mesh.readers if work.batch is None else work.batch
        rows = ceil(batch / mesh.readers)
        sizes = (n << i for i in range(rows.bit_length()) for n in (1, 3))  # of a batch: 1, 3, 2, 6, 4, 12, ... rows
        counts = sorted({1, *(ceil(rows / n) for n in sizes)}) if work.accumulate is None else [work.accumulate]
        given = work.activation_checkpointing
        for checkpointing in ((False, True) if self.stacks else (False,)) if given is None else (given,):
            for accumulate in counts:
                yield replace(work, batch=batch, accumulate=accumulate, activation_checkpointing=checkpointing)

    # ---- parameters ----

    @cached_property
    def cut_parts(self) -> list[tuple[str, Part]]:
        """The paths and modules of the parts that tensor parallelism cuts."""
        modules = self.cost.model.named_modules()
        return [(path, part) for path, part in modules if isinstance(part, Part) and part.tensor_parallel]

    @cached_property
    def facts(self) -> list[ParameterFacts]:
        """The facts of every parameter, tied ones once."""
        model, modules = self.cost.model, list(self.cost.model.modules())
        cuts: dict[int, str] = {}
        for _, part in self.cut_parts:
            for name, kind in part.tensor_parallel.items():
                child = getattr(part, name)
                own = child.named_parameters() if isinstance(child, nn.Module) else [("weight", child)]
                # The bias behind a "row" matrix is added once, to the sum over ranks.
                cuts |= {id(p): kind for leaf, p in own if kind != "row" or leaf != "bias"}
        blocks = [block for stack in self.stacks for block in stack.blocks]
        block_of = {id(p): i for i, block in enumerate(blocks) for p in block.parameters()}
        exact = (PositionScheme, nn.LayerNorm, nn.RMSNorm)  # as in training/stochastic_rounding.py
        kept_exact = {p for module in modules if isinstance(module, exact) for p in module.parameters()}
        kept_exact |= full_precision_parameters(model)
        embedded = {id(module.weight) for module in modules if isinstance(module, Embedding)}
        multiplied = {id(p) for p in self.cost.token.weights()}
        chunked = not self.kind.gives_classes(self.config)
        head = id(getattr(getattr(model, "head", None), "weight", None)) if chunked else 0
        return [
            ParameterFacts(
                tuple(p.shape),
                block_of.get(id(p), -1),
                cuts.get(id(p), ""),
                p in kept_exact,
                id(p) in multiplied,
                id(p) == head,
                id(p) in embedded,
            )
            for p in model.parameters()
        ]

    def rank_parameters(self, mesh: MeshShape, param_dtype: str) -> RankParameters:
        """Return the parameters of the rank that keeps the most, counted once for each shape of a mesh."""
        key = mesh.shard, mesh.tensor, param_dtype
        if key not in self.ranks:
            self.ranks[key] = self._count_parameters(*key)
        return self.ranks[key]

    def _count_parameters(self, shards: int, tensor: int, param_dtype: str) -> RankParameters:
        n_blocks, is_gathered = sum(len(stack.blocks) for stack in self.stacks), MeshShape(1, shards, tensor).uses_fsdp
        blocks, copied = [0] * n_blocks, [0] * n_blocks
        kept = weights = outside = copied_outside = gradients = head = head_gradient = embeddings = 0
        first_block = kept_outside = late = 0
        for p in self.facts:
            shape = p.local_shape(tensor)
            n, width = prod(shape), 2 if param_dtype == "bf16" and not p.is_exact else 4
            own = ceil(shape[0] / shards) * prod(shape[1:]) if shape else 1  # FSDP2 cuts rows, as torch.chunk does
            gradient = n * (2 if is_gathered else width)  # gathered parameters are bf16, and so are their gradients
            kept, weights, gradients = kept + own, weights + own * width, gradients + gradient
            first_block += own * width * (p.block == 0)
            kept_outside += own * width * (p.block < 0)
            late += own * width * (p.is_embedding and not p.is_head)
            if p.block >= 0:
                blocks[p.block] += n
                copied[p.block] += n * p.is_multiplied
            else:
                outside += n
                copied_outside += n * (p.is_multiplied and not p.is_head)
            head += n * p.is_head
            head_gradient += gradient * p.is_head
            embeddings += gradient * p.is_embedding
        own_bytes = kept, weights, first_block, kept_outside, late
        sizes = tuple(blocks), outside, tuple(copied), copied_outside
        return RankParameters(*own_bytes, *sizes, gradients, head, head_gradient, embeddings)

    # ---- memory ----

    def memory(self, mesh: MeshShape, work: Workload) -> dict[str, MemoryParts]:
        """Return the bytes of a rank in each phase of a step."""
        own = self.rank_parameters(mesh, work.param_dtype)
        config, rows = cut_config(self.config, mesh.tensor), batch_rows(mesh, work)
        is_sharded, checkpointing = mesh.uses_fsdp, work.activation_checkpointing
        s, t = side_lengths(config, work.length)
        hidden = 2 * rows * max(s, t) * config.d_model  # a vector in bf16 for each token

        # Activations: of all blocks, or of their inputs; then those of the first and the last block alone.
        stacks = [] if self.kind.is_recurrent else stack_activations(config, s, t)
        activations = rows * activation_bytes(config, s, t)
        if checkpointing:
            activations -= rows * sum(stack.n_blocks * (stack.block - stack.residual) for stack in stacks)
        first_block = rows * (stacks[0].block + stacks[0].ends) if stacks else 0
        last_block = rows * stacks[-1].block if stacks and checkpointing else 0  # recomputed

        # bf16 copies that autocast makes: gathered parameters, and those that are bf16, need none.
        has_copies = not is_sharded and work.param_dtype == "fp32"
        copies = [2 * n * has_copies for n in own.copied]
        copies_outside, head_copy = 2 * own.copied_outside * has_copies, 2 * own.head * has_copies
        copies_forward = copies_outside + (0 if checkpointing else sum(copies))
        last_copies, first_copies = (copies[-1], copies[0]) if copies else (0, 0)

        # Gradients: DDP's buckets, and gradients that several batches are added to, keep their memory through a step.
        lasting = own.weights if (mesh.data > 1 and not is_sharded) or (work.accumulate or 1) > 1 else 0
        # Those of the first block and of the embeddings are made at the end. FSDP2 keeps those outside of blocks, which are
        # one unit, in bf16 until then.
        pending = 2 * own.outside if is_sharded else 0
        of_blocks = own.weights - (own.kept_outside if is_sharded else own.late)
        tied = own.embedding_gradients if own.late == 0 else 0  # made beside the gradient of the output matrix
        gathered_outside = 2 * own.outside if is_sharded else 0
        gathered = gathered_outside + (2 * sum(sorted(own.blocks)[-2:]) if is_sharded else 0)

        # The loss computes the gradients of the output matrix, in fp32, and of its input. BERT's input is the output of a
        # norm, in fp32. A vocabulary is padded to a multiple of 64 rows, in a copy.
        loss_input = hidden if own.head else 0
        normed = 3 * hidden if self.kind.fills_blanks else 0
        is_padded = bool(own.head) and self.kind.output_vocabulary(config) % 64 > 0
        padded = 2 * own.head if is_padded and not has_copies else 0
        # The backward pass of a block: the gradients of its residual stream and inside of it, and their reduction.
        inside = block_gradient_bytes(config, rows * max(s, t)) if stacks else 0
        backward = 2 * hidden + inside + (6 * max(own.blocks, default=0) if is_sharded else 0)

        phases: dict[str, MemoryParts] = {
            "loss": {
                "gradients": lasting,
                "bf16 copies": copies_forward + head_copy,
                "gathered": gathered,
                "activations": activations,
                "logits": logit_bytes(config, rows, s, t),
                "working": 4 * own.head + loss_input + normed + padded,
            },
            "loss gradient": {
                "gradients": lasting + own.head_gradient,
                "bf16 copies": copies_forward,
                "gathered": gathered,
                "activations": activations,
                "working": 4 * own.head + 2 * loss_input + normed,
            },
            "backward begins": {
                "gradients": lasting + own.head_gradient,
                "bf16 copies": copies_forward + (last_copies if checkpointing else 0),
                "gathered": gathered,
                "activations": activations + last_block,
                "working": backward,
            },
            "backward ends": {
                "gradients": max(lasting, of_blocks - own.first_block) + pending,
                "bf16 copies": copies_outside + first_copies,
                "gathered": gathered,
                "activations": first_block,
                "working": backward,
            },
            "embedding gradient": {
                "gradients": max(lasting, of_blocks + (0 if is_sharded else own.late)) + pending,
                "bf16 copies": copies_outside,
                "gathered": gathered_outside,
                "working": tied + 3 * hidden + (4 * own.outside if is_sharded else 0),
            },
            "update": {"gradients": own.weights},
        }
        state = {"weights": own.weights, "moments": 2 * own.weights}
        workspaces = {"workspaces": WORKSPACES * self.cluster.gpu.workspace}
        return {phase: {**state, **dict.fromkeys(PARTS, 0), **parts, **workspaces} for phase, parts in phases.items()}

    # ---- communication and time ----

    def row_costs(self, length: int) -> RowCosts:
        """Return the costs of a row of a length, which are counted once."""
        if length not in self.rows:
            self.rows[length] = RowCosts(*self._row_flops(length), *self._tensor_reductions(length))
        return self.rows[length]

    def _row_flops(self, length: int) -> tuple[int, int]:
        """Return the FLOPs of a forward pass: those that tensor parallelism divides, and the others."""
        flops, cut_paths = (
            self.cost.module_flops(*side_lengths(self.config, length)),
            {path for path, _ in self.cut_parts},
        )

        def is_cut(path: str) -> bool:
            steps = path.split(".")
            return any(".".join(steps[: i + 1]) in cut_paths for i in range(len(steps)))

        cut = sum(n for path, n in flops.items() if is_cut(path))
        return cut, flops.total() - cut

    def _tensor_reductions(self, length: int) -> tuple[int, int, int, int]:
        """Return the vectors of a row that are all-reduced over `tensor`, forward and backward, and the operations."""
        s, t = side_lengths(self.config, length)
        forward: list[int] = []
        backward: list[int] = []
        for stack in self.stacks:
            tokens = s if stack.side == "encoder" else t
            for part in (part for block in stack.blocks for part in block.get_submodule("sublayers").children()):
                for name, kind in getattr(part, "tensor_parallel", {}).items():
                    reads_memory = isinstance(part, CrossAttention) and name == "kv"
                    forward += [tokens] * (kind == "row")
                    backward += [s if reads_memory else tokens] * (kind == "column")
        return sum(forward), sum(backward), len(forward), len(backward)

    def predict_step(self, mesh: MeshShape, work: Workload) -> StepPrediction:
        """Return the prediction for a workload that leaves nothing open."""
        assert work.batch is not None
        assert work.accumulate is not None
        batches, rows, speed = work.accumulate, batch_rows(mesh, work), self.cluster.gpu.peak * self.cluster.efficiency
        own, row = self.rank_parameters(mesh, work.param_dtype), self.row_costs(work.length)
        recomputed = 1 if work.activation_checkpointing else 0  # forward passes
        forward = rows * (row.cut_flops / mesh.tensor + row.other_flops) / speed  # seconds of one batch
        backward = (2 + recomputed) * forward
        vectors = rows * ((1 + recomputed) * row.forward_vectors + row.backward_vectors)
        reductions = (1 + recomputed) * row.forward_reductions + row.backward_reductions

        blocks, units, first = sum(own.blocks), len(own.blocks), (own.blocks or (0,))[0]
        gather_backward, scatter = (
            Transfer("all-gather", 2 * blocks, units),
            Transfer("reduce-scatter", 4 * blocks, units),
        )
        # Over `data`: DDP's gradients in buckets, or those of the rank's shard by units. Those of embeddings are ready last,
        # or, with shards, those of all parameters outside of blocks, which are one unit.
        summed, late = own.gradients, own.embedding_gradients
        buckets = ceil((summed - late) / BUCKET)
        if mesh.uses_fsdp:
            summed, late, buckets = 4 * own.kept, ceil(4 * own.outside / mesh.shard), units
        # The backward pass hides gathers first, then the reduction over `shard`, and in the last batch that over `data`.
        after_gather = max(0.0, backward - self._seconds(gather_backward, "shard", mesh))
        after_scatter = max(0.0, after_gather - self._seconds(scatter, "shard", mesh))
        communication = (
            self._communication(
                *("data", mesh, 1),
                (Transfer("all-reduce", summed - late, buckets), after_scatter),
                (Transfer("all-reduce", late, 1), 0.0),
            ),
            self._communication(
                *("shard", mesh, batches),
                (Transfer("all-gather", 2 * (own.outside + first), 2), 0.0),
                (Transfer("all-gather", 2 * (blocks - first), max(0, units - 1)), forward),
                (gather_backward, backward),
            ),
            self._communication(
                *("shard", mesh, batches),
                (scatter, after_gather),
                (Transfer("reduce-scatter", 4 * own.outside, 1), 0.0),
            ),
            self._communication(
                *("tensor", mesh, batches),
                (Transfer("all-reduce", 2 * self.config.d_model * vectors, reductions), 0.0),
            ),
        )
        flops = 3 * work.batch * (row.cut_flops + row.other_flops)
        sent = tuple(one for one in communication if one.sent)
        return StepPrediction(
            mesh, self.cluster, work, self.memory(mesh, work), sent, batches * (forward + backward), flops
        )

    def _seconds(self, transfer: Transfer, axis: str, mesh: MeshShape) -> float:
        size, stride = mesh.group(axis)
        if size == 1:
            return 0.0
        latency = self.cluster.latency(size, stride, transfer.operation)
        return transfer.sent(size) / self.cluster.group_bandwidth(size, stride) + transfer.operations * latency

    def _communication(
        self, axis: str, mesh: MeshShape, batches: int, *transfers: tuple[Transfer, float]
    ) -> Communication:
        """Return transfers of one kind, in each of some batches; each has a time of computation that it can hide behind."""
        seconds = [self._seconds(transfer, axis, mesh) for transfer, _ in transfers]
        hidden = sum(min(own, window) for own, (_, window) in zip(seconds, transfers, strict=True))
        sent = sum(transfer.sent(mesh.group(axis)[0]) for transfer, _ in transfers)
        operation = transfers[0][0].operation
        return Communication(axis, operation, round(batches * sent), batches * sum(seconds), batches * hidden)


# ---- choices and sizes -------------------------------------------------------------------------------------------------


def prefer(found: list[StepPrediction]) -> StepPrediction:
    """Return the fastest prediction that fits or, where none does, the one that needs the least memory.

    Of those that are as fast, by what a prediction can tell, it is the one that cuts the model least."""
    fitting = [one for one in found if one.fits]
    if not fitting:
        return min(found, key=lambda one: one.peak_memory)
    fastest = min(one.seconds_per_row for one in fitting)
    as_fast = [one for one in fitting if one.seconds_per_row <= (1 + AS_FAST) * fastest]
    return min(as_fast, key=lambda one: (one.mesh.tensor, one.mesh.shard, one.seconds_per_row))


def meshes_of(gpus: int, gpus_per_node: int) -> Iterator[MeshShape]:
    """Yield all meshes of a number of GPUs whose tensor-parallel ranks are in one node; the first is all `data`."""
    for tensor in (n for n in range(1, min(gpus, gpus_per_node) + 1) if gpus % n == 0):
        for shard in (n for n in range(1, gpus // tensor + 1) if gpus // tensor % n == 0):
            yield MeshShape(gpus // tensor // shard, shard, tensor)


def numbers_of_gpus(gpus_per_node: int) -> Iterator[int]:
    """Yield the numbers of GPUs that are tried: the divisors of a node, then 2, 3, 4, 6, 8, 12, ... nodes."""
    yield from (n for n in range(1, gpus_per_node + 1) if gpus_per_node % n == 0)
    nodes = 2
    while nodes <= MOST_NODES:
        yield from (n * gpus_per_node for n in (nodes, nodes + nodes // 2) if n <= MOST_NODES)
        nodes *= 2


def batch_rows(mesh: MeshShape, work: Workload) -> int:
    """Return the rows of one batch on the rank that has the most."""
    assert work.batch is not None
    assert work.accumulate is not None
    return ceil(ceil(work.batch / mesh.readers) / work.accumulate)


def cut_config(config: ModelConfig, tensor: int) -> ModelConfig:
    """Return the sizes of one tensor-parallel rank, which has a share of the heads and of the inner width."""
    if tensor == 1:
        return config
    heads: dict[str, Any] = {"n_heads": config.n_heads // tensor, "n_kv_heads": config.n_kv_heads // tensor}
    attends = architecture_of(config).translates or any(find("mixer", name).tensor_parallel for name in config.mixer)
    cut = all(find("feedforward", name).tensor_parallel for name in config.feedforward)
    inner: dict[str, Any] = {"d_ff": config.d_ff // tensor} if cut else {}
    return replace(config, **(heads if attends else {}), **inner)


def block_gradient_bytes(config: ModelConfig, tokens: int) -> int:
    """Return the bytes that the backward pass of a block needs beside its activations and its residual stream.

    The most is needed inside the feed-forward layer: the gradients behind and before the activation function. The former
    take the memory of its output, unless that is still needed (relu). Without such a layer it is the gradients of q, k, v
    and of attention's output."""
    queries, keys = head_widths(config)
    parts: list[type[FeedForward]] = [find("feedforward", name) for name in config.feedforward]
    inner = max(
        (4 if part.gated or config.activation == "relu" else 2)
        * max(1, part.experts_per_token(settings_of(part, config)))
        for part in parts
    )
    return tokens * max(inner * config.d_ff, 2 * (queries + 2 * keys) + 2 * queries)
