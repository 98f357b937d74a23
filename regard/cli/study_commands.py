"""`regard study`: experiments that test published claims."""

from __future__ import annotations

import json as jsons
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from regard.cli.options import App, Device, Json, check_settings

study_app = App(help="Run experiments that test published claims.", invoke_without_command=True)


Output = Annotated[Path, typer.Option("--output", "-o", help="Folder of the results.")]


@study_app.callback()
def study(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        check_settings(context)
        for command in study_app.registered_commands:
            assert command.callback is not None
            print(f"regard study {command.name:<16} {(command.callback.__doc__ or '').splitlines()[0]}")


@study_app.command("dictionary")
def study_dictionary(json: Json = False) -> None:
    """Show attention as a soft dictionary look-up, hard at low temperature."""
    from regard.studies.soft_dictionary import run, show

    result = run()
    print(jsons.dumps(result, ensure_ascii=False) if json else show(result))


@study_app.command("positions")
def study_positions(
    output: Output = Path("studies/positions"),
    data: Annotated[Path | None, typer.Option(help="A text file; by default the embedded toy corpus.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps; by default 2,000, and 40 with --quick.")] = None,
    schemes: Annotated[
        str | None, typer.Option(help="Schemes to compare, such as rope,alibi,none; default: all.")
    ] = None,
    jobs: Annotated[int, typer.Option(help="Number of parallel trainings.")] = 1,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Use tiny models and few steps, to try it out.")] = False,
) -> None:
    """Train each position scheme at one length and test it at longer ones."""
    from regard.studies.position_study import study

    names = tuple(name.strip() for name in schemes.split(",")) if schemes else None
    print(study(out=output, data=data, steps=steps, schemes=names, jobs=jobs, device=device, quick=quick))
    print(f"regard: table, pictures and numbers are in {output}", file=sys.stderr)


Texts = Annotated[Path, typer.Option("--text", help="Folder with wikitext2.{train,valid,test}.txt.xz.")]
Glue = Annotated[Path, typer.Option("--glue", help="Folder with the files of GLUE, such as SST-2.train.tsv.xz.")]
Seeds = Annotated[int, typer.Option(min=1, help="Number of fine-tunings of each model on each task.")]
Jobs = Annotated[int, typer.Option(min=1, help="Number of parallel trainings.")]
Quick = Annotated[bool, typer.Option("--quick", help="Train for a few steps, to try it out.")]
Tasks = Annotated[str, typer.Option(help="Tasks to run, such as SST-2,CoLA; default: all.")]


@study_app.command("pretraining")
def study_pretraining(
    text: Texts,
    glue: Glue,
    output: Output = Path("studies/pretraining"),
    tasks: Tasks = "",
    seeds: Seeds = 3,
    jobs: Jobs = 1,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Fine-tune a GPT with and without pre-training and auxiliary loss."""
    from regard.studies.finetuning_study import PRETRAINING

    print_study(PRETRAINING, tasks, output, text, glue, seeds, jobs, device, quick)


@study_app.command("roformer")
def study_roformer(
    text: Texts,
    glue: Glue,
    output: Output = Path("studies/roformer"),
    tasks: Tasks = "",
    seeds: Seeds = 3,
    jobs: Jobs = 1,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Compare BERT with RoFormer: learned against rotary positions."""
    from regard.studies.finetuning_study import ROFORMER

    print_study(ROFORMER, tasks, output, text, glue, seeds, jobs, device, quick)


Translations = Annotated[
    Path, typer.Option("--data", help="Folder of Multi30k, with train.de.xz, train.en.xz and so on.")
]


@study_app.command("gradient-flow")
def study_gradient_flow(
    output: Output = Path("studies/gradient-flow"),
    quick: Annotated[bool, typer.Option("--quick", help="Use small layers and few steps, to try it out.")] = False,
) -> None:
    """Measure gradients k steps back in time: RNN, LSTM, GRU, attention."""
    from regard.studies.gradient_flow import study

    print_table(study(output, quick))


@study_app.command("three-ways")
def study_three_ways(
    output: Output = Path("studies/three-ways"),
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Use short rows and narrow layers, to try it out.")] = False,
) -> None:
    """Compare time and memory of recurrence, convolution and attention."""
    from regard.studies.layer_comparison import study

    print_table(study(output, device, quick))


@study_app.command("long-range")
def study_long_range(
    output: Output = Path("studies/long-range"),
    data: Annotated[Path | None, typer.Option(help="A text file for the character model; default: none.")] = None,
    systems: Annotated[
        str | None, typer.Option(help="Systems to compare, such as attention,lstm,s4d; default: all.")
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Of copying,selective-copying,recall,text,cost; default: all, text if --data is given."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps of the tasks of memory.")] = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Use tiny models and few steps, to try it out.")] = False,
) -> None:
    """Compare attention, LSTM and state spaces: memory tasks, time and memory."""
    from regard.studies.long_range import study

    compared, scored = ([name.strip() for name in names.split(",")] if names else None for names in (systems, tasks))
    print_table(study(output, data, compared, scored, steps, jobs, device, quick))


@study_app.command("cell-search")
def study_cell_search(
    output: Output = Path("studies/cell-search"),
    minutes: Annotated[float, typer.Option(min=0, help="Time of the whole search.")] = 30.0,
    rounds: Annotated[
        int | None,
        typer.Option(min=1, help="Exact number of rounds, which can be repeated; --minutes is then ignored."),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="A text file; by default the embedded toy corpus.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the search.")] = 0,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes; each uses one core.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Use tiny cells and few steps, to try it out.")] = False,
) -> None:
    """Search for a recurrent cell by mutations of the GRU and the LSTM."""
    from regard.studies.cell_search import study

    print_table(study(output, minutes, jobs, seed, data, quick, rounds))


