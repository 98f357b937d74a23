"""Translation of files: their segments in chunks, with a journal from which an interrupted translation is resumed.

A file is read in pieces, each with its segments: a line, a paragraph, a heading, a subtitle, a message. A file of lines and
a plain text have many pieces, so a large one is never in memory as a whole; other formats are one piece, since they must be
parsed as a whole. The segments of a piece are divided into chunks by their number and length alone. A chunk that is
translated is appended to the journal, a file beside the output. A translation that begins again takes the chunks that are in
the journal from there and translates the others, so its output has the same bytes. The output appears under its name when
it is complete, and the journal is removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

from regard import __version__
from regard.data.parallel_corpus import BOM, COMPRESSIONS, file_digest, read_blocks
from regard.errors import RegardError
from regard.files import MANIFEST, disk_errors, exists, parse_json, sha256, sync, temporary_path
from regard.inference.streaming import ChunkTranslator, Line, read_line_batches
from regard.inference.translator import Translation
from regard.model_folder import find
from regard.pretrained import DEFAULT, bundled_path
from regard.text.alignment import Link
from regard.text.language_identification import identify_languages

CHUNK_SEGMENTS = 256
CHUNK_CHARACTERS = 1 << 13  # about a second of decoding on two cores
PIECE_CHARACTERS = 1 << 16  # of a plain text, which is divided at the next empty line
LANGUAGE_SEGMENTS = 1000  # segments whose languages are detected before the first is translated
NO_ROOM_FOR_MARKUP = "left in the source language: the translation has not enough words for its markup"
LARGE_TEXT = 1 << 22  # bytes of a file of plain text that is parsed again each time it is read

Result = dict[str, Any]  # what is kept of a translation: `text`, `to`, `notes`, and `alignment` where it is needed


# ---- pieces of a file ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """A part of a file that is parsed and written on its own."""

    texts: list[str]  # its segments
    lines: list[int]  # the line of the file where each segment begins
    needs_alignment: list[bool]  # the segment has inline markup, which is moved to the words it belongs to
    render: Callable[[Sequence[Result]], str]  # returns this part of the file with the results in place of the texts
    # Returns whether `render` writes the result of a segment; one that has not enough words for its markup is left out.
    is_written: Callable[[int, Result], bool] = lambda i, result: True


def is_pipe(path: Path) -> bool:
    """Return whether a path can be read only once: a FIFO, a device, or what a shell gives for <(command)."""
    return exists(path) and not path.is_file() and not path.is_dir()


def choose_format(path: Path, has_texts: bool) -> str:
    """Return the format of a file by its suffix: "lines" for one that is not known, plain text where there is none.

    A model that takes one sentence a text (`has_texts` is false) reads any file as lines.
    """
    if not has_texts:
        return "lines"
    from regard.documents import FORMATS, format_of

    name = path.with_suffix("") if path.suffix.lower() in COMPRESSIONS else path
    known = {suffix for format in FORMATS.values() for suffix in format.suffixes}
    if name.suffix and name.suffix.lower() not in known:
        return "lines"
    begin = b"" if name.suffix or is_pipe(path) else next(read_blocks(path), b"")
    return format_of(name, begin[:100].decode(errors="replace"))


def read_pieces(batches: Iterable[list[Line]], format: str) -> Iterator[Piece]:
    """Yield the pieces of a file that is read in batches of lines."""
    if format == "lines":
        yield from map(line_piece, batches)
        return
    lines: list[Line] = []
    size = 0
    for line in (line for batch in batches for line in batch):
        lines.append(line)
        size += len(line.text)
        if format == "text" and size >= PIECE_CHARACTERS and not line.text.strip():
            yield document_piece(lines, format)
            lines, size = [], 0
    if lines:
        yield document_piece(lines, format)


def line_piece(lines: Sequence[Line]) -> Piece:
    """Return lines as a piece: each is a segment."""

    def render(results: Sequence[Result]) -> str:
        return "".join(
            fit_line(line.text, result["text"]) + line.end for line, result in zip(lines, results, strict=True)
        )

    return Piece([line.text for line in lines], [line.number for line in lines], [False] * len(lines), render)


def document_piece(lines: Sequence[Line], format: str) -> Piece:
    """Return lines as a piece whose segments the parser of a format finds."""
    from regard.documents import Segment, finish_segment, parse_document

    document = parse_document("".join(line.text + line.end for line in lines), format)
    segments = document.segments

    def finish(segment: Segment, result: Result) -> Segment:
        return finish_segment(segment, result["text"], [Link(*link) for link in result.get("alignment", ())])

    def render(results: Sequence[Result]) -> str:
        finished = [finish(*each) for each in zip(segments, results, strict=True)]
        letters: Counter[str] = Counter()  # of the segments that are in each language now; "" stands for the source's
        for segment, result, made in zip(segments, results, finished, strict=True):
            letters[result["to"] if made != segment else ""] += len(segment.text)
        return document.render(finished, max(letters, key=letters.__getitem__, default=""))

    def is_written(i: int, result: Result) -> bool:
        return result["text"] == segments[i].text or finish(segments[i], result) is not segments[i]

    return Piece(
        [segment.text for segment in segments],
        [lines[0].number + segment.line - 1 for segment in segments],
        [bool(segment.spans) for segment in segments],
        render,
        is_written,
    )


def divide(texts: Sequence[str]) -> Iterator[slice]:
    """Yield the chunks of a list of texts: each ends where it has enough texts or characters."""
    begin = size = 0
    for i, text in enumerate(texts):
        size += len(text)
        if i + 1 - begin == CHUNK_SEGMENTS or size >= CHUNK_CHARACTERS or i + 1 == len(texts):
            yield slice(begin, i + 1)
            begin, size = i + 1, 0


# ---- the journal -----------------------------------------------------------------------------------------------------


class Journal:
    """A file of the results of all chunks that are translated, one line of JSON for each, after a line that says of what.

    A journal is used only for the translation that began it: `identity` is compared with the first line. The file is locked
    while it is open. What a killed process wrote in part is cut off.
    """

    KIND = "regard translation journal"

    def __init__(self, path: Path, identity: dict[str, str]) -> None:
        self.path, self.n_chunks = path, 0
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        self.file = os.fdopen(descriptor, "r+b")
        try:
            self._open(identity)
        except BaseException:
            self.file.close()
            raise

    def _open(self, identity: dict[str, str]) -> None:
        """Lock the file, compare its first line, and find the end of its last whole line."""
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RegardError(f"another process uses {self.path}: wait for it, or choose another output") from None
        first = self.file.readline()
        if not first:
            return self._write({"kind": self.KIND, **identity})
        found = _parse_line(first)
        if not isinstance(found, dict) or found.get("kind") != self.KIND:
            raise RegardError(
                f"{self.path} is in the way of the journal, and is none: move it, or choose another output"
            )
        if changed := [name for name in identity if found.get(name) != identity[name]]:
            raise RegardError(
                f"{self.path} is what is left of another translation (not the same {', '.join(changed)}): give the command "
                f"that began it to finish that one, or remove the file to start anew"
            )
        end = self.file.tell()
        while isinstance(_parse_line(line := self.file.readline()), list):
            end += len(line)
            self.n_chunks += 1
        self.file.seek(end)
        self.file.truncate()

    def append(self, results: Sequence[Result]) -> None:
        """Write the results of the next chunk."""
        self._write(list(results))
        self.n_chunks += 1

    def _write(self, value: Any) -> None:
        with disk_errors(self.path):
            self.file.write(json.dumps(value, ensure_ascii=False).encode() + b"\n")
            self.file.flush()

    def chunks(self) -> Iterator[list[Result]]:
        """Yield the results of each chunk that is in the journal now, in order."""
        with self.path.open("rb") as file:
            file.readline()
            for line in islice(file, self.n_chunks):
                yield parse_json(line.decode())

    def close(self) -> None:
        """Close the file, which stays where it is unless no chunk is in it."""
        if not self.file.closed and not self.n_chunks:
            self.remove()
        self.file.close()

    def remove(self) -> None:
        """Remove the file, unless its name has become that of another."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.stat(self.path), os.fstat(self.file.fileno())):
                self.path.unlink()
        self.file.close()


