"""The rank of this process among those that torchrun started, from the environment alone: torch is not imported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from regard.errors import RegardError


@dataclass(frozen=True)
class Rank:
    """The place of a process in its group.

    Attributes:
        index: The number of this process among those of all machines, from 0 on.
        count: The number of processes of all machines.
        local_index: The number of this process among those of its machine, from 0 on: with CUDA that of its GPU.
        local_count: The number of processes of this machine.
    """

    index: int = 0
    count: int = 1
    local_index: int = 0
    local_count: int = 1

    def __post_init__(self) -> None:
        if not (0 <= self.index < self.count and 0 <= self.local_index < self.local_count <= self.count):
            raise RegardError(
                f"rank {self.index} of {self.count}, local rank {self.local_index} of {self.local_count} cannot be: RANK is "
                f"below WORLD_SIZE, LOCAL_RANK below LOCAL_WORLD_SIZE; start the processes with torchrun"
            )

    @property
    def is_first(self) -> bool:
        """Whether this process is rank 0, the one that prints; a process without torchrun is."""
        return self.index == 0

    @property
    def is_alone(self) -> bool:
        """Whether there is no other process."""
        return self.count == 1


def current_rank(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return the rank that torchrun wrote into the environment; without torchrun, rank 0 of 1.

    The variables are read only where both RANK and WORLD_SIZE are set. LOCAL_RANK and LOCAL_WORLD_SIZE are those of a
    single machine where they are missing.
    """
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return Rank()
    index, count = _read_number(environment, "RANK"), _read_number(environment, "WORLD_SIZE")
    return Rank(
        index,
        count,
        _read_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else index,
        _read_number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else count,
    )


def _read_number(environment: Mapping[str, str], name: str) -> int:
    """Return the whole number in an environment variable."""
    try:
        return int(environment[name])
    except ValueError:
        raise RegardError(
            f"the environment variable {name} is {environment[name]!r}, no whole number: start the processes with torchrun"
        ) from None
