"""Parts that all commands share: options of the same name and meaning, settings of recipes, output files, errors.

A command that takes settings of a recipe, `--section.name VALUE`, declares their sections, as in
`@app.command(settings=("decode",))`.
"""

from __future__ import annotations

import difflib
import gc
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from regard.errors import RegardError
from regard.terminal import stderr_console

Json = Annotated[bool, typer.Option("--json", help="Print JSON: one object for each result.")]
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")]
Weights = Annotated[
    str,
    typer.Option("--weights", help="auto (GPU: bf16; CPU: fp32, bundled model int8), fp32, bf16, int8 or fp16."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress on stderr.")]
Model = Annotated[Path, typer.Argument(help="A run or model folder, or the name of a bundled model.")]
To = Annotated[str | None, typer.Option("--to", help="Target language; by default German for English, else English.")]


def decoding(*names: str, help: str) -> Any:
    """Return an option of decoding, which help lists in a panel of its own."""
    return typer.Option(*names, help=help, rich_help_panel="Decoding")


Seed = Annotated[int | None, decoding("--seed", help="Random seed for sampling.")]


def launching(*names: str, help: str) -> Any:
    """Return an option of the launcher (`regard.cli.launch`), which help lists in a panel of its own."""
    return typer.Option(*names, help=help, rich_help_panel="Many processes")


# The names and meanings are those of torchrun.
NprocPerNode = Annotated[
    str | None, launching("--nproc-per-node", help="Start so many processes: a number, gpu (one for each GPU), auto.")
]
Nnodes = Annotated[str, launching("--nnodes", help="Number of machines, or MIN:MAX.")]
NodeRank = Annotated[int | None, launching("--node-rank", help="Number of this machine, from 0; default: any order.")]
RdzvEndpoint = Annotated[str, launching("--rdzv-endpoint", help="HOST:PORT of one machine, the same on all of them.")]
RdzvId = Annotated[str, launching("--rdzv-id", help="Name of the job, the same on all machines.")]
MaxRestarts = Annotated[int, launching("--max-restarts", help="Restart all processes so often after one has failed.")]


def start_ranks(
    nproc_per_node: str | None,
    nnodes: str,
    node_rank: int | None,
    rdzv_endpoint: str,
    rdzv_id: str,
    max_restarts: int,
    join_seconds: int = 600,
) -> bool:
    """Run this command in several processes if --nproc-per-node was given, and return whether it was.

    Where it was, the ranks have ended with success: a failure is a SystemExit.
    """
    if nproc_per_node is None:
        others = {
            "--nnodes": nnodes != "1",
            "--node-rank": node_rank is not None,
            "--rdzv-endpoint": bool(rdzv_endpoint),
        }
        wrong = [name for name, is_given in {**others, "--max-restarts": max_restarts != 0}.items() if is_given]
        if wrong:
            raise RegardError(f"{wrong[0]} needs --nproc-per-node: the number of processes to start on this machine")
        return False
    level = os.environ.get("TORCH_CPP_LOG_LEVEL")  # torch reads it when it is imported
    os.environ["TORCH_CPP_LOG_LEVEL"] = level or ("WARNING" if os.environ.get("REGARD_DEBUG") else "FATAL")
    from regard.cli.launch import LaunchOptions, launch_command

    os.environ["TORCH_CPP_LOG_LEVEL"] = level or "WARNING"  # that of the ranks
    launch_command(LaunchOptions(nproc_per_node, nnodes, node_rank, rdzv_endpoint, rdzv_id, max_restarts, join_seconds))
    return True


# ---- commands --------------------------------------------------------------------------------------------------------


class App(typer.Typer):
    """A group of commands whose errors are one line and whose help texts are wrapped by paragraphs."""

    def command(  # type: ignore[override]
        self, name: str | None = None, settings: tuple[str, ...] = (), **options: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a command, which takes the settings of some sections of recipes."""

        def add(function: Callable[..., Any]) -> Callable[..., Any]:
            kind = type("Command", (Command,), {"sections": settings})
            help = join_lines(function.__doc__ or "")
            return super(App, self).command(name, cls=kind, help=help, **options)(function)

        return add


class Command(TyperCommand):
    """A command that refuses settings of recipes that it does not take, and suggests the nearest option."""

    sections: tuple[str, ...] = ()

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options; an unknown one is a RegardError that suggests the nearest option or setting."""
        try:
            found = super().parse_args(ctx, args)
        except Exception as error:
            if not hasattr(error, "possibilities"):  # only the error of an unknown option has suggestions
                raise
            unknown = error.option_name  # type: ignore[attr-defined]
            options = [name for parameter in self.params for name in parameter.opts if name.startswith("--")]
            hint = suggest_option(unknown, options, self.sections)
            raise RegardError(f"no option {unknown}: {hint or f'`{ctx.command_path} --help` lists them'}") from None
        check_settings(ctx, self.sections)
        return found


def check_settings(context: Any, sections: tuple[str, ...] = ()) -> None:
    """Refuse settings of sections that a command does not take; a command that takes all leaves them to the recipe."""
    wrong = [name for name in context.obj or {} if name.split(".")[0] not in sections]
    if not wrong or set(SECTIONS) <= set(sections):
        return
    names = " and ".join(f"--{section}.NAME" for section in sections)
    only = (
        f"only {names} settings can be given" if sections else f"`{context.command_path}` takes no settings of a recipe"
    )
    raise RegardError(f"--{wrong[0]} does not belong here: {only}")


SECTIONS = ("data", "tokenizer", "model", "train", "decode")
ALL_SECTIONS = (*SECTIONS, "name", "task")


def suggest_option(unknown: str, options: Sequence[str], sections: Iterable[str]) -> str:
    """Return "did you mean --train.steps?", or the empty string where nothing is near.

    A setting is near if its name without the section is; settings of parts are left out, since listing them imports torch.
    """
    from regard.config import Config
    from regard.config.recipes import flatten

    word = unknown.lstrip("-")
    settings: dict[str, str] = {}
    for name, _, _ in flatten(Config()):
        section, _, key = name.partition(".")
        if key and section in sections:
            settings.setdefault(key.replace("_", "-"), f"--{name}")
    names = settings | {option.lstrip("-"): option for option in options}
    near = [name for name in (word, word.replace("_", "-")) if name in names]
    near = near or difflib.get_close_matches(word.replace("_", "-"), names, n=1, cutoff=0.7)
    return f"did you mean {names[near[0]]}?" if near else ""


def join_lines(text: str) -> str:
    """Return a docstring whose paragraphs are one line each, to be wrapped by the width of the terminal."""
    paragraphs = re.split(r"\n\s*\n", text.strip())
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


# ---- settings of recipes ---------------------------------------------------------------------------------------------


def split_settings(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Split a command line into its words and the settings `--section.name VALUE` or `--section.name=VALUE` among them."""
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
    """Return the settings of one section by their names in it."""
    given = context.obj or {}
    return {name.removeprefix(f"{section}."): v for name, v in given.items() if name.startswith(f"{section}.")}


def decode_options(context: typer.Context, **given: Any) -> dict[str, Any]:
    """Return the decode settings that were given, as options of their own or as --decode.NAME, with their types."""
    from regard.config import DecodeConfig
    from regard.config.recipes import cast_settings

    settings = section_settings(context, "decode")
    return {name: value for name, value in given.items() if value not in (None, [])} | cast_settings(
        settings, DecodeConfig, "decode."
    )


# ---- input and output ------------------------------------------------------------------------------------------------


def stdin_lines() -> Iterator[str]:
    """Yield the lines of stdin, read as UTF-8 whatever the locale; an error names the line."""
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


def choose_output(
    given: Path | None, default: str | Path = "", inputs: Iterable[Path | None] = (), *, folder: bool = False
) -> Path:
    """Return the file to write, before any work is done: the one given, or the first free name like `default`.

    A file that was not asked for by name is never replaced: `look.html` becomes `look-2.html`. One that was is replaced,
    which is said on stderr, unless it is an input of the command. With `folder` the output may be a folder.
    """
    if given is None:
        return free_path(Path(default))
    if any(path is not None and is_same_file(path, given) for path in inputs):
        raise RegardError(f"{given} is an input of this command and would be replaced: choose another output")
    if given.is_dir() and not folder:
        raise RegardError(f"{given} is a folder: give the name of a file to write")
    if given.is_file():
        print(f"regard: {given} exists and will be replaced", file=sys.stderr)
    elif given.is_dir() and any(given.iterdir()):
        print(f"regard: {given} exists; files of the same names in it will be replaced", file=sys.stderr)
    return given


def free_path(path: Path, taken: Collection[Path] = ()) -> Path:
    """Return the path, or the first of NAME-2, NAME-3, ... that does not exist and is not taken."""
    number, found = 1, path
    while found in taken or found.exists() or found.is_symlink():
        number += 1
        found = path.with_name(f"{path.stem}-{number}{path.suffix}")
    return found


def is_same_file(a: Path, b: Path) -> bool:
    try:
        return a.samefile(b)
    except (OSError, ValueError):  # one of them does not exist, or is no path at all
        return False


def print_result(result: dict[str, Any], as_json: bool) -> None:
    """Print names and values, in columns or as one JSON object."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        width = max(map(len, result))
        for name, value in result.items():
            print(f"{name:<{width}}  {value}")


@contextmanager
def quiet_end() -> Iterator[None]:
    """End without a traceback on Ctrl-C, or where the process that reads stdout has ended, as `head` does.

    Exit codes are those of a process that the signal ends: 130 (SIGINT) and 141 (SIGPIPE).
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes stdout once more when it ends
        raise SystemExit(141) from None
    except KeyboardInterrupt as stopped:
        if str(stopped):
            print(f"regard: {stopped}", file=sys.stderr)
        raise SystemExit(130) from None


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Show on stderr, if it is a terminal, that something is being done."""
    console = stderr_console()
    if console.is_terminal:
        with console.status(what):
            yield
    else:
        yield


@contextmanager
def no_collecting() -> Iterator[None]:
    """Pause garbage collection around imports, which spend a third of their time in it.

    What they created is exempt from collection afterwards, which makes the exit of Python faster too.
    """
    first = "torch" not in sys.modules  # otherwise nothing slow is left to import
    if first:
        gc.disable()
    try:
        yield
    finally:
        if first:
            gc.freeze()
            gc.enable()
