"""`regard` in the process of a test."""

import io
import sys

import pytest

from regard.cli import main


def call(capfd, monkeypatch, *words: str, stdin: bytes = b"") -> tuple[int, str, str]:
    """Run `regard WORDS` and return its exit code, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["regard", *words])
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    with pytest.raises(SystemExit) as stop:
        main.main()
    out, err = capfd.readouterr()
    return int(stop.value.code or 0), out, err
