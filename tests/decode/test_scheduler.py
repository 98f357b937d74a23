"""The scheduler and its workers: many requests at once get what each gets alone, and no failure reaches its neighbours."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from configured import model_config

import regard
from regard import model_folder
from regard.config import DecodeConfig, TokenizerConfig
from regard.decode.generation import make_request
from regard.inference.generator import Generator
from regard.inference.translator import Translator
from regard.models.architectures import make_model
from regard.serve import batch_runner
from regard.serve.batch_runner import BatchRunner, DecodeEvent, DecodeTask, SlotTranslations
from regard.serve.decoding_workers import (
    MessageReader,
    ProcessWorker,
    WorkerProcesses,
    event_message,
    read_task,
    write_message,
)
from regard.serve.model_store import ModelStore
from regard.serve.request_context import (
    Cancelled,
    DeadlineExceeded,
    Draining,
    Overloaded,
    RequestContext,
    WorkerLost,
    current_request,
)
from regard.serve.scheduler import Scheduler, WorkerLimits
from regard.text.tokenizer import Tokenizer, Tokenizers

SENTENCES = [
    f"the {animal} sees {n} small {thing}s"
    for animal in ("cat", "dog", "owl")
    for n in (2, 30, 400)
    for thing in ("mouse", "house")
]


def save_model(folder: Path, kind: str, n_layers: int = 2) -> Path:
    """Save a small model with random weights: a translator, or a language model."""
    torch.manual_seed(0)
    one = Tokenizer.train(SENTENCES, TokenizerConfig(kind="char", vocab_size=60))
    sizes: dict[str, Any] = {"d_model": 32, "n_heads": 2, "d_ff": 64, "max_len": 64, "dropout": 0.0}
    vocabularies = {"source_vocab": len(one), "target_vocab": len(one)}
    if kind == "translator":
        config = model_config(
            preset="transformer-base", n_encoder_layers=n_layers, n_decoder_layers=n_layers, **sizes, **vocabularies
        )
        task = "translation"
    else:
        config = model_config(preset="gpt2", n_decoder_layers=n_layers, **sizes, **vocabularies)
        task = "causal-lm"
    model = make_model(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(2.0)
    package = model_folder.ModelPackage(
        model,
        Tokenizers(one, one),
        task,
        DecodeConfig(beam=2, max_len_b=8, max_new_tokens=12),
        source="en",
        target="xx",
    )
    model_folder.save(folder, package, "# A model with random weights\n")
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {kind: save_model(root / kind, kind) for kind in ("translator", "writer")}


@pytest.fixture(scope="module")
def store(folders: dict[str, Path]) -> Iterator[ModelStore]:
    made = ModelStore(folders, device="cpu", workers=2)
    yield made
    made.close()


def run_in_threads(functions: list[Any]) -> list[Any]:
    """Call functions at the same time, each as a request of a client of its own; return results or exceptions."""
    found: list[Any] = [None] * len(functions)

    def call(i: int) -> None:
        current_request.set(RequestContext(f"request {i}", f"client {i % 3}"))
        try:
            found[i] = functions[i]()
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


# ---- one model, many requests ----------------------------------------------------------------------------------------


def test_concurrent_translations_are_those_of_each_alone(store: ModelStore, folders: dict[str, Path]) -> None:
    direct = Translator.load(folders["translator"])
    alone = [direct.translate_sentences([text])[0].text for text in SENTENCES]
    with store.lease("translator") as loaded:
        calls = [lambda text=text: loaded.inference.translate_sentences([text])[0].text for text in SENTENCES]
        assert run_in_threads(calls) == alone
        assert [one.text for one in loaded.inference.translate_sentences(SENTENCES)] == alone


@pytest.mark.parametrize("options", [{"beam": 1}, {"beam": 4, "nbest": 3}, {"temperature": 0.9, "seed": 3, "nbest": 2}])
def test_requests_with_different_settings_run_side_by_side(
    store: ModelStore, folders: dict[str, Path], options: dict[str, Any]
) -> None:
    direct = Translator.load(folders["translator"])
    with store.lease("translator") as loaded:
        served: Translator = loaded.inference
        mixed = [
            lambda: served.translate_sentences(SENTENCES[:3], **options),
            lambda: served.translate_sentences(SENTENCES[3:6]),
        ]
        first, second = run_in_threads(mixed)
    assert [one.text for one in first] == [one.text for one in direct.translate_sentences(SENTENCES[:3], **options)]
    assert [one.text for one in second] == [one.text for one in direct.translate_sentences(SENTENCES[3:6])]
    nbest = options.get("nbest", 1)
    assert all(len(one.nbest) == (nbest if nbest > 1 else 0) for one in first)


def test_the_server_samples_with_the_seeds_that_it_is_given(store: ModelStore, folders: dict[str, Path]) -> None:
    options: dict[str, Any] = {"temperature": 0.9, "nbest": 2, "seeds": [2**70 + 3, 5, 5]}
    direct = Translator.load(folders["translator"]).translate_sentences(SENTENCES[:3], **options)
    with store.lease("translator") as loaded:
        found = loaded.inference.translate_sentences(SENTENCES[:3], **options)
    assert [[each.text for each in one.nbest] for one in found] == [[each.text for each in one.nbest] for one in direct]


def test_concurrent_texts_of_a_language_model_are_those_of_each_alone(
    store: ModelStore, folders: dict[str, Path]
) -> None:
    prompts = [text[: 5 + i] for i, text in enumerate(SENTENCES)]
    options: dict[str, Any] = {"temperature": 0.8, "seed": 1}
    direct = Generator.load(folders["writer"])
    alone = [direct.generate(prompt, **options).text for prompt in prompts]
    with store.lease("writer") as loaded:
        found = run_in_threads([lambda text=text: loaded.inference.generate(text, **options).text for text in prompts])
        assert found == alone
        assert "".join(loaded.inference.stream(prompts[0], **options)) == alone[0]


def test_a_stream_ends_at_a_stop_string_and_frees_its_place(store: ModelStore, folders: dict[str, Path]) -> None:
    direct = Generator.load(folders["writer"])
    texts = {seed: direct.generate("the cat", temperature=1.0, min_len=11, seed=seed).text for seed in range(8)}
    seed, whole = max(texts.items(), key=lambda item: len(item[1]))
    options: dict[str, Any] = {"temperature": 1.0, "min_len": 11, "seed": seed}
    stop = whole[len(whole) // 2]
    with store.lease("writer") as loaded:
        assert loaded.inference.generate("the cat", stop=[stop], **options).text == whole.split(stop)[0]
        assert loaded.scheduler is not None
        assert loaded.scheduler.wait_until_idle(5.0)


# ---- limits, deadlines, cancellation -----------------------------------------------------------------------------------


class HeldWorker:
    """A worker that decodes nothing until it is told to."""

    def __init__(self, report: Any, lost: Any) -> None:
        self.report, self.lost = report, lost
        self.tasks: list[DecodeTask] = []
        self.removed: list[int] = []

    def send(self, tasks: Any, removed: Any = ()) -> None:
        self.tasks += tasks
        self.removed += removed

    def finish(self, task: DecodeTask) -> None:
        self.report([DecodeEvent(task.number, done=True)])

    def close(self) -> None:
        pass


class Held:
    """A scheduler with one worker that decodes when it is told to."""

    def __init__(self, queue_tokens: int = 1000, rows: int = 4, tokens: int = 10**6) -> None:
        self.workers: list[HeldWorker] = []
        self.scheduler = Scheduler(self.make, 1, queue_tokens, WorkerLimits(rows, tokens))

    def make(self, report: Any, lost: Any) -> HeldWorker:
        self.workers.append(HeldWorker(report, lost))
        return self.workers[-1]

    def begin(
        self, tasks: int, client: str, length: int = 10, context: RequestContext | None = None
    ) -> threading.Thread:
        """Begin a call in a thread; its exception, if any, is put into `thread.error`."""
        options = DecodeConfig(beam=1)
        own = [DecodeTask(next(self.scheduler.numbers), (1,) * length, options, (1,)) for _ in range(tasks)]

        def call() -> None:
            current_request.set(context or RequestContext("", client))
            try:
                for _ in self.scheduler._run(own):
                    pass
            except Exception as error:
                thread.error = error  # type: ignore[attr-defined]

        thread = threading.Thread(target=call)
        thread.error = None  # type: ignore[attr-defined]
        before = self.scheduler.statistics()["queued_sequences"] + len(self.workers[-1].tasks)
        thread.start()
        wait_until(lambda: self.count() >= before + tasks or not thread.is_alive())
        return thread

    def count(self) -> int:
        return self.scheduler.statistics()["queued_sequences"] + len(self.workers[-1].tasks)


def wait_until(condition: Any, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.002)


def test_a_worker_has_at_most_so_many_tokens_with_padding() -> None:
    """Two sources of 10 tokens are 20 with padding, and with one of 30 they would be 90: it waits until both are done."""
    held = Held(tokens=40)
    held.begin(2, "a")
    held.begin(1, "b", length=30)
    worker = held.workers[0]
    assert [len(task.ids) for task in worker.tasks] == [10, 10]
    worker.finish(worker.tasks[0])
    assert len(worker.tasks) == 2  # 60 with padding
    worker.finish(worker.tasks[1])
    assert [len(task.ids) for task in worker.tasks] == [10, 10, 30]  # a worker without tasks takes any
    worker.finish(worker.tasks[2])


def test_the_queue_is_bounded_in_tokens() -> None:
    held = Held(queue_tokens=100)
    first = held.begin(4, "a")  # goes to the worker: 4 rows of 20 tokens
    second = held.begin(5, "b")  # 100 tokens wait
    refused = held.begin(1, "c")
    refused.join()
    error = refused.error  # type: ignore[attr-defined]
    assert isinstance(error, Overloaded)
    assert (error.limit, error.value) == (100, 120)
    assert error.retry_after
    for task in [*held.workers[0].tasks]:
        held.workers[0].finish(task)
    wait_until(lambda: len(held.workers[0].tasks) == 8)
    for task in held.workers[0].tasks[4:]:
        held.workers[0].finish(task)
    wait_until(lambda: len(held.workers[0].tasks) == 9)
    held.workers[0].finish(held.workers[0].tasks[-1])
    first.join(5)
    second.join(5)
    assert not first.error  # type: ignore[attr-defined]
    assert not second.error  # type: ignore[attr-defined]
    assert held.scheduler.statistics()["queued_tokens"] == 0


def test_clients_take_turns() -> None:
    held = Held(rows=1, queue_tokens=10**6)
    threads = [held.begin(20, "many"), held.begin(2, "few")]
    done = []
    for i in range(22):
        wait_until(lambda i=i: len(held.workers[0].tasks) == i + 1)
        done.append(held.workers[0].tasks[i].number)
        held.workers[0].finish(held.workers[0].tasks[i])
    for thread in threads:
        thread.join(5)
    few = [i for i, number in enumerate(done) if number >= 20]
    assert max(few) <= 4  # not after the twenty of the other client


def test_a_cancelled_request_leaves_queue_and_worker() -> None:
    held = Held(rows=2)
    context = RequestContext("", "a")
    thread = held.begin(5, "a", context=context)
    assert held.scheduler.statistics()["running_sequences"] == 2
    context.cancelled.set()
    thread.join(5)
    assert isinstance(thread.error, Cancelled)  # type: ignore[attr-defined]
    numbers = held.scheduler.statistics()
    assert (numbers["queued_tokens"], numbers["running_sequences"]) == (0, 0)
    assert sorted(held.workers[0].removed) == sorted(task.number for task in held.workers[0].tasks)


def test_a_deadline_ends_a_request() -> None:
    held = Held()
    thread = held.begin(1, "a", context=RequestContext("", "a", deadline=time.monotonic() + 0.1))
    thread.join(5)
    assert isinstance(thread.error, DeadlineExceeded)  # type: ignore[attr-defined]
    assert held.scheduler.wait_until_idle(1.0)


def test_a_lost_worker_is_replaced_and_fails_only_its_own_requests() -> None:
    held = Held(rows=2)
    first, second = held.begin(2, "a"), held.begin(2, "b")
    held.workers[0].lost()
    first.join(5)
    assert isinstance(first.error, WorkerLost)  # type: ignore[attr-defined]
    assert len(held.workers) == 2
    for task in held.workers[1].tasks:
        held.workers[1].finish(task)
    second.join(5)
    assert second.error is None  # type: ignore[attr-defined]
    assert held.scheduler.statistics()["lost_workers"] == 1


def test_what_waits_when_the_server_stops_is_told_so() -> None:
    held = Held()
    thread = held.begin(3, "a")
    held.scheduler.close()
    thread.join(5)
    assert isinstance(thread.error, Draining)  # type: ignore[attr-defined]


# ---- processes ---------------------------------------------------------------------------------------------------------


def test_a_killed_process_is_replaced(store: ModelStore) -> None:
    """SIGKILL while a long text is decoded: its request fails, and the next one is decoded by a new process."""
    with store.lease("translator") as loaded:
        scheduler = loaded.scheduler
        assert scheduler is not None
        before = {place.worker.pid for place in scheduler.places if isinstance(place.worker, ProcessWorker)}
        lost = scheduler.lost_workers
        errors: list[Any] = []

        def call() -> None:
            current_request.set(RequestContext("", "a"))
            try:
                while True:
                    loaded.inference.translate_sentences(SENTENCES * 4, min_len=40)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        wait_until(lambda: all(place.tasks for place in scheduler.places))
        for pid in before:
            os.kill(pid, signal.SIGKILL)
        thread.join(20)
        assert isinstance(errors[0], WorkerLost)
        wait_until(lambda: scheduler.lost_workers == lost + 2 and scheduler.statistics()["workers"] == 2)
        assert len(loaded.inference.translate_sentences(SENTENCES[:2])) == 2
        after = {place.worker.pid for place in scheduler.places if isinstance(place.worker, ProcessWorker)}
        assert not before & after


def test_the_process_that_forks_workers_is_started_again(folders: dict[str, Path]) -> None:
    processes = WorkerProcesses(folders["translator"], "fp32")
    gone = threading.Event()
    try:
        processes.make_worker(lambda events: None, lambda: None).close()
        assert processes.process is not None
        processes.process.kill()
        processes.process.wait()
        worker = processes.make_worker(lambda events: None, gone.set)
        os.kill(worker.pid, signal.SIGKILL)
        assert gone.wait(5)
    finally:
        processes.close()


def test_workers_end_with_the_server(folders: dict[str, Path]) -> None:
    made = ModelStore({"one": folders["translator"]}, device="cpu", workers=2)
    with made.lease() as loaded:
        assert loaded.scheduler is not None
        pids = [place.worker.pid for place in loaded.scheduler.places]  # type: ignore[union-attr]
    made.close()

    def is_running(pid: int) -> bool:
        with contextlib.suppress(OSError):
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        return False

    wait_until(lambda: not any(map(is_running, pids)))


# ---- models ------------------------------------------------------------------------------------------------------------


def test_models_are_loaded_when_asked_for_and_given_back(folders: dict[str, Path]) -> None:
    with contextlib.closing(ModelStore(folders, device="cpu", workers=1, memory_limit=1)) as made:
        assert {entry.task for entry in made.entries.values()} == {"translation", "generation"}
        assert not made.loaded
        with made.lease("translator"):
            with made.lease("writer"):
                assert set(made.loaded) == {"translator", "writer"}  # both in use: the limit has to wait
            assert made.check("writer") > 0
        made.loaded.clear()
        with made.lease("translator"):
            pass
        with made.lease("writer"):
            assert set(made.loaded) == {"writer"}
        with pytest.raises(KeyError):
            made.get("none")


def test_a_store_that_drains_takes_no_new_request(folders: dict[str, Path]) -> None:
    with contextlib.closing(ModelStore(folders, device="cpu", workers=1)) as made:
        assert made.drain(0.1)
        with pytest.raises(Draining), made.lease():
            pass


# ---- batches -----------------------------------------------------------------------------------------------------------


def test_a_batch_that_fails_takes_only_its_own_sequences_with_it(folders: dict[str, Path]) -> None:
    model: Any = Translator.load(folders["translator"]).model
    runner = BatchRunner(model)
    options = DecodeConfig(beam=2, max_len_b=4)
    runner.add(DecodeTask(1, (5, 6, 7, 2), options, (1,)))
    runner.add(DecodeTask(2, (10**9, 2), replace(options, beam=3), (1,)))  # there is no such token
    events: list[DecodeEvent] = []
    while runner.size:
        events += runner.step()
    found = {event.number: event for event in events}
    assert found[1].hypotheses
    assert found[2].error
    assert found[2].done


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_worker_on_a_gpu_decodes_like_the_model_itself(folders: dict[str, Path]) -> None:
    """In fp32, for translations by beam search and sampling and for continuations, also after the worker was killed."""
    with contextlib.closing(ModelStore(folders, device="cuda", weights="fp32")) as made:
        for name, call in (
            ("translator", lambda one: [each.text for each in one.translate_sentences(SENTENCES)]),
            ("translator", lambda one: [each.text for each in one.translate_sentences(SENTENCES, temperature=1.0)]),
            ("writer", lambda one: one.generate("a b", max_new_tokens=8).text),
        ):
            expected = call(regard.load(folders[name], "cuda", "fp32"))
            with made.lease(name) as loaded:
                assert call(loaded.inference) == expected
                scheduler = loaded.scheduler
                assert scheduler is not None
                os.kill(scheduler.places[0].worker.pid, signal.SIGKILL)  # type: ignore[union-attr]
                lost = scheduler.lost_workers
                wait_until(lambda scheduler=scheduler, lost=lost: scheduler.lost_workers > lost)
                assert call(loaded.inference) == expected


def test_a_prompt_that_leaves_no_room_is_refused_before_it_waits(store: ModelStore) -> None:
    with store.lease("writer") as loaded, pytest.raises(Exception, match="at most 64"):
        make_request([5] * 64, 0, DecodeConfig(), loaded.inference.model)


def test_a_batch_in_slots_returns_its_engine_for_the_next_one(folders: dict[str, Path]) -> None:
    """A CUDA graph takes long to capture, so it outlives the requests that it was captured for."""
    model: Any = Translator.load(folders["translator"]).model
    batch = SlotTranslations(model, DecodeConfig(beam=2, max_len_b=4), (1,), 32, 8)
    engine = batch.job.engine
    batch.close()
    assert SlotTranslations(model, DecodeConfig(beam=2, max_len_b=4), (1,), 32, 8).job.engine is engine


def test_many_sequences_get_more_slots_and_every_one_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slots on the CPU: the number of slots follows the load, and results are those of beam search without slots.

    Triton's interpreter runs the kernels there, so everything is small."""
    for name, value in {"FEW_SLOTS": 1, "MANY_SLOTS": 3, "MANY": 3, "FEW": 1}.items():
        monkeypatch.setattr(batch_runner, name, value)
    model: Any = Translator.load(save_model(tmp_path / "model", "translator", 1)).model
    options = DecodeConfig(beam=2, max_len_b=2)
    tasks = [DecodeTask(i, (*range(5, 7 + i % 3), 2), options, (1,)) for i in range(7)]

    def decode(uses_graphs: bool) -> tuple[dict[int, list[int]], set[int]]:
        runner, found, slots, waiting = BatchRunner(model), {}, set(), list(tasks)
        runner.uses_graphs[2] = uses_graphs
        while waiting or runner.size:
            for task in waiting[: 1 if runner.steps < 3 else 99]:  # a few at first, then all the others at once
                runner.add(task)
                waiting.remove(task)
            for event in runner.step():
                assert not event.error
                found[event.number] = event.hypotheses[0].tokens
            slots |= {group.slots for group in runner.groups.values()}
        return found, slots

    plain, _ = decode(False)
    in_slots, slots = decode(True)
    assert in_slots == plain
    assert slots == {1, 3}


def test_sending_does_not_wait_for_the_worker() -> None:
    """A worker that writes many events before it reads: neither side may wait for the other."""
    ours, theirs = socket.socketpair()
    reported: list[DecodeEvent] = []
    worker = ProcessWorker(ours, 0, reported.extend, lambda: None)
    task = DecodeTask(1, tuple(range(100)), DecodeConfig(), (1,))
    begun = time.monotonic()
    worker.send([task] * 20_000)
    assert time.monotonic() - begun < 1
    write_message(theirs, [event_message(DecodeEvent(i, done=True)) for i in range(50_000)])
    wait_until(lambda: len(reported) == 50_000)
    messages = MessageReader(theirs).read()
    assert messages is not None
    assert read_task(messages[0][0][-1]) == task
    worker.close()
    theirs.close()