def _parse_line(line: bytes) -> Any:
    """Return the value of a line of JSON, or None for one that is broken or not complete."""
    try:
        return parse_json(line.decode()) if line.endswith(b"\n") else None
    except ValueError:
        return None


# ---- what is written -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OutputStyle:
    """How translations are written: the text or file itself, or lines that describe each translation."""

    as_json: bool = False  # a JSON object for each text
    has_nbest: bool = False  # a line for each hypothesis of each text: number of the text, score, translation
    has_languages: bool = False  # JSON objects have the language that was detected in the text

    def keep_all(self, texts: Sequence[str], found: Sequence[Translation]) -> list[Result]:
        """Return what has to be kept of translations until they are written."""
        kept = [self.keep(each) for each in found]
        if self.as_json and self.has_languages:
            for result, each in zip(kept, identify_languages(texts), strict=True):
                language = {"language": each.language, "probability": round(each.probability, 4)}
                result["detected"] = {**language, "is_certain": each.is_certain}
        return kept

    def keep(self, translation: Translation) -> Result:
        """Return what has to be kept of a translation, without the language that was detected."""
        if self.as_json or self.has_nbest:
            return describe(translation)
        kept: Result = {"text": translation.text, "to": translation.target, "notes": list(translation.notes)}
        return kept if translation.alignment is None else kept | {"alignment": list_links(translation)}

    def render(self, piece: Piece, results: Sequence[Result]) -> str:
        """Return what is written for a piece."""
        if not self.as_json and not self.has_nbest:
            return piece.render(results)
        each = zip(piece.lines, piece.texts, results, strict=True)
        return "".join(self.render_result(line, text, result) for line, text, result in each)

    def render_result(self, line: int, text: str, result: Result) -> str:
        """Return the lines that describe one translation."""
        if self.as_json:
            return json.dumps({"line": line, "source": text, **result}, ensure_ascii=False) + "\n"
        hypotheses = result.get("nbest") or [result]
        return "".join(f"{line - 1}\t{each['score']:.4f}\t{join_lines(each['text'])}\n" for each in hypotheses)


