"""A test of the interconnect before a run: do all ranks answer, do they agree, are sums exact, and how fast are they?

Every rank calls `examine_interconnect`. Ranks first find each other through torch's key/value store, which needs one open
port; there each says which stage of the test it has reached. When a stage takes too long, the ranks that are behind are
named.

Bandwidths are those of NVIDIA's nccl-tests. A collective operation on S bytes in t seconds has the algorithm bandwidth
S / t; S is the whole tensor, for all-gather its result, for reduce-scatter its argument. The bus bandwidth multiplies this
with the share of S that the slowest link must carry, 2(n - 1)/n for all-reduce and (n - 1)/n for the others, so it can be
compared with the data sheet of a link, whatever the number of ranks n.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

import regard
from regard.errors import RegardError
from regard.process_rank import Rank
from regard.terminal import format_bytes, format_table

SIZES = {
    "cpu": (1_000, 16_000, 256_000, 4_000_000, 16_000_000),
    "cuda": (1_000, 16_000, 256_000, 4_000_000, 64_000_000, 256_000_000),
}
SECONDS_PER_SIZE = 0.2  # the repetitions of one operation at one size take about so long
PING_PONGS = 50
CLOCK_ROUNDS = 5
MAX_CLOCK_OFFSET = 1.0  # seconds: log lines of several machines are no longer in order beyond
WATCH_MARGIN = 2.0  # seconds after the timeout for which torch's own errors are waited for

STAGES = ("start", "device", "process group", "clocks", "exact sums", "bandwidth", "latency", "end")


@dataclass(frozen=True)
class RankIdentity:
    """What a rank is: its machine, its device, and the versions of what it runs."""

    rank: int
    host: str
    device: str
    torch: str
    regard: str
    python: str


@dataclass(frozen=True)
class CollectiveTiming:
    """The time of one collective operation on `nbytes` bytes among `ranks` ranks, in the mean of its repetitions.

    It is the time of the slowest rank, for which a training step waits.
    """

    operation: str
    nbytes: int
    seconds: float
    ranks: int

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes of the tensor a second."""
        return self.nbytes / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes a second that the slowest link carries."""
        passes = 2 if self.operation == "all-reduce" else 1
        return self.algorithm_bandwidth * passes * (self.ranks - 1) / self.ranks


@dataclass(frozen=True)
class InterconnectReport:
    """The result of the test on rank 0.

    Attributes:
        clock_offsets: Seconds by which the clock of each rank is ahead of that of rank 0.
        latencies: Seconds that a message of 8 bytes takes between two neighbours, by their ranks.
        problems: What makes training wrong or impossible.
        warnings: What makes it slower, or its logs confusing.
    """

    backend: str
    identities: list[RankIdentity]
    clock_offsets: list[float]
    timings: list[CollectiveTiming]
    latencies: dict[tuple[int, int], float]
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


# torch 2.13 has new names for these, and warns about the old ones.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# ---- ranks that do not answer ----------------------------------------------------------------------------------------


class StageBoard:
    """A place in torch's key/value store where each rank says which stage of the test it has reached.

    A thread calls `on_timeout` with an error that names the ranks that are behind, when this rank is in one stage for longer
    than the timeout: a hanging call of NCCL or of the driver can be ended by nothing else than the end of the process.
    """

    def __init__(self, rank: Rank, timeout: float, on_timeout: Callable[[RegardError], None]) -> None:
        self.rank, self.timeout, self._on_timeout = rank, timeout, on_timeout
        self.store = connect_store(rank, timeout)
        self._own_store = self.store.clone() if hasattr(self.store, "clone") else self.store
        self._stage = 0
        self._entered = time.monotonic()
        self._ended = threading.Event()
        threading.Thread(target=self._watch, name="regard-interconnect", daemon=True).start()

    def enter(self, stage: str) -> None:
        """Say that this rank has finished the stages before `stage`."""
        self._stage, self._entered = STAGES.index(stage), time.monotonic()
        self.store.set(f"stage/{self.rank.index}", str(self._stage))

    def close(self) -> None:
        """Stop watching the time."""
        self._ended.set()

    def publish(self, name: str, value: object) -> None:
        """Write a value of this rank, to be collected by rank 0."""
        self.store.set(f"{name}/{self.rank.index}", json.dumps(value))

    def collect(self, name: str) -> list:
        """Return the values that all ranks have published under a name; wait for them until the timeout."""
        keys = [f"{name}/{index}" for index in range(self.rank.count)]
        end = time.monotonic() + self.timeout
        while not self.store.check(keys):
            if time.monotonic() > end:
                raise self.explain()
            time.sleep(0.02)
        return [json.loads(value) for value in self.store.multi_get(keys)]

    def explain(self, error: Exception | None = None) -> RegardError:
        """Return an error that names the ranks that are behind this one; where none is, that of torch."""
        return self._explain(self.store, error)

    def _explain(self, store: dist.Store, error: Exception | None = None) -> RegardError:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        stages: dict[int, int] = {}
        for index in range(self.rank.count):
            if store.check([f"stage/{index}"]):
                stages[index] = int(store.get(f"stage/{index}"))
        silent = [index for index in range(self.rank.count) if index not in stages]
        within = f"within {self.timeout:g} s"
        if silent:
            return RegardError(
                f"{name_ranks(silent)} of {self.rank.count} did not answer {within}: see that the process was started, "
                f"that it has not ended with an error, and that its machine reaches {address}"
            )
        first = min(stages.values())
        behind = [index for index, stage in stages.items() if stage == first]
        if first < self._stage or error is None:
            hosts = sorted({str(json.loads(store.get(f"host/{index}"))) for index in behind})
            return RegardError(
                f"{name_ranks(behind)} of {self.rank.count} did not get beyond the stage '{STAGES[first]}' {within} "
                f"({', '.join(hosts)}): see what the process does there, and that machines reach each other on all ports"
            )
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return RegardError(f"the stage '{STAGES[self._stage]}' failed on rank {self.rank.index}: {reason}")

    def _watch(self) -> None:
        while not self._ended.wait(0.1):
            if time.monotonic() - self._entered > self.timeout + WATCH_MARGIN:
                try:
                    error = self._explain(self._own_store)
                except RuntimeError:  # the store is gone too
                    stage = STAGES[self._stage]
                    error = RegardError(f"the stage '{stage}' did not end within {self.timeout:g} s")
                self._on_timeout(error)
                return


def connect_store(rank: Rank, timeout: float) -> dist.Store:
    """Return the key/value store of the ranks, which torchrun's agent or else rank 0 hosts."""
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError):
        raise RegardError(
            "MASTER_ADDR and MASTER_PORT do not say where the ranks meet: start them with torchrun, or with --nproc-per-node"
        ) from None
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"  # it outlives a restart of the ranks
    is_host = rank.index == 0 and not is_shared
    end = time.monotonic() + timeout
    while not is_host:  # torch would print the stack of its C++ code for each attempt
        try:
            socket.create_connection((host, port), timeout=timeout).close()
            break
        except OSError as error:
            if time.monotonic() > end:
                raise RegardError(
                    f"nothing answers at {host}:{port} within {timeout:g} s ({error.strerror or error}): see that rank 0 "
                    "was started and that this machine reaches the port"
                ) from None
            time.sleep(0.1)
    store = dist.TCPStore(
        host, port, is_master=is_host, timeout=timedelta(seconds=timeout), wait_for_workers=False, multi_tenant=True
    )
    start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") if is_shared else "0"
    return dist.PrefixStore(f"regard-interconnect/{start}", store)


