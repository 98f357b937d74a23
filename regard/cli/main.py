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
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
from regard.cli.options import ALL_SECTIONS, App, split_settings
from regard.cli.rank_errors import is_launched, print_error, record_error
from regard.cli.serve_commands import serve_app
from regard.cli.study_commands import study_app
from regard.cli.tokenizer_commands import tokenizer_app
from regard.cli.vector_commands import vectors_app
from regard.errors import RegardError
from regard.process_rank import current_rank
from regard.terminal import safe_terminal

# The panels of `regard --help`, in order: (name, function or group of commands, sections of settings that it takes).
PANELS: dict[str, tuple[tuple[str, Any, tuple[str, ...]], ...]] = {
    "Use": (
        ("translate", translate_commands.translate, ("decode",)),
        ("generate", text_commands.generate, ("decode",)),
        ("chat", text_commands.chat, ("decode",)),
        ("classify", text_commands.classify, ()),
        ("embed", text_commands.embed, ()),
        ("score", text_commands.score, ()),
        ("serve", serve_app, ()),
    ),
    "Train": (
        ("train", train_commands.train, ALL_SECTIONS),
        ("resume", train_commands.resume, ALL_SECTIONS),
        ("evaluate", translate_commands.evaluate, ("data", "decode")),
        ("tokenizer", tokenizer_app, ()),
        ("settings", train_commands.settings, ()),
    ),
    "See": (
        ("look", look_app, ()),
        ("study", study_app, ()),
        ("cost", cost_commands.cost, ("model",)),
        ("summary", cost_commands.summary, ("model",)),
    ),
    "Exchange": (
        ("import", exchange_commands.import_model, ()),
        ("export", exchange_commands.export_model, ()),
    ),
    "Ancestors of attention": (
        ("vectors", vectors_app, ()),
        ("filter", filter_app, ()),
    ),
    "Machine": (("doctor", doctor_commands.doctor, ("model",)),),
}


class InOrder(TyperGroup):
    """A group that lists its commands in the order of the panels."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for commands in PANELS.values() for name, _, _ in commands]


app = App(
    name="regard",
    cls=InOrder,
    help="Translate; train, evaluate and look into sequence models.",
    epilog="`regard COMMAND --help` explains a command.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for panel, commands in PANELS.items():
    for name, command, sections in commands:
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, sections, rich_help_panel=panel)(command)


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
        message = str(error).replace("\n", "\\n")  # a message is one line, whatever it quotes
        record_error(message, 2)
        if os.environ.get("REGARD_DEBUG"):
            raise
        print_error(message)
        raise SystemExit(2) from None
    except OSError as error:
        if error.filename is None or os.environ.get("REGARD_DEBUG"):
            end_rank(error)
            raise
        from regard.files import shorten_path

        message = f"{shorten_path(Path(error.filename))}: {error.strerror}; give another path"
        record_error(message, 2)
        print_error(message)
        raise SystemExit(2) from None
    except Interrupted as stopped:
        if current_rank().is_first:
            print(f"regard: {stopped}", file=sys.stderr)
        raise SystemExit(stopped.exit_code) from None
    except KeyboardInterrupt:
        if "LOCAL_RANK" in os.environ:  # every rank is interrupted at the same place: one traceback would be enough
            raise SystemExit(130) from None
        raise
    except typer.Abort:
        raise SystemExit(1) from None
    except Exception as error:
        print_usage_error(error)
        raise SystemExit(2) from None


def end_rank(error: Exception) -> None:
    """Record an unexpected error for the launcher of this rank, which prints its traceback; elsewhere return.

    Raises:
        SystemExit: Regard's launcher started this process, and --debug was not given.
    """
    record_error(f"{type(error).__name__}: {error}", 1)
    if is_launched() and not os.environ.get("REGARD_DEBUG"):
        raise SystemExit(1)


def print_usage_error(error: Exception) -> None:
    """Print an error of Typer as one line that names the page of help; raise any other error again.

    The classes of Typer's errors are private and differ between its versions, so they are told by their methods.
    """
    if not hasattr(error, "format_message"):
        end_rank(error)
        raise error
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError" or context is None:
        return error.show()  # type: ignore[attr-defined]
    message = error.format_message().rstrip(".")
    end = "" if message.endswith("?") else ";"
    print(
        f"regard: {message[:1].lower()}{message[1:]}{end} `{context.command_path} --help` explains it", file=sys.stderr
    )


def main() -> None:
    """Run the command line."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    with safe_terminal(), readable_errors():
        words, settings = split_settings(sys.argv[1:])
        code = app(words, prog_name="regard", obj=settings, standalone_mode=False)
        raise SystemExit(code if isinstance(code, int) else 0)