@study_app.command("lstm-odyssey")
def study_lstm_odyssey(
    output: Output = Path("studies/lstm-odyssey"),
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes; each uses one core.")] = 2,
    quick: Annotated[bool, typer.Option("--quick", help="Use tiny cells and few steps, to try it out.")] = False,
) -> None:
    """Compare the LSTM with peepholes and its eight variants."""
    from regard.studies.lstm_odyssey import study

    print_table(study(output, jobs, quick))


@study_app.command("sentence-length")
def study_sentence_length(
    data: Translations,
    output: Output = Path("studies/sentence-length"),
    jobs: Jobs = 1,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Measure BLEU by sentence length: context vector, attention, Transformer."""
    from regard.studies.sentence_length import study

    print_table(study(output, data, jobs, device, quick))


@study_app.command("translation-cost")
def study_translation_cost(
    data: Translations,
    output: Output = Path("studies/translation-cost"),
    systems: Annotated[
        str | None, typer.Option(help="Rows to measure and report, such as gnmt,gnmt-ensemble; default: all.")
    ] = None,
    jobs: Jobs = 1,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """Measure BLEU against training FLOPs: the systems of Table 2."""
    from regard.studies.translation_cost import study

    rows = [name.strip() for name in systems.split(",")] if systems else None
    print_table(study(output, data, jobs, device, quick, rows))


@study_app.command("filters")
def study_filters(
    image: Annotated[
        Path | None, typer.Option(help="An 8-bit picture; by default one with edges and textures.")
    ] = None,
    sigma: Annotated[float, typer.Option(help="Standard deviation of the noise, out of 255.")] = 20.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of the noise.")] = 0,
    output: Output = Path("studies/filters"),
    device: Device = "auto",
) -> None:
    """Compare denoising filters, from Gaussian to non-local means."""
    from regard.studies.filter_study import study

    print_table(study(output, image, sigma, seed, device))


def print_table(out: Path) -> None:
    """Print the table of a study, and say where its pictures and numbers are."""
    print((out / "table.md").read_text())
    print(f"regard: table, pictures and numbers are in {out}", file=sys.stderr)


def print_study(plan: Any, tasks: str, out: Path, text: Path, glue: Path, *how: Any) -> None:
    """Run a study of fine-tuning, and show its table."""
    from regard.studies.finetuning_study import study

    chosen = tasks.split(",") if tasks else list(plan.tasks)
    print_table(study(plan, out, text, glue, chosen, *how))
