"""`regard look`: a page, pictures and numbers that show what a model does.

`page` writes an HTML page; `attention`, `statistics`, `experts`, `alignment`, `gradients`, `training`, `positions` and
`mixers` draw one thing each; `change` and `heads` compare a model with itself after an intervention.
"""

from __future__ import annotations

import json as jsons
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from regard.cli.options import (
    ALL_SECTIONS,
    App,
    Device,
    Json,
    Model,
    To,
    choose_output,
    decode_options,
    section_settings,
)
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.look.figures import Drawable
    from regard.look.interventions import Intervention
    from regard.look.mixer_figure import MixerFigure
    from regard.look.position_figures import PositionFigure


class PageFirst(TyperGroup):
    """A command group in which `regard look MODEL TEXT` is `regard look page MODEL TEXT`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names_no_command = args and args[0] not in (*self.commands, "-h", "--help")
        return super().parse_args(ctx, ["page", *args] if names_no_command else args)


look_app = App(
    cls=PageFirst,
    help=(
        "Look inside a model: attention, vectors, gradients, interventions.\n\n"
        'regard look en-de-fr-zh "I ate an apple."\n\n'
        "`regard look MODEL TEXT` is short for `regard look page MODEL TEXT`: it writes an HTML page that shows every "
        "weight of every head. MODEL is a run, a model folder or a bundled model; TEXT is a sentence, a prompt or a picture."
    ),
    no_args_is_help=True,
)


# ---- options and output that several commands share ------------------------------------------------------------------


def check_picture_format(path: Path | None) -> Path | None:
    """Refuse a picture of an unknown format before the work is done, not after it."""
    from regard.look.figures import image_format

    if path is not None:
        image_format(path)
    return path


Picture = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="File for the picture: .png or .svg.", callback=check_picture_format),
]
Csv = Annotated[Path | None, typer.Option(help="Write the numbers to this CSV file.")]
Texts = list[str] | None


def decode_settings(context: typer.Context, to: str | None) -> dict[str, Any]:
    """Return the --decode.NAME settings, and the target language if one was given."""
    return decode_options(context) | ({"to": to} if to else {})


def parse_changes(**given: Texts) -> list[Intervention]:
    """Return the interventions that --zero, --uniform, --force, --forbid, --pin, --replace and --positions ask for."""
    from regard.look.interventions import parse

    return [parse(kind, text) for kind, texts in given.items() for text in texts or ()]


def write_results(
    found: Drawable,
    json: bool,
    picture: Path | None,
    usual: str,
    tables: dict[Path | None, str] | None = None,
    inputs: Iterable[Path | None] = (),
) -> None:
    """Write the files asked for, or a picture named like `usual`, and print their names; or print the numbers as JSON.

    `tables` maps the name of a file to the method of `found` that writes it. Inputs of the command are not replaced.
    """
    read = list(inputs)
    asked = {path: getattr(found, way) for path, way in (tables or {}).items() if path}
    files: dict[Path, Any] = {choose_output(path, "", read): write for path, write in asked.items()}
    if picture is not None or not (files or json):
        files[choose_output(picture, usual, read)] = found.save
    for path, write in files.items():
        write(path)
    if json:
        return print(jsons.dumps(found.numbers(), ensure_ascii=False))
    for path in files:
        print(path)


# ---- the page --------------------------------------------------------------------------------------------------------


def change_option(name: str, help: str) -> Any:
    return typer.Option(f"--{name}", help=help, rich_help_panel="Changes for a second view (may be repeated)")


@look_app.command("page", settings=("decode",))
def look_page(
    context: typer.Context,
    model: Model,
    text: Annotated[str, typer.Argument(help="A sentence or prompt; a text with <mask>; or the file of a picture.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File for the page; by default look.html.")
    ] = None,
    other: Annotated[Path | None, typer.Option("--with", help="Another model to compare with.")] = None,
    own: Annotated[
        bool, typer.Option("--own", help="Compare each along its own output, not both along the first's.")
    ] = False,
    zero: Annotated[Texts, change_option("zero", "Zero the output of heads: decoder.2.cross:3")] = None,
    uniform: Annotated[Texts, change_option("uniform", "Make heads attend uniformly: decoder.2.cross:3")] = None,
    force: Annotated[Texts, change_option("force", "Attend to one key only: decoder.2.cross:3@Apfel>apple")] = None,
    forbid: Annotated[Texts, change_option("forbid", "Mask a key: Apfel>apple")] = None,
    pin: Annotated[Texts, change_option("pin", "Force, in all attention over the source.")] = None,
    replace: Annotated[Texts, change_option("replace", "Replace a token: source:3=dog or target:2=Hund")] = None,
    positions: Annotated[Texts, change_option("positions", "Change the position scheme: none, alibi, ...")] = None,
    to: To = None,
    device: Device = "cpu",
    browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
    json: Json = False,
) -> None:
    """Write an HTML page that shows every attention weight and vector of a model.

    regard look en-de-fr-zh "I ate an apple."

    regard look page runs/toy-en-de "I ate an apple." --forbid "Apfel>apple"

    With another model, or with changes to this one, the page compares both. The target language is chosen as `regard
    translate` does. All decode settings can be given: --decode.beam 1, ...
    """
    from regard.look.page.html_page import show

    given = {"zero": zero, "uniform": uniform, "force": force, "forbid": forbid, "pin": pin, "replace": replace}
    changes = parse_changes(**given, positions=positions)
    page = show(model, text, other, changes, own, device=device, **decode_settings(context, to))
    if output or not json:
        path = choose_output(output, "look.html", [Path(text)])
        page.save(path)
    if json:
        return print(jsons.dumps(page.document.tree, ensure_ascii=False))
    print(*(view.output for view in page.views), path, sep="\n")
    if browser:
        import webbrowser

        webbrowser.open(path.resolve().as_uri())


# ---- pictures --------------------------------------------------------------------------------------------------------


@look_app.command("positions", settings=("model",))
def look_positions(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="A position scheme: sinusoidal, rope, alibi, t5, ...")],
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Draw what this run or model has learned.")
    ] = None,
    length: Annotated[int, typer.Option(help="Number of positions or distances to draw.")] = 128,
    output: Picture = None,
    json: Json = False,
) -> None:
    """Draw a position scheme, at initialization or as a model has learned it.

    Model settings can be tried: --model.n_heads 8, ...
    """
    if length < 2:
        raise RegardError(f"--length must be at least 2, not {length}")
    picture = positions_picture(name, model, section_settings(context, "model"), length)
    write_results(picture, json, output, f"positions-{name}.png")


def positions_picture(name: str, model: Path | None, settings: dict[str, str], length: int) -> PositionFigure:
    """Return the picture of a position scheme: that of a trained model, or one made with `settings`."""
    from regard.look.position_figures import draw_trained_scheme, draw_untrained_scheme

    if model is not None:
        from regard.device import pick_device
        from regard.exchange.loader import load_model

        if settings:
            raise RegardError(f"{model} has its own settings: leave out --model.{next(iter(settings))}")
        return draw_trained_scheme(name, load_model(model, pick_device("cpu")).model, length)
    from regard.config import ModelConfig
    from regard.config.recipes import build, nest
    from regard.models.architectures import ARCHITECTURES
    from regard.models.sizes import resolve_sizes

    # The scheme is drawn for a decoder; the encoder gets one that every encoder can use.
    values = {"encoder_positions": "sinusoidal", **nest(settings), "positions": name}
    tables = [kind.presets for kind in ARCHITECTURES.values() if "decoder" in kind.sides and not kind.is_recurrent]
    presets = {name: preset for table in tables for name, preset in table.items()}
    config = resolve_sizes(build(values, ModelConfig, "model."), presets)
    return draw_untrained_scheme(name, config, length)


@look_app.command("mixers", settings=("model",))
def look_mixers(
    context: typer.Context,
    names: Annotated[str, typer.Argument(help="Token mixers, such as attention,gla,mamba. Default: all.")] = "",
    model: Annotated[
        Path | None, typer.Option("--model", "-m", help="Draw the blocks of this run or model instead.")
    ] = None,
    length: Annotated[int, typer.Option(min=2, help="Number of tokens.")] = 256,
    output: Picture = None,
    json: Json = False,
) -> None:
    """Draw how much earlier tokens influence a later one, by distance, for token mixers.

    Mixers are drawn at initialization, or as a model has learned them. Model settings can be tried: --model.d_model 64, ...
    """
    settings = section_settings(context, "model")
    if model is not None and (names or settings):
        raise RegardError(
            f"{model} has its own mixers and settings: leave out {names or '--model.' + next(iter(settings))}"
        )
    write_results(mixers_picture(names, model, settings, length), json, output, "mixers.png")


def mixers_picture(names: str, model: Path | None, settings: dict[str, str], length: int) -> MixerFigure:
    """Return the picture of token mixers: those of a trained model, or of a small decoder with `settings`."""
    from regard.look.mixer_figure import draw_trained_mixers, draw_untrained_mixers

    if model is not None:
        from regard.device import pick_device
        from regard.exchange.loader import load_model

        return draw_trained_mixers(load_model(model, pick_device("cpu")).model, length)
    from regard.config import ModelConfig
    from regard.config.recipes import build, nest
    from regard.config.registry import PARTS, find
    from regard.models.architectures import with_preset

    if "mixer" in settings:
        raise RegardError(
            f"--model.mixer does not belong here: name the mixers themselves, regard look mixers {settings['mixer']}"
        )
    chosen = [name.strip() for name in names.split(",")] if names else list(PARTS["mixer"])
    for name in chosen:
        find("mixer", name)  # an unknown one is refused
    sizes = {"preset": "gpt-tiny", "positions": "none", "target_vocab": 8, "n_decoder_layers": len(chosen)}
    values = {**with_preset(sizes, nest(settings)), "mixer": chosen}  # of all of them, whose settings may be given
    return draw_untrained_mixers(chosen, build(values, ModelConfig, "model."), length)


@look_app.command("alignment", settings=("decode",))
def look_alignment(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder that translates.")],
    sentence: Annotated[str, typer.Argument(help="A sentence in the source language.")],
    output: Picture = None,
    layer: Annotated[
        str, typer.Option(help="A cross-attention layer, such as decoder.2.cross. Default: the last.")
    ] = "",
    json: Json = False,
    device: Device = "cpu",
    to: To = None,
) -> None:
    """Translate a sentence and draw which source words each word attends to."""
    from regard.inference.translator import Translator
    from regard.look.attention_figure import draw_alignment

    drawn = draw_alignment(Translator.load(model, device), sentence, layer, **decode_settings(context, to))
    if not json:
        print(drawn.translation)
    write_results(drawn, json, output, "alignment.png")


@look_app.command("attention", settings=("decode",))
def look_attention(
    context: typer.Context,
    model: Model,
    sentence: Annotated[str, typer.Argument(help="The sentence to read; for a vision model the file of a picture.")],
    layer: Annotated[
        str,
        typer.Option(
            help="A layer, such as encoder.5.self, or a pattern. Default: the last, of cross-attention if any."
        ),
    ] = "",
    kind: Annotated[str, typer.Option(help="All layers of a kind: encoder, decoder or cross.")] = "",
    head: Annotated[int | None, typer.Option(help="One head, counted from 0; by default all.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Merge subword pieces into words.")] = False,
    hide_sinks: Annotated[
        bool, typer.Option("--hide-sinks", help="Leave out keys that are special tokens or punctuation.")
    ] = False,
    renormalize: Annotated[
        bool, typer.Option("--renormalize", help="With --hide-sinks: let rows sum to one again.")
    ] = False,
    output: Picture = None,
    csv: Csv = None,
    npz: Annotated[Path | None, typer.Option(help="Write the weights as NumPy arrays, (heads, queries, keys).")] = None,
    json: Json = False,
    device: Device = "cpu",
    to: To = None,
) -> None:
    """Draw attention weights: of one head, of a layer, or of a kind of layer.

    A translator translates the sentence; other models read it.
    """
    from regard.device import pick_device
    from regard.exchange.loader import load_model as load
    from regard.look.attention_figure import draw_attention

    options = decode_settings(context, to)
    package = load(model, pick_device(device), "fp32")
    found = draw_attention(package, sentence, layer, kind, head, words, hide_sinks, renormalize, **options)
    if found.output and not json:
        print(found.output)
    write_results(found, json, output, "attention.png", {csv: "save_csv", npz: "save_npz"}, [Path(sentence)])


@look_app.command("statistics", settings=("decode",))
def look_statistics(
    context: typer.Context,
    model: Model,
    text: Annotated[str, typer.Argument(help="The text to read; or give --file.")] = "",
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read each line of this file.")] = None,
    output: Picture = None,
    csv: Csv = None,
    json: Json = False,
    device: Device = "cpu",
    to: To = None,
) -> None:
    """Measure every head (entropy, distance, sinks) and the residual stream."""
    from regard.data.parallel_corpus import read_lines
    from regard.device import pick_device
    from regard.exchange.loader import load_model as load
    from regard.look.statistics_figure import measure_statistics
    from regard.terminal import progress_bar

    if bool(text) == (file is not None):
        raise RegardError("give a text, or --file FILE with one on each line")
    texts = [text] if file is None else [line for line in read_lines(file) if line.strip()]
    options = decode_settings(context, to)
    package = load(model, pick_device(device), "fp32")
    with progress_bar("reading", len(texts), quiet=len(texts) == 1) as advance:
        found = measure_statistics(package, texts, advance, **options)
    if not json:
        print(found)
    write_results(found, json, output, "statistics.png", {csv: "save_csv"}, [file])


@look_app.command("experts", settings=("decode",))
def look_experts(
    context: typer.Context,
    model: Model,
    text: Annotated[str, typer.Argument(help="The text to read.")],
    output: Picture = None,
    csv: Csv = None,
    json: Json = False,
    device: Device = "cpu",
    to: To = None,
) -> None:
    """Draw which token went to which expert (mixtures of experts)."""
    from regard.device import pick_device
    from regard.exchange.loader import load_model as load
    from regard.look.expert_figure import trace_experts

    options = decode_settings(context, to)
    found = trace_experts(load(model, pick_device(device), "fp32"), text, **options)
    if not json:
        print(found)
    write_results(found, json, output, "experts.png", {csv: "save_csv"})


@look_app.command("gradients", settings=ALL_SECTIONS)
def look_gradients(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run; or a model folder, with --data.train FILE.")],
    output: Picture = None,
    csv: Csv = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """Draw the gradient norms of one training batch.

    They are shown by layer and kind, and by time step where a model is recurrent. Any setting of the run can be changed:
    --train.batch_tokens 1024, --data.train FILE, ...
    """
    from regard.look.gradient_figure import measure_gradients

    found = measure_gradients(run, context.obj or {}, device)
    if not json:
        print(found)
    write_results(found, json, output, "gradients.png", {csv: "save_csv"})


@look_app.command("training")
def look_training(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, finished or not.")],
    output: Picture = None,
    csv: Csv = None,
    json: Json = False,
) -> None:
    """Draw the loss, learning rate, gradient norm and speed of runs."""
    from regard.look.training_curves import read_training_curves

    found = read_training_curves(runs)
    if not json:
        print(found)
    write_results(found, json, output, "training.png", {csv: "save_csv"})


# ---- interventions ---------------------------------------------------------------------------------------------------


@look_app.command("change", settings=("decode",))
def look_change(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder that translates or generates.")],
    sentence: Annotated[str, typer.Argument(help="A sentence to translate, or a prompt.")],
    zero: Annotated[
        Texts, typer.Option("--zero", help="Zero the output of heads: LAYER[:HEADS], such as decoder.2.cross:3.")
    ] = None,
    uniform: Annotated[Texts, typer.Option("--uniform", help="Make heads attend uniformly: LAYER[:HEADS].")] = None,
    force: Annotated[Texts, typer.Option("--force", help="Attend to one key only: [LAYER[:HEADS]@]QUERY>KEY.")] = None,
    forbid: Annotated[
        Texts, typer.Option("--forbid", help="Mask a key: [LAYER[:HEADS]@]QUERY>KEY, by index or word.")
    ] = None,
    pin: Annotated[Texts, typer.Option("--pin", help="Force in all attention over the source: QUERY>KEY.")] = None,
    replace: Annotated[
        Texts, typer.Option("--replace", help="Replace a token: source:INDEX=TEXT or target:INDEX=TEXT.")
    ] = None,
    positions: Annotated[
        str | None, typer.Option("--positions", help="Change the position scheme: none, rope, alibi, ...")
    ] = None,
    to: To = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Intervene in a model, and print its output before and after."""
    from regard.inference.generator import Generator
    from regard.inference.load import load
    from regard.inference.translator import Translator
    from regard.look.output_comparison import compare

    given = {"zero": zero, "uniform": uniform, "force": force, "forbid": forbid, "pin": pin, "replace": replace}
    changes = parse_changes(**given, positions=[positions] if positions else None)
    if not changes:
        raise RegardError(
            "nothing is changed: give --zero, --uniform, --force, --forbid, --pin, --replace or --positions"
        )
    user = load(model, device)
    if not isinstance(user, (Translator, Generator)):
        raise RegardError(f"the model in {model} neither translates nor writes, so there is nothing to compare")
    found = compare(user, sentence, changes, **decode_settings(context, to))
    print(jsons.dumps(found.numbers(), ensure_ascii=False) if json else found)


@look_app.command("heads")
def look_heads(
    model: Annotated[Path, typer.Argument(help="A run or model folder: a translator, a GPT or a BERT.")],
    source: Annotated[Path, typer.Option(help="File of sentences, one a line; for a GPT or BERT any text.")],
    target: Annotated[Path | None, typer.Option(help="File of their translations.")] = None,
    metric: Annotated[str, typer.Option(help="loss, or for translations bleu.")] = "loss",
    sentences: Annotated[int, typer.Option(help="Number of lines to read.")] = 500,
    to: To = None,
    output: Picture = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Zero every head in turn, and measure how much worse the model gets."""
    from itertools import islice

    from regard.data.parallel_corpus import read_lines
    from regard.device import pick_device
    from regard.exchange.loader import load_model
    from regard.look.head_importance import scan_heads

    if sentences < 2:
        raise RegardError(f"--sentences must be at least 2, not {sentences}: one alone has no error to tell")
    lines, other = (list(islice(read_lines(path), sentences)) if path else [] for path in (source, target))
    found = scan_heads(load_model(model, pick_device(device), "fp32"), lines, other, metric, to)
    if not json:
        print(found)
    write_results(found, json, output, "heads.png", inputs=[source, target])
