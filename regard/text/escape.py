"""Control characters made visible, so that text of a model or a file cannot give orders to a terminal.

`ESC ] 0 ; ...` sets a window's title, others move the cursor or answer as if the user had typed; bidirectional overrides
show text in another order than it has. Zero-width joiners, which Persian and emoji need, stay as they are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

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
