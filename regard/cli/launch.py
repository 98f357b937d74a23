"""The launcher of `--nproc-per-node`: starts the same command in several processes, on one machine or on many.

It is torch's elastic launcher, as torchrun is: `regard train RECIPE --nproc-per-node 8` runs in each process (rank) what
`torchrun --nproc-per-node 8 -m regard train RECIPE` runs. Three things differ. Options such as --run, which torchrun takes
for its own on Python 3.11, reach the command. The error of the rank that failed first is printed once, as one line. The exit
code is that of one process.

Ctrl-C and SIGTERM are passed on to the ranks, which save a checkpoint and end. torch waits SHUTDOWN_SECONDS for them before
it kills them; torch 2.11 waits 30 seconds and cannot be told otherwise.
"""

from __future__ import annotations

import json
import logging
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed import DistError
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousTimeoutError,
)
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.distributed.run import determine_local_world_size

from regard.cli.rank_errors import LAUNCHED
from regard.device import cpu_cores
from regard.errors import RegardError
from regard.training.interconnect import name_ranks

SHUTDOWN_SECONDS = 60
# Ranks that fail after another one, because it is gone, do so within this time; torch's grace period is longer.
SAME_MOMENT_SECONDS = 2
# Exit codes that are no failure: after a stop request, and where the process that reads stdout has ended, as `head` does.
STOPPED = {sign for n in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE) for sign in (128 + n, -n)}


@dataclass(frozen=True)
class LaunchOptions:
    """How many processes to start and where they meet; the names are those of torchrun's options.

    Attributes:
        nproc_per_node: Processes of this machine: a number, gpu, cpu or auto.
        nnodes: Number of machines, or MIN:MAX.
        node_rank: Number of this machine. It fixes the order of ranks (torch's static rendezvous); without it machines
            take numbers in any order and may leave and join (c10d rendezvous).
        rdzv_endpoint: HOST:PORT of one of the machines; needed if there are several.
        rdzv_id: Name of the job, the same on all machines.
        max_restarts: How often all ranks are started again after one has failed.
        join_seconds: How long to wait for the other machines.
    """

    nproc_per_node: str
    nnodes: str = "1"
    node_rank: int | None = None
    rdzv_endpoint: str = ""
    rdzv_id: str = "regard"
    max_restarts: int = 0
    join_seconds: int = 600

    def __post_init__(self) -> None:
        low, high = self.machines
        if not 1 <= low <= high:
            raise RegardError(f"--nnodes {self.nnodes} cannot be: at least 1 machine, and MIN:MAX in this order")
        if high > 1 and not self.rdzv_endpoint:
            raise RegardError(
                f"--nnodes {self.nnodes} needs a place where the machines meet: "
                "add --rdzv-endpoint HOST:PORT, with the name of one of them and a free port, the same on all"
            )
        if self.rdzv_endpoint and not re.fullmatch(r".+:\d+", self.rdzv_endpoint):
            raise RegardError(f"--rdzv-endpoint {self.rdzv_endpoint} is not HOST:PORT, such as node1:29400")
        if self.node_rank is not None and low < high:
            raise RegardError("--node-rank fixes the number of machines: give --nnodes one number, or no --node-rank")
        if self.node_rank is not None and not 0 <= self.node_rank < high:
            raise RegardError(f"--node-rank is 0 to {high - 1} for {high} machines, not {self.node_rank}")
        if self.max_restarts < 0:
            raise RegardError(f"--max-restarts must be at least 0, not {self.max_restarts}")

    @property
    def machines(self) -> tuple[int, int]:
        """The smallest and the largest number of machines."""
        found = re.fullmatch(r"(\d+)(?::(\d+))?", self.nnodes)
        if not found:
            raise RegardError(f"--nnodes is a number of machines or MIN:MAX, not '{self.nnodes}'")
        return int(found[1]), int(found[2] or found[1])

    @property
    def place(self) -> str:
        """The address at which the machines meet, for messages."""
        return self.rdzv_endpoint or "this machine"


def launch_command(options: LaunchOptions) -> None:
    """Run the command of this process, without the launcher's options, in every rank. Return when all have succeeded.

    Raises:
        SystemExit: A rank failed or was stopped; its error is printed.
    """
    if "LOCAL_RANK" in os.environ:
        raise RegardError("this process is already one of several, as torchrun starts them: leave out --nproc-per-node")
    launch(options, without_launch_options(sys.argv[1:]))


LAUNCH_NAMES = ("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-id", "--max-restarts")


def without_launch_options(words: Iterable[str]) -> list[str]:
    """Return the words of a command line without the options of the launcher and their values."""
    rest: list[str] = []
    waiting = iter(words)
    for word in waiting:
        if word == "--":
            return [*rest, word, *waiting]
        if word in LAUNCH_NAMES:
            next(waiting, None)
        elif word.split("=")[0] not in LAUNCH_NAMES:
            rest.append(word)
    return rest


