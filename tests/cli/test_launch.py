"""The launcher of --nproc-per-node, with small scripts as ranks: what reaches them, signals, errors, restarts and machines.

Launchers are forked from one process that has imported torch, each ready in milliseconds.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from command_line import call

from regard.cli import launch, rank_errors
from regard.cli.launch import LaunchOptions, RankFailure, first_failure, report_failures, without_launch_options
from regard.errors import RegardError

ROOT = Path(__file__).parents[2]
RANK = """
import json, os, signal, sys, time
from pathlib import Path
from regard.cli.rank_errors import print_error, record_error

mode, folder = sys.argv[1], Path(sys.argv[-1])
rank = int(os.environ["RANK"])
start = os.environ["TORCHELASTIC_RESTART_COUNT"]
if mode == "same":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torch stops the others as soon as the first has failed
found = {"words": sys.argv[1:], "environment": dict(os.environ), "pid": os.getpid(), "cores": len(os.sched_getaffinity(0))}
(folder / f".{rank}").write_text(json.dumps(found))
(folder / f".{rank}").rename(folder / f"rank-{rank}-{start}.json")
while mode not in ("fine", "wait") and len(list(folder.glob(f"rank-*-{start}.json"))) < int(os.environ["WORLD_SIZE"]):
    time.sleep(0.01)

def fail(message, code):
    try:
        raise ValueError(message)
    except ValueError:
        record_error(message, code)
        print_error(message)
        sys.exit(code)

def save(signum, frame):
    if sys.argv[2] == "full":
        fail("the disk is full", 2)
    (folder / f"saved-{rank}").write_text(signal.Signals(signum).name)
    sys.exit(128 + signum)

if mode == "wait":
    signal.signal(signal.SIGTERM, save)
    signal.signal(signal.SIGINT, save)
    (folder / f"ready-{rank}").touch()
    time.sleep(60)
if mode == "same":
    fail("no recipe", 2)
if rank == 1 and mode == "user":
    fail("wrong setting", 2)
if rank == 1 and mode == "bug":
    fail("a bug", 1)
if rank == 1 and mode == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
if rank == 1 and mode == "once" and start == "0":
    fail("lost\\nand more", 1)
if rank == 1 and mode == "once-killed" and start == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if mode in ("user", "bug", "kill") or (mode.startswith("once") and start == "0"):
    time.sleep(60)  # torch ends it with SIGTERM
