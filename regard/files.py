"""Writing that cannot half-happen: fsync, checksums, and a rename as the last act."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import stat
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from regard.errors import RegardError

MANIFEST = "manifest.json"
LARGEST_TEXT = 1 << 28  # bytes; the tokenizer.json of a vocabulary of 250,000 pieces has about 2^25


def sha256(path: Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    """Force a file, or a folder's list of names, onto the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Replace a small file in one act."""
    draft = _draft(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text, encoding="utf-8")
            sync(draft)
            draft.rename(path)
            sync(path.parent)
        finally:
            draft.unlink(missing_ok=True)


def _draft(path: Path) -> Path:
    """Where this process writes what will be `path`; the dot hides it, the number keeps processes apart."""
    return path.with_name(f".{path.name}.{os.getpid()}")


def remove_drafts(folder: Path, *names: str) -> None:
    """Clear away the drafts of `names` (patterns) that killed processes left in a folder which is now ours alone."""
    for path in chain.from_iterable(folder.glob(f".{name}.*") for name in names):
        if path.suffix[1:].isdecimal():
            remove(path)


def remove(path: Path) -> None:
    """A file or a folder, if it is there and can be removed."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full or read-only disk, said in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports the disk's errors in its own words
        full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
        hint = "free some space" if full else "check the folder's permissions and disk"
        what = getattr(error, "strerror", None) or error
        raise RegardError(f"cannot write {path}: {what}; {hint} and run the same command again") from error


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Fill a draft folder; on success it gets its manifest and then its name, on any error it vanishes.

    The manifest is written last and names the SHA-256 of every other file: a folder without a matching one is not whole.
    """
    draft, old = _draft(path), _draft(path.with_name(f"{path.name}.old"))
    with disk_errors(path):
        remove(draft)
        try:
            draft.mkdir(parents=True)
            yield draft
            seal(draft)
            if path.exists():  # only two renames, not a slow removal, lie between the old folder and the new
                remove(old)
                path.rename(old)
            try:
                draft.rename(path)
            except OSError:
                if old.exists():
                    old.rename(path)
                raise
            sync(path.parent)
            remove(old)
        finally:
            remove(draft)


def seal(folder: Path) -> None:
    """fsync every file, then write the manifest of their checksums.

    Every file gets the mode that the manifest has from `open` and the umask: safetensors creates its files with 0600.
    """
    sums, manifest = {}, folder / MANIFEST
    manifest.touch()
    mode = stat.S_IMODE(manifest.stat().st_mode)
    for path in sorted(path for path in folder.iterdir() if path != manifest):
        path.chmod(mode)
        sync(path)
        sums[path.name] = sha256(path)
    manifest.write_text(json.dumps({"sha256": sums}, indent=1), encoding="utf-8")
    sync(manifest)
    sync(folder)


def damage(folder: Path) -> str | None:
    """What is wrong with a sealed folder, or None when every checksum holds."""
    try:
        sums = read_json(folder / MANIFEST)["sha256"]
        for name, expected in sums.items():
            if Path(name).name != name or name in ("", ".."):
                return f"{MANIFEST} names a file outside the folder"
            if sha256(folder / name) != expected:
                return f"{name} does not match its checksum"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except NotRegular as error:
        return f"{Path(error.filename).name} is {error.strerror}"
    except OSError as error:  # says nothing about what is written there
        raise RegardError(f"cannot read {folder}: {error.strerror or error}; check the disk") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


# ---- reading -----------------------------------------------------------------------------------------------------


class NotRegular(OSError):
    """The error of a path that is no regular file, such as a folder or a FIFO."""


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading.

    Anything else in its place raises `NotRegular`, without waiting: opening a FIFO the usual way blocks until somebody
    writes to it.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        kind = "a folder" if stat.S_ISDIR(mode) else "a FIFO or device"
        raise NotRegular(errno.EINVAL, f"{kind}, not a file", str(path))
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path) -> Path:
    """Return `path` if it can be opened as a regular file, for libraries that open files themselves."""
    open_regular(path).close()
    return path


def read_bytes(path: Path, most: int = LARGEST_TEXT) -> bytes:
    """Return the content of a small file. What is wrong with it is an `OSError` or a `ValueError`."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it is larger than {most >> 20:,} MiB")
        return file.read()


def read_text(path: Path) -> str:
    """Return the text of a small UTF-8 file. What is wrong with it is an `OSError` or a `ValueError`."""
    return read_bytes(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the value in a small JSON file. What is wrong with it is an `OSError` or a `ValueError`."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; one that is nested too deeply is a `ValueError` like any other broken text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file, empty where there is no file; anything else is a `RegardError`."""
    if not exists(path):
        return {}
    try:
        values = read_json(path)
    except (ValueError, OSError) as error:
        why = getattr(error, "strerror", None) or error
        raise RegardError(f"{path} cannot be read as JSON ({why}); copy it anew") from None
    if not isinstance(values, dict):
        raise RegardError(f"{path} is not a JSON object; copy it anew")
    return values


def exists(path: Path) -> bool:
    """Return whether there is something at `path`; a name or folder that cannot be looked up is a `RegardError`."""
    try:
        return path.exists()
    except OSError as error:
        raise RegardError(f"cannot look at {shortened(path)}: {error.strerror or error}; give another path") from None


def shortened(path: Path) -> str:
    """Return a path as text for an error message, its middle left out where it is very long."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:90]} ... {text[-90:]}"


def refuse_pickle(folder: Path) -> None:
    """Pickled weights run whatever code they contain."""
    pickled = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt", "pkl") for path in folder.glob(f"*.{ending}"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise RegardError(
            f"the weights in {folder} are pickled ({pickled[0]}), and loading a pickle can run any code in it: "
            f"Regard reads model.safetensors alone; convert them where you trust them"
        )
