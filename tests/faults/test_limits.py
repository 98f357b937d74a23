"""The suite itself: a hang and a flood of memory are failures, not a suite that never ends."""

from __future__ import annotations

import os
from pathlib import Path

import faults
import pytest
import torch


def test_a_hang_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "ALARM", 0.05)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(faults.Hang):
        faults.outcome((tmp_path / "fifo").read_bytes)


def test_endless_work_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faults, "SECONDS", 0.1)

    def work() -> None:
        while True:
            pass

    with pytest.raises(faults.Hang):
        faults.outcome(work)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="memory is limited where /proc tells what is in use")
def test_a_flood_of_memory_is_seen() -> None:
    with pytest.raises(RuntimeError, match="allocate"):
        faults.outcome(lambda: torch.empty(faults.ROOM))
