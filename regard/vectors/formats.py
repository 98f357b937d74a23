"""File formats of word vectors, read and written: word2vec's text and binary files, GloVe's text, Regard's own folder.

| kind   | first line | each word                                                  |
|--------|------------|------------------------------------------------------------|
| text   | V D        | the word and D numbers, spaces between them; a line each   |
| binary | V D        | the word, a space, D little-endian float32; maybe a "\n"   |
| glove  | none       | as text                                                    |
| folder |            | words.txt, vectors.safetensors, config.json, manifest.json |

A file to read is recognised by its content; only its compression (.gz, .xz, .zst) is taken from its name. It is read in
chunks, so little more than the vectors themselves is in memory. A word in a text file may contain spaces, as some of
GloVe's do, so the numbers are taken from the right. The original C program truncates long words inside a UTF-8
character: such bytes become U+FFFD, unless the caller asks for another way to handle errors.

A file to write gets its format from the caller or from its suffix. `write_projector` writes for TensorBoard's embedding
projector.
"""

from __future__ import annotations

import gzip
import json
import lzma
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from regard.data.parallel_corpus import COMPRESSIONS, check_file, read_blocks
from regard.errors import RegardError
from regard.files import (
    atomic_folder,
    check_regular,
    check_replaceable,
    disk_errors,
    exists,
    find_damage,
    read_bytes,
    read_json,
    temporary_path,
)
from regard.vectors.word_vectors import FOLDER_KIND, WordVectors, is_folder

KINDS = ("text", "binary", "glove", "folder")
SUFFIXES = {".txt": "text", ".vec": "text", ".bin": "binary"}

HEADER = re.compile(rb"\s*(\d{1,12})\s+(\d{1,6})\s*")
DETECT_BYTES = 1 << 20  # read from the beginning of a file to detect its format
CHUNK = 1 << 24  # bytes of a file in memory at a time
LONGEST_WORD = 1 << 16  # bytes
FIRST_NUMBERS = 1 << 22  # most numbers allocated before any is read: the dimension that the file states may be wrong
MAGIC = {b"\x1f\x8b": ".gz", b"\xfd7zXZ": ".xz", b"\x28\xb5\x2f\xfd": ".zst"}

Rows = Iterator[tuple[list[bytes], np.ndarray]]  # some words and their vectors (n, D)


# ---- reading ---------------------------------------------------------------------------------------------------------


def read_vectors(path: Path, errors: str = "replace") -> WordVectors:
    """Read word vectors in any of the four formats; of a word that occurs twice, the first vector is kept.

    `errors` says how to decode invalid UTF-8: replace, ignore or strict.
    """
    if exists(path) and path.is_dir():
        return read_folder(path)
    if errors not in ("replace", "ignore", "strict"):
        raise RegardError(f"broken UTF-8 can be met with replace, ignore or strict, not {errors!r}")
    kind, count, dim, start = detect_format(check_file(path))
    rows = binary_rows(path, start, count, dim) if count and kind == "binary" else text_rows(path, count, dim)
    raw, vectors = gather(rows, dim)
    words = [decode_word(word, number, path, errors) for number, word in enumerate(raw, 1)]
    first = {word: row for row, word in zip(reversed(range(len(words))), reversed(words), strict=True)}
    if len(first) < len(words):
        kept = sorted(first.values())
        words, vectors = [words[row] for row in kept], vectors[kept]
    bad = np.flatnonzero(~np.isfinite(vectors.sum(axis=1, dtype=np.float64)))
    if len(bad):
        raise RegardError(f"{path}: the vector of {words[bad[0]]!r} (word {bad[0] + 1:,}) holds NaN or infinity")
    return WordVectors(words, vectors)


def detect_format(path: Path) -> tuple[str, int | None, int, int]:
    """Return the format of a file, the number of words in its header (or None), the dimension, and the end of the header."""
    head = first_bytes(path)
    for magic, suffix in MAGIC.items():
        if head.startswith(magic):
            raise RegardError(f"{path} is compressed: give it a name that ends in {suffix}")
    lines = head.split(b"\n")
    found = HEADER.fullmatch(lines[0])
    if found:
        count, dim, start = int(found[1]), int(found[2]), len(lines[0]) + 1
        if not count or not dim:
            raise RegardError(f"{path} line 1 promises {count} words of {dim} numbers: there is nothing to read")
        if is_binary(head[start:], dim):
            return "binary", count, dim, start
        if len(lines) < 2 or len(lines[1].split()) > 2 or dim == 1:
            return "text", count, dim, start
    return "glove", None, most_common_dimension(path, lines), 0


