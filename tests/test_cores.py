"""Cores for decoding: processes that share sentences, threads inside large products only, and what becomes of late ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.config import DecodeConfig
from regard.decode import batch_decoding, cpu_processes
from regard.decode.batch_decoding import count_processes, decode, make_batches
from regard.decode.cpu_processes import fork_map, idle_cores
from regard.kernels import cpu_threads
from regard.kernels.cpu_threads import LARGE_MATRIX_BYTES, LargeMatmul, large_matmul, one_thread
from regard.layers.quantization import convert_weights
from regard.models.architectures import make_model, preset

pytestmark = pytest.mark.skipif(not cpu_processes.CAN_FORK, reason="processes are forked on Linux alone")
CPU = torch.device("cpu")


@pytest.fixture
def _two_threads() -> Iterator[None]:
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def gathered(work: Any, items: list[Any], processes: int) -> dict[int, Any]:
    found: dict[int, Any] = {}
    fork_map(work, items, processes, found.__setitem__)
    return found


# ---- processes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [1, 2, 4])
def test_every_item_is_worked_on_once_whoever_does_it(processes: int) -> None:
    items = list(range(50))
    assert gathered(lambda x: [x * x, "ü", 0.1, -float("inf")], items, processes) == {
        i: [i * i, "ü", 0.1, -float("inf")] for i in items
    }


def test_several_processes_do_take_part() -> None:
    found = gathered(lambda x: time.sleep(0.01) or os.getpid(), list(range(20)), 2)
    assert len(set(found.values())) == 2
    assert os.getpid() in found.values()


def test_more_items_than_a_pipe_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_processes, "MAX_ITEMS", 7)
    assert gathered(lambda x: -x, list(range(30)), 2) == {i: -i for i in range(30)}


def test_results_larger_than_a_pipe() -> None:
    assert gathered(lambda x: "x" * 300_000, [0, 1, 2, 3], 2) == dict.fromkeys(range(4), "x" * 300_000)


def test_items_of_a_killed_process_are_done_here(caplog: pytest.LogCaptureFixture) -> None:
    parent = os.getpid()

    def work(x: int) -> int:
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.01)
        return x

    assert gathered(work, list(range(12)), 3) == {i: i for i in range(12)}
    assert "ended early" in caplog.text


def test_an_error_is_raised_here_whoever_met_it() -> None:
    def work(x: int) -> int:
        if x == 5:
            raise ValueError("five")
        return x

    with pytest.raises(ValueError, match="five"):
        gathered(work, list(range(8)), 2)


def test_no_process_is_left_behind_after_an_error_here(monkeypatch: pytest.MonkeyPatch) -> None:
    parent, children, fork = os.getpid(), [], os.fork

    def noted() -> int:
        child = fork()
        children.append(child)
        return child

    def work(x: int) -> int:
        if os.getpid() == parent:
            raise KeyboardInterrupt
        time.sleep(60)
        return x

    monkeypatch.setattr(os, "fork", noted)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gathered(work, list(range(4)), 2)
    assert time.monotonic() - begun < 30
    assert len(children) == 1
    with pytest.raises(ProcessLookupError):
        os.kill(children[0], 0)


# ---- decoding -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(0)
    return make_model(
        preset(
            *("transformer-base",),
            **{"source_vocab": 60, "target_vocab": 60, "d_model": 16, "d_ff": 32, "n_heads": 2, "max_len": 40},
            **{"n_encoder_layers": 1, "n_decoder_layers": 1, "dropout": 0.0},
        )
    ).eval()


SOURCES = [[5 + (7 * i + 3 * j) % 50 for j in range(3 + i % 9)] for i in range(40)]


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("options", [{}, {"beam": 3, "nbest": 2}, {"temperature": 1.0, "seed": 3}])
def test_sentences_in_several_processes_are_translated_as_in_one(
    model: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = DecodeConfig(max_len_b=8, **options)
    done: list[int] = []
    monkeypatch.setattr(batch_decoding, "count_processes", lambda *args: 1)
    alone = decode(model, SOURCES, chosen, 40, CPU)
    monkeypatch.setattr(batch_decoding, "count_processes", lambda *args: 3)
    monkeypatch.setattr(batch_decoding, "idle_cores", lambda: 2)
    shared = decode(model, SOURCES, chosen, 40, CPU, done.append)
    assert sum(done) == len(SOURCES)
    assert torch.get_num_threads() == 2
    for a, b in zip(alone, shared, strict=True):  # batches differ, so sums may in their last bits
        assert [h.tokens for h in a] == [h.tokens for h in b]
        assert [h.ended for h in a] == [h.ended for h in b]
        assert [h.log_prob for h in a] == pytest.approx([h.log_prob for h in b], rel=1e-5)


@pytest.mark.usefixtures("_two_threads")
def test_translations_do_not_depend_on_what_else_runs(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is resumed on a busy machine has the same bytes: batches are those of an idle one."""
    monkeypatch.setattr(batch_decoding, "count_processes", lambda *args: 2)
    found = []
    for idle in (0, 1):
        monkeypatch.setattr(batch_decoding, "idle_cores", lambda idle=idle: idle)
        found.append(decode(model, SOURCES, DecodeConfig(beam=2, max_len_b=8), 40, CPU))
    assert found[0] == found[1]  # to the last bit: the same sums in the same order


