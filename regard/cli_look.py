"""The verbs that show: `regard look` draws what a model does, `regard study` repeats an experiment."""

from __future__ import annotations

import json as jsons
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import RegardError

if TYPE_CHECKING:
    from regard.look.positions import Picture

look_app = typer.Typer(help="See what a model does, as pictures or numbers.", no_args_is_help=True)
study_app = typer.Typer(help="Experiments that repeat a claim and measure it.", invoke_without_command=True)

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


@study_app.callback()
def study(context: typer.Context) -> None:
    if context.obj:
        raise RegardError(f"--{next(iter(context.obj))} does not belong here: a study has its own settings")
    if context.invoked_subcommand is None:
        for command in study_app.registered_commands:
            assert command.callback is not None
            print(f"regard study {command.name:<12} {(command.callback.__doc__ or '').splitlines()[0]}")


@study_app.command("dictionary")
def study_dictionary(json: Json = False) -> None:
    """Attention as a soft dictionary: two queries at once, and a temperature that makes the look-up hard."""
    from regard.studies.dictionary import run, show

    result = run()
    print(jsons.dumps(result, ensure_ascii=False) if json else show(result))


@study_app.command("positions")
def study_positions(
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("studies/positions"),
    data: Annotated[Path | None, typer.Option(help="A text file; by default the embedded toy corpus.")] = None,
    steps: Annotated[int | None, typer.Option(help="Of each training; by default 2,000, and 40 with --quick.")] = None,
    schemes: Annotated[str | None, typer.Option(help="Only these, such as rope,alibi,none.")] = None,
    jobs: Annotated[int, typer.Option(help="Trainings at a time.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    quick: Annotated[bool, typer.Option("--quick", help="Tiny models and few steps, to try it out.")] = False,
) -> None:
    """Every position scheme trained at one length and tested at longer ones."""
    from regard.studies.positions import study

    names = tuple(name.strip() for name in schemes.split(",")) if schemes else None
    print(study(out=out, data=data, steps=steps, schemes=names, jobs=jobs, device=device, quick=quick))


Texts = Annotated[Path, typer.Option("--text", help="Folder with wikitext2.{train,valid,test}.txt.xz.")]
Glue = Annotated[Path, typer.Option("--glue", help="Folder with the files of GLUE, such as SST-2.train.tsv.xz.")]
Seeds = Annotated[int, typer.Option(min=1, help="Fine-tunings of each model on each task.")]
Jobs = Annotated[int, typer.Option(min=1, help="Trainings at a time.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Quick = Annotated[bool, typer.Option("--quick", help="A few steps each, to try it out.")]
Tasks = Annotated[str, typer.Option(help="Only these, such as SST-2,CoLA.")]


@study_app.command("pretraining")
def study_pretraining(
    text: Texts,
    glue: Glue,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("studies/pretraining"),
    tasks: Tasks = "",
    seeds: Seeds = 3,
    jobs: Jobs = 1,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """What pre-training and the auxiliary loss bring: a GPT fine-tuned with and without them."""
    from regard.studies import pretraining

    print_study(pretraining, tasks, out, text, glue, seeds, jobs, device, quick)


@study_app.command("roformer")
def study_roformer(
    text: Texts,
    glue: Glue,
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("studies/roformer"),
    tasks: Tasks = "",
    seeds: Seeds = 3,
    jobs: Jobs = 1,
    device: Device = "auto",
    quick: Quick = False,
) -> None:
    """BERT against RoFormer: the same model with learned positions or rotary ones, pre-trained and fine-tuned."""
    from regard.studies import roformer

    print_study(roformer, tasks, out, text, glue, seeds, jobs, device, quick)


def print_study(module: Any, tasks: str, out: Path, text: Path, glue: Path, *how: Any) -> None:
    """Run a study of fine-tuning, and show its table."""
    from regard.studies.finetuning import study

    chosen = tasks.split(",") if tasks else list(module.TASKS)
    print((study(module.STUDY, out, text, glue, chosen, *how) / "table.md").read_text())
