"""The test of the interconnect on CPU ranks: figures by hand, ranks that disagree, and ranks that do not answer."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import regard
from regard.errors import RegardError
from regard.process_rank import Rank
from regard.training import interconnect
from regard.training.interconnect import (
    CollectiveTiming,
    InterconnectReport,
    RankIdentity,
    StageBoard,
    neighbour_rounds,
)

HERE = Path(__file__).parent
ME = RankIdentity(0, "a", "NVIDIA H200", "2.13.0", "0.2", "3.11.7")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


# ---- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "ranks", "bus"),
    [  # 8 GB in 2 s are 4 GB/s; the factors are those of PERFORMANCE.md of nccl-tests
        ("all-reduce", 8, 7e9),
        ("all-reduce", 2, 4e9),
        ("all-gather", 8, 3.5e9),
        ("reduce-scatter", 2, 2e9),
        ("all-reduce", 1, 0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, ranks: int, bus: float) -> None:
    timing = CollectiveTiming(operation, 8_000_000_000, 2.0, ranks)
    assert timing.algorithm_bandwidth == 4e9
    assert timing.bus_bandwidth == pytest.approx(bus, rel=1e-12)


@pytest.mark.parametrize("n", range(1, 10))
def test_every_pair_of_neighbours_is_in_one_round_and_no_rank_in_two(n: int) -> None:
    rounds = neighbour_rounds(n)
    pairs = [frozenset(pair) for pairs in rounds for pair in pairs]
    expected = {frozenset((i, (i + 1) % n)) for i in range(n)} if n > 1 else set()
    assert set(pairs) == expected
    assert len(pairs) == len(expected)
    for pairs_of_round in rounds:
        ranks = [rank for pair in pairs_of_round for rank in pair]
        assert len(ranks) == len(set(ranks))


@pytest.mark.parametrize(
    ("ranks", "expected"), [([3], "rank 3"), ([2, 0, 1, 5], "ranks 0-2, 5"), (range(8, 16), "ranks 8-15")]
)
def test_names_of_ranks(ranks: list[int], expected: str) -> None:
    assert interconnect.name_ranks(ranks) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(12.34e-6, "12.3 us"), (4.567e-3, "4.57 ms"), (2.5, "2.5 s"), (0.0, "0 us")]
)
def test_times_have_a_unit(seconds: float, expected: str) -> None:
    assert interconnect.format_seconds(seconds) == expected


# ---- ranks that disagree ---------------------------------------------------------------------------------------------


def test_other_versions_are_a_problem_and_other_devices_a_warning() -> None:
    ranks = [replace(ME, rank=rank) for rank in range(4)]
    assert interconnect.compare_identities(ranks) == ([], [])
    ranks[2] = replace(ranks[2], torch="2.11.0")
    ranks[3] = replace(ranks[3], torch="2.11.0", device="NVIDIA H100", host="b")
    problems, warnings = interconnect.compare_identities(ranks)
    assert problems == ["torch differs: 2.13.0 on ranks 0-1; 2.11.0 on ranks 2-3"]
    assert warnings == ["device differs: NVIDIA H200 on ranks 0-2; NVIDIA H100 on rank 3"]


def test_clocks_that_are_seconds_apart_are_named() -> None:
    assert interconnect.compare_clocks([0.0, 0.9, -0.9]) == []
    assert interconnect.compare_clocks([0.0, 3.04, -2.0]) == [
        "the clock of rank 1 is 3.0 s ahead of that of rank 0",
        "the clock of rank 2 is 2.0 s behind that of rank 0",
    ]


def test_the_report_is_a_table() -> None:
    report = InterconnectReport(
        "NCCL",
        [ME, replace(ME, rank=1)],
        [0.0, -2e-6],
        [CollectiveTiming("all-reduce", 1000, 1e-5, 2), CollectiveTiming("all-gather", 4_000_000, 2e-3, 2)],
        {(0, 1): 1.25e-5},
        warnings=["slow"],
    )
    assert interconnect.format_report(report).splitlines() == [
        "ranks      2 on 1 machine, NCCL, NVIDIA H200",
        "versions   torch 2.13.0, regard 0.2",
        "clocks     within 2 us of that of rank 0",
        "sums       exact: all-reduce, all-gather, reduce-scatter",
        "latency    12.5 us between neighbours in the median, 12.5 us between ranks 0 and 1, the slowest",
        "",
        "operation     size   time  algorithm bandwidth  bus bandwidth",
        "all-reduce  1.0 kB  10 us           0.100 GB/s     0.100 GB/s",
        "all-gather  4.0 MB   2 ms           2.000 GB/s     1.000 GB/s",
        "warning: slow",
    ]
    wrong = replace(report, problems=["all-reduce gives wrong numbers on rank 1"])
    assert "sums" not in interconnect.format_report(wrong)


def test_a_hanging_call_is_ended_by_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 of 2 is in a stage for too long, whatever it does there; rank 1 is in the stage before."""
    monkeypatch.setattr(interconnect, "WATCH_MARGIN", 0.1)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    errors: queue.Queue[RegardError] = queue.Queue()
    board = StageBoard(Rank(0, 2, 0, 2), 0.3, errors.put)
    board.store.set("stage/1", str(interconnect.STAGES.index("clocks")))
    board.store.set("host/1", json.dumps("far-away"))
    board.publish("host", "here")
    board.enter("exact sums")
    time.sleep(0.5)  # stands for a call that does not return
    assert "rank 1 of 2 did not get beyond the stage 'clocks' within 0.3 s (far-away)" in str(errors.get(timeout=30))
    failed = board.explain(RuntimeError("Connection closed by peer"))
    assert "rank 1 of 2 did not get beyond" in str(failed)
    board.enter("clocks")
    assert str(board.explain(RuntimeError("no\nroute"))) == "the stage 'clocks' failed on rank 0: no"
    board.close()