def test_small_work_is_for_one_process(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy, wide = DecodeConfig(beam=1), DecodeConfig(beam=4)
    long = [list(range(5, 35))] * 4000
    assert count_processes(model, SOURCES, greedy, 8) == 1  # a model that takes no time
    assert count_processes(model, long, greedy, 8) == 8
    assert count_processes(model, long, greedy, 1) == 1
    monkeypatch.setattr(batch_decoding, "FORKED_SECONDS", 0.0)
    assert count_processes(model, long[:7], greedy, 8) == 1  # seven rows cost little more than one
    assert count_processes(model, long[:16], greedy, 8) == 2
    assert count_processes(model, long[:16], wide, 8) == 8
    assert count_processes(model, long[:1], wide, 8) == 1


@pytest.mark.parametrize(("running", "idle"), [(1, 3), (3, 1), (4, 0), (9, 0)])
def test_cores_that_run_something_are_not_idle(
    running: int, idle: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    load = tmp_path / "loadavg"
    load.write_text(f"0.52 0.61 0.30 {running}/345 12345\n")
    assert idle_cores(str(load)) == idle
    load.write_text("a machine that says something else")
    assert idle_cores(str(load)) == 3
    assert idle_cores(str(tmp_path / "nowhere")) == 3


@pytest.mark.parametrize(("n", "width", "workers"), [(16, 1, 2), (16, 4, 2), (1000, 1, 2), (7, 5, 3), (1, 1, 4)])
def test_batches_for_several_processes_are_even_and_not_too_large(n: int, width: int, workers: int) -> None:
    found = list(make_batches([[5] * 10] * n, DecodeConfig(beam=width), CPU, workers))
    sizes = [len(rows) for rows in found]
    assert sorted(i for rows in found for i in rows) == list(range(n))
    assert max(sizes) * width <= max(batch_decoding.ROWS, width)
    assert max(sizes) - min(sizes) <= max(1, max(sizes) - (n - (len(sizes) - 1) * max(sizes)))
    assert len(sizes) >= min(workers, n)


# ---- threads ------------------------------------------------------------------------------------------------------------


class Matrix:
    """A product that notes in how many threads it runs, and takes as long as it is told by a clock of its own."""

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.seconds, self.now = 1e-4, 0.0

    def multiply(self, x: Any) -> Any:
        self.threads.append(torch.get_num_threads())
        self.now += self.seconds
        return x


def test_a_product_that_is_late_is_done_in_one_thread_for_ever_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    team, matrix, x = LargeMatmul(), Matrix(), torch.ones(1, 4)
    monkeypatch.setattr(cpu_threads.time, "perf_counter", lambda: matrix.now)
    team.threads = 2
    for _ in range(3):
        team(matrix.multiply, x)
    assert matrix.threads == [2, 2, 2]
    pauses = []
    for _ in range(3):
        matrix.seconds = 3e-3
        team(matrix.multiply, x)
        matrix.seconds, matrix.threads = 1e-4, []
        while 2 not in matrix.threads:
            team(matrix.multiply, x)
        pauses.append(len(matrix.threads) - 1)
    assert pauses == [32, 63, 125]  # twice as long, less one for the product that was in time
    assert torch.get_num_threads() == 1


@pytest.mark.usefixtures("_two_threads")
def test_decoding_is_in_one_thread_and_threads_come_back_after_it() -> None:
    def interrupted() -> None:
        with one_thread() as threads:
            assert (threads, torch.get_num_threads(), large_matmul.threads) == (2, 1, 2)
            with one_thread() as inner:
                assert (inner, large_matmul.threads) == (1, 2)
            raise KeyError

    with pytest.raises(KeyError):
        interrupted()
    assert torch.get_num_threads() == 2
    assert large_matmul.threads == 1


@pytest.mark.usefixtures("_two_threads")
def test_threads_come_back_after_bodies_of_one_thread_that_overlap() -> None:
    """The second begins in a new thread of Python while the first is in its body, and ends after it."""
    first_ends, second_begins = threading.Event(), threading.Event()
    seen = []

    def second() -> None:
        with one_thread() as threads:
            seen.append((threads, torch.get_num_threads(), large_matmul.threads))
            second_begins.set()
            assert first_ends.wait(20)
            seen.append((torch.get_num_threads(), large_matmul.threads))

    with one_thread():
        other = threading.Thread(target=second)
        other.start()
        assert second_begins.wait(20)
    first_ends.set()
    other.join(20)
    assert seen == [(2, 1, 2), (1, 2)]
    found: list[int] = []
    later = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
    later.start()
    later.join(20)
    assert found == [2]
    assert (torch.get_num_threads(), large_matmul.threads) == (2, 1)


@pytest.mark.usefixtures("_two_threads")
def test_requests_of_a_server_have_torchs_threads_though_their_thread_begins_while_another_decodes() -> None:
    pytest.importorskip("starlette")
    from regard.serve.blocking_calls import BlockingCalls

    calls = BlockingCalls(1)
    with one_thread():
        assert calls._threads.submit(torch.get_num_threads).result(20) == 2
        assert torch.get_num_threads() == 1
    calls.close()


@pytest.mark.usefixtures("_two_threads")
@pytest.mark.parametrize("weights", ["fp32", "int8"])
def test_large_matrices_are_multiplied_in_several_threads_and_others_in_one(
    weights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In decoding alone, and with the results of one thread up to rounding."""
    torch.manual_seed(0)
    sizes = {"source_vocab": 5000, "target_vocab": 5000, "d_model": 1024, "d_ff": 16, "n_heads": 2, "max_len": 16}
    model = make_model(preset("transformer-base", **sizes, n_encoder_layers=1, n_decoder_layers=1, dropout=0.0)).eval()
    model = convert_weights(model, weights, CPU)
    seen: list[int] = []
    judge = LargeMatmul.update_backoff

    def judged(self: LargeMatmul, which: tuple[int, int], seconds: float) -> None:
        seen.append(which[0])
        judge(self, which, 0.0)

    monkeypatch.setattr(LargeMatmul, "update_backoff", judged)
    with torch.inference_mode():
        source = torch.tensor([[5, 6, 7, 2]])
        plain = model.step(torch.tensor([1]), model.begin(source))
        assert not seen
        state = model.begin(source)
        with one_thread():
            threaded = model.step(torch.tensor([1]), state)
    products = {name: m for name, m in model.decoder.named_modules() if isinstance(m, torch.nn.Linear)}
    large = [
        name for name, m in products.items() if m.weight.nbytes >= LARGE_MATRIX_BYTES and not name.endswith("cross.kv")
    ]
    assert len(set(seen)) == (1 + len(large) if weights == "fp32" else 1)  # the memory's kv are made by `begin`
    error = (plain - threaded).abs().max()
    assert error <= 1024 * torch.finfo(torch.float32).eps * plain.abs().max()


@pytest.mark.parametrize("own", [None, "7"])
def test_idle_threads_of_torch_yield_their_core_in_python_too(own: str | None) -> None:
    """The environment variable is set before torch is imported, and only where the user has not set it."""
    environment = {key: value for key, value in os.environ.items() if key != "GOMP_SPINCOUNT"}
    code = "import os, sys, regard; print(os.environ['GOMP_SPINCOUNT'], 'torch' in sys.modules)"
    found = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | ({"GOMP_SPINCOUNT": own} if own else {}),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert found == [own or "10000", "False"]
