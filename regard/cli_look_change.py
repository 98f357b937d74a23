"""`regard look change` and `regard look heads`: what a model does if a part of it does otherwise."""

from __future__ import annotations

from regard.exchange.loader import load_model
import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli_look_figures import Png, hand_out
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.look.change.changes import Change

Texts = list[str] | None
Zeroed = Annotated[
    Texts, typer.Option("--zero", help="Heads that say nothing: LAYER[:HEADS], as in decoder.2.cross:3.")
]
Levelled = Annotated[Texts, typer.Option("--mean", help="Heads that look alike at all they see: LAYER[:HEADS].")]
Forced = Annotated[Texts, typer.Option("--force", help="Look at nothing else: [LAYER[:HEADS]@]QUERY>KEY.")]
Forbidden = Annotated[
    Texts,
    typer.Option(
        "--forbid", help="Do not look there: [LAYER[:HEADS]@]QUERY>KEY; places or words, as in 'Apfel>apple'."
    ),
]
Pinned = Annotated[Texts, typer.Option("--pin", help="Force in all attention over the source: QUERY>KEY.")]
Replaced = Annotated[Texts, typer.Option("--replace", help="Another word: source:PLACE=TEXT or target:PLACE=TEXT.")]
Placed = Annotated[str | None, typer.Option("--positions", help="Another position scheme: none, rope, alibi, ...")]
Json = Annotated[bool, typer.Option("--json", help="Print the numbers as one JSON object instead.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def changes_of(
    zero: Texts, mean: Texts, force: Texts, forbid: Texts, pin: Texts, replace: Texts, positions: str | None
) -> list[Change]:
    """What these options ask for."""
    from regard.look.change.changes import parse

    named = {"zero": zero, "mean": mean, "force": force, "forbid": forbid, "pin": pin, "replace": replace}
    named["positions"] = [positions] if positions else None
    return [parse(kind, text) for kind, texts in named.items() for text in texts or ()]


def look_change(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder that translates or writes.")],
    sentence: Annotated[str, typer.Argument(help="A sentence to translate, or a prompt.")],
    zero: Zeroed = None,
    mean: Levelled = None,
    force: Forced = None,
    forbid: Forbidden = None,
    pin: Pinned = None,
    replace: Replaced = None,
    positions: Placed = None,
    to: Annotated[str | None, typer.Option(help="The language, for a model that translates to several.")] = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Change what a model looks at, and print what it writes before and after, side by side."""
    from regard.api import load
    from regard.cli import section_settings
    from regard.inference.generator import Writer
    from regard.inference.translator import Translator
    from regard.look.change.compare import compare

    changes = changes_of(zero, mean, force, forbid, pin, replace, positions)
    if not changes:
        raise RegardError("nothing is changed: give --zero, --mean, --force, --forbid, --pin, --replace or --positions")
    user = load(model, device)
    if not isinstance(user, (Translator, Writer)):
        raise RegardError(f"the model in {model} neither translates nor writes, so there is nothing to compare")
    options = section_settings(context, "decode") | ({"to": to} if to else {})
    found = compare(user, sentence, changes, **options)
    print(jsons.dumps(found.numbers(), ensure_ascii=False) if json else found)


def look_heads(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder: one that translates, a GPT or a BERT.")],
    source: Annotated[Path, typer.Option(help="Sentences, one a line; for a GPT or BERT any text.")],
    target: Annotated[Path | None, typer.Option(help="Their translations.")] = None,
    metric: Annotated[str, typer.Option(help="loss, or for translations bleu.")] = "loss",
    sentences: Annotated[int, typer.Option(help="How many lines to read.")] = 500,
    to: Annotated[str | None, typer.Option(help="The language, for a model that translates to several.")] = None,
    png: Png = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Zero every head in turn, and say how much worse the model is without it."""
    from itertools import islice

    from regard import model_folder
    from regard.cli import no_settings
    from regard.data.parallel_corpus import read_lines
    from regard.device import pick_device
    from regard.look.change.heads import scan

    no_settings(context)
    if sentences < 2:
        raise RegardError(f"--sentences must be at least 2, not {sentences}: one alone has no error to tell")
    lines, other = (list(islice(read_lines(path), sentences)) if path else [] for path in (source, target))
    found = scan(load_model(model, pick_device(device), "fp32"), lines, other, metric, to)
    if not json:
        print(found)
    hand_out(found, json, png, {}, Path("heads.png"))
