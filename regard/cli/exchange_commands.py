"""`regard import` and `regard export`: models from and to folders of Hugging Face transformers."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli.options import Json, choose_output
from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.exchange.weight_conversion import ConversionReport

ReportFile = Annotated[Path | None, typer.Option("--report", help="Write a JSON report on every tensor to this file.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Print the report tensor by tensor.")]


def import_model(
    folder: Annotated[Path, typer.Argument(help="A folder of Hugging Face transformers, with safetensors.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; by default NAME-regard.")
    ] = None,
    report: ReportFile = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Import a Hugging Face model: GPT-2, LLaMA, BERT, T5, BART, ViT, ..."""
    target = output or Path(f"{folder.resolve().name}-regard")
    refuse_existing(target)
    import torch

    from regard import model_folder as folders
    from regard.exchange.huggingface import read_huggingface

    package, found = read_huggingface(folder, torch.device("cpu"))
    origin = f"# {target.name}\n\nImported from {folder.resolve().name}.\n\n{found.summary()}\n"
    folders.save(target, package, f"---\nlibrary_name: regard\n---\n{origin}")
    print_report(found, target, report, json, verbose)


def export_model(
    model: Annotated[Path, typer.Argument(help="A run or model folder.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Folder to write; by default NAME-FORMAT.")
    ] = None,
    format: Annotated[str, typer.Option("--format", help="Format to write: huggingface.")] = "huggingface",
    report: ReportFile = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Export a model as a folder of Hugging Face transformers."""
    if format != "huggingface":
        raise RegardError(f"unknown format '{format}': Regard writes huggingface")
    target = output or Path(f"{model.resolve().name}-{format}")
    refuse_existing(target)
    import torch

    from regard.exchange.huggingface import write_huggingface
    from regard.exchange.loader import load_model

    found = write_huggingface(target, load_model(model, torch.device("cpu")))
    print_report(found, target, report, json, verbose)


def refuse_existing(path: Path) -> None:
    if path.exists():
        raise RegardError(f"{path} is already there: choose another folder with --output, or remove it")


def print_report(found: ConversionReport, target: Path, report: Path | None, json: bool, verbose: bool) -> None:
    """Print the report of an import or export, and write it to a file if one was given."""
    text = jsons.dumps({"folder": str(target), **found.to_dict()}, ensure_ascii=False)
    if report is not None:
        from regard.files import write_text

        write_text(choose_output(report), text + "\n")
    if json:
        return print(text)
    if verbose:
        print(found.table())
    print(f"{found.summary()}\n{target}")
