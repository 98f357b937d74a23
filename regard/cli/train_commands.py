"""`regard train`, `regard resume` and `regard settings`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import Quiet


def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe, such as recipes/toy-en-de.toml.")],
    name: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/NAME.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Start over: remove what Regard wrote into the run.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe; the same command goes on with a run that was stopped.

    Any setting can be given as --section.name VALUE, for example --train.steps 2000; `regard settings` lists them all.
    """
    from regard.tasks import run as runs

    settings = context.obj | ({} if name is None else {"name": name})
    print(runs.train(recipe, run, settings=settings, overwrite=overwrite, quiet=quiet))


def resume(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/toy-en-de.")],
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its newest valid checkpoint, exactly; --train.steps N makes it longer."""
    from regard.tasks import run as runs

    print(runs.resume(run, settings=context.obj, quiet=quiet))


def settings(
    name: Annotated[str, typer.Argument(help="A section, a part or a table of model settings, such as yarn.")] = "",
) -> None:
    """List every setting of a recipe with its default and meaning, and the parts that models are made of."""
    from regard.cli.settings_listing import print_settings

    print_settings(name)
