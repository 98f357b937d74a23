"""A run that was stopped and resumed is the run that was never stopped, bit for bit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers import (
    STEPS_PER_EPOCH,
    after_step,
    assert_equal_tensors,
    assert_same_run,
    checkpoint,
    fit,
    fit_until,
    metrics,
    tiny,
    write_corpus,
)

import regard
from regard.config import recipes
from regard.errors import RegardError
from regard.files import read_json
from regard.signals import Interrupted
from regard.tasks import translation
from regard.tasks.run import train_config as train
from regard.training.checkpoint import Checkpoints


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    write_corpus(folder)
    return folder


@pytest.fixture(scope="module")
def reference(corpus: Path) -> Path:
    return fit(corpus / "reference")


@pytest.fixture
def run(corpus: Path, tmp_path: Path) -> Path:
    return corpus / tmp_path.name


def cursor(run: Path) -> dict[str, int]:
    newest = max((run / "checkpoints").iterdir())
    return read_json(newest / "state.json")["progress"]["cursor"]


def test_the_run_under_test_has_what_could_go_wrong(reference: Path) -> None:
    kinds = [(line["kind"], line["step"]) for line in metrics(reference)]
    assert [step for kind, step in kinds if kind == "train"] == [2, 4, 6, 8, 10, 12, 14]
    assert [step for kind, step in kinds if kind == "valid"] == [3, 6, 9, 12, 14]
    assert cursor(reference)["epoch"] == 14 // STEPS_PER_EPOCH
    assert len({line["loss"] for line in metrics(reference)}) == 12  # every line says something else


@pytest.mark.parametrize(
    ("stops", "place"),
    [
        pytest.param([5], {"epoch": 1, "batch": 2}, id="mid-epoch"),
        pytest.param([8], {"epoch": 2, "batch": 0}, id="at an epoch's end, a regular checkpoint and no validation"),
        pytest.param([9], {"epoch": 2, "batch": 2}, id="where a validation is due"),
        pytest.param([12], {"epoch": 3, "batch": 0}, id="where everything is due"),
        pytest.param([14], {"epoch": 3, "batch": 4}, id="in the last step"),
        pytest.param([5, 2], {"epoch": 1, "batch": 6}, id="twice in one epoch"),
        pytest.param([1] * 13, {"epoch": 3, "batch": 2}, id="after every step"),
    ],
)
def test_interrupted_and_resumed(run: Path, reference: Path, stops: list[int], place: dict[str, int]) -> None:
    for steps in stops:
        fit_until(run, steps)
    assert cursor(run) == place
    fit(run)
    assert_same_run(run, reference)


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_says_how_to_go_on(run: Path, signum: int, code: int) -> None:
    stopped = fit_until(run, 5, signum)
    assert stopped.exit_code == code
    assert f"regard resume {run}" in str(stopped)
    assert signal.Signals(signum).name in str(stopped)
    assert Checkpoints(run / "checkpoints").steps() == [3, 4, 5]  # the best, the regular, that of the interruption


@pytest.mark.parametrize(
    ("work", "nth"),
    [("total_loss", 1), ("decode", 2), ("decode", 5), ("total_loss", 6), ("decode", 6)],
    ids=["loss at step 3", "decoding at step 6", "decoding at the last step", "final loss", "final decoding"],
)
def test_interrupted_while_validating(
    run: Path, reference: Path, work: str, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        signal_in_call(patch, work, nth)
        with pytest.raises(Interrupted, match="regard resume"):
            fit(run)
    fit(run)
    assert_same_run(run, reference)


def signal_in_call(patch: pytest.MonkeyPatch, work: str, nth: int) -> None:
    """Ctrl-C within the n-th validation's `work`."""
    original, calls = getattr(translation, work), iter(range(1, 100))

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == nth:
            os.kill(os.getpid(), signal.SIGINT)
        return original(*args, **kwargs)

    patch.setattr(translation, work, interrupted)