# ---- processes -------------------------------------------------------------------------------------------------------

# A rank that answers, and then does nothing more.
STUCK = """
import time
from regard.process_rank import current_rank
from regard.training.interconnect import StageBoard
print("ready", flush=True)
board = StageBoard(current_rank(), 60, print)
board.publish("host", "far-away")
board.enter("start")
time.sleep(60)
"""


class Ranks:
    """Processes with the environment of torchrun, of which a test starts as many as it likes."""

    def __init__(self, count: int) -> None:
        self.port, self.count = free_port(), count
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, rank: int, *words: str) -> subprocess.Popen[str]:
        environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.count, "LOCAL_WORLD_SIZE": self.count}
        environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": self.port, "OMP_NUM_THREADS": 1}
        process = subprocess.Popen(
            [sys.executable, *words],
            env=os.environ | {name: str(value) for name, value in environment.items()},
            cwd=HERE.parents[1],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def doctor(self, rank: int, *options: str) -> subprocess.Popen[str]:
        return self.start(rank, "-m", "regard", "doctor", "--distributed", "--device", "cpu", *options)


@pytest.fixture
def two_ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    for process in ranks.processes:
        process.kill()
        process.communicate()


def test_two_ranks_agree_and_add_exactly(two_ranks: Ranks) -> None:
    first, second = two_ranks.doctor(0, "--json"), two_ranks.doctor(1, "--json")
    out, err = first.communicate(timeout=60)
    assert first.returncode == 0, err
    assert second.communicate(timeout=60)[0] == ""  # rank 0 prints
    report = json.loads(out)
    assert (report["backend"], report["problems"]) == ("Gloo", [])
    assert [one["rank"] for one in report["ranks"]] == [0, 1]
    assert {one["regard"] for one in report["ranks"]} == {regard.__version__}
    assert max(map(abs, report["clock_offsets"])) < 1  # one machine has one clock; a round trip may wait for a core
    sizes = {one["bytes"] for one in report["collectives"]}
    assert sizes == set(interconnect.SIZES["cpu"])
    assert len(report["collectives"]) == 3 * len(sizes)
    for one in report["collectives"]:
        assert one["algorithm_bandwidth"] == pytest.approx(one["bytes"] / one["seconds"])
    assert [one["ranks"] for one in report["latencies"]] == [[0, 1]]
    assert 0 < report["latencies"][0]["seconds"] < 1


def test_a_rank_that_was_not_started_is_named_within_the_timeout(two_ranks: Ranks) -> None:
    process = two_ranks.doctor(0, "--timeout", "2")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert err.startswith("regard: rank 0: rank 1 of 2 did not answer within 2 s: ")
    assert err.count("\n") == 1


def test_a_rank_that_stops_answering_is_named_with_its_stage_and_machine(two_ranks: Ranks) -> None:
    stuck = two_ranks.start(1, "-c", STUCK)
    assert stuck.stdout is not None
    assert stuck.stdout.readline() == "ready\n"
    process = two_ranks.doctor(0, "--timeout", "3")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "rank 1 of 2 did not get beyond the stage 'start' within 3 s (far-away)" in err
    assert err.count("\n") == 1


def test_a_rank_without_rank_0_says_where_it_looked(two_ranks: Ranks) -> None:
    process = two_ranks.doctor(1, "--timeout", "1")
    _, err = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"nothing answers at localhost:{two_ranks.port} within 1 s" in err
    assert err.count("\n") == 1