def describe(translation: Translation) -> Result:
    """Return all that is known of a translation, as values of JSON."""
    found: Result = {"text": translation.text, "from": translation.source, "to": translation.target}
    if translation.via:
        found["via"] = translation.via
    found |= {"notes": list(translation.notes), **describe_scores(translation)}
    if translation.alignment is not None:
        found["alignment"] = list_links(translation)
    if translation.nbest:
        found["nbest"] = [{"text": each.text, **describe_scores(each)} for each in translation.nbest]
    return found


def describe_scores(translation: Translation) -> Result:
    """Return how sure the model was of a translation, and its tokens."""
    return {
        "confidence": round(translation.confidence, 4),
        "score": translation.score,
        "log_prob": translation.log_prob,
        "ended": translation.ended,
        "tokens": list(translation.tokens),
    }


def list_links(translation: Translation) -> list[list[float]]:
    """Return the word alignment as [source begin, source end, target begin, target end, weight], characters from 0 on."""
    return [[*link[:4], round(link[4], 3)] for link in translation.alignment or ()]


def join_lines(text: str) -> str:
    """Return a text on one line."""
    return " ".join(text.splitlines())


def fit_line(source: str, text: str) -> str:
    """Return the translation of a line as a line; line breaks that the source has too, such as form feeds, stay."""
    is_line = text.count("\n") <= source.count("\n") and len(text.splitlines()) <= max(1, len(source.splitlines()))
    return text if is_line else join_lines(text)