def name_ranks(ranks: Iterable[int]) -> str:
    """Return "rank 3", or "ranks 0-2, 5" with runs of neighbours joined."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    text = ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
    return f"rank{'s' if sum(map(len, runs)) > 1 else ''} {text}"


# ---- the test --------------------------------------------------------------------------------------------------------


def examine_interconnect(
    rank: Rank, device: torch.device, timeout: float, on_timeout: Callable[[RegardError], None]
) -> InterconnectReport | None:
    """Test the connections of all ranks, each of which calls this; return the report on rank 0, None on the others.

    Args:
        device: The device of this rank: a GPU tests NCCL, a CPU tests Gloo.
        timeout: Seconds that any stage of the test may take.
        on_timeout: Called in another thread with an error, if a stage hangs; it should end the process.

    Raises:
        RegardError: A rank does not answer, or an operation failed.
    """
    board = StageBoard(rank, timeout, on_timeout)
    try:
        return _examine(rank, device, board)
    except RuntimeError as error:
        raise board.explain(error) from error
    finally:
        board.close()


def _examine(rank: Rank, device: torch.device, board: StageBoard) -> InterconnectReport | None:
    board.publish("host", socket.gethostname())
    board.enter("start")
    board.collect("stage")
    board.enter("device")
    identity = identify(rank, device)
    board.publish("identity", asdict(identity))
    identities = [RankIdentity(**one) for one in board.collect("identity")]

    board.enter("process group")
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(
        backend,
        store=dist.PrefixStore("group", board.store),
        rank=rank.index,
        world_size=rank.count,
        timeout=timedelta(seconds=board.timeout),
    )
    barrier()
    board.enter("clocks")
    offsets = measure_clock_offsets(rank)
    board.enter("exact sums")
    board.publish("problems", check_collectives(rank, device))
    problems = [problem for one in board.collect("problems") for problem in one]
    board.enter("bandwidth")
    timings = []
    for nbytes in SIZES[device.type]:
        timings += time_collectives(rank, device, nbytes)
        board.enter("bandwidth")  # the timeout is that of one size
    board.enter("latency")
    board.publish("latencies", [[*pair, seconds] for pair, seconds in measure_latencies(rank, device).items()])
    latencies = {(a, b): seconds for one in board.collect("latencies") for a, b, seconds in one}
    board.enter("end")
    barrier()
    dist.destroy_process_group()  # not after an error: with a rank that hangs it would wait for ever
    if not rank.is_first:
        return None
    name = "NCCL" if device.type == "cuda" else "Gloo"
    differences, warnings = compare_identities(identities)
    return InterconnectReport(
        name, identities, offsets, timings, latencies, differences + problems, warnings + compare_clocks(offsets)
    )


def identify(rank: Rank, device: torch.device) -> RankIdentity:
    """Return what this rank is; a GPU is set as the current device."""
    name = platform.machine() + " CPU"
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)  # the driver is initialized here and not in the first collective operation
        name = torch.cuda.get_device_name(device)
    return RankIdentity(
        rank.index, socket.gethostname(), name, torch.__version__, regard.__version__, platform.python_version()
    )


def compare_identities(identities: Sequence[RankIdentity]) -> tuple[list[str], list[str]]:
    """Return problems (versions that differ) and warnings (Python or devices that differ)."""
    return (
        [*_differences(identities, "torch"), *_differences(identities, "regard")],
        [*_differences(identities, "python"), *_differences(identities, "device")],
    )


def _differences(identities: Sequence[RankIdentity], name: str) -> list[str]:
    ranks: dict[str, list[int]] = {}
    for identity in identities:
        ranks.setdefault(getattr(identity, name), []).append(identity.rank)
    if len(ranks) == 1:
        return []
    return [f"{name} differs: " + "; ".join(f"{value} on {name_ranks(found)}" for value, found in ranks.items())]


def compare_clocks(offsets: Sequence[float]) -> list[str]:
    """Return a warning for each rank whose clock is far from that of rank 0."""
    return [
        f"the clock of rank {rank} is {abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} that of rank 0"
        for rank, offset in enumerate(offsets)
        if abs(offset) > MAX_CLOCK_OFFSET
    ]


def measure_clock_offsets(rank: Rank) -> list[float]:
    """Return on rank 0 by how many seconds the clock of each rank is ahead; an empty list on other ranks.

    A rank answers with its time, which is compared with the middle of the round trip; the fastest of a few rounds counts.
    """
    clock = torch.zeros(1, dtype=torch.float64)
    if not rank.is_first:
        for _ in range(CLOCK_ROUNDS):
            dist.recv(clock, 0)
            clock[0] = time.time()
            dist.send(clock, 0)
        return []
    offsets = [0.0]
    for other in range(1, rank.count):
        rounds = []
        for _ in range(CLOCK_ROUNDS):
            sent = time.time()
            dist.send(clock, other)
            dist.recv(clock, other)
            received = time.time()
            rounds.append((received - sent, clock.item() - (sent + received) / 2))
        offsets.append(min(rounds)[1])
    return offsets


def check_collectives(rank: Rank, device: torch.device, n: int = 25_000) -> list[str]:
    """Return which collective operations give wrong numbers on this rank.

    The numbers are whole, rank r having r + 1 times 1, 2, ..., so sums are exact whatever their order.
    """
    ranks = rank.count
    row = torch.arange(1, n + 1, device=device)  # (n,) int64
    total = row * (ranks * (ranks + 1) // 2)
    mine = row * (rank.index + 1)

    reduced = mine.clone()
    dist.all_reduce(reduced)
    gathered = torch.empty(ranks * n, dtype=torch.int64, device=device)
    all_gather(gathered, mine)
    everyone = torch.cat([row * (r + 1) for r in range(ranks)])
    scattered = torch.empty(n, dtype=torch.int64, device=device)
    reduce_scatter(scattered, mine.repeat(ranks))

    results = {"all-reduce": (reduced, total), "all-gather": (gathered, everyone), "reduce-scatter": (scattered, total)}
    return [
        f"{operation} gives wrong numbers on rank {rank.index}"
        for operation, (result, expected) in results.items()
        if not torch.equal(result, expected)
    ]


def time_collectives(rank: Rank, device: torch.device, nbytes: int) -> list[CollectiveTiming]:
    """Return the times of all-reduce, all-gather and reduce-scatter of about `nbytes` bytes, the same on all ranks."""
    share = max(1, nbytes // 4 // rank.count)  # numbers of one rank
    whole = torch.zeros(share * rank.count, device=device)
    part = torch.zeros(share, device=device)
    operations: dict[str, Callable[[], object]] = {
        "all-reduce": lambda: dist.all_reduce(whole),
        "all-gather": lambda: all_gather(whole, part),
        "reduce-scatter": lambda: reduce_scatter(part, whole),
    }
    return [
        CollectiveTiming(operation, 4 * share * rank.count, time_repeated(run, device), rank.count)
        for operation, run in operations.items()
    ]


def time_repeated(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one call on the slowest rank, in the mean of as many as take about SECONDS_PER_SIZE."""

    def seconds(n: int) -> Tensor:
        barrier()
        synchronize(device)
        start = time.perf_counter()
        for _ in range(n):
            run()
        synchronize(device)
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        return slowest

    seconds(2)  # connections are made, and memory is registered
    once = seconds(1).item()
    n = min(200, max(2, round(SECONDS_PER_SIZE / once)))  # the same on all ranks, since `once` is
    return seconds(n).item() / n