def first_bytes(path: Path) -> bytes:
    """Return the beginning of a file, decompressed."""
    head = b""
    for block in read_blocks(path):
        head += block
        if len(head) >= DETECT_BYTES:
            break
    return head


def is_binary(body: bytes, dim: int) -> bool:
    """Return whether the bytes after a header are binary: not a text line with a word and `dim` numbers."""
    line = body.split(b"\n", 1)[0]
    fields = line.split()
    if len(fields) > dim and parse_numbers(b" ".join(fields[-dim:]), dim) is not None:
        return False
    if len(fields) == 1:  # a text line has numbers: here a byte of a float is a line feed
        return True
    return bool(re.search(rb"[\x00-\x08\x0e-\x1f]", body[: 8 * dim + 4096])) or not fields_are_text(line)


def fields_are_text(line: bytes) -> bool:
    """Return whether everything after the word consists of characters that numbers are written with."""
    return bool(re.fullmatch(rb"[-+.0-9eEinfatyINFATY\s]*", line.partition(b" ")[2]))


def most_common_dimension(path: Path, lines: list[bytes]) -> int:
    """Return the dimension of a GloVe file: how many numbers most lines have; a few lines have words with spaces."""
    whole = [line for line in (lines[:-1] or lines)[:200] if line.strip()]  # the last line may be incomplete
    counts = Counter(len(line.split()) - 1 for line in whole)
    dim = min(counts, key=lambda n: (-counts[n], n), default=0)
    if dim < 1 or not any(parse_numbers(b" ".join(line.split()[-dim:]), dim) is not None for line in whole):
        raise RegardError(
            f"{path} holds no word vectors: a line should be a word and its numbers (GloVe), "
            "after a first line 'words dimension' in word2vec's text and binary files"
        )
    return dim


