"""A bar on stderr for whatever takes longer than a moment; silence where nobody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")


def stderr_console(**settings: Any) -> Console:
    """Return a console that draws on stderr itself, below any stream that escapes control characters.

    While a bar is drawn, Rich puts a stream of its own in the place of `sys.stderr`, so the way down may have two steps.
    """
    stream = sys.stderr
    while hasattr(stream, "rich_proxied_file"):
        stream = stream.rich_proxied_file
    return Console(file=stream, **settings)


@contextmanager
def progress_bar(what: str, total: int | None = None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with how many more are done."""
    console = stderr_console()
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()) if total else (TimeElapsedColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=done)


def counted(items: Iterable[T], advance: Callable[[int], None], every: int = 1000) -> Iterator[T]:
    """The same items; `advance` hears of each thousand that went by."""
    for number, item in enumerate(items, 1):
        yield item
        if number % every == 0:
            advance(every)
