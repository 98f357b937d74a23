"""Atomic writes, checksums, and removing only what Regard wrote."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from regard import files
from regard.errors import RegardError
from regard.files import (
    MANIFEST,
    add_file,
    atomic_folder,
    disk_errors,
    find_damage,
    remove_atomic_folder,
    remove_drafts,
    write_manifest,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    with atomic_folder(tmp_path / "sealed") as draft:
        (draft / "a").write_bytes(b"first")
        (draft / "b").write_bytes(b"")
    return tmp_path / "sealed"


@pytest.fixture
def read_only() -> Iterator[Path]:
    """Make a read-only folder; if root runs the tests, they continue as another user."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        (Path(name) / "old").write_text("old")
        os.chmod(name, 0o555)
        if user := os.geteuid():
            yield Path(name)
        else:
            os.seteuid(65534)
            try:
                yield Path(name)
            finally:
                os.seteuid(user)
        os.chmod(name, 0o755)


def full_disk_at(monkeypatch: pytest.MonkeyPatch, nth: int) -> None:
    """Let the n-th fsync from now fail with a full disk."""
    calls, fsync = iter(range(1, 1000)), os.fsync

    def full(descriptor: int) -> None:
        if next(calls) == nth:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)


# ---- write_text --------------------------------------------------------------------------------------------------


def test_write_text_makes_folders_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b.txt"
    write_text(path, "eins\n")
    write_text(path, "zwei ü\n")
    assert path.read_bytes() == "zwei ü\n".encode()
    assert names(path.parent) == ["b.txt"]


def test_write_text_on_a_full_disk_keeps_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "x", "old")
    full_disk_at(monkeypatch, 1)
    with pytest.raises(RegardError, match=r"cannot write .*x: No space left on device; free some space"):
        write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_write_text_to_dev_full_for_real() -> None:
    with pytest.raises(RegardError, match="No space left on device; free some space"), disk_errors(Path("/dev/full")):
        Path("/dev/full").write_text("x")


def test_a_read_only_folder(read_only: Path) -> None:
    for path in (read_only / "old", read_only / "folder" / "new"):
        with pytest.raises(RegardError, match="Permission denied; check the folder's permissions"):
            write_text(path, "new")
    with (
        pytest.raises(RegardError, match="Permission denied; check the folder's permissions"),
        atomic_folder(read_only / "x"),
    ):
        pass
    assert names(read_only) == ["old"]


@pytest.mark.parametrize(
    "words",
    [
        "Error while serializing: I/O error: No space left on device (os error 28)",
        'Error while serializing: IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
    ],
)
def test_a_full_disk_in_the_words_of_safetensors(words: str) -> None:
    with pytest.raises(RegardError, match=r"No space left on device.*free some space"), disk_errors(Path("x")):
        raise SafetensorError(words)


# ---- atomic_folder -----------------------------------------------------------------------------------------------


def test_an_atomic_folder_has_the_checksums_of_its_files(sealed: Path) -> None:
    sums = json.loads((sealed / MANIFEST).read_text())["sha256"]
    assert sums == {"a": hashlib.sha256(b"first").hexdigest(), "b": hashlib.sha256(b"").hexdigest()}
    assert find_damage(sealed) is None
    assert names(sealed.parent) == ["sealed"]


def test_a_new_folder_replaces_an_old_one(sealed: Path) -> None:
    with atomic_folder(sealed) as draft:
        (draft / "c").write_bytes(b"second")
        assert find_damage(sealed) is None  # the old one, until the new one is whole
    assert names(sealed) == ["c", MANIFEST]
    assert find_damage(sealed) is None
    assert names(sealed.parent) == ["sealed"]


@pytest.mark.parametrize("error", [RegardError("bad"), KeyboardInterrupt(), ValueError()])
def test_an_error_leaves_the_old_folder(sealed: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), atomic_folder(sealed) as draft:  # noqa: PT012
        (draft / "a").write_bytes(b"half")
        raise error
    assert (sealed / "a").read_bytes() == b"first"
    assert names(sealed.parent) == ["sealed"]


