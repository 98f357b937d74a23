"""`regard classify`: answers of a trained classifier."""

from __future__ import annotations

import dataclasses
import json as jsons
from pathlib import Path
from typing import Annotated

import typer

from regard.errors import RegardError


def classify(
    context: typer.Context,
    model: Annotated[Path, typer.Argument(help="A run or model folder.")],
    items: Annotated[
        list[str] | None, typer.Argument(help="Texts (a tab between those of a pair) or pictures; without any, stdin.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Classify the lines of a file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object a line, with all probabilities.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
) -> None:
    """Say the class, number or tags of each text or picture: one line each, with its probability."""
    from regard.cli import no_settings, stdin_lines
    from regard.data.parallel_corpus import read_lines
    from regard.inference.classifier import load_labeller
    from regard.terminal import progress_bar

    no_settings(context)
    if items and input:
        raise RegardError("give texts or --input FILE, not both")
    labeller = load_labeller(model, device)
    lines = items or list(read_lines(input) if input else stdin_lines())
    parts = [(first, second) if tab else first for first, tab, second in (line.partition("\t") for line in lines)]
    with progress_bar("classifying", len(lines)) as advance:
        answers = labeller.classify(parts)
        advance(len(lines))
    for line, answer in zip(lines, answers, strict=True):
        if json:
            print(jsons.dumps({"text": line, **dataclasses.asdict(answer)}, ensure_ascii=False))
        else:
            print(f"{answer}\t{answer.probability:.4f}" if answer.probabilities else answer)
