"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors import SafetensorError

from regard.errors import RegardError
from regard.files import MANIFEST, damage, disk_errors, new_folder, remove_drafts, seal, write_text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def sealed(tmp_path: Path) -> Path:
    with new_folder(tmp_path / "sealed") as draft:
        (draft / "a").write_bytes(b"first")
        (draft / "b").write_bytes(b"")
    return tmp_path / "sealed"


@pytest.fixture
def read_only() -> Iterator[Path]:
    """A folder that may be read only; where root runs the tests, as somebody else."""
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
    """The n-th fsync from now on finds the disk full."""
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
        new_folder(read_only / "x"),
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


# ---- new_folder --------------------------------------------------------------------------------------------------


def test_a_new_folder_is_sealed_with_the_hashes_of_its_files(sealed: Path) -> None:
    sums = json.loads((sealed / MANIFEST).read_text())["sha256"]
    assert sums == {"a": hashlib.sha256(b"first").hexdigest(), "b": hashlib.sha256(b"").hexdigest()}
    assert damage(sealed) is None
    assert names(sealed.parent) == ["sealed"]


def test_a_new_folder_replaces_an_old_one(sealed: Path) -> None:
    with new_folder(sealed) as draft:
        (draft / "c").write_bytes(b"second")
        assert damage(sealed) is None  # the old one, until the new one is whole
    assert names(sealed) == ["c", MANIFEST]
    assert damage(sealed) is None
    assert names(sealed.parent) == ["sealed"]


@pytest.mark.parametrize("error", [RegardError("bad"), KeyboardInterrupt(), ValueError()])
def test_an_error_leaves_the_old_folder(sealed: Path, error: BaseException) -> None:
    with pytest.raises(type(error)), new_folder(sealed) as draft:  # noqa: PT012
        (draft / "a").write_bytes(b"half")
        raise error
    assert (sealed / "a").read_bytes() == b"first"
    assert names(sealed.parent) == ["sealed"]


@pytest.mark.parametrize("nth", [1, 2, 3, 4])  # two files, the manifest, the folder
def test_a_full_disk_leaves_the_old_folder(sealed: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    full_disk_at(monkeypatch, nth)
    with pytest.raises(RegardError, match="No space left on device; free some space"), new_folder(sealed) as draft:  # noqa: PT012
        (draft / "a").write_bytes(b"new")
        (draft / "b").write_bytes(b"new")
    assert damage(sealed) is None
    assert (sealed / "a").read_bytes() == b"first"
    assert names(sealed.parent) == ["sealed"]


def test_drafts_of_killed_processes_are_removed_and_nothing_else(sealed: Path) -> None:
    folder = sealed.parent
    for name in (".sealed.12", ".sealed.old.12", ".sealed.toml", ".mine.12", "sealed.12"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("")
    (folder / ".config.toml.7").write_text("half")
    remove_drafts(folder, "seal*", "config.toml")
    assert names(folder) == [".mine.12", ".sealed.toml", "sealed", "sealed.12"]


# ---- damage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a", "b", MANIFEST])
def test_a_missing_file_is_named(sealed: Path, name: str) -> None:
    (sealed / name).unlink()
    assert damage(sealed) == f"{name} is missing"


def test_a_changed_file_is_named(sealed: Path) -> None:
    (sealed / "b").write_bytes(b"\0")
    assert damage(sealed) == "b does not match its checksum"


def test_every_byte_of_the_manifest_counts(sealed: Path) -> None:
    manifest = (sealed / MANIFEST).read_bytes()
    for place in range(len(manifest)):
        flipped = bytearray(manifest)
        flipped[place] ^= 1 << place % 8
        (sealed / MANIFEST).write_bytes(flipped)
        assert damage(sealed), f"byte {place}"


def test_every_cut_of_the_manifest_counts(sealed: Path) -> None:
    manifest = (sealed / MANIFEST).read_bytes()
    for size in range(len(manifest)):
        (sealed / MANIFEST).write_bytes(manifest[:size])
        assert damage(sealed), f"{size} bytes"


@pytest.mark.parametrize("name", ["../outside", "/etc/hostname", "sub/file", "", "..", "a/../a"])
def test_a_manifest_may_not_name_files_outside(sealed: Path, name: str) -> None:
    outside = sealed.parent / "outside"
    outside.write_bytes(b"x")
    (sealed / MANIFEST).write_text(json.dumps({"sha256": {name: hashlib.sha256(b"x").hexdigest()}}))
    assert damage(sealed)


@pytest.mark.parametrize("text", ["[]", "{}", "3", '{"sha256": []}', '{"sha256": {"a": null}}', '{"sha256": null}'])
def test_a_manifest_of_another_shape(sealed: Path, text: str) -> None:
    (sealed / MANIFEST).write_text(text)
    assert damage(sealed)


def test_sealing_anew_makes_it_whole(sealed: Path) -> None:
    (sealed / "a").write_bytes(b"changed")
    (sealed / MANIFEST).unlink()
    seal(sealed)
    assert damage(sealed) is None
