"""A run's folder: held by one process at a time, and only gone on with as what it was."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from regard import __version__
from regard.config import Config, recipes
from regard.decode import constraints
from regard.errors import RegardError
from regard.files import (
    HIDDEN,
    disk_errors,
    json_object,
    read_json,
    remove_drafts,
    remove_files,
    remove_folder,
    remove_sealed,
    write_text,
)
from regard.model_folder import FILES as MODEL_FILES
from regard.model_folder import ModelPackage
from regard.models.architectures import resolve
from regard.training.checkpoint import Checkpoints

MARKER = "run.json"  # written first into every run: without it, a folder is not Regard's to use or to empty
TOKENIZERS = ("tokenizer.json", "tokenizer.source.json", "tokenizer.target.json", "vocabulary.json")
FILES = ("metrics.jsonl", "start.json", *TOKENIZERS, "config.toml")
EVENTS = "events.out.tfevents.*"


@contextlib.contextmanager
def open_run(folder: Path, config: Config, *, overwrite: bool = False, resuming: bool = False) -> Iterator[None]:
    """Hold the run folder for this process; a run that has checkpoints must agree with `config`."""
    constraints.check_options(config.decode)
    holds_run(folder)  # refuses a folder of somebody else before the lock is made in it
    with _locked(folder):
        if not holds_run(folder) or overwrite:
            write_text(folder / MARKER, json.dumps({"regard_run": 1, "version": __version__}) + "\n")
        checkpoints, path = Checkpoints(folder / "checkpoints"), folder / "config.toml"
        with disk_errors(folder):
            if overwrite:
                _empty(folder, checkpoints)
            for link in _links(folder, checkpoints):
                raise RegardError(f"{link} is a symbolic link, and Regard would replace it: link the whole run instead")
            remove_drafts(folder, MARKER, "model", *FILES, own=MODEL_FILES)
            checkpoints.recover()
        if not checkpoints.steps() and not (folder / "model" / "config.json").exists():
            remove_files(folder, *TOKENIZERS)  # a start that failed may have learned them under other settings
        elif path.exists():
            old = recipes.build(recipes.load(path), Config)
            old = replace(old, model=resolve(old.model))  # sizes that settings newer than the run have by default
            _check_same(folder, old, config, FREE_ON_RESUME if resuming else FREE)
        write_text(path, recipes.to_toml(config))
        yield


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run; one that is empty or not there does not, and any other is refused.

    The lock and the draft of run.json that a killed start leaves count as nothing.
    """
    with disk_errors(folder):
        if folder.is_symlink() and not folder.exists():
            raise RegardError(f"{folder} is a symbolic link to nothing: choose another folder with --run")
        if folder.exists() and not folder.is_dir():
            raise RegardError(f"{folder} is a file, so no run can be in it: choose another folder with --run")
        held = [path for path in folder.iterdir() if not _left_by_a_start(path)] if folder.exists() else []
    wrong = _marker_fault(folder / MARKER) if held else None
    if wrong:
        raise RegardError(
            f"{folder} is not a run of Regard ({wrong}) and is left as it is: choose an empty or new folder with --run"
        )
    return bool(held)


def _left_by_a_start(path: Path) -> bool:
    hidden = HIDDEN.fullmatch(path.name)
    if path.name != ".lock" and not (hidden and (hidden["name"], hidden["kind"]) == (MARKER, "draft")):
        return False
    try:
        status = path.lstat()
    except FileNotFoundError:  # the draft of another process, which has renamed it
        return True
    return stat.S_ISREG(status.st_mode) and (bool(hidden) or status.st_size == 0)


def _marker_fault(path: Path) -> str | None:
    """Return why a run.json does not prove that its folder is a run, if it does not."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return f"its {MARKER} is not a regular file"
        proves = read_json(path)["regard_run"] == 1
    except FileNotFoundError:
        return f"it has no {MARKER}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        proves = False
    return None if proves else f"its {MARKER} is damaged or was not written by Regard"


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(
                f"another process is training in {folder}: wait for it, or choose another --run"
            ) from None
        yield
    finally:
        os.close(lock)


def _empty(folder: Path, checkpoints: Checkpoints) -> None:
    """Remove what Regard wrote into a run but its lock and its marker; whatever a user put there stays.

    Links in the place of model/ and of checkpoints go, or the old model would be taken for the new one; what they lead to
    stays.
    """
    for path in _links(folder, checkpoints):
        path.unlink()
    checkpoints.remove()
    if steps := checkpoints.steps():
        raise RegardError(f"cannot remove {checkpoints.path(steps[0])}: check its permissions, or choose another --run")
    remove_sealed(folder / "model" / "hypotheses")
    remove_sealed(folder / "model", MODEL_FILES)
    remove_sealed(folder / "hypotheses")
    remove_folder(folder / "tensorboard", EVENTS)
    for name in FILES:  # config.toml last: until then, training without --overwrite compares its settings
        remove_files(folder, name)


def _links(folder: Path, checkpoints: Checkpoints) -> list[Path]:
    """Return the symbolic links in the place of folders that Regard replaces or removes."""
    inside = [] if checkpoints.folder.is_symlink() else checkpoints.folder.glob("step-*")
    return [path for path in (folder / "model", checkpoints.folder, *inside) if path.is_symlink()]


# What a run may change: where it runs, how long, and what it shows; with `regard resume`, how it goes on learning too.
FREE: tuple[str, ...] = ("name", "data.root", "data.test", "decode.", "train.steps", "train.patience", "train.samples")
FREE += ("train.init", "train.vectors", "train.keep", "train.device", "train.threads", "train.activation_checkpointing")
FREE_ON_RESUME = (*FREE, "train.lr", "train.schedule", "train.warmup", "train.clip", "train.precision", "train.compile")


def _check_same(folder: Path, old: Config, new: Config, free: tuple[str, ...]) -> None:
    """A run goes on only as what it was."""
    changed = [name for name in recipes.differences(old, new) if not name.startswith(free)]
    if changed:
        raise RegardError(
            f"{folder} holds a run with other settings ({', '.join(changed)}): "
            f"choose another folder with --run, or start over with --overwrite"
        )


# ---- what the initial model of a run leaves behind ------------------------------------------------------------


def save_initial_model_facts(folder: Path, init: ModelPackage | None) -> None:
    """Put what a model knows beside its weights and vocabulary into start.json, for the day when that model is gone."""
    path = folder / "start.json"
    if init is None:
        return path.unlink(missing_ok=True)
    own = {"pooling": init.pooling, "pixels": init.pixels, "origin": init.origin}
    write_text(path, json.dumps({"token_template": init.token_template.to_dict(), **own}, indent=1) + "\n")


def initial_model_facts(folder: Path) -> dict[str, Any]:
    """The same, empty for a run that began by itself."""
    return json_object(folder / "start.json")