# ---- translation -----------------------------------------------------------------------------------------------------


def translate_pieces(
    pieces: Iterable[Piece],
    translator: ChunkTranslator,
    style: OutputStyle,
    *,
    known: Iterator[list[Result]] | None = None,
    keep: Callable[[list[Result]], None] = lambda results: None,
    observe: Callable[[int, str, Translation], None] = lambda line, text, translation: None,
    advance: Callable[[int], None] = lambda done: None,
) -> Iterator[str]:
    """Translate pieces, and yield what is written for each.

    Args:
        pieces: The pieces of a file, in order.
        translator: Translates the chunks of all pieces, in order.
        style: What is written.
        known: Results of the first chunks, which are not translated again.
        keep: A function that is called with the results of each other chunk.
        observe: A function that is called with the line, the text and the translation of each of their segments.
        advance: A function that is called with the number of segments done since its last call.
    """
    for piece in pieces:
        results: list[Result] = []
        for chunk in divide(piece.texts):
            texts = piece.texts[chunk]
            done = next(known, None) if known else None
            if done is None:
                found = translate_chunk(piece, chunk, translator, style)
                done = style.keep_all(texts, found)
                keep(done)
                for line, text, each in zip(piece.lines[chunk], texts, found, strict=True):
                    observe(line, text, each)
            else:
                translator.skip(texts)
            results += done
            advance(len(texts))
        yield style.render(piece, results)


def translate_chunk(piece: Piece, chunk: slice, translator: ChunkTranslator, style: OutputStyle) -> list[Translation]:
    """Translate one chunk of a piece; a translation that has not enough words for its markup is replaced by its source."""
    texts = piece.texts[chunk]
    found = translator.translate(texts, alignment=style.as_json or any(piece.needs_alignment[chunk]))
    for i, each in enumerate(found):
        if not piece.is_written(chunk.start + i, style.keep(each)):
            notes = (*each.notes, NO_ROOM_FOR_MARKUP)
            found[i] = replace(each, text=texts[i], notes=notes, confidence=0.0, alignment=None)
    return found


class TextFile:
    """A file to translate, which can be read more than once.

    Attributes:
        path: The file, UTF-8 text that may be compressed.
        format: The format of its text, one of those of the command line.
        begin: The byte-order mark, where the file begins with one.
    """

    def __init__(self, path: Path, format: str) -> None:
        self.path, self.format = path, format
        self.begin = "\ufeff" if next(read_blocks(path), b"").startswith(BOM) else ""
        self._parsed: list[Piece] | None = None

    def pieces(self) -> Iterator[Piece]:
        """Yield the pieces of the file. They are kept, unless they are lines or a large plain text."""
        if self._parsed is None:
            pieces = read_pieces(read_line_batches(read_blocks(self.path), name=str(self.path)), self.format)
            if self.format == "lines" or (self.format == "text" and self.path.stat().st_size > LARGE_TEXT):
                return pieces
            self._parsed = list(pieces)
        return iter(self._parsed)

    def count(self) -> int:
        """Return the number of segments."""
        return sum(self.chunk_sizes())

    def chunk_sizes(self) -> list[int]:
        """Return the number of segments of each chunk."""
        return [chunk.stop - chunk.start for piece in self.pieces() for chunk in divide(piece.texts)]

    def first_texts(self, most: int = LANGUAGE_SEGMENTS) -> list[str]:
        """Return the first segments, from which the language of the file is detected."""
        return list(islice((text for piece in self.pieces() for text in piece.texts), most))


