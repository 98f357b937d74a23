"""Parallel corpora: aligned files, TSV, JSONL or the embedded toy grammar, read as a stream of sentence pairs.

Files are read block by block, so a corpus may be larger than memory, and every error names file and line.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import IO, Any

from regard.data.held_out import HeldOut, hold_out
from regard.errors import RegardError
from regard.files import exists

BLOCK = 1 << 16
LONGEST_LINE = 1 << 24  # bytes; a file without line breaks must not end up in memory as a whole
BOM = b"\xef\xbb\xbf"
UNPACK: dict[str, Callable[[Any], Any]] = {".gz": gzip.open, ".xz": lzma.open}
COMPRESSIONS = (*UNPACK, ".zst")
DAMAGE = (EOFError, zlib.error, lzma.LZMAError, gzip.BadGzipFile)

Pair = tuple[str, str]


# ---- one file ----------------------------------------------------------------------------------------------------


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a UTF-8 text file, decompressed by its suffix, without line ends and byte-order mark.

    Only "\\n" (or "\\r\\n") ends a line: other line breaks of Unicode occur inside real sentences, and splitting there would
    silently shift the alignment of two files.
    """
    number = 0
    for number, raw in enumerate(_raw_lines(path), 1):
        if b"\0" in raw:
            raise RegardError(f"{path} line {number}: a NUL byte, so this is a binary file; give UTF-8 text")
        if len(raw) > LONGEST_LINE:
            raise RegardError(f"{path} line {number}: over {LONGEST_LINE:,} bytes long; put one sentence on a line")
        try:
            line = raw.removesuffix(b"\r").decode()
        except UnicodeDecodeError as error:
            where = f"{path} line {number}: byte {error.start + 1} is not valid UTF-8"
            raise RegardError(f"{where}; convert the file to UTF-8 or fix that line") from error
        yield line
    if not number:
        raise _empty(path)


def _raw_lines(path: Path) -> Iterator[bytes]:
    rest, first = b"", True
    for block in read_blocks(path):
        *lines, rest = (rest + block).split(b"\n")
        if first and lines:
            lines[0], first = lines[0].removeprefix(BOM), False
        yield from lines
        if len(rest) > LONGEST_LINE:
            yield rest  # refused by read_lines, which knows the line number
    if first:
        rest = rest.removeprefix(BOM)
    if rest:
        yield rest


