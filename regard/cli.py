"""The verbs. Results go to stdout, everything else to stderr; nothing heavy is imported until a verb runs.

Exit codes: 0 done, 1 a failure of ours, 2 something the user can mend (said in one line), 130/143 stopped by a signal.
"""

from __future__ import annotations

import gc
import json
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from regard import cli_cost, cli_exchange, cli_label, cli_summary, cli_write
from regard.cli_filter import filter_app
from regard.cli_look import look_app
from regard.cli_study import study_app
from regard.cli_tokenizer import tokenizer_app
from regard.cli_vectors import vectors_app
from regard.errors import RegardError
from regard.terminal import safe_terminal

app = typer.Typer(
    name="regard",
    help="Sequence models from raw text to a trained, evaluated, inspectable and served model.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(look_app, name="look")
app.add_typer(study_app, name="study")
app.add_typer(vectors_app, name="vectors")
app.add_typer(filter_app, name="filter")
for command in (
    cli_write.generate,
    cli_write.chat,
    cli_write.score,
    cli_write.embed,
    cli_label.classify,
    cli_cost.cost,
    cli_summary.summary,
):
    app.command()(command)
app.command("import")(cli_exchange.import_model)
app.command("export")(cli_exchange.export_model)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object (a line each for translations).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Weights = Annotated[
    str,
    typer.Option(
        help="auto, fp32 or bf16; on a CPU also int8 and fp16. auto: bf16 on a GPU, else fp32; without --model int8."
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress on stderr.")]


def show_version(asked: bool) -> None:
    if asked:
        import regard

        print(regard.__version__)
        raise typer.Exit()


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and stop.", callback=show_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["REGARD_DEBUG"] = "1"


@app.command()
def train(
    context: typer.Context,
    recipe: Annotated[Path, typer.Argument(help="A TOML recipe, such as recipes/toy-en-de.toml.")],
    name: Annotated[str | None, typer.Option(help="Name of the run; by default the recipe's.")] = None,
    run: Annotated[Path | None, typer.Option(help="Folder of the run; by default runs/NAME.")] = None,
    overwrite: Annotated[bool, typer.Option(help="Start over: remove what Regard wrote into the run.")] = False,
    quiet: Quiet = False,
) -> None:
    """Train a recipe; the same command goes on with a run that was stopped.

    Any setting can be given as --section.name VALUE, for example --train.steps 2000; `regard settings` lists them all.
    """
    from regard import api

    settings = context.obj | ({} if name is None else {"name": name})
    print(api.train(recipe, run, settings=settings, overwrite=overwrite, quiet=quiet))


@app.command()
def resume(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="Folder of a run, such as runs/toy-en-de.")],
    quiet: Quiet = False,
) -> None:
    """Go on with a run from its newest valid checkpoint, exactly; --train.steps N makes it longer."""
    from regard import api

    print(api.resume(run, settings=context.obj, quiet=quiet))


@app.command()
def settings(
    name: Annotated[str, typer.Argument(help="A section, a part or a table of model settings, such as yarn.")] = "",
) -> None:
    """List every setting of a recipe with its default and meaning, and the parts that models are made of."""
    from regard.cli_settings import print_settings

    print_settings(name)


@app.command()
def translate(
    context: typer.Context,
    texts: Annotated[list[str] | None, typer.Argument(help="Sentences; without any, lines of stdin.")] = None,
    model: Annotated[
        Path | None,
        typer.Option("--model", "-m", help="A run or model folder; by default the one that Regard brings along."),
    ] = None,
    to: Annotated[
        str | None, typer.Option("--to", help="Language to translate to, of a model that knows several.")
    ] = None,
    source: Annotated[
        str | None, typer.Option("--from", help="Language of the text; by default it is found out.")
    ] = None,
    input: Annotated[Path | None, typer.Option("--input", "-i", help="Translate the lines of a file.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write there instead of stdout.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; 1 = greedy.")] = None,
    nbest: Annotated[int | None, typer.Option(help="Translations for each sentence, with scores.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="a in log p(y) / |y|^a.")] = None,
    min_len: Annotated[int | None, typer.Option(help="Least tokens of a translation.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Above 0: sample.")] = None,
    top_k: Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample among tokens that hold this probability.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the samples.")] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
) -> None:
    """Translate sentences, a file, or stdin, one sentence a line; with a model of several languages also longer texts.

    With --nbest each line is: number of the sentence, score, translation. Other settings: --decode.max_len_b 50, ...
    """
    with no_collecting():
        from regard.cli_translate import translate_command

    options = {"beam": beam, "nbest": nbest, "length_penalty": length_penalty, "min_len": min_len}
    options |= {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    chosen = options | section_settings(context, "decode")
    translate_command(texts, model, input, output, json, device, chosen, weights, to, source)


@app.command()
def evaluate(
    context: typer.Context,
    run: Annotated[Path, typer.Argument(help="A run or model folder.")],
    data: Annotated[
        str | None, typer.Option(help="Corpus to score, as in a recipe; by default the run's data.test.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of the corpus; by default the run's data.root.")] = None,
    beam: Annotated[int | None, typer.Option(help="Beam width; by default the model's own.")] = None,
    length_penalty: Annotated[float | None, typer.Option(help="a in log p(y) / |y|^a.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Where the hypotheses go.")] = None,
    json: Json = False,
    device: Device = "auto",
    weights: Weights = "auto",
) -> None:
    """Score a model on a test set, by the measures of its task.

    Translations: BLEU and chrF with signatures, perplexity, BLEU by length; hypotheses are saved. The columns of labelled
    data may differ from those in training: --data.text 6 --data.label 5.
    """
    from regard.cli_translate import evaluate_command

    options = {"beam": beam, "length_penalty": length_penalty}
    evaluate_command(run, data, root, output, json, device, options, context.obj, weights)


@app.command()
def doctor(
    context: typer.Context,
    target: Annotated[
        Path | None, typer.Argument(help="With --explain: a run or model folder, or a recipe; without, every scheme.")
    ] = None,
    why: Annotated[
        bool, typer.Option("--explain", help="Say which kernel each attention layer gets, and why.")
    ] = False,
    device: Annotated[str, typer.Option(help="With --explain: auto, cpu or cuda, which need not be here.")] = "auto",
    length: Annotated[
        int | None, typer.Option(help="With --explain: tokens in training; by default the model's longest, or 4096.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what this machine has: versions, device, precision, folders; and what is missing.

    With --explain: which kernel attention runs on. Model settings can be tried: --model.positions rope, ...
    """
    from regard.doctor import examine, explain, table

    if why:
        section_settings(context, "model")
        rows = explain(target, context.obj, device, length)
        return print_result({"layers": [vars(row) for row in rows]}, True) if json else print(table(rows))
    if target or length is not None or context.obj or device != "auto":
        raise RegardError("a model, a device, a length and settings belong to `regard doctor --explain`: add --explain")
    print_result(examine(), json)


def stdin_lines() -> Iterator[str]:
    """Lines of stdin as UTF-8, whatever the locale; a broken one is named."""
    for number, line in enumerate(sys.stdin.buffer, 1):
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise RegardError(
                f"line {number} of stdin is not UTF-8 ({error.reason} at byte {error.start + 1})"
            ) from None
        if "\0" in text:
            raise RegardError(f"line {number} of stdin is binary (it holds a NUL byte): give plain text")
        yield text


def split_settings(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Take `--section.name VALUE` and `--section.name=VALUE` out of a command line, wherever they stand."""
    rest, settings, waiting = [], {}, iter(words)
    for word in waiting:
        found = re.fullmatch(r"--(\w+(?:\.[\w-]+)+)(?:=(.*))?", word, re.DOTALL)
        if found:
            value = next(waiting, None) if found[2] is None else found[2]
            if value is None:
                raise RegardError(f"{word} needs a value")
            settings[found[1]] = value
        else:
            rest.append(word)
    return rest, settings


def section_settings(context: typer.Context, section: str) -> dict[str, str]:
    """The settings given to a command that only takes those of one section, by their names there."""
    wrong = [name for name in context.obj if not name.startswith(f"{section}.")]
    if wrong:
        raise RegardError(f"--{wrong[0]} does not belong here: only --{section}.NAME settings can be given")
    return {name.removeprefix(f"{section}."): value for name, value in context.obj.items()}


def no_settings(context: typer.Context) -> None:
    """For a command that takes none."""
    if context.obj:
        raise RegardError(f"--{next(iter(context.obj))} does not belong here: no settings of a recipe do")


def print_result(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        width = max(map(len, result))
        for name, value in result.items():
            print(f"{name:<{width}}  {value}")


@contextmanager
def no_collecting() -> Iterator[None]:
    """For imports: looking for garbage among what they make takes a third of their time, now and when Python ends."""
    first = "torch" not in sys.modules  # else all that takes long is there
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()


@contextmanager
def readable_errors() -> Iterator[None]:
    """Errors as a person would want to read them, and their exit codes."""
    from regard.signals import Interrupted

    try:
        yield
    except RegardError as error:
        if os.environ.get("REGARD_DEBUG"):
            raise
        message = str(error).replace("\n", "\\n")  # a message is one line, whatever it quotes
        print(f"regard: {message}", file=sys.stderr)
        raise SystemExit(2) from None
    except OSError as error:
        if error.filename is None or os.environ.get("REGARD_DEBUG"):
            raise
        from regard.files import shortened

        print(f"regard: {shortened(Path(error.filename))}: {error.strerror}; give another path", file=sys.stderr)
        raise SystemExit(2) from None
    except Interrupted as stopped:
        print(f"regard: {stopped}", file=sys.stderr)
        raise SystemExit(stopped.exit_code) from None


def main() -> None:
    # Idle threads of torch give their core away after some microseconds, not milliseconds: where others need it, a
    # step takes many times as long otherwise. GNU's OpenMP reads this once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    with safe_terminal(), readable_errors():
        words, settings = split_settings(sys.argv[1:])
        app(words, obj=settings)
