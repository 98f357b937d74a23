"""`regard train`, `regard resume` and `regard settings`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from regard.cli.options import MaxRestarts, Nnodes, NodeRank, NprocPerNode, Quiet, RdzvEndpoint, RdzvId, start_ranks
from regard.errors import RegardError
from regard.process_rank import current_rank


def train(
    context: typer.Context,
    recipe: Annotated[str, typer.Argument(help="A TOML file, or the name of a shipped recipe, such as toy-en-de.")],
    name: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/NAME.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Start over: delete what Regard wrote into the run.")] = False,
    quiet: Quiet = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = "regard",
    max_restarts: MaxRestarts = 0,
) -> None:
    """Train a model from a recipe, or resume a run that was stopped.

    regard train toy-en-de

    regard train my-recipe.toml --train.steps 2000 --model.preset transformer-base

    regard train my-recipe.toml --nproc-per-node gpu

    Any setting can be given as --section.name VALUE, for example --train.steps 2000; `regard settings` lists them all.
    """
    if overwrite and max(max_restarts, int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))) > 0:
        raise RegardError(
            "--overwrite would delete the run again at every restart: leave out --max-restarts, "
            "or start a run of another name with --name"
        )
    if start_ranks(nproc_per_node, nnodes, node_rank, rdzv_endpoint, rdzv_id, max_restarts):
        return

    from regard.tasks import run as runs

    settings = context.obj | ({} if name is None else {"name": name})
    config, folder = runs.configure(recipe, run, settings, overwrite)
    with runs.open_trainer(config, folder, overwrite=overwrite, quiet=quiet) as (trainer, stop):
        trainer.run(stop)
    if current_rank().is_first:
        print(folder)


def resume(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/toy-en-de.")],
    quiet: Quiet = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = "1",
    node_rank: NodeRank = None,
    rdzv_endpoint: RdzvEndpoint = "",
    rdzv_id: RdzvId = "regard",
    max_restarts: MaxRestarts = 0,
) -> None:
    """Resume a run from its newest valid checkpoint, bit for bit.

    regard resume runs/toy-en-de --train.steps 4000
    """
    if start_ranks(nproc_per_node, nnodes, node_rank, rdzv_endpoint, rdzv_id, max_restarts):
        return

    from regard.tasks import run as runs

    folder = runs.resume(run, settings=context.obj, quiet=quiet)
    if current_rank().is_first:
        print(folder)


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