def launch(options: LaunchOptions, words: Sequence[str], command: Sequence[str] = ("-m", "regard")) -> None:
    """Start `python COMMAND WORDS` once for each rank of this machine, and return when all have succeeded.

    Raises:
        SystemExit: A rank failed or was stopped; its error is printed.
        RegardError: The machines did not meet.
    """
    n = count_ranks(options.nproc_per_node)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpu_cores() // n)))  # torchrun would set 1
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", str(SHUTDOWN_SECONDS))
    # A store of their own for each start: in a shared one restarted ranks find the addresses of those before them.
    os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    os.environ[LAUNCHED] = "1"
    with tempfile.TemporaryDirectory(prefix="regard-ranks-") as folder, torch_log_messages(shown=is_debugging()):
        logs = RankLogs(folder)
        start = elastic_launch(make_launch_config(options, n, logs), sys.executable)
        try:
            meet_and_run(start, ["-u", *command, *words], options, logs)
        except ChildFailedError as error:
            if is_debugging():
                print(error, file=sys.stderr)
            raise SystemExit(report_failures(read_failures(error))) from None
        except SignalException as stopped:  # a rank may have failed to save
            errors = logs.read_errors()
            raise SystemExit(report_failures(errors) if errors else 128 + stopped.sigval) from None
        except KeyboardInterrupt:  # before the ranks were started
            raise SystemExit(128 + signal.SIGINT) from None


def meet_and_run(start: elastic_launch, words: Sequence[str], options: LaunchOptions, logs: RankLogs) -> None:
    """Wait for the other machines, run the ranks, and explain why machines did not meet.

    A machine may start before the one that all of them meet at, or before its name is known: it tries again.
    """
    deadline = time.monotonic() + options.join_seconds
    while True:
        try:
            start(*words)
            return
        except RendezvousConnectionError:
            if logs.started or time.monotonic() > deadline:
                raise RegardError(
                    f"no connection to {options.place}: start the same command on the machine of that name, "
                    f"and open its port to the other machines"
                ) from None
            time.sleep(1)
        except (RendezvousTimeoutError, DistError):
            low, _ = options.machines
            raise RegardError(
                f"{low} machines did not meet at {options.place} within {options.join_seconds} s: start the same command "
                f"on each, with the same --nnodes, --rdzv-endpoint and --rdzv-id"
            ) from None
        except RendezvousClosedError:
            raise RegardError(
                f"another machine has ended the job '{options.rdzv_id}' at {options.place}: "
                "its message says why; start the command again on all machines"
            ) from None
        except RendezvousError as error:
            raise RegardError(f"the machines did not meet at {options.place}: {error}") from error


def make_launch_config(options: LaunchOptions, n: int, logs: RankLogs) -> LaunchConfig:
    """Return torch's form of the options, for `n` processes on this machine."""
    low, high = options.machines
    is_standalone = high == 1 and not options.rdzv_endpoint
    is_static = options.node_rank is not None and not is_standalone
    seconds = options.join_seconds
    return LaunchConfig(
        min_nodes=low,
        max_nodes=high,
        nproc_per_node=n,
        logs_specs=logs,
        run_id=uuid.uuid4().hex if is_standalone else options.rdzv_id,
        role="regard",
        rdzv_backend="static" if is_static else "c10d",
        rdzv_endpoint="localhost:0" if is_standalone else options.rdzv_endpoint,  # port 0: any that is free
        rdzv_configs={"rank": options.node_rank, "timeout": seconds}
        if is_static
        else {"join_timeout": seconds, "read_timeout": min(60, seconds)},
        local_addr="localhost" if is_standalone else None,  # not every machine can resolve its own name
        max_restarts=options.max_restarts,
    )


def count_ranks(nproc_per_node: str) -> int:
    """Return the number of processes that `--nproc-per-node` means on this machine."""
    try:
        n = determine_local_world_size(nproc_per_node)
    except ValueError as error:
        reason = "this torch sees no GPU" if nproc_per_node == "gpu" else "it is a number, gpu, cpu or auto"
        raise RegardError(f"--nproc-per-node {nproc_per_node} cannot be: {reason}") from error
    if n < 1:
        raise RegardError(f"--nproc-per-node must be at least 1, not {n}")
    return n


def is_debugging() -> bool:
    return bool(os.environ.get("REGARD_DEBUG"))


