"""The folder of a run: locked by one process at a time, and resumed only with the settings it began with.

    run.json  config.toml  tokenizer*.json  metrics.jsonl  tensorboard/  checkpoints/  model/  start.json  .lock

Nothing in it that Regard did not write is ever replaced or removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from regard import __version__
from regard.config import Config, recipes
from regard.decode import constraints
from regard.errors import RegardError
from regard.files import (
    TEMPORARY_NAME,
    disk_errors,
    read_json,
    read_json_object,
    remove_atomic_folder,
    remove_drafts,
    remove_files,
    remove_folder,
    write_text,
)
from regard.model_folder import MODEL_FILES, ModelPackage
from regard.models.architectures import resolve
from regard.training.checkpoint import Checkpoints

MARKER = "run.json"  # written first into every run; a folder without it is neither used nor emptied
TOKENIZERS = ("tokenizer.json", "tokenizer.source.json", "tokenizer.target.json", "vocabulary.json")
FILES = ("metrics.jsonl", "start.json", *TOKENIZERS, "config.toml")
START_FOLDER = ".start"  # in a run that is overwritten: the new start, until it is known to work
STARTED = ("start.json", *TOKENIZERS)  # what is written before training starts
MARKER_TEXT = json.dumps({"regard_run": 1, "version": __version__}) + "\n"
EVENTS = "events.out.tfevents.*"


@dataclass
class OpenedRun:
    """A run folder that this process holds.

    A run that was there stays as it was until the new start is known to work: a start that is refused changes nothing.
    """

    folder: Path
    config: Config
    is_new: bool  # there was no run
    made: list[Path]  # folders that did not exist before, innermost first
    start_folder: Path  # where the start is prepared: the folder itself, or one in it until the old run is replaced
    is_unchanged: bool = False  # the run was begun with exactly these settings

    def replace_old_run(self) -> None:
        """Remove the run that is overwritten, if there is one, and move what was prepared into its place."""
        if self.start_folder == self.folder:
            return
        with disk_errors(self.folder):
            write_text(self.folder / MARKER, MARKER_TEXT)
            _remove_run(self.folder, Checkpoints(self.folder / "checkpoints"))
            for name in STARTED:
                if (self.start_folder / name).exists():
                    os.replace(self.start_folder / name, self.folder / name)
            self.start_folder.rmdir()
        self.start_folder, self.is_new = self.folder, True
        self.save_config()

    def save_config(self) -> None:
        write_text(self.folder / "config.toml", recipes.to_run_toml(self.config))

    def discard(self) -> None:
        """Remove what was made for a start that is refused."""
        if self.start_folder != self.folder:
            _remove_start_folder(self.start_folder)
        elif self.is_new:
            _remove_run(self.folder, Checkpoints(self.folder / "checkpoints"))
            remove_files(self.folder, MARKER, ".lock")
            for path in self.made:
                with contextlib.suppress(OSError):  # not empty: somebody else uses it
                    path.rmdir()


@contextlib.contextmanager
def open_run(folder: Path, config: Config, *, overwrite: bool = False, resuming: bool = False) -> Iterator[OpenedRun]:
    """Hold the run folder for this process; a run that has checkpoints must agree with `config`."""
    if config.task != "translation":
        constraints.check_language_model_options(config.decode)
    constraints.check_options(config.decode)
    if config.decode.ensemble != "mean":
        raise RegardError("decode.ensemble is for several models, and a run trains one: leave it out of the recipe")
    was_there = holds_run(folder)  # refuses a folder of somebody else before the lock is made in it
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    replaces = was_there and overwrite
    opened = OpenedRun(folder, config, not was_there, missing, folder / START_FOLDER if replaces else folder)
    with _locked(folder):
        if not holds_run(folder):
            write_text(folder / MARKER, MARKER_TEXT)
        checkpoints, path = Checkpoints(folder / "checkpoints"), folder / "config.toml"
        with disk_errors(folder):
            for link in [] if replaces else _links(folder, checkpoints):
                raise RegardError(f"{link} is a symbolic link, and Regard would replace it: link the whole run instead")
            remove_drafts(folder, MARKER, "model", *FILES, own=MODEL_FILES)
            _remove_start_folder(folder / START_FOLDER)  # of a process that was killed
            if replaces:
                opened.start_folder.mkdir()
            else:
                checkpoints.recover()
        if replaces:
            pass
        elif not checkpoints.steps() and not (folder / "model" / "config.json").exists():
            remove_files(folder, *TOKENIZERS)  # a failed start may have trained them with other settings
        elif path.exists():
            old = recipes.build(recipes.load(path), Config)
            old = replace(old, model=resolve(old.model))  # defaults of settings that are newer than the run
            opened.is_unchanged = not recipes.differences(old, config)
            _check_same(folder, old, config, CHANGEABLE_ON_RESUME if resuming else CHANGEABLE)
        if opened.is_new:
            opened.save_config()
        yield opened


def _remove_start_folder(folder: Path) -> None:
    """Remove a folder in which the start of a run was prepared, if it is there and holds nothing else."""
    if folder.is_dir() and not folder.is_symlink():
        remove_drafts(folder, *STARTED)
        remove_files(folder, *STARTED)
        with contextlib.suppress(OSError):  # not empty: it holds files of a user
            folder.rmdir()


def holds_run(folder: Path) -> bool:
    """Return whether a folder holds a run; False if it is empty or missing, an error if it holds anything else.

    The lock and the draft of run.json that a killed start leaves do not count.
    """
    with disk_errors(folder):
        if folder.is_symlink() and not folder.exists():
            raise RegardError(f"{folder} is a symbolic link to nothing: choose another folder with --run")
        if folder.exists() and not folder.is_dir():
            raise RegardError(f"{folder} is a file, so no run can be in it: choose another folder with --run")
        held = [path for path in folder.iterdir() if not _is_left_by_failed_start(path)] if folder.exists() else []
    wrong = _marker_fault(folder / MARKER) if held else None
    if wrong:
        raise RegardError(
            f"{folder} is not a run of Regard ({wrong}) and is left as it is: choose an empty or new folder with --run"
        )
    return bool(held)


def _is_left_by_failed_start(path: Path) -> bool:
    """Return whether a file is the lock or the draft of run.json that a killed start leaves."""
    hidden = TEMPORARY_NAME.fullmatch(path.name)
    if path.name != ".lock" and not (hidden and (hidden["name"], hidden["kind"]) == (MARKER, "draft")):
        return False
    try:
        status = path.lstat()
    except FileNotFoundError:  # the draft of another process, which has renamed it
        return True
    return stat.S_ISREG(status.st_mode) and (bool(hidden) or status.st_size == 0)


def _marker_fault(path: Path) -> str | None:
    """Return why a run.json does not prove that its folder is a run, or None if it does."""
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


def _remove_run(folder: Path, checkpoints: Checkpoints) -> None:
    """Remove what Regard wrote into a run except its lock and its marker; files of a user stay.

    Symbolic links in the place of model/ and of checkpoints are removed too, or the old model would be taken for the new
    one; their targets stay.
    """
    for path in _links(folder, checkpoints):
        path.unlink()
    checkpoints.remove()
    if steps := checkpoints.steps():
        raise RegardError(f"cannot remove {checkpoints.path(steps[0])}: check its permissions, or choose another --run")
    remove_atomic_folder(folder / "model" / "hypotheses")
    remove_atomic_folder(folder / "model", MODEL_FILES)
    remove_atomic_folder(folder / "hypotheses")
    remove_folder(folder / "tensorboard", EVENTS)
    for name in FILES:  # config.toml last: as long as it is there, training without --overwrite checks the settings
        remove_files(folder, name)


def _links(folder: Path, checkpoints: Checkpoints) -> list[Path]:
    """Return the symbolic links in the place of folders that Regard would replace or remove."""
    inside = [] if checkpoints.folder.is_symlink() else checkpoints.folder.glob("step-*")
    return [path for path in (folder / "model", checkpoints.folder, *inside) if path.is_symlink()]


# Settings that a run may change: where it runs, how long, and what it shows; with `regard resume` also how it optimizes.
CHANGEABLE: tuple[str, ...] = ("name", "data.root", "data.test", "decode.", "train.steps", "train.patience")
CHANGEABLE += ("train.samples", "train.init_from", "train.pretrained_embeddings")
CHANGEABLE += ("train.keep", "train.device", "train.threads")
CHANGEABLE += ("train.activation_checkpointing", "train.parallel", "train.mesh.", "train.rank_timeout")
CHANGEABLE_ON_RESUME = (*CHANGEABLE, "train.lr", "train.schedule", "train.warmup", "train.clip", "train.precision")
CHANGEABLE_ON_RESUME += ("train.compile",)


def _check_same(folder: Path, old: Config, new: Config, changeable: tuple[str, ...]) -> None:
    """Refuse to resume a run with settings that differ from its own in more than the changeable ones."""
    changed = [name for name in recipes.differences(old, new) if not name.startswith(changeable)]
    if changed:
        raise RegardError(
            f"{folder} holds a run with other settings ({', '.join(changed)}): "
            f"choose another folder with --run, or start over with --overwrite"
        )


# ---- facts about the initial model, in start.json ------------------------------------------------------------


def save_initial_model_facts(folder: Path, init: ModelPackage | None) -> None:
    """Save to start.json what the initial model has besides weights and tokenizers.

    Resuming the run then does not need that model.
    """
    path = folder / "start.json"
    if init is None:
        return path.unlink(missing_ok=True)
    own = {"pooling": init.pooling, "pixels": init.pixels, "origin": init.origin}
    write_text(path, json.dumps({"token_template": init.token_template.to_dict(), **own}, indent=1) + "\n")


def initial_model_facts(folder: Path) -> dict[str, Any]:
    """Return what start.json holds; it is empty for a run that began with fresh weights."""
    return read_json_object(folder / "start.json")
