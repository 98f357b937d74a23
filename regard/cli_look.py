"""`regard look`: what a model does, as pictures or numbers."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.look.positions import Picture

look_app = typer.Typer(help="See what a model does, as pictures or numbers.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object instead.")]


@look_app.command("positions")
def look_positions(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A scheme, as in model.positions: sinusoidal, rope, alibi, t5, ...")],
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Draw what this run or model has learned.")
    ] = None,
    length: Annotated[int, typer.Option(help="Positions, or distances, to draw.")] = 128,
    png: Annotated[Path | None, typer.Option(help="Where the picture goes; by default positions-NAME.png.")] = None,
    json: Json = False,
) -> None:
    """Draw a position scheme: as it starts, under any settings (--model.n_heads 8, ...), or as a model has learned it."""
    from regard.cli import section_settings

    if length < 2:
        raise RegardError(f"--length must be at least 2, not {length}")
    picture = positions_picture(name, model, section_settings(context, "model"), length)
    if json:
        return print(jsons.dumps(picture.numbers(), ensure_ascii=False))
    path = png or Path(f"positions-{name}.png")
    picture.save(path)
    print(path)


@look_app.command("alignment")
def look_alignment(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder that translates.")],
    sentence: Annotated[str, typer.Argument(help="A sentence in the language it translates from.")],
    png: Annotated[Path, typer.Option(help="Where the picture goes.")] = Path("alignment.png"),
    layer: Annotated[str, typer.Option(help="One of its layers, such as decoder.2.cross; by default the last.")] = "",
    json: Json = False,
) -> None:
    """Translate a sentence, and draw which of its words each word of the translation was written from."""
    from regard.cli import section_settings
    from regard.look.alignment import picture
    from regard.translator import load

    drawn = picture(load(model, "cpu"), sentence, layer, **section_settings(context, "decode"))
    if json:
        return print(jsons.dumps(drawn.numbers(), ensure_ascii=False))
    drawn.save(png)
    print(f"{drawn.translation}\n{png}")


def positions_picture(name: str, model: Path | None, settings: dict[str, str], length: int) -> Picture:
    from regard.look.positions import trained, untrained

    if model is not None:
        from regard import folder
        from regard.device import pick_device

        if settings:
            raise RegardError(f"{model} has its own settings: leave out --model.{next(iter(settings))}")
        return trained(name, folder.load(model, pick_device("cpu")).model, length)
    from regard.config import ModelConfig
    from regard.models import gpt, transformer
    from regard.models.sizes import resolve_sizes
    from regard.recipes import build

    config = resolve_sizes(build(settings, ModelConfig, "model."), {**transformer.PRESETS, **gpt.PRESETS})
    return untrained(name, config, length)
