"""The loop's decisions: what is saved and kept, when it stops, what the final model is, what it refuses."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_equal_tensors, assert_same_run, checkpoint, fit, fit_until, metrics, tiny, write_corpus
from safetensors.torch import load_file

from regard.config import ModelConfig
from regard.data.batches import Batch
from regard.errors import RegardError
from regard.models.weights import weights_of
from regard.signals import REPEAT_SECONDS, StopRequest
from regard.tasks import prepare_job
from regard.training import throughput
from regard.training.checkpoint import Checkpoints
from regard.training.job import Validation
from regard.training.optimizer import Updater
from regard.training.trainer import Trainer
from regard.training.training_step import TrainingStep


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("loop")
    write_corpus(folder)
    return folder


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Path:
    return corpus / tmp_path.name


def steps_of(run: Path) -> list[int]:
    return Checkpoints(run / "checkpoints").steps()


def weights(run: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / f"step-{step:08d}" / "model.safetensors")


def final(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "model" / "model.safetensors")


def script(monkeypatch: pytest.MonkeyPatch, losses: list[float], bleus: list[float]) -> list[int]:
    """Let validations report these values, one after the other, and the last one for ever; counts the calls."""
    calls = [0]

    def scripted(self: Trainer, stop: Any, model: Any = None) -> Validation:
        i = min(calls[0], len(losses) - 1)
        calls[0] += 1
        return Validation(losses[i], {"bleu": bleus[i]})

    monkeypatch.setattr(Trainer, "_measure", scripted)
    return calls


# ---- keeping, averaging, the best --------------------------------------------------------------------------------

EVERY_TWO = {"train.valid_every": 2, "train.save_every": 2, "train.average": 1, "train.keep": 2}


def test_the_last_k_and_the_best_are_kept(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, [5.0, 1.0, 4.0, 3.0, 2.0, 2.0, 2.0], [0.0] * 7)
    fit(run, **EVERY_TWO)
    assert steps_of(run) == [4, 12, 14]
    assert_equal_tensors(final(run), weights(run, 4))


def test_a_best_between_the_regular_ones_is_saved(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, [5.0, 1.0, 4.0, 4.0, 4.0], [0.0] * 5)
    fit(run, **{**EVERY_TWO, "train.valid_every": 3})
    assert steps_of(run) == [6, 12, 14]
    assert_equal_tensors(final(run), weights(run, 6))


@pytest.mark.parametrize("stops", [[], [7, 2], [1] * 13], ids=["straight", "interrupted twice", "after every step"])
def test_the_mean_of_the_last_regular_checkpoints(run: Path, stops: list[int]) -> None:
    changes = {"train.average": 3, "train.keep": 1, "train.save_every": 3, "train.steps": 14}
    for steps in stops:
        fit_until(run, steps, **changes)
    fit(run, **changes)
    assert set(steps_of(run)) >= {6, 9, 12}
    for name, tensor in final(run).items():
        mean = np.mean([weights(run, step)[name].double().numpy() for step in (6, 9, 12)], axis=0)
        np.testing.assert_array_equal(tensor.numpy(), mean.astype(np.float32))


def test_damaged_checkpoints_are_not_averaged(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"train.average": 3, "train.save_every": 3, "train.steps": 12}
    fit(run, **changes)
    file = run / "checkpoints" / "step-00000009" / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 64
    file.write_bytes(content)
    shutil.rmtree(run / "model")  # a model that is there is not made again
    fit(run, **changes)
    assert "step-00000009 is damaged (model.safetensors does not match its checksum)" in capsys.readouterr().err
    for name, tensor in final(run).items():
        mean = (weights(run, 6)[name].double() + weights(run, 12)[name].double()) / 2
        assert torch.equal(tensor, mean.float())


def test_a_lost_best_is_replaced_by_the_last(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script(monkeypatch, [5.0, 1.0, 4.0], [0.0] * 3)
    fit(run, **EVERY_TWO)
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    shutil.rmtree(run / "model")
    fit(run, **EVERY_TWO)
    assert "step-00000004 is damaged (manifest.json is missing)" in capsys.readouterr().err
    assert_equal_tensors(final(run), weights(run, 14))


# ---- stopping early ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metric", "losses", "bleus", "end", "best"),
    [
        ("loss", [3.0, 2.0, 2.5, 2.0, 1.0], [0.0] * 5, 8, 4),  # as good as the best is not better
        ("loss", [3.0, 2.9, 3.0, 2.8, 3.0, 3.0, 0.0], [9.0] * 7, 12, 8),
        ("bleu", [1.0] * 5, [10.0, 30.0, 20.0, 29.0, 99.0], 8, 4),
        ("loss", [float("nan"), 2.0, float("inf"), 3.0, 0.0], [0.0] * 5, 8, 4),
    ],
)
def test_patience(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    metric: str,
    losses: list[float],
    bleus: list[float],
    end: int,
    best: int,
) -> None:
    changes = {**EVERY_TWO, "train.patience": 2, "train.metric": metric, "train.steps": 50}
    calls = script(monkeypatch, losses, bleus)
    fit(run, **changes)
    assert calls == [end // 2 + 1]  # and once more for the final model
    assert max(steps_of(run)) == end
    assert_equal_tensors(final(run), weights(run, best))
    fit(run, **changes)  # the end is remembered, and the model is there
    assert calls == [end // 2 + 1]
    assert max(steps_of(run)) == end


def test_patience_survives_an_interruption(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changes = {**EVERY_TWO, "train.patience": 2, "train.steps": 50}
    script(monkeypatch, [3.0, 2.0, 2.5, 2.6, 1.0], [0.0] * 5)
    fit_until(run, 7, **changes)
    fit(run, **changes)
    assert max(steps_of(run)) == 8


# ---- what is not finite ------------------------------------------------------------------------------------------


def poison(monkeypatch: pytest.MonkeyPatch, step: int, where: str) -> None:
    """Not-a-number in the loss or in one weight's gradient of one step."""
    original, calls = Updater.step, iter(range(1, 1000))

    def poisoned(self: Updater, loss: torch.Tensor) -> torch.Tensor:
        if next(calls) == step:
            if where == "gradient":
                self.parameters[2].grad.view(-1)[1] = float("nan")  # type: ignore[union-attr]
            else:
                loss = loss * float("inf")
        return original(self, loss)

    monkeypatch.setattr(Updater, "step", poisoned)