def text_rows(path: Path, count: int | None, dim: int) -> Rows:
    """Yield words and vectors of a word2vec text file (with a header and `count` words) or a GloVe file (None)."""
    lines = ((number, line) for number, line in enumerate(raw_lines(path), 1) if line.strip())
    if count is not None:
        next(lines)
    seen = 0
    while part := list(islice(lines, max(1, 500_000 // dim))):
        words, values = split_lines(path, part, dim)
        seen += len(words)
        if count is not None and seen > count:
            raise RegardError(
                f"{path} line {part[count - seen][0]}: more than the {count:,} words that line 1 promises"
            )
        yield words, values
    if count is not None and seen < count:
        raise RegardError(f"{path} is cut short: it ends after {seen:,} of the {count:,} words that line 1 promises")


def split_lines(path: Path, lines: list[tuple[int, bytes]], dim: int) -> tuple[list[bytes], np.ndarray]:
    """Return the words and vectors of numbered text lines."""
    words, rest = [], []
    for number, line in lines:
        word, values = split_line(line.rstrip(), dim)
        if not word:
            found = f"{len(line.split()) - 1} numbers after a word"
            raise RegardError(f"{path} line {number}: {found}, where {dim} were expected; is the file cut short?")
        words.append(word)
        rest.append(values)
    table = parse_numbers(b" ".join(rest), dim * len(lines))
    if table is None:
        at = next(i for i, row in enumerate(rest) if parse_numbers(row, dim) is None)
        shown = rest[at][:60].decode(errors="replace")
        raise RegardError(f"{path} line {lines[at][0]}: {dim} numbers were expected after a word, not {shown!r} ...")
    return words, table.reshape(-1, dim)


def split_line(line: bytes, dim: int) -> tuple[bytes, bytes]:
    """Split a text line into its word and its last `dim` numbers; the word is empty if there are too few numbers."""
    if line.count(b" ") == dim and line[0] != 32:
        word, _, rest = line.partition(b" ")
        return word, rest
    fields = line.rsplit(None, dim)
    return (fields[0], b" ".join(fields[1:])) if len(fields) > dim else (b"", line)


def parse_numbers(text: bytes, n: int) -> np.ndarray | None:
    """Parse exactly n numbers; return None if the text is something else."""
    try:
        values = np.fromstring(text, dtype=np.float32, sep=" ")
    except ValueError:
        return None
    return values if len(values) == n else None


def raw_lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, decompressed and without line feeds."""
    rest = b""
    for chunk in chunks(path):
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def chunks(path: Path) -> Iterator[bytes]:
    """Yield a file, decompressed, in chunks of about CHUNK bytes."""
    held: list[bytes] = []
    size = 0
    for block in read_blocks(path):
        held.append(block)
        size += len(block)
        if size >= CHUNK:
            yield b"".join(held)
            held, size = [], 0
    yield b"".join(held)


def binary_rows(path: Path, start: int, count: int, dim: int) -> Rows:
    """Yield words and vectors of a word2vec binary file.

    A word ends at a space. The C program writes a line feed after each vector, which is removed from the front of the
    next word.
    """
    rest, seen, offset = b"", 0, 0  # offset: position of `rest` in the file
    for chunk in chunks(path):
        data = rest + chunk
        if offset + len(data) < start:
            rest = data
            continue
        words, values, at = split_records(data, 0 if offset else start, count - seen, dim)
        seen += len(words)
        rest, offset = data[at:], offset + at
        lost = next((word for word in words if b"\0" in word), None)
        if lost is not None or (seen < count and len(rest) > LONGEST_WORD + 4 * dim):
            where = f"{path}, before byte {offset:,}"
            raise RegardError(
                f"{where}: no word stands where one should; are there {dim} numbers to a word, as line 1 says?"
            )
        yield words, values
        if seen == count and rest.strip():
            raise RegardError(f"{path} byte {offset:,}: more than the {count:,} words that line 1 promises")
    if seen < count:
        where = f"it ends inside word {seen + 1:,} of {count:,} (byte {offset + len(rest):,})"
        raise RegardError(f"{path} is cut short: {where}, each a word and {4 * dim} bytes; copy or download it again")


def split_records(data: bytes, at: int, most: int, dim: int) -> tuple[list[bytes], np.ndarray, int]:
    """Return the words and vectors of up to `most` complete records from offset `at` on, and the offset of the next one."""
    size, words, offsets = 4 * dim, list[bytes](), list[int]()
    while len(words) < most:
        space = data.find(b" ", at)
        if space < 0 or space + 1 + size > len(data):
            break
        words.append(data[at:space].lstrip(b"\n"))
        offsets.append(space + 1)
        at = space + 1 + size
    values = np.empty((len(offsets), dim), "<f4")
    for row, offset in enumerate(offsets):
        values[row] = np.frombuffer(data, "<f4", dim, offset)
    return words, values, at


def gather(rows: Rows, dim: int) -> tuple[list[bytes], np.ndarray]:
    """Return all words and one array of all vectors, which grows in place: concatenation would need twice the memory."""
    words: list[bytes] = []
    vectors = np.empty((max(1, min(1024, FIRST_NUMBERS // dim)), dim), np.float32)
    for part, values in rows:
        need = len(words) + len(part)
        if need > len(vectors):
            vectors.resize((max(need, len(vectors) * 3 // 2), dim), refcheck=False)
        vectors[len(words) : need] = values
        words += part
    vectors.resize((len(words), dim), refcheck=False)
    return words, vectors


def decode_word(word: bytes, number: int, path: Path, errors: str) -> str:
    """Decode word number `number` of a file."""
    try:
        return word.decode("utf-8", errors)
    except UnicodeDecodeError as error:
        where = f"{path}: word {number:,} is not UTF-8 ({error.reason} at its byte {error.start + 1})"
        raise RegardError(f"{where}; read it with errors 'replace' or 'ignore'") from None


def read_folder(path: Path) -> WordVectors:
    """Read Regard's own folder of word vectors; check it against its manifest first."""
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not is_folder(path):
        raise RegardError(f"{path} is no folder of word vectors: its config.json should say so")
    if wrong := find_damage(path):
        raise RegardError(f"the word vectors in {path} are damaged: {wrong}; copy the folder again")
    try:
        tensors = load_file(check_regular(path / "vectors.safetensors"))
        words = read_bytes(path / "words.txt", most=1 << 34).decode().split("\n")[:-1]
        about = {k: v for k, v in read_json(path / "config.json").items() if k not in ("kind", "words", "dim")}
        return WordVectors(words, tensors["vectors"], tensors.get("counts"), tensors.get("outside"), about)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise RegardError(f"the word vectors in {path} cannot be read ({error}); copy the folder again") from error


# ---- writing ---------------------------------------------------------------------------------------------------------


def kind_of(path: Path) -> str:
    """Return the format that a name stands for: by its suffix before any compression; a folder if it has no known suffix."""
    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    kind = SUFFIXES.get(name.suffix.lower())
    if kind is None and name != path:
        raise RegardError(
            f"cannot tell what {path} should be: name it like words.txt{path.suffix} or words.bin{path.suffix}"
        )
    return kind or "folder"


def check_target(path: Path, kind: str = "") -> str:
    """Return the format in which to write `path`; raise an error if it cannot be written there."""
    kind = kind or kind_of(path)
    if kind not in KINDS:
        raise RegardError(f"unknown kind of vectors {kind!r}: choose {', '.join(KINDS)}")
    with disk_errors(path):
        if kind == "folder":
            if path.is_file() or (path.is_dir() and any(path.iterdir()) and not is_folder(path)):
                raise RegardError(
                    f"{path} is there and holds no word vectors, so it is not replaced: choose another name"
                )
            check_replaceable(path)
        elif path.is_dir():
            raise RegardError(f"{path} is a folder, and {kind} vectors are a file: give it a name")
    return kind


def write_vectors(vectors: WordVectors, path: Path, kind: str = "") -> None:
    """Write word vectors in the format `kind`, or in the one that the name stands for."""
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
    """Raise an error for a word that could not be read back from a file of this format."""
    bad = r"[ \n\0]" if kind == "binary" else r"^[ \t\n\r\x0b\f]|[ \t\n\r\x0b\f]$|\n" if kind != "folder" else r"\n"
    broken = re.compile(bad)
    for word in words:
        if not word or broken.search(word):
            other = "glove or folder" if kind == "binary" else "folder"
            raise RegardError(f"the word {word!r} cannot stand in a {kind} file: choose another kind ({other})")


def text_records(vectors: WordVectors) -> Iterator[bytes]:
    """Yield a text line for each word; nine digits restore a float32 number exactly."""
    form = " %.9g" * vectors.dim + "\n"
    for word, row in zip(vectors.words, vectors.vectors, strict=True):
        yield word.encode() + (form % tuple(row.tolist())).encode()


def binary_records(vectors: WordVectors) -> Iterator[bytes]:
    """Yield a record of word2vec's binary format for each word."""
    for word, row in zip(vectors.words, vectors.vectors.astype("<f4", copy=False), strict=True):
        yield b"%s %s\n" % (word.encode(), row.tobytes())


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file for writing, compressed by its suffix; it appears under its name only when it is complete."""
    draft = temporary_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with draft.open("wb") as plain, compressor(plain, path.suffix.lower()) as file:
                yield file
            draft.rename(path)
        finally:
            draft.unlink(missing_ok=True)


def compressor(file: IO[bytes], suffix: str) -> Any:
    """Return a writer that compresses into an open file as the suffix says."""
    if suffix == ".zst":
        import zstandard

        return zstandard.ZstdCompressor().stream_writer(file, closefd=False)
    openers: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
    return (
        openers[suffix](file, "wb")
        if suffix in openers
        else open(file.fileno(), "wb", buffering=1 << 20, closefd=False)
    )


def write_folder(vectors: WordVectors, path: Path) -> None:
    """Write Regard's own folder: words.txt, vectors.safetensors, config.json and manifest.json."""
    from safetensors.numpy import save_file

    check_words(vectors.words, "folder")
    given = {"vectors": vectors.vectors, "counts": vectors.counts, "outside": vectors.outside}
    tensors = {name: np.ascontiguousarray(array) for name, array in given.items() if array is not None}
    about = {"kind": FOLDER_KIND, "words": len(vectors), "dim": vectors.dim, **vectors.about}
    with atomic_folder(path) as folder:
        save_file(tensors, folder / "vectors.safetensors")
        (folder / "words.txt").write_bytes("".join(f"{word}\n" for word in vectors.words).encode())
        (folder / "config.json").write_text(json.dumps(about, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# ---- TensorBoard's projector -----------------------------------------------------------------------------------------


def write_projector(vectors: WordVectors, folder: Path, most: int = 10_000) -> int:
    """Write a folder that `tensorboard --logdir` shows under PROJECTOR; return the number of words written.

    The files are tensors.tsv, metadata.tsv (one column, so without a header) and projector_config.pbtxt. Only the first
    `most` words are written, since a browser draws them.
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
            file.write((form % tuple(row.tolist())).encode())
    with new_file(folder / "metadata.tsv") as file:
        for word in vectors.words[:n]:
            file.write((re.sub(r"[\t\n\r]", " ", word) + "\n").encode())
    return n
