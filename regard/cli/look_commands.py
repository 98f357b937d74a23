"""`regard look`: what a model does, as a page, as pictures or as numbers."""

from __future__ import annotations

from regard.exchange.loader import load_model
import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from regard.cli_look_change import look_change, look_heads
from regard.cli_look_figures import look_attention, look_gradients, look_statistics, look_training
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.look.positions import Picture


class PageFirst(TyperGroup):
    """`regard look MODEL TEXT` is `regard look page MODEL TEXT`: what names no command is a model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        plain = args and args[0] not in (*self.commands, "-h", "--help")
        return super().parse_args(ctx, ["page", *args] if plain else args)


look_app = typer.Typer(
    cls=PageFirst,
    help="See what a model does: `regard look MODEL TEXT` writes a page to look into it; the others draw one thing each.",
    no_args_is_help=True,
)

Json = Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object instead.")]
Changes = list[str] | None


def change(name: str, help: str) -> Any:
    return typer.Option(f"--{name}", help=help, rich_help_panel="Changes, for a second view (any of them, many times)")


@look_app.command("page")
def look_page(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder.")],
    text: Annotated[str, typer.Argument(help="A sentence or prompt; a text with <mask>; or the file of a picture.")],
    out: Annotated[Path, typer.Option(help="Where the page goes.")] = Path("look.html"),
    other: Annotated[Path | None, typer.Option("--with", help="Another model, to compare this one with.")] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Compare each along its own output, not both along the first's.")
    ] = False,
    zero: Annotated[Changes, change("zero", "Heads that say nothing: decoder.2.cross:3")] = None,
    mean: Annotated[Changes, change("mean", "Heads that look everywhere alike: decoder.2.cross:3")] = None,
    force: Annotated[Changes, change("force", "Look there alone: decoder.2.cross:3@Apfel>apple")] = None,
    forbid: Annotated[Changes, change("forbid", "Do not look there: Apfel>apple")] = None,
    pin: Annotated[Changes, change("pin", "Look there alone, in all attention over the source.")] = None,
    replace: Annotated[Changes, change("replace", "Another token: source:3=dog or target:2=Hund")] = None,
    positions: Annotated[Changes, change("positions", "Another scheme in the whole model: none, alibi, ...")] = None,
    to: Annotated[str | None, typer.Option(help="The language to translate to, if the model knows several.")] = None,
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print what the page shows, but for its arrays.")] = False,
) -> None:
    """Write one HTML file in which a model can be looked into: where every head looked, and every vector on the way.

    With another model, or with changes to this one, both are in it to be compared. Settings: --decode.beam 1, ...
    """
    from regard.cli import section_settings
    from regard.look.change.intervene import parse
    from regard.look.page.html import show

    given = {"zero": zero, "mean": mean, "force": force, "forbid": forbid, "pin": pin, "replace": replace}
    changes = [parse(kind, word) for kind, words in (given | {"positions": positions}).items() for word in words or ()]
    options = section_settings(context, "decode") | ({"to": to} if to else {})
    page = show(model, text, other, changes, own, **options)
    if json:
        return print(jsons.dumps(page.document.tree, ensure_ascii=False))
    page.save(out)
    print(*(view.output for view in page.views), out, sep="\n")
    if browser:
        import webbrowser

        webbrowser.open(out.resolve().as_uri())


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
    to: Annotated[
        str | None, typer.Option(help="The language to translate to, for a model that knows several.")
    ] = None,
) -> None:
    """Translate a sentence, and draw which of its words each word of the translation was written from."""
    from regard.cli import section_settings
    from regard.inference.translator import load
    from regard.look.alignment import picture

    options = section_settings(context, "decode") | ({"to": to} if to else {})
    drawn = picture(load(model, "cpu"), sentence, layer, **options)
    if json:
        return print(jsons.dumps(drawn.numbers(), ensure_ascii=False))
    drawn.save(png)
    print(f"{drawn.translation}\n{png}")


for command in (look_attention, look_statistics, look_gradients, look_training, look_change, look_heads):
    look_app.command(command.__name__.removeprefix("look_"))(command)


def positions_picture(name: str, model: Path | None, settings: dict[str, str], length: int) -> Picture:
    from regard.look.positions import trained, untrained

    if model is not None:
        from regard import model_folder
        from regard.device import pick_device

        if settings:
            raise RegardError(f"{model} has its own settings: leave out --model.{next(iter(settings))}")
        return trained(name, load_model(model, pick_device("cpu")).model, length)
    from regard.config import ModelConfig
    from regard.config.recipes import build, nested
    from regard.models.architectures import ARCHITECTURES
    from regard.models.sizes import resolve_sizes

    # the scheme is drawn as a decoder has it; an encoder may not be able to use it
    values = {"encoder_positions": "sinusoidal", **nested(settings), "positions": name}
    tables = [kind.presets for kind in ARCHITECTURES.values() if "decoder" in kind.sides and not kind.is_recurrent]
    presets = {name: preset for table in tables for name, preset in table.items()}
    config = resolve_sizes(build(values, ModelConfig, "model."), presets)
    return untrained(name, config, length)
