"""Atomic writes, checksums, and careful reading and removing of files.

A reader or a crash must never see half of a file or folder. An atomic write goes to a temporary name first, is forced onto
the disk (fsync), and is then renamed, which file systems do in one step. A folder also gets a manifest.json with the SHA-256
checksum of every file, written last: a folder whose checksums do not match is damaged.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Collection, Iterator
from fnmatch import fnmatchcase
from itertools import chain, count
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from regard.errors import RegardError

MANIFEST = "manifest.json"
LARGEST_TEXT = 1 << 28  # bytes; the tokenizer.json of a vocabulary of 250,000 pieces has about 2^25


# ---- atomic writes ----------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically: a reader sees the old content or the new one, never a part."""
    draft = temporary_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            draft.write_text(text, encoding="utf-8")
            sync(draft)
            draft.rename(path)
            sync(path.parent)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def atomic_folder(path: Path, own: Collection[str] = ()) -> Iterator[Path]:
    """Write a folder atomically: yield a temporary folder to fill, then write its manifest and rename it to `path`.

    After any error the temporary folder is removed and nothing has changed at `path`.

    A folder that is already at `path` is replaced if it is empty or has a manifest. Files that its manifest does not name
    are a user's, and are moved into the new folder. Any other folder is an error, unless the caller knows it to be
    Regard's and gives the names `own` of the files that Regard writes there.
    """
    draft, old = temporary_path(path), _replaced_path(path)
    with disk_errors(path):
        check_replaceable(path, own)
        remove(draft)
        try:
            draft.mkdir(parents=True)
            yield draft
            write_manifest(draft)
            check_replaceable(path, own)
            if old.exists():  # left by a killed process with the same process id
                _remove_replaced(old, path, own) if path.exists() else old.rename(path)
            try:
                if path.exists():  # renamed, not removed: removing takes time, and until then there is no folder
                    path.rename(old)
                draft.rename(path)
            except BaseException:
                if old.exists() and not path.exists():
                    old.rename(path)
                raise
            sync(path.parent)
            _remove_replaced(old, path, own)
        finally:
            remove(draft)


def check_replaceable(path: Path, own: Collection[str] = ()) -> None:
    """Raise a RegardError if `atomic_folder` would not replace what is at `path`."""
    if path.is_symlink():
        raise RegardError(f"{path} is a symbolic link and is not replaced: remove the link or choose another folder")
    if path.exists() and not path.is_dir():
        raise RegardError(f"{path} is a file and is not replaced by a folder: choose another name")
    if path.exists() and not own and read_checksums(path) is None and any(path.iterdir()):
        raise RegardError(f"{path} holds files that Regard did not write and is not replaced: choose another folder")