def read_blocks(path: Path) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file, in blocks of bounded size."""
    with _open(path) as file:
        if path.suffix.lower() == ".zst":
            yield from _read_zstandard(file, path)
        else:
            unpack = UNPACK.get(path.suffix.lower())
            yield from iter(partial((unpack(file) if unpack else file).read, BLOCK), b"")


@contextmanager
def _open(path: Path) -> Iterator[IO[bytes]]:
    if not exists(path):
        raise RegardError(f"there is no file {path}; check its name and the data folder")
    if path.is_dir():
        raise RegardError(f"{path} is a folder; give a file")
    if path.is_file() and not path.stat().st_size:
        raise _empty(path)
    try:
        with path.open("rb") as file:
            yield file
    except DAMAGE as error:
        raise RegardError(f"{path} is damaged or cut short ({error}); copy or download it again") from error
    except OSError as error:
        raise RegardError(f"cannot read {path}: {error.strerror or error}; check the file") from error


def check_file(path: Path) -> Path:
    """Return `path` if it can be read more than once, as a corpus is: a FIFO would block the second time."""
    if exists(path) and path.is_fifo():
        raise RegardError(f"{path} is a FIFO, which can be read only once: write its content to a file and give that")
    return path


def _empty(path: Path) -> RegardError:
    return RegardError(f"{path} is empty; give a file with at least one line")


def _read_zstandard(file: IO[bytes], path: Path) -> Iterator[bytes]:
    """Yield a zstandard file frame by frame: the stream reader of the library does not report a file cut inside a frame."""
    try:
        import zstandard
    except ImportError as error:
        raise RegardError(f"reading {path} needs the zstandard package: pip install zstandard") from error
    frame = None
    for data in iter(partial(file.read, BLOCK // 4), b""):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                yield frame.decompress(data)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            data = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
    if frame:
        raise EOFError("the last frame is not complete")


# ---- one spec --------------------------------------------------------------------------------------


def parse_part(spec: str) -> tuple[str, tuple[float, float]]:
    """Split `book.txt[:90%]` into the file name and the part as shares, ("book.txt", (0.0, 0.9))."""
    found = re.fullmatch(r"(.*?)(?:\[(?:([\d.]+)%)?:(?:([\d.]+)%)?\])?", spec)
    assert found is not None  # every string matches
    first, last = float(found[2] or 0) / 100, float(found[3] or 100) / 100
    if not first < last <= 1:
        raise RegardError(f"{spec!r} is an empty part: write it like 'book.txt[:90%]' or 'book.txt[90%:]'")
    return found[1], (first, last)


def parse_direction(spec: str) -> tuple[str, str]:
    """Split `train.{lang}.xz@de>en` into the spec and its direction "de>en", which is empty if it has none."""
    found = re.fullmatch(r"(.+)@([A-Za-z][\w-]*>[A-Za-z][\w-]*)", spec)
    return (found[1], found[2]) if found else (spec, "")


def parse_weight(spec: str) -> tuple[str, float]:
    """Split `train.{lang}.xz@de>en*2.5` into the spec and its sampling weight, which is 1 if it has none."""
    found = re.fullmatch(r"(.+)\*(\d+(?:\.\d+)?|\.\d+)", spec)
    if found and not float(found[2]):
        raise RegardError(f"corpus {spec!r} has the weight 0, so nothing of it would be read: leave it out")
    return (found[1], float(found[2])) if found else (spec, 1.0)


def split_directions(spec: str) -> list[str]:
    """Return `pairs.{lang}.xz@en<>de` as two specs, one for each direction, and any other spec as it is."""
    found = re.fullmatch(r"(.+)@([A-Za-z][\w-]*)<>([A-Za-z][\w-]*)", spec)
    return [f"{found[1]}@{found[2]}>{found[3]}", f"{found[1]}@{found[3]}>{found[2]}"] if found else [spec]


def _aligned_pairs(source_path: Path, target_path: Path) -> Iterator[Pair]:
    n_source = n_target = 0
    for source, target in zip_longest(read_lines(source_path), read_lines(target_path)):
        n_source += source is not None
        n_target += target is not None
        if source is not None and target is not None:
            yield source, target
    if n_source != n_target:
        counts = f"{source_path} has {n_source:,} lines but {target_path} has {n_target:,}"
        raise RegardError(f"{counts}; line n of one must be the translation of line n of the other")


def _tsv_pairs(path: Path) -> Iterator[Pair]:
    for number, line in enumerate(read_lines(path), 1):
        columns = line.split("\t")
        if len(columns) != 2:
            what = f"{path} line {number}: {len(columns)} tab-separated columns instead of 2"
            raise RegardError(f"{what}; keep the source and the target sentence only")
        yield columns[0], columns[1]


def json_rows(path: Path, keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Yield the texts under some keys of a JSONL file, one object a line."""
    for number, line in enumerate(read_lines(path), 1):
        try:
            item = json.loads(line)
            if not isinstance(item, dict):
                raise ValueError("not an object")
            row = tuple(_json_text(item, key) for key in keys)
        except (ValueError, RecursionError) as error:
            what = f"not JSON, {error.msg}" if isinstance(error, json.JSONDecodeError) else error
            form = "{" + ", ".join(f'"{key}": "..."' for key in keys) + "}"
            raise RegardError(f"{path} line {number}: {what}; each line must look like {form}") from error
        yield row


def _json_text(item: dict[str, object], key: str) -> str:
    if key not in item:
        raise ValueError(f"no key {key!r}")
    text = item[key]
    if not isinstance(text, str):
        raise ValueError(f"the value of {key!r} is not a string")
    text.encode()  # JSON can escape half a surrogate pair, which is not text: a UnicodeEncodeError is a ValueError
    return text


def _toy_pairs(n: int, split: str, swap: bool) -> Iterator[Pair]:
    from regard.data import toy

    for english, german in toy.pairs(n, split):
        yield (german, english) if swap else (english, german)


def _reversed_rows(rows: Callable[[], Iterator[tuple[str, ...]]]) -> Iterator[tuple[str, ...]]:
    for row in rows():
        yield row[::-1]


