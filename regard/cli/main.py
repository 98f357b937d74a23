"""The verbs. Results go to stdout, everything else to stderr; nothing heavy is imported until a verb runs.

Exit codes: 0 done, 1 a failure of ours, 2 something the user can mend (said in one line), 130/143 stopped by a signal.
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
        from regard.files import shorten_path

        print(f"regard: {shorten_path(Path(error.filename))}: {error.strerror}; give another path", file=sys.stderr)
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
