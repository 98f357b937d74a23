"""A bar on stderr for whatever takes longer than a moment; silence where nobody watches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

T = TypeVar("T")


@contextmanager
def progress_bar(what: str, total: int | None = None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Yields a function to call with how many more are done."""
    console = Console(stderr=True)
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