def barrier() -> None:
    """Wait for all ranks, on the CPU: torch's own barrier would take a GPU where there is one."""
    dist.all_reduce(torch.zeros(1))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def measure_latencies(rank: Rank, device: torch.device) -> dict[tuple[int, int], float]:
    """Return the latency to the next rank of the ring, by the two ranks; empty on the rank that only answers.

    It is half the round trip of 8 bytes. Pairs take turns such that no rank is in two at once.
    """
    message = torch.zeros(1, dtype=torch.float64, device=device)
    found = {}
    for pairs in neighbour_rounds(rank.count):
        for first, second in pairs:
            if rank.index not in (first, second):
                continue
            ping_pong(message, first, second, rank.index == first, 5)
            synchronize(device)
            start = time.perf_counter()
            ping_pong(message, first, second, rank.index == first, PING_PONGS)
            synchronize(device)
            if rank.index == first:
                found[first, second] = (time.perf_counter() - start) / PING_PONGS / 2
        barrier()
    return found


def neighbour_rounds(n: int) -> list[list[tuple[int, int]]]:
    """Return all pairs of neighbours of a ring of `n` ranks, in rounds in which each rank is in at most one pair."""
    pairs = [(i, (i + 1) % n) for i in range(n)] if n > 2 else [(0, 1)] * (n - 1)
    last = [pairs.pop()] if len(pairs) % 2 and n > 2 else []  # an odd ring needs a third round
    return [found for found in (pairs[0::2], pairs[1::2], last) if found]


