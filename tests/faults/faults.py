"""Faults put into files, the limits that every case runs under, and what must hold afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import stat
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.files import MANIFEST, sha256

SECONDS = 5.0  # of the processor
ALARM, PATIENCE = 0.5, 10  # seconds between alarms, and how many of them without work are a hang
ROOM = 1 << 30  # bytes of address space that a case may take
NOBODY = 65534


class Hang(BaseException):
    """Raised by the alarm; no `except Exception` swallows it."""


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """End whatever takes more than some seconds of the processor, waits without work, or takes more than a gigabyte.

    Time on the clock would not tell a hang from a busy machine, on which a process may get no turn for a minute. So an
    alarm rings again and again, and counts when nothing at all was done since the last: what waits for a FIFO wakes for
    each alarm, what waits for its turn wakes to work.
    """
    idle, done = 0, time.process_time()

    def ring(*_: Any) -> None:
        nonlocal idle, done
        idle, done, before = idle + 1, time.process_time(), done
        idle = 0 if done - before > 1e-3 else idle
        if idle >= PATIENCE:
            raise Hang(f"nothing was done for {PATIENCE} alarms")

    def work(*_: Any) -> None:
        raise Hang(f"not done after {SECONDS} s of work")

    alarms = {signal.SIGALRM: (signal.ITIMER_REAL, ring), signal.SIGPROF: (signal.ITIMER_PROF, work)}
    handlers = {number: signal.signal(number, handler) for number, (_, handler) in alarms.items()}
    old = resource.getrlimit(resource.RLIMIT_AS)
    with contextlib.suppress(OSError):  # where there is no /proc, time alone is limited
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM, old[1]))
    signal.setitimer(signal.ITIMER_REAL, ALARM, ALARM)  # and again: a join of threads would wait for ever
    signal.setitimer(signal.ITIMER_PROF, SECONDS, 1.0)
    try:
        yield
    finally:
        for number, (timer, _) in alarms.items():
            signal.setitimer(timer, 0)
            signal.signal(number, handlers[number])
        resource.setrlimit(resource.RLIMIT_AS, old)


def outcome(act: Callable[[], Any]) -> tuple[str, Any]:
    """Return ("line", the message) where `act` raises a `RegardError` of one line, else ("result", what it returns)."""
    try:
        with limits():
            return "result", act()
    except RegardError as error:
        said = str(error)
        assert said.strip()
        assert "\n" not in said
        assert len(said) < 2000, f"{len(said)} characters"
        return "line", said


# ---- faults ----------------------------------------------------------------------------------------------------------


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def halved(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flipped(share: float, bit: int) -> Callable[[Path], None]:
    def flip(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(share * (len(content) - 1))] ^= 1 << bit
        path.write_bytes(content)

    return flip


def folder_instead(path: Path) -> None:
    path.unlink()
    path.mkdir()


def fifo_instead(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def unreadable(path: Path) -> None:
    path.chmod(0)


def huge_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", (1 << 63) - 1) + content[8:])


def long_header(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(struct.pack("<Q", 90 << 20) + content[8:])


FAULTS: dict[str, Callable[[Path], None]] = {
    "emptied": emptied,
    "halved": halved,
    "first-bit": flipped(0.0, 0),
    "bit-at-a-quarter": flipped(0.25, 1),
    "bit-in-the-middle": flipped(0.5, 0),
    "bit-at-three-quarters": flipped(0.75, 6),
    "last-bit": flipped(1.0, 7),
    "deleted": Path.unlink,
    "folder": folder_instead,
    "fifo": fifo_instead,
    "link-to-itself": link_to_itself,
    "unreadable": unreadable,
}
FLIPS = tuple(name for name in FAULTS if "bit" in name)
HEADERS: dict[str, Callable[[Path], None]] = {"huge-header": huge_header, "long-header": long_header}
EVERY = {**FAULTS, **HEADERS}


def cases(files: list[str]) -> list[tuple[str, str]]:
    """Return every (file, fault) that makes sense."""
    return [(file, fault) for file in files for fault in EVERY if fault in FAULTS or file.endswith(".safetensors")]


@contextlib.contextmanager
def as_nobody(fault: str) -> Iterator[None]:
    """Take the rights of root away where a file is unreadable: root reads it all the same."""
    if fault != "unreadable" or os.geteuid():
        yield
        return
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


# ---- folders ---------------------------------------------------------------------------------------------------------


def reseal(folder: Path) -> None:
    """Write the manifest that belongs to the files as they are now, as a user who changed them on purpose would."""
    (folder / MANIFEST).unlink(missing_ok=True)
    sums = {path.name: sha256(path) for path in sorted(folder.iterdir()) if path.is_file() and not path.is_symlink()}
    (folder / MANIFEST).write_text(json.dumps({"sha256": sums}))


def copied(folder: Path, place: Path) -> Path:
    """Return a copy of a folder that every user may read."""
    shutil.copytree(folder, place, symlinks=True)
    if not os.geteuid():
        for path in (place, *place.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
            path.chmod(0o755 if path.is_dir() else 0o644)
    return place


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return the kind and the bytes of everything below a folder."""
    found = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        what = path.read_bytes() if stat.S_ISREG(mode) else b""
        found[str(path.relative_to(folder))] = (stat.S_IFMT(mode), what)
    return found


def change_json(path: Path, keys: tuple[str, ...], value: Any) -> None:
    """Set one value of a JSON file; a `str` that begins with "json:" is put in as that text."""
    values = json.loads(path.read_text())
    place = values
    for key in keys[:-1]:
        place = place[key]
    place[keys[-1]] = "@@" if isinstance(value, str) and value.startswith("json:") else value
    text = json.dumps(values)
    if isinstance(value, str) and value.startswith("json:"):
        text = text.replace('"@@"', value.removeprefix("json:"))
    path.write_text(text)


DEEP = "json:" + "[" * 100_000 + "]" * 100_000
WRONG: dict[str, Any] = {
    "zero": 0, "minus-one": -1, "1e9": 1_000_000_000, "1e30": "json:1e30", "text": "x", "null": None,
}  # fmt: skip
TYPES: dict[str, Any] = {"list": [[1]], "object": {"a": 1}, "true": True, "deep": DEEP, "digits": "json:" + "9" * 4000}
