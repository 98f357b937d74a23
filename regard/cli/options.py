"""Options that several commands share, and the settings that commands take as --section.name VALUE."""

from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from regard.errors import RegardError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object (a line each for translations).")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Weights = Annotated[
    str,
    typer.Option(help="auto (GPU: bf16; CPU: fp32, bundled model int8), fp32, bf16, int8 or fp16."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print no progress on stderr.")]


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
    """Return the settings of one section by their names in it, for a command that takes no others."""
    wrong = [name for name in context.obj if not name.startswith(f"{section}.")]
    if wrong:
        raise RegardError(f"--{wrong[0]} does not belong here: only --{section}.NAME settings can be given")
    return {name.removeprefix(f"{section}."): value for name, value in context.obj.items()}


def no_settings(context: typer.Context) -> None:
    """Refuse settings, for a command that takes none."""
    if context.obj:
        raise RegardError(f"--{next(iter(context.obj))} does not belong here: no settings of a recipe do")


def print_result(result: dict[str, Any], as_json: bool) -> None:
    """Print names and values, in columns or as one JSON object."""
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        width = max(map(len, result))
        for name, value in result.items():
            print(f"{name:<{width}}  {value}")


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
