"""`regard look attention`, `statistics`, `gradients` and `training`: pictures, and the numbers in them."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.look.drawn import Drawn

Model = Annotated[Path, typer.Argument(help="A run or model folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object instead.")]


def drawable(path: Path | None) -> Path | None:
    """Said before the work is done, not after it."""
    from regard.look.figures import kind_of

    if path is not None:
        kind_of(path)
    return path


Png = Annotated[
    Path | None, typer.Option(help="Where the picture goes: PNG, or SVG if the name ends so.", callback=drawable)
]
Csv = Annotated[Path | None, typer.Option(help="Write the numbers as a table.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
To = Annotated[str | None, typer.Option(help="The language to translate to, for a model that knows several.")]


def look_attention(
    context: typer.Context,
    model: Model,
    sentence: Annotated[str, typer.Argument(help="What the model reads: a sentence; for a vision model a picture.")],
    layer: Annotated[
        str, typer.Option(help="Such as decoder.2.cross, or a pattern: 'encoder.*'. Default: the last.")
    ] = "",
    kind: Annotated[str, typer.Option(help="All layers of a kind: encoder, decoder or cross.")] = "",
    head: Annotated[int | None, typer.Option(help="One head, counted from 0; by default all.")] = None,
    words: Annotated[bool, typer.Option("--words", help="Put pieces together to words.")] = False,
    hide_sinks: Annotated[
        bool, typer.Option("--hide-sinks", help="Leave out keys that are special tokens or punctuation.")
    ] = False,
    renormalise: Annotated[
        bool, typer.Option("--renormalise", help="With --hide-sinks: let rows sum to one again.")
    ] = False,
    png: Png = None,
    csv: Csv = None,
    npz: Annotated[Path | None, typer.Option(help="Write the weights as NumPy arrays, (heads, queries, keys).")] = None,
    json: Json = False,
    device: Device = "cpu",
    to: To = None,
) -> None:
    """Draw where heads look: one, all of a layer, or all of a kind. A translator translates; others read the sentence."""
    from regard.cli import section_settings
    from regard.device import pick_device
    from regard.look.attention import attention
    from regard.exchange.loader import load_model as load

    options = section_settings(context, "decode") | ({"to": to} if to else {})
    bundle = load(model, pick_device(device), "fp32")
    found = attention(bundle, sentence, layer, kind, head, words, hide_sinks, renormalise, **options)
    if found.output and not json:
        print(found.output)
    hand_out(found, json, png, {csv: "save_csv", npz: "save_npz"}, Path("attention.png"))


def look_statistics(
    context: typer.Context,
    model: Model,
    text: Annotated[str, typer.Argument(help="What the model reads; or give --file.")] = "",
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read each line of this file.")] = None,
    png: Png = None,
    csv: Csv = None,
    json: Json = False,
    device: Device = "cpu",
    to: To = None,
) -> None:
    """Measure every head (entropy, distance, attention sinks) and the residual stream, on a text or on a file of them."""
    from regard.cli import section_settings
    from regard.data.parallel_corpus import read_lines
    from regard.device import pick_device
    from regard.look.statistics import statistics
    from regard.exchange.loader import load_model as load
    from regard.terminal import progress_bar

    if bool(text) == (file is not None):
        raise RegardError("give a text, or --file FILE with one on each line")
    texts = [text] if file is None else [line for line in read_lines(file) if line.strip()]
    options = section_settings(context, "decode") | ({"to": to} if to else {})
    bundle = load(model, pick_device(device), "fp32")
    with progress_bar("reading", len(texts), quiet=len(texts) == 1) as advance:
        found = statistics(bundle, texts, advance, **options)
    if not json:
        print(found)
    hand_out(found, json, png, {csv: "save_csv"}, Path("statistics.png"))


def look_gradients(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run; or a model folder, with --data.train FILE.")],
    png: Png = None,
    csv: Csv = None,
    json: Json = False,
    device: Device = "auto",
) -> None:
    """Draw the gradient of one training batch by layer and kind, and by time step where a model is recurrent.

    The run's settings hold; others can be given: --train.batch_tokens 1024, --data.train FILE, ...
    """
    from regard.look.gradients import gradients

    found = gradients(run, context.obj or {}, device)
    if not json:
        print(found)
    hand_out(found, json, png, {csv: "save_csv"}, Path("gradients.png"))


def look_training(
    context: typer.Context,
    runs: Annotated[list[Path], typer.Argument(help="Run folders, finished or not.")],
    png: Png = None,
    csv: Csv = None,
    json: Json = False,
) -> None:
    """Draw how runs went: loss, validation, learning rate, gradient norm and speed, all runs in one picture."""
    from regard.cli import no_settings
    from regard.look.curves import training

    no_settings(context)
    found = training(runs)
    if not json:
        print(found)
    hand_out(found, json, png, {csv: "save_csv"}, Path("training.png"))


def hand_out(found: Drawn, json: bool, png: Path | None, tables: dict[Path | None, str], usual: Path) -> None:
    """Numbers to stdout if asked for; whatever files were named, or the usual picture; their names to stdout."""
    named = {path: way for path, way in tables.items() if path is not None}
    files: dict[Path, Any] = {path: getattr(found, way) for path, way in named.items()}
    if png is not None or not (files or json):
        files[png or usual] = found.save
    for path, write in files.items():
        write(path)
    if json:
        return print(jsons.dumps(found.numbers(), ensure_ascii=False))
    for path in files:
        print(path)