@pytest.mark.parametrize("where", ["gradient", "loss"])
@pytest.mark.parametrize("log_every", [1, 100], ids=["seen at once", "seen when saving"])
def test_a_bad_step_is_named_and_not_taken(
    run: Path, monkeypatch: pytest.MonkeyPatch, where: str, log_every: int
) -> None:
    changes = {"train.log_every": log_every, "train.valid_every": 100}
    fit_until(run, 2, **changes)  # so that steps are counted from the beginning of the run, not of the process
    poison(monkeypatch, 3, where)
    trainer = Trainer(prepare_job(run, tiny(run.parent, **changes)), quiet=True)
    with pytest.raises(RegardError, match=r"not finite at step 5; .*go on from step 4 with `regard resume"):
        trainer.run(StopRequest())
    trainer.close()
    assert steps_of(run) == [4]
    assert_equal_tensors(weights_of(trainer.model), weights(run, 4))
    tensors, _ = checkpoint(run / "checkpoints" / "step-00000004")
    for name, parameter in trainer.model.named_parameters():
        for key, value in trainer.training_step.updater.optimizer.state[parameter].items():
            assert torch.equal(value, tensors[f"optimizer:{name}/{key}"])
    assert all(line["step"] < 5 for line in metrics(run))


def test_a_bad_step_is_never_validated(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch, 3, "loss")
    with pytest.raises(RegardError, match=r"not finite at step 3; .*start again"):
        fit(run, **{"train.log_every": 100})
    assert metrics(run) == []
    assert steps_of(run) == []


# ---- clocks ------------------------------------------------------------------------------------------------------


