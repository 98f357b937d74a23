"""A run's folder: held by one process at a time, and only gone on with as what it was."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from regard import recipes
from regard.config import Config
from regard.decode import rules
from regard.errors import RegardError
from regard.files import disk_errors, remove, remove_drafts, write_text
from regard.models.architectures import resolve


@contextlib.contextmanager
def open_run(folder: Path, config: Config, *, overwrite: bool = False, resuming: bool = False) -> Iterator[None]:
    """Hold the run folder for this process; a run that has checkpoints must agree with `config`."""
    rules.check(config.decode)
    with _locked(folder):
        remove_drafts(folder, "config.toml", "metrics.jsonl", "model", "tokenizer*.json")
        path = folder / "config.toml"
        begun = (folder / "model").exists() or any((folder / "checkpoints").glob("step-*"))
        if overwrite:
            _empty(folder)
        elif not begun:  # what a start that failed left: a vocabulary learnt under other settings, perhaps
            for tokenizer in folder.glob("tokenizer*.json"):
                remove(tokenizer)
        elif path.exists():
            old = recipes.build(recipes.load(path), Config)
            old = replace(old, model=resolve(old.model))  # sizes that settings newer than the run have by default
            _check_same(folder, old, config, FREE_ON_RESUME if resuming else FREE)
        write_text(path, recipes.to_toml(config))
        yield


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(
                f"another process is training in {folder}: wait for it, or choose another --run"
            ) from None
        yield


def _empty(folder: Path) -> None:
    """Remove a run's files but not its lock; a folder that holds something else is left alone."""
    held = {path.name: path for path in folder.iterdir() if path.name != ".lock"}
    if held and "config.toml" not in held:
        raise RegardError(f"{folder} is not a run (it has no config.toml) and is not deleted: choose another --run")
    for name in sorted(held, key="config.toml".__eq__):  # that one last: a run until all else is gone
        remove(held[name])


# What a run may change: where it runs, how long, and what it shows; with `regard resume`, how it goes on learning too.
FREE: tuple[str, ...] = ("name", "data.root", "data.test", "decode.", "train.steps", "train.patience", "train.samples")
FREE += ("train.init", "train.vectors", "train.keep", "train.device", "train.threads", "train.recompute")
FREE_ON_RESUME = (*FREE, "train.lr", "train.schedule", "train.warmup", "train.clip", "train.precision", "train.compile")


def _check_same(folder: Path, old: Config, new: Config, free: tuple[str, ...]) -> None:
    """A run goes on only as what it was."""
    changed = [name for name in recipes.differences(old, new) if not name.startswith(free)]
    if changed:
        raise RegardError(
            f"{folder} holds a run with other settings ({', '.join(changed)}): "
            f"choose another folder with --run, or start over with --overwrite"
        )
