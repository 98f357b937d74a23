"""`regard train`, `regard resume` and `regard settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import Quiet


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe, such as toy-en-de.")],
    name: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/NAME.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Start over: delete what Regard wrote into the run.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a model from a recipe, or resume a run that was stopped.

    regard train toy-en-de

    regard train my-recipe.toml --train.steps 2000 --model.preset transformer-base

    Any setting can be given as --section.name VALUE, for example --train.steps 2000; `regard settings` lists them all.
    """
    from regard.tasks import run as runs

    settings = context.obj | ({} if name is None else {"name": name})
    config, folder = runs.configure(recipe, run, settings, overwrite)
    with runs.open_trainer(config, folder, overwrite=overwrite, quiet=quiet) as (trainer, stop):
        trainer.run(stop)
    print(folder)


def resume(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/toy-en-de.")],
    quiet: Quiet = False,
) -> None:
    """Resume a run from its newest valid checkpoint, bit for bit.

    regard resume runs/toy-en-de --train.steps 4000
    """
    from regard.tasks import run as runs

    print(runs.resume(run, settings=context.obj, quiet=quiet))


def settings(
    name: Annotated[
        str, typer.Argument(help="A section (train), a kind of part (positions), a part (yarn), or a shipped recipe.")
    ] = "",
) -> None:
    """List all settings with their defaults, the parts of models and the shipped recipes.

    `regard settings toy-en-de > mine.toml` copies a shipped recipe.
    """
    from regard.cli.settings_listing import print_settings

    print_settings(name)
