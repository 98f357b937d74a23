"""Writing that cannot half-happen: fsync, checksums, and a rename as the last act."""

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


def temporary_path(path: Path) -> Path:
    """Return the hidden name under which this process writes what will be renamed to `path`."""
    return path.with_name(f".{path.name}.draft-{os.getpid()}")


def _replaced(path: Path) -> Path:
    """Return the hidden name that the old folder at `path` has while a new one takes its place."""
    return path.with_name(f".{path.name}.replaced-{os.getpid()}")


HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>draft|replaced)-\d+")  # the names that draft_of and _replaced give


def remove_drafts(folder: Path, *names: str, own: Collection[str] = ()) -> None:
    """Remove the drafts of `names` (patterns) that killed processes left in a folder which this process alone uses.

    A folder that was being replaced gets its name back where its successor does not have it yet; otherwise the successor
    gets the user's files that are still in it. `own` is as in `new_folder`.
    """
    for path in list(folder.iterdir()) if folder.is_dir() else []:
        hidden = HIDDEN.fullmatch(path.name)
        if not hidden or not any(fnmatchcase(hidden["name"], name) for name in names):
            continue
        successor = folder / hidden["name"]
        if hidden["kind"] == "draft":
            remove(path)
        elif not os.path.lexists(successor):
            path.rename(successor)
        else:
            _retire(path, successor, own)