"""


def run_launcher(folder: Path, words: Sequence[str], options: dict[str, Any]) -> None:
    """Launch RANK in this process, with stdout and stderr in files."""
    for descriptor, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(folder / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, descriptor)
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ["PYTHONPATH"] = str(ROOT)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    (folder / "rank.py").write_text(RANK)
    launch.launch(LaunchOptions(**options), [*words, str(folder)], ["rank.py"])


class Launcher:
    """A launcher in a process of its own."""

    def __init__(self, folder: Path, *words: str, **options: Any) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["regard.cli.launch"])
        given = {"nproc_per_node": "2", **options}
        self.process = context.Process(target=run_launcher, args=(folder, words, given))
        self.process.start()

    def ranks(self, n: int, restart: int = 0) -> list[dict[str, Any]]:
        return [json.loads((self.folder / f"rank-{i}-{restart}.json").read_text()) for i in range(n)]

    def wait_for(self, *names: str) -> None:
        end = time.monotonic() + 30
        while not all((self.folder / name).exists() for name in names):
            assert time.monotonic() < end, (self.folder / "stderr").read_text()
            time.sleep(0.02)

    def finish(self) -> tuple[int | None, str]:
        """Return the exit code and what was printed on stderr."""
        self.process.join(30)
        return self.process.exitcode, (self.folder / "stderr").read_text()


# ---- what runs -------------------------------------------------------------------------------------------------------


def test_each_rank_has_the_words_and_the_environment_of_torchrun(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "fine", "--run", "a b")
    assert launcher.finish() == (0, "")
    for rank, found in enumerate(launcher.ranks(2)):
        assert found["words"] == ["fine", "--run", "a b", str(tmp_path)]
        environment = found["environment"]
        expected = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": 2,
            "LOCAL_WORLD_SIZE": 2,
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        assert {name: int(environment[name]) for name in expected} == expected
        assert environment["MASTER_ADDR"] == "localhost"
        assert int(environment["OMP_NUM_THREADS"]) == max(1, found["cores"] // 2)
        assert environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "60"
        assert environment["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    one, other = (found["environment"]["MASTER_PORT"] for found in launcher.ranks(2))
    assert one == other
    assert not list(tmp_path.glob("**/regard-ranks-*"))


def test_options_of_the_launcher_are_removed_and_others_kept() -> None:
    words = ["--debug", "train", "a.toml", "--nproc-per-node", "8", "--run", "r", "--nnodes=2", "--train.steps", "3"]
    words += ["--rdzv-endpoint", "node1:29400", "--rdzv-id=x", "--max-restarts", "3", "--node-rank", "1", "--quiet"]
    kept = ["--debug", "train", "a.toml", "--run", "r", "--train.steps", "3", "--quiet"]
    assert without_launch_options(words) == kept
    assert without_launch_options(["train", "--", "--nnodes", "2"]) == ["train", "--", "--nnodes", "2"]


@pytest.mark.parametrize(
    "words",
    [
        ["train", "toy-en-de", "--run", "r", "--train.steps=3"],
        ["resume", "runs/a", "--quiet"],
        ["doctor", "--distributed", "--json"],
        ["translate", "-i", "a.txt", "-o", "b.txt"],
        ["evaluate", "runs/a"],
        ["embed", "runs/a", "-i", "a.txt", "-o", "b.npy"],
    ],
    ids=lambda words: words[0],
)
def test_commands_launch_themselves(words: list[str], capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    monkeypatch.setattr(launch, "launch", lambda options, words: launched.append((options, words)))
    assert call(capfd, monkeypatch, *words, "--nproc-per-node", "4", "--rdzv-id", "me") == (0, "", "")
    (found,) = launched
    assert (found[0].nproc_per_node, found[0].nnodes, found[0].rdzv_id) == ("4", "1", "me")
    assert found[1] == words


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "x.toml", "--nproc-per-node", "2", "--nnodes", "2"], "add --rdzv-endpoint HOST:PORT"),
        (["train", "x.toml", "--nproc-per-node", "2", "--nnodes", "two"], "MIN:MAX, not 'two'"),
        (["train", "x.toml", "--nproc-per-node", "2", "--nnodes", "3:2", "--rdzv-endpoint", "a:1"], "in this order"),
        (["train", "x.toml", "--nproc-per-node", "2", "--rdzv-endpoint", "node1"], "is not HOST:PORT"),
        (["train", "x.toml", "--nproc-per-node", "2", "--node-rank", "1"], "0 to 0 for 1 machines, not 1"),
        (["train", "x.toml", "--nproc-per-node", "two"], "a number, gpu, cpu or auto"),
        (["train", "x.toml", "--nproc-per-node", "0"], "at least 1, not 0"),
        (["train", "x.toml", "--nproc-per-node", "2", "--max-restarts", "-1"], "at least 0, not -1"),
        (["train", "x.toml", "--nnodes", "2"], "--nnodes needs --nproc-per-node"),
        (["train", "x.toml", "--max-restarts", "2"], "--max-restarts needs --nproc-per-node"),
        (["train", "x.toml", "--overwrite", "--nproc-per-node", "2", "--max-restarts", "2"], "at every restart"),
        (["train", "x.toml", "--nproc_per_node", "2"], "did you mean --nproc-per-node?"),
        (["doctor", "--nproc-per-node", "2"], "add --distributed"),
        (["doctor", "--distributed"], "add --nproc-per-node N"),
        (["doctor", "--distributed", "--nproc-per-node", "2", "--timeout", "0"], "at least 1 second, not 0"),
        (["doctor", "--distributed", "--length", "5"], "leave them out"),
    ],
)
def test_what_cannot_be_launched_is_refused_in_one_line(
    words: list[str], message: str, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = call(capfd, monkeypatch, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err


def test_a_rank_launches_nothing(capfd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "0")
    code, _, err = call(capfd, monkeypatch, "train", "x.toml", "--nproc-per-node", "2")
    assert code == 2
    assert "leave out --nproc-per-node" in err


def test_without_a_gpu_none_can_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(RegardError, match="this torch sees no GPU"):
        launch.count_ranks("gpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert launch.count_ranks("gpu") == 3
    assert launch.count_ranks("5") == 5


# ---- signals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_reaches_the_ranks_which_save_before_the_end(tmp_path: Path, signum: signal.Signals) -> None:
    launcher = Launcher(tmp_path, "wait")
    launcher.wait_for("ready-0", "ready-1")
    os.kill(launcher.process.pid or 0, signum)
    assert launcher.finish() == (128 + signum, "")
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in range(2)] == [signum.name] * 2


def test_a_rank_that_cannot_save_says_so(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "wait", "full")
    launcher.wait_for("ready-0", "ready-1")
    os.kill(launcher.process.pid or 0, signal.SIGTERM)
    assert launcher.finish() == (2, "regard: the disk is full\n")


def test_ranks_that_are_stopped_themselves_end_the_group_with_their_code(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "wait")
    launcher.wait_for("ready-0", "ready-1")
    for rank in launcher.ranks(2):
        os.kill(rank["pid"], signal.SIGTERM)
    assert launcher.finish() == (143, "")


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_an_error_of_one_rank_is_one_line(tmp_path: Path) -> None:
    assert Launcher(tmp_path, "user").finish() == (2, "regard: rank 1: wrong setting\n")


def test_the_same_error_of_all_ranks_is_that_of_one_process(tmp_path: Path) -> None:
    assert Launcher(tmp_path, "same").finish() == (2, "regard: no recipe\n")


def test_a_bug_has_the_traceback_of_its_rank(tmp_path: Path) -> None:
    code, printed = Launcher(tmp_path, "bug").finish()
    assert code == 1
    assert printed.startswith("Traceback (most recent call last):\n")
    assert printed.endswith("ValueError: a bug\nregard: rank 1: a bug\n")
    assert printed.count("Traceback") == 1


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    code, printed = Launcher(tmp_path, "kill").finish()
    assert code == 128 + signal.SIGKILL
    assert printed.startswith("regard: rank 1: ended by SIGKILL")
    assert printed.count("\n") == 1


def test_a_restart_says_why_and_runs_all_ranks_again(tmp_path: Path) -> None:
    launcher = Launcher(tmp_path, "once", max_restarts=2)
    said = "regard: rank 1: lost; rank 0 ended without a message; restart 1 of 2 of all ranks\n"
    assert launcher.finish() == (0, said)
    first, second = launcher.ranks(2), launcher.ranks(2, restart=1)
    assert first[0]["environment"]["TORCHELASTIC_RUN_ID"] == second[0]["environment"]["TORCHELASTIC_RUN_ID"]


def test_a_restart_after_a_kill_names_the_ranks_without_a_message(tmp_path: Path) -> None:
    said = "regard: ranks 0-1 ended without a message; restart 1 of 1 of all ranks\n"
    assert Launcher(tmp_path, "once-killed", max_restarts=1).finish() == (0, said)


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([(0, 1, 10), (1, 1, 9)], 1),  # the first in time
        ([(0, 1, 10), (1, -9, 11)], 1),  # rank 0 lost its connection to the killed rank
        ([(0, 1, 10), (1, -9, 41)], 0),  # rank 1 was killed by torch, 30 seconds after the signal
        ([(0, -6, 10), (1, 2, 10)], 1),  # an error that the user can fix
        ([(0, 143, 9), (1, 1, 10), (2, -15, 9)], 1),  # others were stopped by torch
        ([(0, 143, 9), (1, -15, 9)], None),
    ],
)
def test_the_failure_that_caused_the_others(failures: list[tuple[int, int, int]], expected: int | None) -> None:
    found = first_failure([RankFailure(rank, code, "error", "", seconds) for rank, code, seconds in failures])
    assert (None if found is None else found.rank) == expected


def test_exit_codes_are_those_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_failures([RankFailure(0, 143)]) == 143
    assert report_failures([RankFailure(0, -signal.SIGTERM)]) == 143
    assert report_failures([RankFailure(0, 141)]) == 141
    assert capsys.readouterr().err == ""
    assert report_failures([RankFailure(3, -signal.SIGSEGV)]) == 139
    assert report_failures([RankFailure(3, 5)]) == 5
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].startswith("regard: rank 3: ended by SIGSEGV")
    assert lines[1] == "regard: rank 3: ended with exit code 5 and no message"


def test_torch_reads_the_errors_of_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The form of the file is that of torch's own handler, so torchrun shows the error too."""
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler

    files = [tmp_path / "ours.json", tmp_path / "torchs.json"]
    for path, record in zip(
        files, (lambda e: rank_errors.record_error(str(e), 1), get_error_handler().record_exception), strict=True
    ):
        monkeypatch.setenv(rank_errors.ERROR_FILE, str(path))
        try:
            raise ValueError("lost")
        except ValueError as error:
            record(error)
    ours, torchs = (ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path)) for path in files)
    assert isinstance(ours.message, dict)
    assert ours.message.keys() - torchs.message.keys() == {"errorCode"}  # torch sets it later
    assert ours.message["extraInfo"].keys() == torchs.message["extraInfo"].keys()
    found = launch.read_error_file(0, files[1], 1)
    assert found is not None
    assert found.message == "ValueError: lost"
    assert launch.read_error_file(0, tmp_path / "absent.json") is None


