"""Labelled text: sentences or sentence pairs with a class or a number, and sentences with a tag for each word.

TSV files are read without quoting (a quotation mark is text), JSONL files have one object a line; both may be compressed.
White space around a text or label is removed. Every error names file and line.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.data.parallel_corpus import COMPRESSIONS, read_lines
from regard.errors import RegardError
from regard.text.tokenizer import Tokenizer

CONTINUES = -1  # the tag of a piece that is not the first of its word
MAX_LISTED = 20  # labels in an error message


@dataclass(frozen=True)
class ColumnNames:
    """The columns of a file: names (TSV with a header), numbers from 1 (without), or keys (JSONL); empty: no such column."""

    text: str = "text"
    pair: str = ""
    label: str = "label"
    header: bool = True

    @property
    def names(self) -> list[str]:
        """The columns to read, the label last."""
        return [name for name in (self.text, self.pair, self.label) if name]


@dataclass(frozen=True)
class Example:
    """One or two texts with a label, or words with tags; `line` is its (first) line in the file."""

    texts: tuple[str, ...]
    label: str | None = None
    words: tuple[str, ...] = ()
    tags: tuple[str, ...] = ()
    line: int = 0


# ---- classes and numbers -----------------------------------------------------------------------------------------


def read_examples(path: Path, columns: ColumnNames) -> Iterator[Example]:
    """Yield the examples of a .tsv or .jsonl file, in order."""
    rows = _json_rows(path, columns) if _is_json(path) else _tsv_rows(path, columns)
    for number, cells in rows:
        label = cells.pop() if columns.label else None
        if label == "":
            raise RegardError(f"{path} line {number}: its label is empty; give every example one")
        yield Example(tuple(cells), label, line=number)


def _tsv_rows(path: Path, columns: ColumnNames) -> Iterator[tuple[int, list[str]]]:
    """Yield line number and cells of the columns; lines of another length than the header are refused (a tab in a text?)."""
    lines = enumerate((line.split("\t") for line in read_lines(path)), 1)
    header = [name.strip() for name in next(lines)[1]] if columns.header else None
    places = [_column_index(name, header, path) for name in columns.names]
    least = len(header) if header else max(places) + 1
    for number, cells in lines:
        if len(cells) < least or (header and len(cells) > least):
            has = f"{path} line {number}: {len(cells)} tab-separated columns"
            wanted = f"the header has {least}: {', '.join(header)}" if header else f"column {least} is asked for"
            raise RegardError(f"{has}, but {wanted}; fix the line or name other columns")
        yield number, [cells[place].strip() for place in places]


def _column_index(name: str, header: list[str] | None, path: Path) -> int:
    if header and name in header:
        return header.index(name)
    if name.isdecimal() and 1 <= int(name) <= (len(header) if header else math.inf):
        return int(name) - 1
    if header:
        known = f"its columns are {', '.join(header)}"
        raise RegardError(f"{path} line 1: there is no column {name!r}; {known}")
    raise RegardError(f"{path} is read without a header, so columns are numbers from 1 up, not {name!r}")


def _json_rows(path: Path, columns: ColumnNames) -> Iterator[tuple[int, list[str]]]:
    for number, item in _json_objects(path, columns.names):
        yield number, [_json_text(item[name], name, f"{path} line {number}") for name in columns.names]


def _json_objects(path: Path, keys: Sequence[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(read_lines(path), 1):
        try:
            item = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RegardError(f"{path} line {number}: not JSON ({error}); put one object on each line") from error
        if not isinstance(item, dict):
            raise RegardError(f"{path} line {number}: not an object; it must have the keys {', '.join(keys)}")
        for key in keys:
            if key not in item:
                raise RegardError(f"{path} line {number}: there is no key {key!r}; its keys are {', '.join(item)}")
        yield number, item


def _json_text(value: object, name: str, where: str) -> str:
    """Return a string stripped, a number or truth value (which a label may be) as JSON writes it."""
    if not isinstance(value, (str, int, float)):
        raise RegardError(f"{where}: {name!r} is {json.dumps(value)[:40]}; it must be a string or a number")
    text = value.strip() if isinstance(value, str) else json.dumps(value)
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RegardError(f"{where}: {name!r} holds half a surrogate pair, which is not text; fix it") from error
    return text


def _is_json(path: Path) -> bool:
    name = Path(path.stem) if path.suffix.lower() in COMPRESSIONS else path
    return name.suffix.lower() == ".jsonl"


# ---- tags --------------------------------------------------------------------------------------------------------


def read_tagged(path: Path) -> Iterator[Example]:
    """Yield tagged sentences: {"words": [...], "tags": [...]} in a .jsonl file, else word<TAB>tag lines and a blank one."""
    for number, words, tags in _json_tagged(path) if _is_json(path) else _line_tagged(path):
        yield Example((" ".join(words),), words=tuple(words), tags=tuple(tags), line=number)


def _json_tagged(path: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    for number, item in _json_objects(path, ("words", "tags")):
        words, tags = item["words"], item["tags"]
        if not (isinstance(words, list) and isinstance(tags, list) and len(words) == len(tags) > 0):
            raise RegardError(f"{path} line {number}: words and tags must be two lists of the same length, not empty")
        where = f"{path} line {number}"
        rows = [(_json_text(w, "words", where), _json_text(t, "tags", where)) for w, t in zip(words, tags, strict=True)]
        if not all(map(all, rows)):
            raise RegardError(f"{where}: a word or tag is empty; give every word a tag")
        yield number, [word for word, _ in rows], [tag for _, tag in rows]


def _line_tagged(path: Path) -> Iterator[tuple[int, list[str], list[str]]]:
    words: list[str] = []
    tags: list[str] = []
    number = 0
    for number, line in enumerate(read_lines(path), 1):
        cells = [cell.strip() for cell in line.split("\t")]
        if len(cells) == 2 and all(cells):
            words.append(cells[0])
            tags.append(cells[1])
        elif any(cells):
            raise RegardError(f"{path} line {number}: not a word, a tab and a tag; a blank line ends a sentence")
        elif words:
            yield number - len(words), words, tags
            words, tags = [], []
    if words:
        yield number - len(words) + 1, words, tags


def tags_to_pieces(words: Sequence[str], tags: Sequence[int], tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the token ids of words, and a tag for each: that of the word on its first token, -1 on the others.

    The ids are those of the words joined by spaces; a word that the tokenizer drops becomes the unknown token.
    """
    twice = tokenizer.encode_batch(["a", "a a"])
    space = "" if twice[0] * 2 == twice[1] else " "  # byte-level tokenizers add no space before the first word
    found = tokenizer.encode_batch([*words[:1], *(space + word for word in words[1:])])
    pieces = [part or [tokenizer.special.require("unk", "a word that the tokenizer drops")] for part in found]
    ids = [i for word in pieces for i in word]
    aligned = zip(pieces, tags, strict=True)
    return ids, [tag if first else CONTINUES for word, tag in aligned for first in (True, *[False] * (len(word) - 1))]


