"""The rank of a process, as torchrun writes it into the environment."""

from __future__ import annotations

import subprocess
import sys

import pytest

from regard.errors import RegardError
from regard.process_rank import Rank, current_rank


def test_without_torchrun_a_process_is_alone() -> None:
    assert current_rank({}) == Rank(0, 1, 0, 1)
    assert current_rank({"RANK": "3"}) == Rank()  # of a program that means something else
    assert (Rank().is_first, Rank().is_alone) == (True, True)


def test_ranks_of_several_machines() -> None:
    found = current_rank({"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"})
    assert found == Rank(9, 16, 1, 8)
    assert (found.is_first, found.is_alone) == (False, False)
    assert current_rank({"RANK": "1", "WORLD_SIZE": "2"}) == Rank(1, 2, 1, 2)


@pytest.mark.parametrize(
    "values",
    [
        {"RANK": "2", "WORLD_SIZE": "2"},
        {"RANK": "-1", "WORLD_SIZE": "2"},
        {"RANK": "0", "WORLD_SIZE": "0"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "1"},
        {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"},
        {"RANK": "one", "WORLD_SIZE": "2"},
    ],
)
def test_what_cannot_be_is_refused(values: dict[str, str]) -> None:
    with pytest.raises(RegardError, match="start the processes with torchrun"):
        current_rank(values)


def test_torch_is_not_imported() -> None:
    program = "import sys, regard.process_rank; raise SystemExit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
