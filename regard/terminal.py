"""The terminal: progress bars, tables of text, readable sizes, and escaped control characters.

Progress goes to stderr, and only where that is a terminal. Text of a model or a file is escaped before it reaches a
terminal: `ESC ] 0 ; ...` sets a window's title, other sequences move the cursor or answer as if the user had typed, and
bidirectional overrides show text in another order than it has. Zero-width joiners, which Persian and emoji need, are left
as they are.
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


# ---- progress bars ---------------------------------------------------------------------------------------------------


def stderr_console(**settings: Any) -> Console:
    """Return a Rich console on the original stderr, below any stream that escapes control characters.

    While Rich draws a bar, it replaces `sys.stderr` by a stream of its own, so there may be two streams above the original.
    """
    stream = sys.stderr
    while hasattr(stream, "rich_proxied_file"):
        stream = stream.rich_proxied_file
    return Console(file=stream, **settings)


@contextmanager
def progress_bar(what: str, total: int | None = None, quiet: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on stderr; yield a function that is called with the number of items done since the last call."""
    console = stderr_console()
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn()) if total else (TimeElapsedColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), *times)
    with Progress(*columns, console=console, transient=True, disable=quiet or not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, advance=done)


def count_progress(items: Iterable[T], advance: Callable[[int], None], every: int = 1000) -> Iterator[T]:
    """Yield the items, and call `advance(every)` after each `every` items."""
    for number, item in enumerate(items, 1):
        yield item
        if number % every == 0:
            advance(every)


# ---- tables and numbers ----------------------------------------------------------------------------------------------


def format_table(rows: Sequence[tuple[str, ...]], right: int) -> list[str]:
    """Return the lines of a table with aligned columns; those from column `right` on are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(w) if i >= right else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return lines


def format_bytes(n: int) -> str:
    """Return a number of bytes with a suitable unit: 37.1 MB."""
    power = min(max(0, (len(str(n)) - 1) // 3), 4)
    return f"{n / 1000**power:,.{1 if power else 0}f} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def format_count(n: int) -> str:
    """Return a number with four digits and a unit: 79.05 G."""
    power = min(max(0, (len(str(n)) - 1) // 3), 5)
    return f"{n / 1000**power:.4g} {('', 'k', 'M', 'G', 'T', 'P')[power]}".strip()


# ---- control characters ----------------------------------------------------------------------------------------------

# Unicode category Cc without tab and newline, and the bidirectional embeddings, overrides and isolates.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def escape_controls(text: str) -> str:
    r"""Return the text with its control characters written as `\x1b` or `\u202e`; tabs and newlines stay.

    Characters from U+007F on are written with \u, as in JSON, because `json.dumps` output goes through here unescaped.
    """
    return CONTROL.sub(
        lambda found: f"\\x{ord(found[0]):02x}" if found[0] < "\x7f" else f"\\u{ord(found[0]):04x}", text
    )


class EscapingStream:
    """A text stream that escapes the control characters of everything written to it.

    Rich writes its colours and cursor movements to `rich_proxied_file`, the original stream, when it finds this stream as
    `sys.stdout` or `sys.stderr`.
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
    """Escape control characters in everything that is written to stderr and, if it is a terminal, to stdout.

    A pipe or a file gets the exact text of a result. After an unexpected exception the streams stay replaced, so that the
    traceback is escaped too.
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