# ---- labels as numbers -------------------------------------------------------------------------------------------


def label_names(examples: Iterable[Example]) -> tuple[str, ...]:
    """Return all labels (or tags) that occur, sorted; by value if all are numbers."""
    names = {name for example in examples for name in (example.tags or (example.label,)) if name is not None}
    numbers = {name: number for name in names if (number := _number(name)) is not None}
    return tuple(sorted(names, key=lambda name: (numbers[name] if len(numbers) == len(names) else 0.0, name)))


def label_ids(examples: Iterable[Example], names: Sequence[str], where: Path | str) -> list[int]:
    """Return the index of each example's label in `names`, the labels of the training data."""
    index = {name: i for i, name in enumerate(names)}
    return [_index_of(_label(example, where), index, example, where) for example in examples]


def tag_ids(examples: Iterable[Example], names: Sequence[str], where: Path | str) -> list[list[int]]:
    """Return the index of each word's tag in `names`, sentence by sentence."""
    index = {name: i for i, name in enumerate(names)}
    return [[_index_of(tag, index, example, where) for tag in example.tags] for example in examples]


def label_numbers(examples: Iterable[Example], where: Path | str) -> list[float]:
    """Return each example's label as the number to predict."""
    return [_finite(_label(example, where), f"{where} line {example.line}") for example in examples]


def _label(example: Example, where: Path | str) -> str:
    if example.label is None:
        raise RegardError(f"{where} line {example.line}: the example has no label; name the column that holds it")
    return example.label


def _index_of(name: str, index: dict[str, int], example: Example, where: Path | str) -> int:
    if name not in index:
        known = ", ".join(list(index)[:MAX_LISTED])
        known += f" and {len(index) - MAX_LISTED} more" if len(index) > MAX_LISTED else ""
        raise RegardError(f"{where} line {example.line}: label {name!r} is not one of the training data's: {known}")
    return index[name]


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _finite(text: str, where: str) -> float:
    number = _number(text)
    if number is None:
        raise RegardError(
            f"{where}: label {text!r} is not a number; regression needs numbers, classes a classification"
        )
    return number
