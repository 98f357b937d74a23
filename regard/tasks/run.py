"""Train a recipe or resume a run: configuration, run folder and trainer, for the command line and for Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from regard.config import Config, recipes
from regard.device import pick_device
from regard.errors import RegardError
from regard.files import exists
from regard.signals import StopRequest
from regard.tasks import prepare_job
from regard.tasks.run_config import make_config, recipe_warnings
from regard.training.job import Job
from regard.training.metrics_log import print_message
from regard.training.parallel import open_ranks
from regard.training.run_folder import MARKER, OpenedRun, holds_run, open_run
from regard.training.trainer import Trainer, check_job

RUNS_FOLDER = Path("runs")


Table = Mapping[str, Any]  # settings of one section by name, such as {"steps": 2000}; parts have tables of their own


def train(
    recipe: str | Path,
    run: str | Path | None = None,
    *,
    name: str | None = None,
    settings: Mapping[str, Any] | None = None,
    data: Table | None = None,
    tokenizer: Table | None = None,
    model: Table | None = None,
    train: Table | None = None,
    decode: Table | None = None,
    overwrite: bool = False,
    quiet: bool = False,
) -> Path:
    """Train a recipe, or resume its run if it exists. Return the folder of the run.

    Examples:
        >>> import regard
        >>> regard.train("toy-en-de", train={"steps": 2}, data={"train": "toy:200"}, quiet=True).name
        'toy-en-de'

    Args:
        recipe: Path of a TOML file, or the name of a shipped recipe.
        run: Folder of the run; by default runs/NAME, where NAME is that of the recipe or `name`.
        name: Name of the run; by default the recipe's.
        data: Settings of the section [data] over those of the recipe; likewise the next four.
        tokenizer: Settings of [tokenizer].
        model: Settings of [model]; those of a part are a table in it: {"rope": {"base": 1e6}}.
        train: Settings of [train].
        decode: Settings of [decode].
        settings: Settings by dotted names, as on the command line: {"model.rope.base": 1e6}.
        overwrite: Start over: delete what Regard wrote into the run.
        quiet: Print no progress on stderr.
    """
    given = _section_settings(data=data, tokenizer=tokenizer, model=model, train=train, decode=decode)
    given |= {} if name is None else {"name": name}
    config, folder = configure(recipe, run, {**given, **(settings or {})}, overwrite)
    with open_trainer(config, folder, overwrite=overwrite, quiet=quiet) as (trainer, stop):
        trainer.run(stop)
    return folder


def configure(
    recipe: str | Path, run: str | Path | None, settings: Mapping[str, Any], overwrite: bool = False
) -> tuple[Config, Path]:
    """Return the complete configuration of a recipe with these settings (dotted names), and the folder of its run."""
    values = recipes.load(recipe)
    name = recipes.build(
        {"name": settings.get("name", values["name"])}, Config
    ).name  # checked before it becomes a path
    folder = Path(run) if run else RUNS_FOLDER / name
    begun = folder / "config.toml"
    if holds_run(folder) and exists(begun) and not overwrite:  # train.init_from may not exist any more
        values["model"] = recipes.merge_tables(recipes.load(begun).get("model", {}), values.get("model", {}))
    return make_config(values, settings), folder


def resume(
    run: str | Path,
    *,
    settings: Mapping[str, Any] | None = None,
    data: Table | None = None,
    train: Table | None = None,
    decode: Table | None = None,
    quiet: bool = False,
) -> Path:
    """Resume a run from its newest intact checkpoint; `train={"steps": 4000}` makes it longer. Return the folder.

    Args:
        run: Folder of the run.
        data: Settings of [data] to change; those of model and tokenizer are fixed.
        train: Settings of [train] to change.
        decode: Settings of [decode] to change.
        settings: Settings by dotted names.
        quiet: Print no progress on stderr.
    """
    given = _section_settings(data=data, train=train, decode=decode)
    path = Path(run) / "config.toml"
    if not exists(path):
        raise RegardError(f"no run at {run}: there is no config.toml in it; start one with `regard train RECIPE`")
    if not (Path(run) / MARKER).exists():
        raise RegardError(
            f"{run} has a config.toml but no {MARKER}, so Regard did not begin a run there: "
            f"start one elsewhere with `regard train {path} --run FOLDER`"
        )
    config = make_config(recipes.load(path), {**given, **(settings or {})})
    with open_trainer(config, Path(run), resuming=True, quiet=quiet) as (trainer, stop):
        trainer.run(stop)
    return Path(run)


def train_config(
    config: Config, run: Path, *, overwrite: bool = False, resuming: bool = False, quiet: bool = False
) -> Path:
    """Train a complete configuration in the folder `run`, and return that folder."""
    with open_trainer(config, run, overwrite=overwrite, resuming=resuming, quiet=quiet) as (trainer, stop):
        trainer.run(stop)
    return run


@contextmanager
def open_trainer(
    config: Config, run: Path, *, overwrite: bool = False, resuming: bool = False, quiet: bool = False
) -> Iterator[tuple[Trainer, StopRequest]]:
    """Lock a run folder, prepare its task, and yield its trainer and the stop request that signals set."""
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(open_ranks(config.train))
        opened: OpenedRun | None = None
        jobs: list[Job] = []

        def prepare() -> bool:
            nonlocal opened
            opened = stack.enter_context(open_run(run, config, overwrite=overwrite, resuming=resuming))
            for warning in recipe_warnings(config) if opened.is_new or overwrite else []:
                print_message(f"warning: {warning}", quiet)
            try:
                pick_device(config.train.device)  # an unknown device is refused before data are prepared
                job = prepare_job(opened.start_folder, config, quiet)
                check_job(job)
                opened.replace_old_run()
            except BaseException:
                opened.discard()
                raise
            jobs.append(replace(job, folder=run))
            return opened.is_unchanged

        is_unchanged = ranks.from_first(prepare)  # the others find tokenizers and tokenized data in the run folder
        job = jobs[0] if jobs else prepare_job(run, config, quiet=True)
        try:
            trainer = Trainer(job, quiet, is_unchanged, ranks)
        except BaseException:
            if opened is not None:
                opened.discard()
            raise
        if opened is not None:
            opened.save_config()
        try:
            with StopRequest() as stop:
                yield trainer, stop
        except torch.OutOfMemoryError as error:
            raise RegardError(
                "the device is out of memory: lower train.batch_tokens (and raise train.accumulate to keep the step's "
                "size), or set train.activation_checkpointing true"
            ) from error
        finally:
            trainer.close()


def _section_settings(**sections: Table | None) -> dict[str, Any]:
    """Return the settings of sections by dotted names; anything but a table is a TypeError."""
    for name, table in sections.items():
        if not isinstance(table, Mapping | None):
            raise TypeError(f"{name} takes a table of settings such as {{'steps': 2000}}, not {type(table).__name__}")
    return _dotted(sections)


def _dotted(sections: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested settings: {"model": {"rope": {"base": 1e6}}} -> {"model.rope.base": 1e6}; None is left out."""
    dotted: dict[str, Any] = {}
    for name, value in sections.items():
        if value is None:
            continue
        if isinstance(value, Mapping):
            dotted.update({f"{name}.{key}": inner for key, inner in _dotted(value).items()})
        else:
            dotted[name] = value
    return dotted
