"""A tiny run with everything a real one has (dropout, accumulation, averaging, validation), and ways to end it early.

Its corpus makes 8 batches an epoch, so with two accumulated an epoch is 4 optimizer steps.
"""

from __future__ import annotations

import importlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from regard.config import Config
from regard.files import read_json
from regard.signals import Interrupted
from regard.tasks.run import train_config as train
from regard.tasks.run_config import make_config
from regard.training.metrics_log import TIMES
from regard.training.training_step import TrainingStep

STEPS_PER_EPOCH = 4


def write_corpus(folder: Path) -> None:
    """Words and their reversals: 16 short pairs (2 batches) and 24 long ones (6 batches); 6 for validation."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefgh", k=k)) for k in [2] * 16 + [6] * 24 + [3, 4, 5, 6, 5, 4]]
    lines = [f"{word}\t{word[::-1]}\n" for word in words]
    (folder / "train.tsv").write_text("".join(lines[:40]), encoding="utf-8")
    (folder / "valid.tsv").write_text("".join(lines[40:]), encoding="utf-8")


def tiny(folder: Path, **changes: Any) -> Config:
    """The configuration of a run on the corpus in `folder`; changes are `{"train.steps": 3}`.

    A run that starts from another one has the vocabulary of that one."""
    sizes = {"n_encoder_layers": 1, "n_decoder_layers": 1, "d_model": 16, "n_heads": 2, "d_ff": 32, "max_len": 32}
    training = {"steps": 14, "batch_tokens": 32, "accumulate": 2, "lr": 3e-3, "warmup": 3, "weight_decay": 0.01}
    every = {"log_every": 2, "valid_every": 3, "save_every": 4, "keep": 2, "average": 2, "samples": 1}
    values = {
        "name": "tiny",
        "data": {"root": str(folder), "train": ["train.tsv"], "valid": ["valid.tsv"]},
        "tokenizer": {} if "train.init_from" in changes else {"kind": "char", "vocab_size": 40},
        "model": {**sizes, "dropout": 0.2, "attention_dropout": 0.1},
        "train": {**training, **every, "device": "cpu", "threads": 1},
        "decode": {"max_len_b": 4},
    }
    return make_config(values, changes)


def fit(run: Path, quiet: bool = True, **changes: Any) -> Path:
    """Train the tiny run in `run`, whose parent holds the corpus."""
    return train(tiny(run.parent, **changes), run, quiet=quiet)


@contextmanager
def after_step(k: int, act: Callable[[], None]) -> Iterator[None]:
    """`act` within the k-th optimizer step that this process does."""
    original, done = TrainingStep.__call__, 0

    def counted(self: TrainingStep, *args: Any) -> None:
        nonlocal done
        original(self, *args)
        done += 1
        if done == k:
            act()

    TrainingStep.__call__ = counted  # type: ignore[method-assign]
    try:
        yield
    finally:
        TrainingStep.__call__ = original  # type: ignore[method-assign]


def fit_until(run: Path, step: int, signum: int = signal.SIGINT, **changes: Any) -> Interrupted:
    """Train on until a signal arrives within an optimizer step, counted from the start of this call."""
    with after_step(step, lambda: os.kill(os.getpid(), signum)):
        try:
            fit(run, **changes)
        except Interrupted as stopped:
            return stopped
    raise AssertionError("the run was not interrupted")


# ---- what two runs must have in common ---------------------------------------------------------------------------


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, without what a clock says."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in TIMES} for line in lines]


def checkpoint(folder: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """All tensors of a checkpoint, and all else but times."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"optimizer:{name}": t for name, t in load_file(folder / "optimizer.safetensors").items()}
    state = read_json(folder / "state.json")
    del state["progress"]["seconds"]
    return tensors, state


def assert_equal_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].dtype == b[name].dtype
        bits = (x.reshape(-1).view(torch.uint8) for x in (a[name], b[name]))  # as NumPy has no bf16
        assert torch.equal(*bits), name


def assert_same_run(run: Path, reference: Path) -> None:
    """Bit for bit: metrics, every checkpoint left (weights, moments, random state, place in the data), the model."""
    assert metrics(run) == metrics(reference)
    names = [sorted(p.name for p in (r / "checkpoints").iterdir()) for r in (run, reference)]
    assert names[0] == names[1]
    for name in names[0]:
        (tensors, state), (expected, expected_state) = (checkpoint(r / "checkpoints" / name) for r in (run, reference))
        assert_equal_tensors(tensors, expected)
        assert state == expected_state
    assert_equal_tensors(*(load_file(r / "model" / "model.safetensors") for r in (run, reference)))
    assert {p.name for p in run.iterdir()} == {p.name for p in reference.iterdir()}  # and nothing half-written


# ---- trainers to kill --------------------------------------------------------------------------------------------


def serve() -> None:
    """Fork a trainer for each line on stdin, kill it as asked, and answer with its exit status and seconds.

    This process imports torch but never computes, so that it has one thread and a fork of it is safe and quick.
    A line is {"run": folder, "after": seconds} or {"run": folder, "before": n-th file operation}.
    """
    for name in ("torch._dynamo", "torch.utils.tensorboard", "sacrebleu"):  # what training imports on its way
        importlib.import_module(name)
    for line in sys.stdin:
        order = json.loads(line)
        started = time.monotonic()
        pid = os.fork()
        if pid == 0:
            _train_and_exit(Path(order["run"]), order.get("before"))
        status = _wait(pid, order.get("after", 60.0))
        print(json.dumps([status, time.monotonic() - started]), flush=True)


def _wait(pid: int, after: float) -> int:
    deadline = time.monotonic() + after
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _train_and_exit(run: Path, before: int | None) -> None:
    try:
        if before is not None:
            _die_before(before, run)
        fit(run)
        os._exit(0)
    except BaseException as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        os._exit(1)


def _die_before(n: int, run: Path) -> None:
    """SIGKILL just before the n-th time this process opens, makes, renames or removes something in the run."""
    count = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate"):
            inside = isinstance(arguments[0], (str, os.PathLike)) and str(arguments[0]).startswith(str(run))
            # shutil.rmtree names files relative to an open folder
            count += inside or (event in ("os.remove", "os.rmdir") and arguments[-1] != -1)
            if count == n:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