def add_file(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    """Write a file into a folder atomically and add its checksum to the folder's manifest, which is created if needed.

    The manifest is first written without the file and then with it, so that its checksums hold at any moment.
    """
    path = folder / name
    draft = temporary_path(path)
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if (sums := read_checksums(folder)) is None and os.path.lexists(folder / MANIFEST):
            raise RegardError(
                f"{folder / MANIFEST} is damaged or was not written by Regard: move it away and try again"
            )
        others = {k: v for k, v in (sums or {}).items() if k != name}
        try:
            write(draft)
            sync(draft)
            write_text(folder / MANIFEST, _manifest_text(others))
            draft.rename(path)
            write_text(folder / MANIFEST, _manifest_text(others | {name: sha256(path)}))
        finally:
            draft.unlink(missing_ok=True)


def temporary_path(path: Path) -> Path:
    """Return the hidden name under which this process writes what will be renamed to `path`."""
    return path.with_name(f".{path.name}.draft-{os.getpid()}")


def _replaced_path(path: Path) -> Path:
    """Return the hidden name that the old folder at `path` has while a new one takes its place."""
    return path.with_name(f".{path.name}.replaced-{os.getpid()}")


# Matches the names that temporary_path and _replaced_path return.
TEMPORARY_NAME = re.compile(r"\.(?P<name>.+)\.(?P<kind>draft|replaced)-\d+")


def _remove_replaced(old: Path, new: Path, own: Collection[str]) -> None:
    """Move a user's files from a replaced folder to its successor, and remove the rest of it."""
    names = _own_names(old, own)
    for path in list(old.iterdir()) if names and old.is_dir() else []:
        if is_folder(path) or path.name not in names:
            if TEMPORARY_NAME.fullmatch(path.name):
                remove(path)
            else:
                path.rename(_unused_name(new / path.name))
    remove_atomic_folder(old, own)


def _unused_name(path: Path) -> Path:
    """Return `path`, with a number after its name if that name is taken."""
    names = chain([path], (path.with_name(f"{path.name}.{i}") for i in count(1)))
    return next(name for name in names if not os.path.lexists(name))


def sync(path: Path) -> None:
    """Force a file, or the list of names in a folder, onto the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn errors of a full or read-only disk into a RegardError about `path`."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports the disk's errors in its own words
        full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
        hint = "free some space" if full else "check the folder's permissions and disk"
        what = getattr(error, "strerror", None) or error
        raise RegardError(
            f"cannot write {shorten_path(path)}: {what}; {hint} and run the same command again"
        ) from error


# ---- checksums --------------------------------------------------------------------------------------------------------


def sha256(path: Path) -> str:
    """Return the SHA-256 checksum of a file."""
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_manifest(folder: Path) -> None:
    """Write the manifest of a folder, the checksums of its files, after flushing every file to the disk (fsync).

    Every file gets the permissions that a new file has by the umask: safetensors creates its files with 0600.
    """
    sums, manifest = {}, folder / MANIFEST
    manifest.touch()
    mode = stat.S_IMODE(manifest.stat().st_mode)
    for path in sorted(path for path in folder.iterdir() if path != manifest):
        path.chmod(mode)
        sync(path)
        sums[path.name] = sha256(path)
    manifest.write_text(_manifest_text(sums), encoding="utf-8")
    sync(manifest)
    sync(folder)


def _manifest_text(sums: dict[str, str]) -> str:
    return json.dumps({"sha256": sums}, indent=1)


def find_damage(folder: Path) -> str | None:
    """Verify the checksums of a folder: return what is wrong with it, or None when every checksum matches."""
    try:
        for name, expected in _parse_manifest(folder).items():
            if sha256(folder / name) != expected:
                return f"{name} does not match its checksum"
    except _Damaged as error:
        return str(error)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except NotRegular as error:
        return f"{Path(error.filename).name} is {error.strerror}"
    except OSError as error:  # the disk failed, which does not mean that the files are damaged
        raise RegardError(f"cannot read {folder}: {error.strerror or error}; check the disk") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({type(error).__name__})"
    return None


class _Damaged(ValueError):
    """An error in a manifest; its message says what is wrong."""


def read_checksums(folder: Path) -> dict[str, str] | None:
    """Return the checksums in a folder's manifest by file name, or None if it has no readable manifest."""
    try:
        return _parse_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _parse_manifest(folder: Path) -> dict[str, str]:
    sums: dict[str, str] = read_json(folder / MANIFEST)["sha256"]
    for name, expected in sums.items():
        if Path(name).name != name or name in ("", "..", MANIFEST):
            raise _Damaged(f"{MANIFEST} names a file outside the folder")
        if not re.fullmatch(r"[0-9a-f]{64}", expected):
            raise ValueError(expected)
    return sums


def _own_names(folder: Path, own: Collection[str]) -> set[str]:
    """Return the names of Regard's files in a folder: those in its manifest or, where it cannot be read, `own`."""
    sums = read_checksums(folder)
    names = set(own if sums is None else sums)
    return names | {MANIFEST} if own or sums is not None else names


# ---- removing ---------------------------------------------------------------------------------------------------------


def remove_atomic_folder(folder: Path, own: Collection[str] = ()) -> None:
    """Remove the files that the manifest of a folder names, and the folder if nothing else is in it.

    Where the manifest cannot be read, files with one of the names `own` are removed.
    """
    if is_folder(folder):
        remove_drafts(folder, "*")
    names = _own_names(folder, own)
    remove_folder(folder, *(glob.escape(name) for name in names - {MANIFEST}))
    remove_folder(folder, *(names & {MANIFEST}))  # last, so that a removal that was killed can be repeated


def remove_folder(folder: Path, *patterns: str) -> None:
    """Remove the files in `folder` whose names match, and the folder if nothing else is in it.

    Where `folder` is a symbolic link, nothing is removed.
    """
    if is_folder(folder):
        remove_files(folder, *patterns)
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def remove_files(folder: Path, *patterns: str) -> None:
    """Remove the files in `folder` whose names match; folders of these names stay."""
    for path in list(folder.iterdir()):
        if any(fnmatchcase(path.name, pattern) for pattern in patterns) and not is_folder(path):
            path.unlink(missing_ok=True)


def remove_drafts(folder: Path, *names: str, own: Collection[str] = ()) -> None:
    """Remove the temporary files of `names` (patterns) that killed processes left in a folder.

    No other process may use the folder. A folder that was being replaced gets its name back where its successor does not
    have it yet; otherwise the successor gets the user's files that are still in it. `own` is as in `atomic_folder`.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        hidden = TEMPORARY_NAME.fullmatch(path.name)
        if not hidden or not any(fnmatchcase(hidden["name"], name) for name in names):
            continue
        successor = folder / hidden["name"]
        if hidden["kind"] == "draft":
            remove(path)
        elif not os.path.lexists(successor):
            path.rename(successor)
        else:
            _remove_replaced(path, successor, own)


def remove(path: Path) -> None:
    """Remove a file or folder that Regard wrote, if it exists and can be removed."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder itself, not a symbolic link to one."""
    return path.is_dir() and not path.is_symlink()


# ---- reading ----------------------------------------------------------------------------------------------------------


class NotRegular(OSError):
    """The error of opening something that is not a regular file, such as a folder or a FIFO."""


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
    """Return the content of a small file. Errors are `OSError` or `ValueError`."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > most:
            raise ValueError(f"it is larger than {most >> 20:,} MiB")
        return file.read()


def read_text(path: Path) -> str:
    """Return the text of a small UTF-8 file. Errors are `OSError` or `ValueError`."""
    return read_bytes(path).decode("utf-8")


def read_json(path: Path) -> Any:
    """Return the value in a small JSON file. Errors are `OSError` or `ValueError`."""
    return parse_json(read_text(path))


def parse_json(text: str) -> Any:
    """Return the value of a JSON text; one that is nested too deeply is a `ValueError` like any other broken text."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a small JSON file, or an empty one if there is no file; anything else is a `RegardError`."""
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
    """Return whether something exists at `path`; a path that cannot be looked up is a `RegardError`."""
    try:
        return path.exists()
    except OSError as error:
        raise RegardError(
            f"cannot look at {shorten_path(path)}: {error.strerror or error}; give another path"
        ) from None


def shorten_path(path: Path) -> str:
    """Return a path for an error message, without its middle where it is very long."""
    text = str(path)
    return text if len(text) <= 200 else f"{text[:90]} ... {text[-90:]}"


def refuse_pickle(folder: Path) -> None:
    """Raise a RegardError if a folder has only pickled weights: loading a pickle can run any code."""
    pickled = sorted(path.name for ending in ("bin", "pt", "pth", "ckpt", "pkl") for path in folder.glob(f"*.{ending}"))
    if pickled and not any(folder.glob("*.safetensors")):
        raise RegardError(
            f"the weights in {folder} are pickled ({pickled[0]}), and loading a pickle can run any code in it: "
            f"Regard reads model.safetensors alone; convert them where you trust them"
        )
