"""The log of a run: a progress bar and messages on stderr, metrics.jsonl, TensorBoard."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from regard.errors import RegardError
from regard.files import disk_errors, exists, open_regular, parse_json, sync, write_text
from regard.terminal import escape_controls, stderr_console

TIMES = ("seconds", "tokens_per_s", "mfu")  # fields that differ from run to run


class MetricsLog:
    """The metrics of a run, written to metrics.jsonl and TensorBoard.

    When a run resumes, everything after its checkpoint is removed and written again. A checkpoint may have been saved before
    the validation of its own step, so the lines of training and those of validation may end at different steps.
    """

    def __init__(self, run: Path, trained: int, validated: int) -> None:
        self.path = run / "metrics.jsonl"
        kept = _lines_until(self.path, {"train": trained, "valid": validated})
        write_text(self.path, "".join(f"{line}\n" for line in kept))
        with disk_errors(run):
            self.file = self.path.open("a", encoding="utf-8")
            self.board = _tensorboard(run / "tensorboard", trained)

    def write(self, kind: str, step: int, **values: Any) -> None:
        with disk_errors(self.path):
            self.file.write(json.dumps({"kind": kind, "step": step, **values}) + "\n")
            self.file.flush()
            for name, value in values.items():
                if isinstance(value, (int, float)):
                    self.board.add_scalar(f"{kind}/{name}", value, step)

    def sync(self) -> None:
        """Sync metrics.jsonl to disk; a checkpoint that is saved next relies on these lines."""
        with disk_errors(self.path):
            sync(self.path)

    def close(self) -> None:
        with disk_errors(self.path):
            self.file.close()
            self.board.close()


class NoMetrics:
    """The metrics of a process that writes none: another one does."""

    def write(self, kind: str, step: int, **values: Any) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self) -> None:
        pass


def _lines_until(path: Path, last: dict[str, int]) -> list[str]:
    """Return the lines of each kind up to its last step."""
    if not exists(path):
        return []
    kept = []
    for line in read_metric_lines(path):
        try:
            values = parse_json(line)
            if values["step"] <= last[values["kind"]]:
                kept.append(line.rstrip("\n"))
        except (ValueError, KeyError, TypeError):  # a killed run may have left half a line
            continue
    return kept


def read_metric_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a metrics.jsonl, unparsed."""
    try:
        with open_regular(path) as file:
            yield from io.TextIOWrapper(file, encoding="utf-8", errors="replace")
    except OSError as error:
        raise RegardError(f"cannot read {path}: {error.strerror or error}; put the file back, or remove it") from None


def _tensorboard(folder: Path, resumed_step: int) -> Any:
    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=resumed_step + 1)


class ProgressDisplay:
    """The progress of training on stderr: a progress bar on a terminal, plain lines elsewhere."""

    def __init__(self, done: int, total: int, quiet: bool = False) -> None:
        self.console = stderr_console(quiet=quiet, highlight=False, soft_wrap=True)
        self.is_live = self.console.is_terminal and not quiet
        self.progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.is_live,
        )
        self.task = self.progress.add_task("", total=total, completed=done, status="")
        self.progress.start()

    def say(self, text: str) -> None:
        self.console.print(escape_controls(text), markup=False)

    def step(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def status(self, step: int, status: str) -> None:
        self.progress.update(self.task, status=status)
        if not self.is_live:
            self.say(f"step {step:,} of {self.progress.tasks[0].total:,.0f}: {status}")

    def close(self) -> None:
        self.progress.stop()


def print_message(text: str, quiet: bool = False) -> None:
    """Print a line to stderr, for messages outside the training loop."""
    if not quiet:
        print(escape_controls(text), file=sys.stderr, flush=True)
