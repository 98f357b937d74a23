"""GPUs, nodes of GPUs and meshes over them: the numbers that predictions of training on many GPUs are made of.

The GPUs of a job form a mesh of three axes, data x shard x tensor, with neighbours along `tensor`:

- `data`: replicas that only sum their gradients (DDP, or the replicate axis of HSDP);
- `shard`: ranks that share parameters, gradients and optimizer state (FSDP2);
- `tensor`: ranks that share matrices (tensor parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from regard.device import PEAK_FLOPS
from regard.errors import RegardError

GB = 10**9


@dataclass(frozen=True)
class GpuKind:
    """The published numbers of a GPU and of the DGX that it stands in; none of them was measured here."""

    name: str
    peak: float  # dense bf16 FLOP/s
    memory: int  # bytes: the GB of the data sheet, which leave some 6% for the CUDA context, NCCL and fragmentation
    bandwidth: float  # bytes/s of NVLink in one direction
    network: float  # bytes/s of one network adapter in one direction; a DGX has one for each GPU
    workspace: int  # bytes of each workspace that torch allocates for cuBLAS


GPUS = {
    "h200": GpuKind("h200", PEAK_FLOPS["H200"], 141 * GB, 450e9, 50e9, 32 << 20),
    "h100": GpuKind("h100", PEAK_FLOPS["H100"], 80 * GB, 450e9, 50e9, 32 << 20),
    "a100": GpuKind("a100", PEAK_FLOPS["A100"], 80 * GB, 300e9, 25e9, 8 << 20),
    "a100-40gb": GpuKind("a100-40gb", PEAK_FLOPS["A100"], 40 * GB, 300e9, 25e9, 8 << 20),
}

# Seconds from one rank to the next, inside a node and between nodes: the numbers of NCCL's own tuning model (tuning.cc).
HOP_INSIDE, HOP_BETWEEN = 3.4e-6, 14e-6

# The share of its peak that a GPU reaches while it computes: that of LLaMA 1.3B on an H200 (docs/benchmarks.md), with FLOPs
# as `regard cost` counts them. Smaller models reach less.
EFFICIENCY = 0.55


@dataclass(frozen=True)
class Cluster:
    """Nodes of GPUs of one kind; bandwidths are bytes/s of one GPU in one direction."""

    gpu: GpuKind
    gpus_per_node: int
    bandwidth: float  # inside a node
    network: float  # between nodes
    efficiency: float  # the share of its peak that a GPU reaches while it computes

    def members_in_node(self, size: int, stride: int) -> int:
        """Return how many of the `size` ranks of a group, `stride` ranks apart, are in one node."""
        return min(size, max(1, self.gpus_per_node // stride))

    def group_bandwidth(self, size: int, stride: int) -> float:
        """Return the bytes/s at which each rank of a group sends.

        A group that spans nodes uses the network adapters of all its members in a node."""
        members = self.members_in_node(size, stride)
        return self.bandwidth if members == size else min(self.bandwidth, members * self.network)

    def latency(self, size: int, stride: int, operation: str) -> float:
        """Return the seconds of an operation without its bytes: a ring of hops; for an all-reduce a tree between nodes."""
        members = self.members_in_node(size, stride)
        nodes = ceil(size / members)
        if operation == "all-reduce":
            return 2 * ((members - 1) * HOP_INSIDE + log2(nodes) * HOP_BETWEEN)
        return (size - nodes) * HOP_INSIDE + (nodes - 1) * HOP_BETWEEN


def make_cluster(
    gpu: str = "h200",
    gpus_per_node: int = 8,
    bandwidth: float | None = None,
    network: float | None = None,
    efficiency: float = EFFICIENCY,
) -> Cluster:
    """Return a cluster of GPUs of a named kind; bandwidths (bytes/s) that are not given are those of the data sheet."""
    if gpu.lower() not in GPUS:
        raise RegardError(f"unknown --gpu '{gpu}': there are {', '.join(GPUS)}")
    kind = GPUS[gpu.lower()]
    bandwidth, network = (
        kind.bandwidth if bandwidth is None else bandwidth,
        kind.network if network is None else network,
    )
    if gpus_per_node < 1 or bandwidth <= 0 or network <= 0 or not 0 < efficiency <= 1:
        raise RegardError(
            f"--gpus-per-node {gpus_per_node}, --bandwidth {bandwidth / GB:g} and --network {network / GB:g} must be "
            f"above 0, and --efficiency {efficiency:g} above 0 and at most 1"
        )
    return Cluster(kind, gpus_per_node, bandwidth, network, efficiency)


class MeshShape(NamedTuple):
    """The number of ranks along each axis of a mesh."""

    data: int = 1
    shard: int = 1
    tensor: int = 1

    @property
    def gpus(self) -> int:
        """The number of GPUs."""
        return self.data * self.shard * self.tensor

    @property
    def readers(self) -> int:
        """The number of ranks, or of groups of tensor-parallel ranks, that share the rows of a batch."""
        return self.data * self.shard

    @property
    def uses_fsdp(self) -> bool:
        """Whether FSDP2 arranges the parameters, in one shard beside tensor parallelism too; otherwise DDP does, if any."""
        return self.shard > 1 or self.tensor > 1

    def group(self, axis: str) -> tuple[int, int]:
        """Return the size of a group along an axis, and the distance of its neighbours in ranks."""
        strides = {"data": self.shard * self.tensor, "shard": self.tensor, "tensor": 1}
        return getattr(self, axis), strides[axis]

    def __str__(self) -> str:
        return f"data={self.data},shard={self.shard},tensor={self.tensor}"


def parse_mesh(text: str, gpus: int | None = None) -> MeshShape:
    """Return the mesh of a text such as `data=8,shard=4,tensor=2`, which must have `gpus` GPUs if that is given.

    An axis that is left out is 1; `data`, if it is left out or 0, is what the others leave of `gpus`."""
    found: dict[str, int] = {}
    for entry in text.split(","):
        name, _, number = (word.strip() for word in entry.partition("="))
        if (
            name not in MeshShape._fields
            or name in found
            or not number.isdecimal()
            or (name != "data" and number == "0")
        ):
            raise RegardError(f"--mesh '{text}' is no mesh: give numbers of ranks as in data=8,shard=4,tensor=2")
        found[name] = int(number)
    others = found.get("shard", 1) * found.get("tensor", 1)
    data = found.get("data", 0) or max(1, (gpus or others) // others)
    mesh = MeshShape(data, found.get("shard", 1), found.get("tensor", 1))
    if gpus is not None and mesh.gpus != gpus:
        product = " x ".join(str(n) for n in mesh)
        raise RegardError(f"--mesh {mesh} has {product} = {mesh.gpus:,} GPUs, but --gpus is {gpus:,}: make them equal")
    return mesh