def remove(path: Path) -> None:
    """Remove a file or a folder of Regard's own, if it is there and can be removed."""
    if is_folder(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_folder(path: Path) -> bool:
    """Return whether `path` is a folder itself, not a symbolic link to one."""
    return path.is_dir() and not path.is_symlink()


def remove_files(folder: Path, *patterns: str) -> None:
    """Remove the files in `folder` whose names match; folders of these names stay."""
    for path in list(folder.iterdir()):
        if any(fnmatchcase(path.name, pattern) for pattern in patterns) and not is_folder(path):
            path.unlink(missing_ok=True)


def remove_folder(folder: Path, *patterns: str) -> None:
    """Remove the files in `folder` whose names match, and the folder if nothing else is in it.

    Where `folder` is a symbolic link, nothing is removed.
    """
    if is_folder(folder):
        remove_files(folder, *patterns)
        with contextlib.suppress(OSError):  # it is not empty
            folder.rmdir()


def remove_sealed(folder: Path, own: Collection[str] = ()) -> None:
    """Remove the files that the manifest of a sealed folder names, and the folder if nothing else is in it.

    Where the manifest cannot be read, files are removed that have one of the names `own`.
    """
    if is_folder(folder):
        remove_drafts(folder, "*")
    names = _own_names(folder, own)
    remove_folder(folder, *(glob.escape(name) for name in names - {MANIFEST}))
    remove_folder(folder, *(names & {MANIFEST}))  # last: a removal that was killed still knows the names


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """A full or read-only disk, said in one line."""
    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors reports the disk's errors in its own words
        full = any(os.strerror(number) in str(error) for number in (errno.ENOSPC, errno.EDQUOT))
        hint = "free some space" if full else "check the folder's permissions and disk"
        what = getattr(error, "strerror", None) or error
        raise RegardError(
            f"cannot write {shorten_path(path)}: {what}; {hint} and run the same command again"
        ) from error


@contextlib.contextmanager
def atomic_folder(path: Path, own: Collection[str] = ()) -> Iterator[Path]:
    """Fill a draft folder; on success it gets its manifest and then its name, on any error it vanishes.

    The manifest is written last and names the SHA-256 of every other file: a folder without a matching one is not whole.

    A folder that is already at `path` is replaced if it is empty or has a manifest. Files that its manifest does not name
    are a user's, and are moved into the new folder. Any other folder is refused, unless the caller knows it to be Regard's
    and gives the names `own` of the files that Regard writes there.
    """
    draft, old = temporary_path(path), _replaced(path)
    with disk_errors(path):
        check_replaceable(path, own)
        remove(draft)
        try:
            draft.mkdir(parents=True)
            yield draft
            write_manifest(draft)
            check_replaceable(path, own)
            if old.exists():  # left by a killed process that had the same number
                _retire(old, path, own) if path.exists() else old.rename(path)
            try:
                if path.exists():  # only two renames, not a slow removal, lie between the old folder and the new
                    path.rename(old)
                draft.rename(path)
            except BaseException:
                if old.exists() and not path.exists():
                    old.rename(path)
                raise
            sync(path.parent)
            _retire(old, path, own)
        finally:
            remove(draft)


def check_replaceable(path: Path, own: Collection[str] = ()) -> None:
    """Raise a RegardError if `new_folder` would not replace what is at `path`."""
    if path.is_symlink():
        raise RegardError(f"{path} is a symbolic link and is not replaced: remove the link or choose another folder")
    if path.exists() and not path.is_dir():
        raise RegardError(f"{path} is a file and is not replaced by a folder: choose another name")
    if path.exists() and not own and manifest_of(path) is None and any(path.iterdir()):
        raise RegardError(f"{path} holds files that Regard did not write and is not replaced: choose another folder")


def _retire(old: Path, new: Path, own: Collection[str]) -> None:
    """Move a user's files from a replaced folder to its successor, and remove the rest of it."""
    names = _own_names(old, own)
    for path in list(old.iterdir()) if names and old.is_dir() else []:
        if is_folder(path) or path.name not in names:
            if HIDDEN.fullmatch(path.name):
                remove(path)
            else:
                path.rename(_free(new / path.name))
    remove_sealed(old, own)


def _free(path: Path) -> Path:
    """Return `path`, with a number behind its name if something else has that name."""
    names = chain([path], (path.with_name(f"{path.name}.{i}") for i in count(1)))
    return next(name for name in names if not os.path.lexists(name))


def add_file(folder: Path, name: str, write: Callable[[Path], object]) -> None:
    """Write a file into a folder and enter it into the folder's manifest, which is begun if there is none.

    The manifest is first written without the file and then with it, so the folder is whole at any moment in between.
    """
    path = folder / name
    draft = temporary_path(path)
    with disk_errors(path):
        folder.mkdir(parents=True, exist_ok=True)
        if (sums := manifest_of(folder)) is None and os.path.lexists(folder / MANIFEST):
            raise RegardError(
                f"{folder / MANIFEST} is damaged or was not written by Regard: move it away and try again"
            )
        others = {k: v for k, v in (sums or {}).items() if k != name}
        try:
            write(draft)
            sync(draft)
            write_text(folder / MANIFEST, _manifest(others))
            draft.rename(path)
            write_text(folder / MANIFEST, _manifest(others | {name: sha256(path)}))
        finally:
            draft.unlink(missing_ok=True)


def write_manifest(folder: Path) -> None:
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
    manifest.write_text(_manifest(sums), encoding="utf-8")
    sync(manifest)
    sync(folder)


def _manifest(sums: dict[str, str]) -> str:
    return json.dumps({"sha256": sums}, indent=1)


def manifest_of(folder: Path) -> dict[str, str] | None:
    """Return the checksums by file name in a folder's manifest, or None if it has no manifest that can be read."""
    try:
        return _read_manifest(folder)
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _read_manifest(folder: Path) -> dict[str, str]:
    sums: dict[str, str] = read_json(folder / MANIFEST)["sha256"]
    for name, expected in sums.items():
        if Path(name).name != name or name in ("", "..", MANIFEST):
            raise _Damaged(f"{MANIFEST} names a file outside the folder")
        if not re.fullmatch(r"[0-9a-f]{64}", expected):
            raise ValueError(expected)
    return sums


def _own_names(folder: Path, own: Collection[str]) -> set[str]:
    """Return the names of Regard's files in a folder: those in its manifest or, where it cannot be read, `own`."""
    sums = manifest_of(folder)
    names = set(own if sums is None else sums)
    return names | {MANIFEST} if own or sums is not None else names


class _Damaged(ValueError):
    """What is wrong with a sealed folder."""


def find_damage(folder: Path) -> str | None:
    """Return what is wrong with a sealed folder, or None when every checksum holds."""
    try:
        for name, expected in _read_manifest(folder).items():
            if sha256(folder / name) != expected:
                return f"{name} does not match its checksum"
    except _Damaged as error:
        return str(error)
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
        raise RegardError(
            f"cannot look at {shorten_path(path)}: {error.strerror or error}; give another path"
        ) from None


def shorten_path(path: Path) -> str:
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
