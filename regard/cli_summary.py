"""`regard summary`: a model layer by layer."""

from __future__ import annotations

import json as jsons
from typing import Annotated

import typer


def summary(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="A run or model folder, a preset or a recipe; `regard cost` lists presets.")
    ],
    depth: Annotated[int, typer.Option(help="1 for stacks, 2 for their blocks, 3 for the sublayers of those.")] = 2,
    length: Annotated[int | None, typer.Option(help="Tokens in a row; by default the model's longest.")] = None,
    source_length: Annotated[int | None, typer.Option(help="Tokens of a source; by default as many.")] = None,
    batch: Annotated[int, typer.Option(help="Rows at a time.")] = 1,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Count the parameters, the FLOPs of a forward pass and the weights' bytes of every layer.

    The model runs without numbers, whatever its size. Model settings can be tried: --model.n_kv_heads 8, ...
    """
    from regard.cli import section_settings
    from regard.models.analysis.summary import summary as summed

    settings = section_settings(context, "model")
    found = summed(model, batch=batch, length=length, source_length=source_length, depth=depth, settings=settings)
    print(jsons.dumps(found.to_dict(), ensure_ascii=False) if json else found)
