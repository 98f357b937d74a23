"""Word vectors into files: the four kinds that vectors.py reads, and TensorBoard's projector."""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import numpy as np

from regard.data.corpus import COMPRESSIONS
from regard.errors import RegardError
from regard.files import check_replaceable, disk_errors, draft_of, new_folder
from regard.vectors.words import FOLDER, WordVectors, is_folder

KINDS = ("text", "binary", "glove", "folder")
SUFFIXES = {".txt": "text", ".vec": "text", ".bin": "binary"}


def kind_of(path: Path) -> str:
    """What a name asks for: a file by its suffix, whatever it is compressed by; a folder where it has none of ours."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    kind = SUFFIXES.get(name.suffix.lower())
    if kind is None and name != path:
        raise RegardError(
            f"cannot tell what {path} should be: name it like words.txt{path.suffix} or words.bin{path.suffix}"
        )
    return kind or "folder"


def check_target(path: Path, kind: str = "") -> str:
    """Return the kind of vectors that `path` is for; refuse one at which they cannot be written."""
    kind = kind or kind_of(path)
    if kind not in KINDS:
        raise RegardError(f"unknown kind of vectors {kind!r}: choose {', '.join(KINDS)}")
    with disk_errors(path):
        _check_free(path, kind)
    return kind


def _check_free(path: Path, kind: str) -> None:
    if kind == "folder":
        if path.is_file() or (path.is_dir() and any(path.iterdir()) and not is_folder(path)):
            raise RegardError(f"{path} is there and holds no word vectors, so it is not replaced: choose another name")
        check_replaceable(path)
    elif path.is_dir():
        raise RegardError(f"{path} is a folder, and {kind} vectors are a file: give it a name")


def write(vectors: WordVectors, path: Path, kind: str = "") -> None:
    kind = check_target(path, kind)
    if kind == "folder":
        return write_folder(vectors, path)
    check_words(vectors.words, kind)
    records = binary_records(vectors) if kind == "binary" else text_records(vectors)
    with new_file(path) as file:
        if kind != "glove":
            file.write(b"%d %d\n" % vectors.vectors.shape)
        for record in records:
            file.write(record)


def check_words(words: Iterable[str], kind: str) -> None:
    """A word that could not be read back is refused, not written."""
    bad = r"[ \n\0]" if kind == "binary" else r"^[ \t\n\r\x0b\f]|[ \t\n\r\x0b\f]$|\n" if kind != "folder" else r"\n"
    broken = re.compile(bad)
    for word in words:
        if not word or broken.search(word):
            other = "glove or folder" if kind == "binary" else "folder"
            raise RegardError(f"the word {word!r} cannot stand in a {kind} file: choose another kind ({other})")


def text_records(vectors: WordVectors) -> Iterator[bytes]:
    """Nine digits, by which float32 numbers come back as they were."""
    form = " %.9g" * vectors.dim + "\n"
    for word, row in zip(vectors.words, vectors.vectors, strict=True):
        yield word.encode() + _row(form, row)


def _row(form: str, row: np.ndarray) -> bytes:
    return (form % tuple(row.tolist())).encode()


def binary_records(vectors: WordVectors) -> Iterator[bytes]:
    for word, row in zip(vectors.words, vectors.vectors.astype("<f4", copy=False), strict=True):
        yield b"%s %s\n" % (word.encode(), row.tobytes())


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Compressed by its suffix; it has its name only when all of it is written."""
    draft = draft_of(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as plain, packed(plain, path.suffix.lower()) as file:
                yield file
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)


def packed(file: IO[bytes], suffix: str) -> Any:
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor().stream_writer(file, closefd=False)
    ways: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return ways[suffix](file, "wb") if suffix in ways else open(file.fileno(), "wb", buffering=1 << 20, closefd=False)


def write_folder(vectors: WordVectors, path: Path) -> None:
    from safetensors.numpy import save_file

    check_words(vectors.words, "folder")
    given = {"vectors": vectors.vectors, "counts": vectors.counts, "outside": vectors.outside}
    tensors = {name: np.ascontiguousarray(array) for name, array in given.items() if array is not None}
    about = {"kind": FOLDER, "words": len(vectors), "dim": vectors.dim, **vectors.about}
    with new_folder(path) as folder:
        save_file(tensors, folder / "vectors.safetensors")
        (folder / "words.txt").write_bytes("".join(f"{word}\n" for word in vectors.words).encode())
        (folder / "config.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- TensorBoard's projector -------------------------------------------------------------------------------------


def project(vectors: WordVectors, folder: Path, most: int = 10_000) -> int:
    """A folder that `tensorboard --logdir` shows under PROJECTOR: tensors.tsv, metadata.tsv and projector_config.pbtxt.

    A browser draws it, so only the first words are written; metadata of one column has no header. Returns how many.
    """
    n = min(most, len(vectors))
    if n < 1:
        raise RegardError(f"at least 1 word must be written, not {most}")
    taken = [name for name in ("tensors.tsv", "metadata.tsv") if (folder / name).exists()]
    if taken and not (folder / "projector_config.pbtxt").exists():
        raise RegardError(f"{folder / taken[0]} is not of a projector and is not replaced: choose another folder")
    about = f'tensor_name: "word vectors ({n} of {len(vectors)})"\n  tensor_path: "tensors.tsv"\n'
    with new_file(folder / "projector_config.pbtxt") as file:
        file.write(f'embeddings {{\n  {about}  metadata_path: "metadata.tsv"\n}}\n'.encode())
    form = "\t".join(["%.9g"] * vectors.dim) + "\n"
    with new_file(folder / "tensors.tsv") as file:
        for row in vectors.vectors[:n]:
            file.write(_row(form, row))
    with new_file(folder / "metadata.tsv") as file:
        for word in vectors.words[:n]:
            file.write((re.sub(r"[\t\n\r]", " ", word) + "\n").encode())
    return n
