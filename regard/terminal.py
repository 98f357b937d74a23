"""A bar on stderr for whatever takes longer than a moment; silence where nobody watches.

MERGED: Numbers as people read them: columns side by side, bytes and FLOPs in a unit that suits them.

MERGED: Control characters made visible, so that text of a model or a file cannot give orders to a terminal.

`ESC ] 0 ; ...` sets a window's title, others move the cursor or answer as if the user had typed; bidirectional overrides
show text in another order than it has. Zero-width joiners, which Persian and emoji need, stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TextIO, TypeVar, cast

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


def count_progress(items: Iterable[T], advance: Callable[[int], None], every: int = 1000) -> Iterator[T]:
    """The same items; `advance` hears of each thousand that went by."""
    for number, item in enumerate(items, 1):
        yield item
        if number % every == 0:
            advance(every)


def format_table(rows: Sequence[tuple[str, ...]], right: int) -> list[str]:
    """Columns side by side, those from `right` on flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i >= right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_bytes(n: int) -> str:
    """Bytes in the unit that suits them."""
    power = min(max(0, (len(str(n)) - 1) // 3), 4)
    return f"{n / 1000**power:,.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def format_count(n: int) -> str:
    """Four digits and a unit: 79.05 G."""
    power = min(max(0, (len(str(n)) - 1) // 3), 5)
    return f"{n / 1000**power:.4g} {('', 'k', 'M', 'G', 'T', 'P')[power]}".strip()


# Unicode category Cc without tab and newline, and the bidirectional embeddings, overrides and isolates.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""Return the text with its control characters as `\x1b` or `\u202e`; tabs and newlines stay.

    Characters from U+007F on are written with \u, as JSON writes them: `json.dumps` leaves those to be escaped here.
    """
    return CONTROL.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\x7f" else f"\\u{ord(found[0]):04x}", text
    )


class EscapingStream:
    """A text stream that escapes the control characters of everything written to it.

    `rich_proxied_file` is where Rich writes its colours and cursor movements when it finds this stream in the place of
    `sys.stdout` or `sys.stderr`: the stream below, as it is.
    """

    def __init__(self, stream: TextIO) -> None:
        self.rich_proxied_file = stream

    def write(self, text: str) -> int:
        self.rich_proxied_file.write(escape_controls(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.rich_proxied_file, name)


@contextmanager
def safe_terminal() -> Iterator[None]:
    """Escape control characters in all that is written to stderr and, where it is a terminal, to stdout.

    A pipe or a file gets the exact text of a result. After an unexpected exception the streams stay in place, for the
    traceback that Python prints.
    """
    before = sys.stdout, sys.stderr
    sys.stderr = cast(TextIO, EscapingStream(sys.stderr))
    if sys.stdout.isatty():
        sys.stdout = cast(TextIO, EscapingStream(sys.stdout))
    try:
        yield
    except SystemExit:
        sys.stdout, sys.stderr = before
        raise
    sys.stdout, sys.stderr = before