def test_errors_of_ranks_reach_the_launcher_and_not_the_terminal(
    tmp_path: Path, capfd: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "error.json"
    for name, value in {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(rank_errors.ERROR_FILE, str(path))
    code, _, err = call(capfd, monkeypatch, "train", "absent.toml")
    assert (code, err[:25]) == (2, "regard: rank 3: no recipe")  # under torchrun each rank prints its own
    monkeypatch.setenv(rank_errors.LAUNCHED, "1")
    code, _, printed = call(capfd, monkeypatch, "train", "absent.toml")
    assert (code, printed) == (2, "")
    assert f"regard: rank 3: {json.loads(path.read_text())['message']['message']}\n" == err


# ---- several machines ------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


@pytest.mark.parametrize("is_static", [False, True], ids=["c10d", "static"])
def test_launchers_of_two_machines_make_one_group(tmp_path: Path, is_static: bool) -> None:
    meeting = {"nnodes": "2", "rdzv_endpoint": f"localhost:{free_port()}", "rdzv_id": "two", "join_seconds": 20}
    launchers = [
        Launcher(tmp_path / str(node), "fine", **meeting, node_rank=node if is_static else None, nproc_per_node=n)
        for node, n in ((0, "1"), (1, "2"))
    ]
    for launcher in launchers:
        code, printed = launcher.finish()
        assert code == 0
        assert "regard:" not in printed  # torch's C++ code warns where one launcher has ended before another
    ranks = [
        sorted(int(path.name.split("-")[1]) for path in launcher.folder.glob("rank-*.json")) for launcher in launchers
    ]
    assert ranks in ([[0], [1, 2]], [[2], [0, 1]])
    assert not is_static or ranks == [[0], [1, 2]]


def test_a_machine_that_does_not_arrive_is_an_error(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    code, printed = Launcher(tmp_path, "fine", nnodes="2", rdzv_endpoint=endpoint, join_seconds=2).finish()
    assert code != 0
    assert f"2 machines did not meet at {endpoint} within 2 s" in printed


# ---- start files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["torchrun.sh", "slurm.sbatch"])
def test_start_files_are_shell_scripts(name: str) -> None:
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "scale" / name)], check=True)


def test_the_job_of_kubernetes_is_whole() -> None:
    yaml = pytest.importorskip("yaml")
    service, job = yaml.safe_load_all((ROOT / "examples" / "scale" / "kubernetes.yaml").read_text())
    assert (service["kind"], service["spec"]["clusterIP"]) == ("Service", "None")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    assert (job["kind"], spec["completionMode"]) == ("Job", "Indexed")
    assert spec["completions"] == spec["parallelism"]
    assert pod["subdomain"] == service["metadata"]["name"]
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()
    (container,) = pod["containers"]
    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes
    words = container["args"]
    options = dict(pairwise(words))
    assert int(options["--nnodes"]) == spec["completions"]
    assert options["--rdzv-endpoint"].split(":")[0] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    seconds = {variable["name"]: variable["value"] for variable in container["env"]}["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]
    assert int(seconds) < pod["terminationGracePeriodSeconds"]