def translate_file(
    file: TextFile,
    target: Path,
    translator: ChunkTranslator,
    style: OutputStyle,
    identity: dict[str, str],
    *,
    total: int,
    observe: Callable[[int, str, Translation], None] = lambda line, text, translation: None,
    advance: Callable[[int], None] = lambda done: None,
) -> None:
    """Translate a file and write `target`, or continue where an interrupted call with the same arguments stopped.

    `identity` says of what the journal is: it must change with everything that has an effect on the translation. `total` is
    the number of segments. A KeyboardInterrupt that comes out of here says how to continue.
    """
    journal = Journal(target.with_name(f"{target.name}.partial"), identity)
    done = 0

    def count(segments: int) -> None:
        nonlocal done
        done += segments
        advance(segments)

    try:
        known = journal.chunks()
        for _ in translate_pieces(
            file.pieces(), translator, style, known=known, keep=journal.append, observe=observe, advance=count
        ):
            pass
        known = journal.chunks()
        with atomic_file(target) as write:
            write("" if style.as_json or style.has_nbest else file.begin)
            for piece in file.pieces():
                write(style.render(piece, [each for _ in divide(piece.texts) for each in next(known)]))
    except KeyboardInterrupt:
        if not journal.n_chunks:
            raise
        raise KeyboardInterrupt(
            f"stopped after {done:,} of {total:,} segments, which are kept in {journal.path}: the same command continues"
        ) from None
    else:
        journal.remove()
    finally:
        journal.close()


def write_parts(parts: Iterable[str], target: Path | None, stdout: TextIO | None = None) -> None:
    """Write parts of a text to a file, which appears when it is complete, or each at once to stdout."""
    if target:
        with atomic_file(target) as write:
            for part in parts:
                write(part)
        return
    stdout = stdout or sys.stdout
    for part in parts:
        stdout.write(part)
        stdout.flush()


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Callable[[str], None]]:
    """Write a text file atomically: yield a function that writes, and rename the file to `path` when all is written."""
    draft = temporary_path(path)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = draft.open("w", encoding="utf-8", newline="")

    def write(text: str) -> None:
        with disk_errors(path):
            stream.write(text)

    try:
        yield write
        with disk_errors(path):
            stream.close()
            sync(draft)
            draft.rename(path)
            sync(path.parent)
    finally:
        with contextlib.suppress(OSError):
            stream.close()
        draft.unlink(missing_ok=True)


def translation_identity(
    path: Path,
    model: Path | Sequence[Path] | None,
    translator: ChunkTranslator,
    style: OutputStyle,
    format: str,
    **settings: object,
) -> dict[str, str]:
    """Return what the journal of a translation must agree with: checksums of the input and the model, and all settings.

    `model` is the folder that was given, or several, None for the bundled model. `settings` are those that the translator
    does not know, such as the device; a path among them stands for the content of its file.
    """
    settings |= {
        "to": translator.to,
        "from": translator.source,
        "format": format,
        "chunk": [CHUNK_SEGMENTS, CHUNK_CHARACTERS],
    }
    settings |= {name: value for name, value in translator.options.items() if name not in ("seen", "glossary")}
    settings["json"] = style.as_json
    return work_identity(file_digest(path), model, **settings)


def model_identity(folder: Path) -> str:
    """Return the checksum of a model folder, or the sizes and dates of its files where it has no manifest."""
    if (folder / MANIFEST).is_file():
        return sha256(folder / MANIFEST)
    files = sorted((each.name, each.stat()) for each in folder.iterdir() if each.is_file())
    return json.dumps([(name, status.st_size, status.st_mtime_ns) for name, status in files])


def work_identity(input: str, model: Path | Sequence[Path] | None, **settings: object) -> dict[str, str]:
    """Return what kept results must agree with to be used again: the checksum of the input, the model, and all settings.

    `model` is the folder that was given, or several, None for the bundled model. A path among the settings stands for the
    content of its file.
    """
    models = [model] if isinstance(model, Path) else model or [bundled_path(DEFAULT)]
    if settings.get("unknown_dictionary"):
        settings["unknown_dictionary"] = Path(str(settings["unknown_dictionary"]))
    given = {name: sha256(value) if isinstance(value, Path) else value for name, value in settings.items()}
    return {
        "input": input,
        "model": " ".join(model_identity(find(each)) for each in models),
        "options": json.dumps(given, sort_keys=True),
        "version": __version__,
    }
