"""A translator that writes texts in capitals, in this process and as the bundled model of a `regard` that a test starts."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from regard.config import DecodeConfig
from regard.inference.translator import Translation
from regard.text.language_identification import Direction


class CapitalTranslator:
    """A translator of which each text depends on nothing but itself; `before` is called with the texts of each call."""

    def __init__(
        self,
        directions: Sequence[str] = ("en>de", "de>en"),
        before: Callable[[list[str]], None] = lambda texts: None,
    ) -> None:
        self.directions, self.before = tuple(directions), before
        self.calls: list[list[str]] = []
        self.detected: list[str] = []  # texts whose language was detected without a translation
        self.detector: Any = SimpleNamespace(detect=self.detect)
        self.forms: dict[str, tuple[str, ...]] = {}
        self.options = DecodeConfig()
        self.called_with: dict[str, Any] = {}  # the options of the last call

    def detect(self, texts: Sequence[str], *arguments: Any, **options: Any) -> list[Direction]:
        self.detected.extend(texts)
        return [Direction("en", "de")] * len(texts)

    def translate(
        self, texts: Sequence[str], to: str | None = None, source: str | None = None, **options: Any
    ) -> list[Translation]:
        self.before(list(texts))
        self.calls.append(list(texts))
        self.called_with = options
        return [self.one(text, to or "de") for text in texts]

    def one(self, text: str, to: str) -> Translation:
        notes = ("left as it is",) if "???" in text else ()
        return Translation(text.upper(), -1.0, -2.0, tuple(text.split()), source="en", target=to, notes=notes)


# `regard` with this translator for the bundled model; SECONDS is how long it takes for each call.
PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may ignore it
sys.path.insert(0, {folder!r})
import regard.inference.translator as module
from fake_translation import CapitalTranslator, slow
module.bundled_translator = lambda *a: CapitalTranslator(before=slow)
from regard.cli.main import main
main()
"""


def slow(texts: list[str]) -> None:
    time.sleep(float(os.environ.get("SECONDS", 0)))


def start(*words: str, seconds: float = 0.0, TERM: str = "dumb", **how: Any) -> subprocess.Popen[bytes]:
    """Start `regard WORDS` with the translator above, which takes so many seconds for each call."""
    program = PROGRAM.format(folder=os.path.dirname(__file__))
    environment = {**os.environ, "SECONDS": str(seconds), "TERM": TERM}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.Popen([sys.executable, "-c", program, *words], env=environment, **pipes)