def test_killed_after_making_up_for_an_interrupted_validation(
    run: Path, reference: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The validation's line is written, its checkpoint is not: the next run must not write the line a second time."""
    with monkeypatch.context() as patch:
        signal_in_call(patch, "decode", 1)
        with pytest.raises(Interrupted):
            fit(run)
        patch.setattr(Checkpoints, "save", die)
        with pytest.raises(Killed):
            fit(run)
    assert metrics(run)[-1]["kind"] == "valid"
    fit(run)
    assert_same_run(run, reference)


class Killed(BaseException):
    """What stands for SIGKILL inside one process."""


def die(*args: Any) -> None:
    raise Killed


def test_killed_between_a_save_and_its_tidying(run: Path, reference: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the last save, after which no other one comes to tidy up."""
    with (
        monkeypatch.context() as patch,
        after_step(14, lambda: patch.setattr(Checkpoints, "prune", die)),
        pytest.raises(Killed),
    ):
        fit(run)
    (run / "checkpoints" / ".step-00000014.draft-1").mkdir()
    (run / ".model.draft-1").mkdir()
    (run / ".config.toml.draft-1").write_text("half")
    fit(run)
    assert_same_run(run, reference)


def test_killed_between_two_tokenizers(run: Path, corpus: Path) -> None:
    changes = {"tokenizer.joint": False, "model.tie": "decoder", "train.steps": 2}
    fit(run, **changes)
    expected = (run / "tokenizer.target.json").read_bytes()
    (run / "tokenizer.target.json").unlink()
    fit(run, **changes)
    assert (run / "tokenizer.target.json").read_bytes() == expected


def test_the_last_line_of_a_killed_run_is_mended(run: Path, reference: Path) -> None:
    fit_until(run, 5)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 5, "los')
    fit(run)
    assert_same_run(run, reference)


def test_a_finished_run_resumes_to_itself(corpus: Path, run: Path, reference: Path) -> None:
    fit(run)
    regard.resume(run, quiet=True)
    assert_same_run(run, reference)


def test_more_steps(run: Path, reference: Path) -> None:
    """The weights go the same way (this schedule does not look at the end); only the extra validation at 8 differs."""
    fit(run, **{"train.steps": 8})
    regard.resume(run, quiet=True, train={"steps": 14})
    name = "step-00000014"
    assert_equal_tensors(*(checkpoint(r / "checkpoints" / name)[0] for r in (run, reference)))
    without = [line for line in metrics(run) if (line["kind"], line["step"]) != ("valid", 8)]
    assert without == metrics(reference)
    assert recipes.load(run / "config.toml")["train"]["steps"] == 14


def test_other_settings_are_refused_by_name(run: Path) -> None:
    fit_until(run, 5)
    before = sorted(run.rglob("*"))
    with pytest.raises(RegardError, match=r"other settings \(model\.d_ff, train\.lr\).*--run.*--overwrite"):
        fit(run, **{"train.lr": 0.5, "model.d_ff": 64})
    assert sorted(run.rglob("*")) == before


def test_a_run_from_before_a_setting_existed_goes_on(run: Path, reference: Path) -> None:
    fit_until(run, 6)
    path = run / "config.toml"
    lines = path.read_text().splitlines()
    path.write_text("\n".join(line for line in lines if not line.startswith(("d_head", "n_kv_heads", "window"))) + "\n")
    regard.resume(run, quiet=True)
    assert_same_run(run, reference)


def test_overwrite_starts_afresh(run: Path, reference: Path) -> None:
    fit_until(run, 5, **{"train.lr": 0.5})
    train(tiny(run.parent), run, overwrite=True, quiet=True)
    assert_same_run(run, reference)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_run_in_use_is_left_alone(run: Path, overwrite: bool) -> None:
    fit_until(run, 5)
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"}
    program = "import fcntl, sys; fcntl.flock(f := open(sys.argv[1]), fcntl.LOCK_EX); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program, run / ".lock"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()  # it holds the lock
        with pytest.raises(RegardError, match=r"another process is training in .*--run"):
            train(tiny(run.parent), run, overwrite=overwrite, quiet=True)
        other.communicate(b"\n")
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*") if path.name != ".lock"} == before


def test_resume_needs_a_run(tmp_path: Path) -> None:
    with pytest.raises(RegardError, match=r"no run at .*regard train"):
        regard.resume(tmp_path)


def test_a_damaged_checkpoint_costs_time_and_nothing_else(
    run: Path, reference: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fit_until(run, 10)
    file = run / "checkpoints" / "step-00000010" / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    capsys.readouterr()
    fit(run, quiet=False)
    said = capsys.readouterr().err
    assert "step-00000010 is damaged (optimizer.safetensors does not match its checksum): falling back" in said
    assert "resuming at step 9" in said
    assert_same_run(run, reference)


def test_only_damaged_checkpoints_start_over(run: Path, reference: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fit_until(run, 5)
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.unlink()
    fit(run)
    assert "starting from the beginning" in capsys.readouterr().err
    assert_same_run(run, reference)


def test_changed_training_data_is_refused_and_moved_data_is_not(run: Path) -> None:
    fit_until(run, 5)
    config = tiny(run.parent)
    corpus = Path(config.data.root) / config.data.train[0]
    before = corpus.read_text()
    corpus.write_text(before.replace("a", "b", 1))
    try:
        with pytest.raises(RegardError, match="the training data, as tokenized, is not what"):
            fit(run)
    finally:
        corpus.write_text(before)
    fit(run)