def test_training_time_is_that_of_training(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes a second; validating and saving take thousands, and count for nothing."""
    now = [0.0]
    monkeypatch.setattr(throughput.time, "perf_counter", lambda: now[0])
    slow(monkeypatch, TrainingStep, "__call__", now, 1.0)
    slow(monkeypatch, Trainer, "_measure", now, 1e3)
    slow(monkeypatch, Checkpoints, "save", now, 1e6)
    fit(run, **{"train.log_every": 1})
    lines = [line for line in full_metrics(run) if line["kind"] == "train"]
    assert [line["seconds"] for line in lines] == pytest.approx(range(1, 15))
    tokens = np.diff([0, *(line["tokens"] for line in lines)])
    assert [line["tokens_per_s"] for line in lines] == pytest.approx(tokens.tolist())


def slow(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, now: list[float], seconds: float) -> None:
    original = getattr(owner, name)

    def slowed(*args: Any, **kwargs: Any) -> Any:
        now[0] += seconds
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, name, slowed)


def full_metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


# ---- the disk ----------------------------------------------------------------------------------------------------


def test_a_full_disk_under_the_metrics(run: Path) -> None:
    run.mkdir()
    trainer = Trainer(prepare_job(run, tiny(run.parent)), quiet=True)
    trainer.metrics.file = open("/dev/full", "a")  # noqa: SIM115
    with pytest.raises(RegardError, match=r"metrics.jsonl: No space left on device; free some space"):
        trainer.run(StopRequest())
    with pytest.raises(RegardError, match="free some space"):  # what is left in the buffer is still too much
        trainer.close()


def test_a_run_folder_that_cannot_be_made(run: Path) -> None:
    run.write_text("a file")
    with pytest.raises(RegardError, match="is a file"):
        fit(run)


# ---- settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("train.steps", 0),
        ("train.accumulate", 0),
        ("train.batch_tokens", -1),
        ("train.log_every", 0),
        ("train.valid_every", 0),
        ("train.save_every", 0),
        ("train.average", 0),
        ("train.keep", -1),
        ("train.beta2", 1.0),
        ("train.label_smoothing", 1.0),
        ("train.lr", 0.0),
        ("train.lr", float("nan")),
        ("train.threads", -2),
        ("decode.beam", 0),
    ],
)
def test_numbers_that_mean_nothing(run: Path, name: str, value: float) -> None:
    with pytest.raises(RegardError, match=name):
        fit(run, **{name: value})
    assert not run.exists()


def test_sentences_beyond_the_positions_are_counted_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words have at most 7 tokens with the mark of their beginning, and an end: 8 positions are enough, 7 are not."""
    fit(run.parent / f"{run.name}-8", quiet=False, **{"model.max_len": 8, "train.steps": 1})
    assert "longer than 7 tokens 0" in capsys.readouterr().err
    with pytest.raises(RegardError, match=r"validation pairs are longer than model.max_len 7"):
        fit(run.parent / f"{run.name}-7", quiet=False, **{"model.max_len": 7, "train.steps": 1})
    assert "longer than 6 tokens 24" in capsys.readouterr().err


# ---- signals -----------------------------------------------------------------------------------------------------


@pytest.fixture
def _handlers() -> Iterator[None]:
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
    yield
    assert {s: signal.getsignal(s) for s in before} == before


@pytest.mark.usefixtures("_handlers")
def test_the_first_signal_asks_and_the_second_insists(request: pytest.FixtureRequest) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
    request.addfinalizer(lambda: signal.signal(signal.SIGINT, before))
    with StopRequest() as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop
        assert stop.signum == signal.SIGINT
        signal.raise_signal(signal.SIGINT)  # at once: the same request, sent twice
        stop._received_at -= 2 * REPEAT_SECONDS
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("_handlers")
def test_training_in_a_thread(run: Path) -> None:
    """Only the main thread may handle signals; another can train all the same."""
    thread = threading.Thread(target=lambda: fit(run, **{"train.steps": 1}))
    thread.start()
    thread.join()
    assert (run / "model").exists()


def test_only_padding_is_left_out_of_the_useful_work() -> None:
    """Most tokens of a masked text are not scored, and yet all are read."""
    ids, blanks = torch.tensor([[1, 7, 8, 2], [1, 9, 2, -1]]), torch.tensor([[-1, 7, -1, -1], [-1, -1, -1, -1]])
    batch = Batch((ids, blanks), 1)
    shares = {
        name: throughput.non_padding_share(ModelConfig(architecture=name), batch) for name in ("bert", "gpt", "vit")
    }
    assert shares == {"bert": 7 / 8, "gpt": 1 / 8, "vit": 1.0}
    assert throughput.non_padding_share(ModelConfig(architecture="gpt"), Batch((ids, torch.tensor([1, 0])), 2)) == 7 / 8


# ---- the cache of prepared data ----------------------------------------------------------------------------------


def test_a_flipped_bit_in_the_cache_changes_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """One in each kind of file of the training store: it is named and prepared again, and trains the same bits."""
    monkeypatch.setenv("REGARD_CACHE", str(tmp_path / "cache"))
    changes = {"train.steps": 2, "train.samples": 0}
    fit(run, **changes)
    store = max((tmp_path / "cache").iterdir(), key=lambda folder: (folder / "side-0.ids").stat().st_size)
    for name in ("side-0.ids", "side-1.ids", "side-1.offsets", "meta.json", "manifest.json"):
        content = bytearray((store / name).read_bytes())
        content[len(content) // 2] ^= 1
        (store / name).write_bytes(content)
        capsys.readouterr()
        again = fit(run.with_name(f"{run.name}-{name}"), **changes)
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{store} is damaged" in line
        assert_same_run(again, run)