@pytest.mark.parametrize("nth", [1, 2, 3, 4])  # two files, the manifest, the folder
def test_a_full_disk_leaves_the_old_folder(sealed: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk_at(monkeypatch, nth)
    with pytest.raises(RegardError, match="No space left on device; free some space"), atomic_folder(sealed) as draft:  # noqa: PT012
        (draft / "a").write_bytes(b"new")
        (draft / "b").write_bytes(b"new")
    assert find_damage(sealed) is None
    assert (sealed / "a").read_bytes() == b"first"
    assert names(sealed.parent) == ["sealed"]


def test_temporary_files_of_killed_processes_are_removed_and_nothing_else(sealed: Path) -> None:
    folder = sealed.parent
    kept = [
        ".config.toml.2024",
        ".mine.draft-12",
        ".sealed.12",
        ".sealed.draft",
        ".sealed.draft-12.txt",
        "sealed.draft-1",
    ]
    for name in (".sealed.draft-12", *kept):
        (folder / name).mkdir()
        (folder / name / "file").write_text("")
    (folder / ".config.toml.draft-7").write_text("half")
    remove_drafts(folder, "seal*", "config.toml")
    assert names(folder) == sorted(["sealed", *kept])


# ---- folders that are there already --------------------------------------------------------------------------------


def fill(path: Path, own: tuple[str, ...] = ()) -> None:
    with atomic_folder(path, own) as draft:
        (draft / "c").write_bytes(b"second")


def add_own(folder: Path) -> None:
    (folder / "notes").write_text("mine")
    (folder / "more").mkdir()
    (folder / "more" / "notes").write_text("mine too")
    (folder / "c").write_text("mine, under the name of a new file")


def check_own(folder: Path, *others: str) -> None:
    assert names(folder) == sorted(["c", "c.1", MANIFEST, "more", "notes", *others])
    assert (folder / "notes").read_text() == "mine"
    assert (folder / "more" / "notes").read_text() == "mine too"
    assert (folder / "c.1").read_text() == "mine, under the name of a new file"


def test_files_that_the_manifest_does_not_name_are_carried_over(sealed: Path) -> None:
    add_own(sealed)
    fill(sealed)
    check_own(sealed)
    assert find_damage(sealed) is None
    assert names(sealed.parent) == ["sealed"]


@pytest.mark.parametrize("manifest", [None, "{}", '{"sha256": {"../a": "b"}}', '{"name": "app", "icons": []}'])
def test_a_folder_without_a_manifest_of_ours_is_not_replaced(sealed: Path, manifest: str | None) -> None:
    (sealed / MANIFEST).unlink()
    if manifest is not None:
        (sealed / MANIFEST).write_text(manifest)
    before = {path.name: path.read_bytes() for path in sealed.iterdir()}
    with pytest.raises(RegardError, match="Regard did not write"):
        fill(sealed)
    assert {path.name: path.read_bytes() for path in sealed.iterdir()} == before
    add_own(sealed)
    fill(sealed, own=("a",))  # known to be ours by other means: what has another name is kept
    check_own(sealed, "b")


def test_files_links_and_empty_folders(tmp_path: Path, sealed: Path) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to("sealed")
    for name, said in (("file", "is a file"), ("link", "is a symbolic link")):
        with pytest.raises(RegardError, match=said):
            fill(tmp_path / name, own=("a",))
    (tmp_path / "empty").mkdir()
    fill(tmp_path / "empty")
    assert find_damage(tmp_path / "empty") is None
    assert (tmp_path / "file").read_text() == "mine"
    assert find_damage(tmp_path / "link") is None
    assert names(tmp_path) == ["empty", "file", "link", "sealed"]


class Killed(BaseException):
    """The exception that stands for SIGKILL inside one process."""


@pytest.mark.parametrize("nth", range(1, 20))
def test_a_replacement_killed_at_any_moment_loses_nothing(
    sealed: Path, nth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill between any two renames and removals; then clean up as the next run does at its start."""
    add_own(sealed)
    calls, folder = iter(range(1, 1000)), sealed.parent
    with monkeypatch.context() as patch, contextlib.suppress(Killed):
        for name in ("rename", "unlink", "rmdir"):
            original = getattr(Path, name)

            def dying(self: Path, *args: Any, original: Any = original, **kwargs: Any) -> Any:
                if next(calls) >= nth:  # and all that follows, as the clean-up of an exception
                    raise Killed
                return original(self, *args, **kwargs)

            patch.setattr(Path, name, dying)
        patch.setattr(files, "remove", lambda path: None)
        fill(sealed)
    remove_drafts(folder, "sealed")
    assert names(folder) == ["sealed"]
    assert find_damage(sealed) is None
    assert (sealed / "notes").read_text() == "mine"
    fill(sealed)
    assert {"mine", "mine, under the name of a new file"} <= {p.read_text() for p in sealed.glob("[cn]*")}
    assert (sealed / "more" / "notes").read_text() == "mine too"
    assert find_damage(sealed) is None


def test_an_interruption_between_the_two_renames_puts_the_old_folder_back(
    sealed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rename = Path.rename

    def interrupted(self: Path, target: Path) -> Path:
        if ".draft-" in self.name:
            raise KeyboardInterrupt
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fill(sealed)
    assert find_damage(sealed) is None
    assert (sealed / "a").read_bytes() == b"first"
    assert names(sealed.parent) == ["sealed"]


def test_a_file_is_added_to_the_manifest(sealed: Path) -> None:
    for text in ("one", "two"):
        add_file(sealed, "new", lambda draft, text=text: draft.write_text(text))
        assert (sealed / "new").read_text() == text
        assert find_damage(sealed) is None
    assert names(sealed) == ["a", "b", MANIFEST, "new"]
    remove_atomic_folder(sealed)
    assert not sealed.exists()


def test_removing_an_atomic_folder_leaves_what_its_manifest_does_not_name(sealed: Path) -> None:
    add_own(sealed)
    (sealed / "b").unlink()
    (sealed / "b").mkdir()  # a user's folder under a name of ours
    remove_atomic_folder(sealed)
    assert names(sealed) == ["b", "c", "more", "notes"]
    remove_atomic_folder(sealed)
    assert names(sealed) == ["b", "c", "more", "notes"]


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b", MANIFEST])
def test_a_missing_file_is_named(sealed: Path, name: str) -> None:
    (sealed / name).unlink()
    assert find_damage(sealed) == f"{name} is missing"


def test_a_changed_file_is_named(sealed: Path) -> None:
    (sealed / "b").write_bytes(b"\0")
    assert find_damage(sealed) == "b does not match its checksum"


def test_every_byte_of_the_manifest_counts(sealed: Path) -> None:
    manifest = (sealed / MANIFEST).read_bytes()
    for place in range(len(manifest)):
        flipped = bytearray(manifest)
        flipped[place] ^= 1 << place % 8
        (sealed / MANIFEST).write_bytes(flipped)
        assert find_damage(sealed), f"byte {place}"


def test_every_cut_of_the_manifest_counts(sealed: Path) -> None:
    manifest = (sealed / MANIFEST).read_bytes()
    for size in range(len(manifest)):
        (sealed / MANIFEST).write_bytes(manifest[:size])
        assert find_damage(sealed), f"{size} bytes"


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/file", "", "..", "a/../a"])
def test_a_manifest_may_not_name_files_outside(sealed: Path, name: str) -> None:
    outside = sealed.parent / "outside"
    outside.write_bytes(b"x")
    (sealed / MANIFEST).write_text(json.dumps({"sha256": {name: hashlib.sha256(b"x").hexdigest()}}))
    assert find_damage(sealed)


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"sha256": []}', '{"sha256": {"a": null}}', '{"sha256": null}'])
def test_a_manifest_of_another_shape(sealed: Path, text: str) -> None:
    (sealed / MANIFEST).write_text(text)
    assert find_damage(sealed)


def test_a_new_manifest_makes_it_whole(sealed: Path) -> None:
    (sealed / "a").write_bytes(b"changed")
    (sealed / MANIFEST).unlink()
    write_manifest(sealed)
    assert find_damage(sealed) is None