@contextmanager
def torch_log_messages(shown: bool) -> Iterator[None]:
    """Show or hide the log messages of torch's launcher, which repeat what is printed here."""
    logging.disable(logging.NOTSET if shown else logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


# ---- errors of ranks -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankFailure:
    """How a rank ended.

    Attributes:
        exit_code: Its exit code, negative for a signal; None where it is not known.
        message: The error as one line; empty where the rank wrote none.
        traceback: The traceback of the error.
        seconds: The time of the error since 1970.
    """

    rank: int
    exit_code: int | None
    message: str = ""
    traceback: str = ""
    seconds: int = 0

    def describe(self) -> str:
        """Return what happened, as one line without the rank."""
        if self.message:
            return self.message.splitlines()[0]
        if self.exit_code is not None and self.exit_code < 0:
            name = signal.Signals(-self.exit_code).name
            cause = ", as the system does when memory runs out" if name == "SIGKILL" else ""
            return f"ended by {name}{cause}; the same command resumes a training run from its newest checkpoint"
        return f"ended with exit code {self.exit_code} and no message"


class RankLogs(DefaultLogsSpecs):
    """The files in which ranks leave their errors; a restart reports those of the ranks before it."""

    def __init__(self, folder: str) -> None:
        super().__init__(log_dir=folder)
        self._files: dict[int, str] = {}  # global rank -> error file of the last start
        self._restarts = ""

    @property
    def started(self) -> bool:
        """Whether ranks were started."""
        return bool(self._files)

    def read_errors(self) -> list[RankFailure]:
        """Return the errors that ranks of this machine have written since the last start."""
        return [failure for rank, path in self._files.items() if (failure := read_error_file(rank, path))]

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return the files of the ranks that start now; torch calls this once for each start."""
        restarts, most = envs[0]["TORCHELASTIC_RESTART_COUNT"], envs[0]["TORCHELASTIC_MAX_RESTARTS"]
        if self.started:
            if restarts == self._restarts:
                print("regard: the machines of the job have changed: all ranks start again", file=sys.stderr)
            else:
                print(f"regard: {self._explain_failure()}; restart {restarts} of {most} of all ranks", file=sys.stderr)
        found = super().reify(envs)
        self._files = {int(envs[local]["RANK"]): path for local, path in found.error_files.items()}
        self._restarts = restarts
        return found

    def _explain_failure(self) -> str:
        """Return the error of the ranks before a restart, and those that left none: a killed rank cannot."""
        errors = self.read_errors()
        cause = first_failure(errors)
        silent = self._files.keys() - {error.rank for error in errors}
        parts = [f"rank {cause.rank}: {cause.describe()}"] if cause else []
        return "; ".join([*parts, *([f"{name_ranks(silent)} ended without a message"] if silent else [])])


def read_error_file(rank: int, path: str | Path, exit_code: int | None = None) -> RankFailure | None:
    """Return the error that a rank wrote with `record_error`, or with torch's `record`; None where it wrote none."""
    try:
        message = json.loads(Path(path).read_text(encoding="utf-8"))["message"]
        details = message["extraInfo"]
        return RankFailure(
            rank,
            message.get("errorCode") if exit_code is None else exit_code,
            message["message"],
            details.get("py_callstack", ""),
            int(details.get("timestamp", 0)),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_failures(error: ChildFailedError) -> list[RankFailure]:
    """Return the failures of the ranks of this machine, in the order in which torch noticed them."""
    return [
        read_error_file(rank, failure.error_file, failure.exitcode)
        or RankFailure(rank, failure.exitcode, seconds=failure.timestamp)
        for rank, failure in error.failures.items()
    ]


def first_failure(failures: Sequence[RankFailure]) -> RankFailure | None:
    """Return the failure that caused the others; None where ranks were only stopped.

    When a rank is gone, others fail because they wait for it, and torch stops the rest. Among those that failed at about the
    same time a killed rank is the cause, then one whose error the user can fix (exit code 2), then the first.
    """
    causes = [failure for failure in failures if failure.exit_code not in STOPPED]
    if not causes:
        return None
    first = min(failure.seconds for failure in causes)
    near = [failure for failure in causes if failure.seconds <= first + SAME_MOMENT_SECONDS]
    order: Mapping[int | None, int] = {-signal.SIGKILL: 0, 2: 1}
    return min(near, key=lambda failure: (order.get(failure.exit_code, 2), failure.seconds))


def report_failures(failures: Sequence[RankFailure]) -> int:
    """Print the error of the rank that failed first, as one process prints its own, and return the exit code.

    An error that the user can fix (exit code 2) is one line; others have their traceback. The rank is left out where all
    ranks have the same error. Ranks that were stopped by a signal have said so themselves.
    """
    cause = first_failure(failures)
    if cause is None:
        code = next((failure.exit_code for failure in failures if failure.exit_code), 1)
        return code if code > 0 else 128 - code
    code = 1 if cause.exit_code is None else cause.exit_code
    if cause.traceback and code != 2 and not is_debugging():  # with --debug the rank has printed it
        print(cause.traceback.rstrip(), file=sys.stderr)
    is_same = len(failures) > 1 and all(failure.message == cause.message != "" for failure in failures)
    print(f"regard: {'' if is_same else f'rank {cause.rank}: '}{cause.describe()}", file=sys.stderr)
    return code if code > 0 else 128 - code
