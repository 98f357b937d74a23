"""The `regard` command: its subcommands, and how their errors are reported.

Results go to stdout, everything else to stderr. Nothing heavy (torch, numpy) is imported until a command runs.
Exit codes: 0 success, 1 a bug in Regard, 2 an error that the user can fix (one line on stderr), 130/143 stopped by a signal.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from regard.cli import (
    cost_commands,
    doctor_commands,
    exchange_commands,
    text_commands,
    train_commands,
    translate_commands,
)
from regard.cli.filter_commands import filter_app
from regard.cli.look_commands import look_app
from regard.cli.options import split_settings
from regard.cli.study_commands import study_app
from regard.cli.tokenizer_commands import tokenizer_app
from regard.cli.vector_commands import vectors_app
from regard.errors import RegardError
from regard.terminal import safe_terminal

app = typer.Typer(
    name="regard",
    help="Train, evaluate, inspect and use sequence models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(look_app, name="look")
app.add_typer(study_app, name="study")
app.add_typer(vectors_app, name="vectors")
app.add_typer(filter_app, name="filter")
app.command("import")(exchange_commands.import_model)
app.command("export")(exchange_commands.export_model)
for command in (
    text_commands.generate,
    text_commands.chat,
    text_commands.score,
    text_commands.embed,
    text_commands.classify,
    cost_commands.cost,
    cost_commands.summary,
    train_commands.train,
    train_commands.resume,
    train_commands.settings,
    translate_commands.translate,
    translate_commands.evaluate,
    doctor_commands.doctor,
):
    app.command()(command)


def print_version(asked: bool) -> None:
    if asked:
        import regard

        print(regard.__version__)
        raise typer.Exit()


@app.callback()
def root(
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    if debug:
        os.environ["REGARD_DEBUG"] = "1"


@contextmanager
def readable_errors() -> Iterator[None]:
    """Print errors that a user can fix as one line, and exit with their code."""
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
        from regard.files import shorten_path

        print(f"regard: {shorten_path(Path(error.filename))}: {error.strerror}; give another path", file=sys.stderr)
        raise SystemExit(2) from None
    except Interrupted as stopped:
        print(f"regard: {stopped}", file=sys.stderr)
        raise SystemExit(stopped.exit_code) from None


def main() -> None:
    """Run the command line."""
    # Let idle OpenMP threads of torch yield their core after microseconds, not milliseconds: on a busy machine a step takes
    # many times as long otherwise. GNU's OpenMP reads this once, when torch is imported.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    with safe_terminal(), readable_errors():
        words, settings = split_settings(sys.argv[1:])
        app(words, obj=settings)