@dataclass(frozen=True)
class _Part:
    """The meaning of one spec: its kind, the files that determine its content (for `toy`: the grammar), how to read it."""

    kind: str
    files: tuple[Path, ...]
    rows: Callable[[], Iterator[tuple[str, ...]]]
    direction: str = ""  # "en>de", where the spec says so

    def content(self) -> list[str]:
        return [self.kind, *map(file_digest, self.files), *([self.direction] if self.direction else [])]


def file_digest(path: Path) -> str:
    """Return a hash of the bytes on disk, and the compression: equal bytes under another suffix read differently."""
    compression = path.suffix.lower() if path.suffix.lower() in COMPRESSIONS else ""
    with _open(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest() + compression  # type: ignore[arg-type]


# ---- the corpus --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ParallelCorpus:
    """Sentence pairs named by specs relative to `root`, read one spec after the other.

    A spec is `train.{lang}.xz` or `a.txt|b.txt` (aligned files), `pairs.tsv`, `pairs.jsonl` (one object a line, keyed
    by language) or `toy:20000` (the embedded grammar); files may end in .gz, .xz or .zst. With `@de>en` at its end a spec
    has a direction of its own, and one model learns all directions of its corpus (data/multilingual.py); `@de<>en` means
    both directions. `pairs.tsv` and `a.txt|b.txt` do not name their languages: if the direction is the reverse of source
    and target, the pairs are swapped. With `*2.5` at its very end a training corpus is read two and a half times in an
    epoch: `weights` has these numbers, and `specs` is without them.
    """

    specs: tuple[str, ...]
    source: str
    target: str
    root: Path
    split: str = "train"
    held_out: HeldOut | None = None  # yield only what it holds (split valid), or only the rest (split train)
    weights: tuple[float, ...] = field(default=(), compare=False)  # of the specs, where they do not say it themselves

    def __post_init__(self) -> None:
        """Take the weights out of the specs, and the two directions of `@de<>en` apart."""
        parsed = [parse_weight(spec) for spec in self.specs]
        given = self.weights if len(self.weights) == len(parsed) else (1.0,) * len(parsed)
        each = [
            (one, weight * before)
            for (spec, weight), before in zip(parsed, given, strict=True)
            for one in split_directions(spec)
        ]
        if self.split != "train" and any(weight != 1 for _, weight in parsed):
            raise RegardError(f"a weight such as *2 is for training corpora: leave it out of data.{self.split}")
        object.__setattr__(self, "specs", tuple(spec for spec, _ in each))
        object.__setattr__(self, "weights", tuple(weight for _, weight in each))

    def rows(self) -> Iterator[tuple[str, ...]]:
        """Yield the sentence pairs (source, target) of all specs, one after the other."""
        for _, source, target in self.directed_rows():
            yield source, target

    def directed_rows(self) -> Iterator[tuple[str, str, str]]:
        """Yield (direction, source, target); the direction is "en>de", or empty if the specs have none."""
        for rows in self.directed_rows_by_spec():
            yield from rows

    def directed_rows_by_spec(self) -> Iterator[Iterator[tuple[str, str, str]]]:
        """Yield what `directed_rows` yields, in one iterator for each spec."""
        return (self._directed_rows(part) for part in self._parts())

    def rows_by_spec(self) -> Iterator[Iterator[tuple[str, ...]]]:
        """Yield what `rows` yields, in one iterator for each spec."""
        return (((source, target) for _, source, target in rows) for rows in self.directed_rows_by_spec())

    def _directed_rows(self, part: _Part) -> Iterator[tuple[str, str, str]]:
        for source, target in part.rows():
            if self.held_out is None or self.held_out.holds(self._key(part, source, target)) == (self.split == "valid"):
                yield part.direction, source, target

    def hold_out(self, share: float, seed: int) -> tuple[ParallelCorpus, ParallelCorpus]:
        """Return the corpus without a share of its pairs, and these pairs as a validation corpus.

        Pairs are chosen by one of their sentences: the source, or in a corpus of several directions the sentence in the
        language that most directions have. So all translations of a sentence are on one side, in every direction. Pairs
        with an empty sentence are never held out.
        """
        keys = (
            self._key(part, source, target)
            for part in self._parts()
            for source, target in part.rows()
            if source.strip() and target.strip()
        )
        held = hold_out(keys, share, seed)
        return replace(self, held_out=held), replace(self, split="valid", held_out=held)

    def _key(self, part: _Part, source: str, target: str) -> str:
        """Return the sentence of a pair by which it is held out."""
        return target if part.direction and part.direction.split(">")[1] == self._pivot else source

    @cached_property
    def _pivot(self) -> str:
        """The language that most directions have; of several, that of the first source."""
        found = Counter(language for direction in self.directions for language in direction.split(">"))
        return found.most_common(1)[0][0] if found else ""

    def files(self) -> list[Path]:
        """Return all files of the corpus."""
        return [path for part in self._parts() for path in part.files]

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions of the corpus, in the order of the specs; empty if these have none."""
        found = [parse_direction(spec)[1] for spec in self.specs]
        if any(found) and not all(found):
            bare = next(spec for spec in self.specs if not parse_direction(spec)[1])
            raise RegardError(f"corpus {bare!r} has no direction, but others have: write '{bare}@{self.source}>...'")
        return tuple(dict.fromkeys(filter(None, found)))

    def fingerprint(self) -> str:
        """Return a hash of the content, not of its place: moved or touched files keep it, changed ones do not."""
        content: list[Any] = [part.content() for part in self._parts()]
        if self.held_out is not None:
            content.append([self.split, self.held_out.fingerprint()])
        return hashlib.sha256(json.dumps([self.source, self.target, content]).encode()).hexdigest()

    def _parts(self) -> list[_Part]:
        if not self.specs:
            raise RegardError(f"no {self.split} corpus is given; name one, such as 'train.{{lang}}.txt' or 'toy:20000'")
        parts = [self._directed(spec) for spec in self.specs]
        for part in parts:
            for path in part.files:
                check_file(path)
        return parts

    def _directed(self, spec: str) -> _Part:
        bare, direction = parse_direction(spec)
        if not direction:
            return self._part(spec)
        source, target = direction.split(">")
        part = replace(self, source=source, target=target)._part(bare)
        unnamed = part.kind in ("tsv", "aligned") and "{lang}" not in bare
        if unnamed and (source, target) == (self.target, self.source):
            part = replace(part, rows=partial(_reversed_rows, part.rows))
        return replace(part, direction=direction)

    def _part(self, spec: str) -> _Part:
        if spec.startswith("toy:"):
            return self._toy(spec)
        name = Path(spec.lower())
        suffix = Path(name.stem).suffix if name.suffix in COMPRESSIONS else name.suffix
        if spec.count("|") == 1:
            files = tuple(map(self._path, spec.split("|")))
            return _Part("aligned", files, partial(_aligned_pairs, *files))
        if "{lang}" in spec:
            files = tuple(self._path(spec.replace("{lang}", lang)) for lang in (self.source, self.target))
            return _Part("aligned", files, partial(_aligned_pairs, *files))
        if suffix == ".tsv":
            return _Part("tsv", (self._path(spec),), partial(_tsv_pairs, self._path(spec)))
        if suffix == ".jsonl":
            read = partial(json_rows, self._path(spec), (self.source, self.target))
            return _Part("jsonl", (self._path(spec),), read)
        forms = "'train.{lang}.txt', 'a.txt|b.txt', 'pairs.tsv', 'pairs.jsonl' or 'toy:20000'"
        raise RegardError(f"cannot tell what corpus {spec!r} is; use a form like {forms}")

    def _toy(self, spec: str) -> _Part:
        if not re.fullmatch(r"toy:[1-9][0-9]*", spec):
            raise RegardError(f"corpus {spec!r} needs a number of pairs, such as 'toy:20000'")
        if {self.source, self.target} != {"en", "de"}:
            asked = f"not {self.source} to {self.target}"
            raise RegardError(f"corpus {spec!r} is English and German, {asked}; set the languages to en and de")
        grammar = tuple(sorted(Path(__file__).parent.glob("toy*.py")))
        split = "train" if self.held_out else self.split
        pairs = partial(_toy_pairs, int(spec[4:]), split, self.source == "de")
        return _Part(f"{spec} {split}", grammar, pairs)

    def _path(self, name: str) -> Path:
        if not Path(name).is_absolute() and not (exists(self.root) and self.root.is_dir()):
            raise RegardError(f"there is no data folder {self.root}; give the folder that holds {name}")
        return self.root / name