def ping_pong(message: Tensor, first: int, second: int, is_first: bool, n: int) -> None:
    """Send a message to the other rank and back, `n` times."""
    for _ in range(n):
        if is_first:
            dist.send(message, second)
            dist.recv(message, second)
        else:
            dist.recv(message, first)
            dist.send(message, first)


# ---- the report ------------------------------------------------------------------------------------------------------


def summarize(report: InterconnectReport) -> dict[str, object]:
    """Return the report as names and values for JSON."""
    return {
        "backend": report.backend,
        "ranks": [asdict(identity) for identity in report.identities],
        "clock_offsets": report.clock_offsets,
        "collectives": [
            {
                "operation": timing.operation,
                "bytes": timing.nbytes,
                "seconds": timing.seconds,
                "algorithm_bandwidth": timing.algorithm_bandwidth,
                "bus_bandwidth": timing.bus_bandwidth,
            }
            for timing in report.timings
        ],
        "latencies": [{"ranks": list(pair), "seconds": seconds} for pair, seconds in report.latencies.items()],
        "problems": report.problems,
        "warnings": report.warnings,
    }


def format_report(report: InterconnectReport) -> str:
    """Return the report as lines of text: what the ranks are, and a table of bandwidths."""
    hosts = sorted({identity.host for identity in report.identities})
    devices = sorted({identity.device for identity in report.identities})
    versions = sorted({f"torch {one.torch}, regard {one.regard}" for one in report.identities})
    machines = f"{len(hosts)} machine{'s' if len(hosts) > 1 else ''}"
    lines = [
        f"ranks      {len(report.identities)} on {machines}, {report.backend}, {', '.join(devices)}",
        f"versions   {'; '.join(versions)}",
        f"clocks     within {format_seconds(max(map(abs, report.clock_offsets)))} of that of rank 0",
    ]
    if not any("wrong numbers" in problem for problem in report.problems):
        lines.append("sums       exact: all-reduce, all-gather, reduce-scatter")
    if report.latencies:
        slowest = max(report.latencies, key=lambda pair: report.latencies[pair])
        middle = statistics.median(report.latencies.values())
        lines.append(
            f"latency    {format_seconds(middle)} between neighbours in the median, "
            f"{format_seconds(report.latencies[slowest])} between ranks {slowest[0]} and {slowest[1]}, the slowest"
        )
    rows = [("operation", "size", "time", "algorithm bandwidth", "bus bandwidth")]
    for operation in dict.fromkeys(timing.operation for timing in report.timings):
        rows += [format_timing(timing) for timing in report.timings if timing.operation == operation]
    lines += ["", *format_table(rows, right=1)]
    lines += [f"warning: {warning}" for warning in report.warnings]
    return "\n".join(lines)


def format_timing(timing: CollectiveTiming) -> tuple[str, str, str, str, str]:
    """Return a row of the table of bandwidths."""
    return (
        timing.operation,
        format_bytes(timing.nbytes),
        format_seconds(timing.seconds),
        f"{timing.algorithm_bandwidth / 1e9:,.3f} GB/s",
        f"{timing.bus_bandwidth / 1e9:,.3f} GB/s",
    )


def format_seconds(seconds: float) -> str:
    """Return a time with a suitable unit: 12.3 us, 4.56 ms."""
    for limit, unit in ((1e-3, "us"), (1.0, "ms")):
        if seconds < limit:
            return f"{seconds / limit * 1000:.3g} {unit}"
    return f"{seconds:.3g} s"
